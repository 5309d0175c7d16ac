"""Whether local data files can be read as rows (import tier 0)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator

from .schedule import dataset_path

_HEAD_BYTES = 2**22
_SHOWN = 60


def broken_row(path: str, *, whole: bool = False) -> str | None:
    """What is wrong with the first broken row of a .jsonl or .json file, with file and line; None where nothing is seen.

    Both endings may hold one object a line or one array of objects; `datasets`, which reads them, goes by the content. Reads the first 4 MiB, so that
    a dry run stays quick, or the whole file.
    """
    path = os.path.expanduser(path)
    if not path.endswith(('.jsonl', '.json')) or not os.path.isfile(path):
        return None
    with open(path, 'rb') as file:
        lines = enumerate(_head(file, None if whole else _HEAD_BYTES), 1)
        for number, line in lines:
            if not line.strip():
                continue
            problem = _problem(line)
            if problem is None:
                break
            return None if _is_one_value(path, whole) else f'{path}, line {number}: {problem}'
        for number, line in lines:
            problem = _problem(line) if line.strip() else None
            if problem is not None:
                return f'{path}, line {number}: {problem}'
    return None


def broken_rows(specs: Iterable[str], *, whole: bool = False) -> list[str]:
    """`broken_row` of each data set that is a local file, #N left out."""
    found = (broken_row(dataset_path(spec)[0], whole=whole) for spec in specs)
    return [problem for problem in found if problem is not None]


def _head(file: Iterable[bytes], limit: int | None) -> Iterator[bytes]:
    """Whole lines, until `limit` bytes are read."""
    read = 0
    for line in file:
        yield line
        read += len(line)
        if limit is not None and read >= limit:
            return


def _problem(line: bytes) -> str | None:
    try:
        text = line.decode('utf-8-sig')
    except UnicodeDecodeError as error:
        return f'not UTF-8 (byte {error.start + 1} is {line[error.start]:#x}). Save the file as UTF-8.'
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        return f'no JSON ({error.msg}, column {error.colno}): {_shown(text)}'
    except RecursionError:
        return 'nested too deeply.'
    return None if isinstance(row, dict) else f'a row is an object {{...}}, and this is {_shown(text)}'


def _is_one_value(path: str, whole: bool) -> bool:
    """Whether the file is one array or object over several lines; a file too large to see in a moment is taken for one."""
    if not whole and os.path.getsize(path) > _HEAD_BYTES:
        return True
    try:
        with open(path, encoding='utf-8-sig') as text:
            content = json.load(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) or (isinstance(content, list) and all(isinstance(row, dict) for row in content))


def _shown(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _SHOWN else f'{text[:_SHOWN]}...'
