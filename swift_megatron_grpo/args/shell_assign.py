"""NAME=value, arrays, export and declare (import tier 0)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .shell_expand import Expander
from .shell_tree import Word

_ASSIGN = re.compile(r'^([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=')


def assignment(word: Word) -> re.Match[str] | None:
    """The head NAME=, NAME+=, NAME[index]= of a word that is an assignment: name, index, plus sign."""
    match = _ASSIGN.match(word.raw)
    return match if match is not None and _begins_plain(word, match.end()) else None


def assigned(values: Expander, word: Word, match: re.Match[str]) -> str:
    """The value of NAME=VALUE or NAME+=VALUE; no splitting, as in the shell."""
    value = values.text(_behind(word, match.end()))
    before = values.lookup(match.group(1)) if match.group(3) else ''
    return (before if isinstance(before, str) else ' '.join(before or [])) + value


def assign_word(values: Expander, word: Word, match: re.Match[str]) -> None:
    """NAME=( ... ), NAME+=( ... ), NAME[index]=value."""
    name, index, more = match.groups()
    if word.items is None:
        _assign_element(values, name, index[1:-1], values.text(_behind(word, match.end())))
        return
    pairs = [item for item in word.items if re.match(r'\[[^\]]+\]=', item.raw)]
    if pairs and len(pairs) == len(word.items):
        values.variables[name] = {
            item.raw[1 : item.raw.index(']')].strip('"\''): values.text(_behind(item, item.raw.index('=') + 1)) for item in pairs
        }
        return
    before = values.variables.get(name, []) if more else []
    known = before if isinstance(before, list) else [before] if isinstance(before, str) else []
    values.variables[name] = [*known, *(value for item in word.items for value in values.fields(item))]


def _assign_element(values: Expander, name: str, index: str, value: str) -> None:
    known = values.variables.get(name, [])
    if isinstance(known, dict):
        known[values.inner(index).strip('"\'')] = value
        return
    number = int(values.arithmetic(index))
    if 0 <= number < 10_000:
        items = [known] if isinstance(known, str) else known
        items = [*items, *[''] * (number + 1 - len(items))]
        items[number] = value
        values.variables[name] = items


def declare(values: Expander, words: Sequence[Word], export: bool) -> None:
    """export, declare, local, readonly, typeset."""
    maps = any(word.raw.startswith('-') and 'A' in word.raw for word in words)
    for word in words:
        match = assignment(word)
        if match is not None and word.items is not None:
            assign_word(values, word, match)
        elif match is not None:
            values.assign(match.group(1), assigned(values, word, match))
        elif maps and word.raw.isidentifier():
            values.variables[word.raw] = {}
        name = match.group(1) if match is not None else word.raw
        value = values.variables.get(name)
        if export and isinstance(value, str):
            values.exported[name] = value


def _begins_plain(word: Word, size: int) -> bool:
    """Whether the first ``size`` characters of a word stand there unquoted, as a name and its equals sign do."""
    taken = 0
    for text, quoted, expands in word.parts:
        if taken >= size:
            return True
        if (quoted and text) or expands:
            return False
        taken += len(text)
    return taken >= size


def _behind(word: Word, skip: int) -> Word:
    """The word without its first ``skip`` characters."""
    parts = []
    for text, quoted, expands in word.parts:
        cut = text[skip:] if skip else text
        skip = max(0, skip - len(text))
        parts.append((cut, quoted, expands))
    return Word(parts=parts, start=word.start, end=word.end)
