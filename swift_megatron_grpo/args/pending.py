"""Arguments whose part of the trainer is not finished (import tier 0).

The list, ``NOT_YET``, stands in config.py beside the worker's own check, and that module needs Megatron. It is a literal, so it is read
from the source text: one list, and the dry run refuses what the worker would refuse.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import Any

from .translation import Translation


@functools.cache
def not_yet() -> tuple[tuple[str, tuple[Any, ...], str], ...]:
    """(name, values that ask for nothing, what to do instead) for each unfinished argument; empty where all are finished."""
    source = (Path(__file__).parent.parent / 'config.py').read_text(encoding='utf-8')
    for node in ast.parse(source).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == 'NOT_YET' and node.value is not None:
            rows: tuple[tuple[str, tuple[Any, ...], str], ...] = ast.literal_eval(node.value)
            return rows
    return ()


def unfinished(t: Translation) -> list[str]:
    """One message for each argument that asks for an unfinished part."""
    messages = []
    for name, harmless, instead in not_yet():
        value = t.effective(name)
        if value not in harmless:
            messages.append(message(name, value, instead))
    return messages


def message(name: str, value: Any, instead: str) -> str:
    from .translation import show

    return f'--{name} {show(value)}: not available with --backend megatron in this version; {instead}.'


def is_unfinished(error: str) -> bool:
    """Whether a message of a plan only says that a part is not finished."""
    return ': not available with --backend megatron in this version; ' in error
