"""Names of reward functions, read from source text without importing anything (import tier 0)."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

# The registries of swift.rewards, and what a plugin calls the one for functions.
_REGISTRIES = ('orms', 'ORMS')
_WELL_KNOWN = sys.stdlib_module_names | {'swift', 'swift_megatron_grpo', 'torch', 'numpy', 'transformers', 'datasets', 'PIL', 'requests'}


@functools.cache
def builtin_names() -> set[str] | None:
    """The keys of ``swift.rewards.orm.orms``; None where ms-swift is not installed or its source has another shape."""
    spec = importlib.util.find_spec('swift')  # finding a top-level package imports nothing
    if spec is None or not spec.submodule_search_locations:
        return None
    for folder in spec.submodule_search_locations:
        source = Path(folder) / 'rewards' / 'orm.py'
        if source.is_file():
            return _keys(source.read_text(encoding='utf-8'))[0] or None
    return None


def _keys(source: str) -> tuple[set[str], bool]:
    """(names registered in a source text, whether it registers some that cannot be read off)."""
    names: set[str] = set()
    unclear = False
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return names, True
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id in _REGISTRIES and isinstance(node.value, ast.Dict):
                    names |= {key.value for key in node.value.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
                elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name) and target.value.id in _REGISTRIES:
                    if isinstance(target.slice, ast.Constant) and isinstance(target.slice.value, str):
                        names.add(target.slice.value)
                    else:
                        unclear = True
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ('update', 'setdefault', '__setitem__')
        ):
            owner = node.func.value
            unclear = unclear or (isinstance(owner, ast.Name) and owner.id in _REGISTRIES)
    return names, unclear


def _imports_well_known_only(source: str) -> bool:
    """Whether a source text imports packages only that register no reward functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level:
            return False
        names = (
            [node.module or '']
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else []
        )
        if any(name.split('.')[0] not in _WELL_KNOWN for name in names):
            return False
    return True


def known_names(plugins: Sequence[str]) -> set[str] | None:
    """All reward names that a run with these plugin files would know; None where that cannot be told from the text.

    A plugin that registers none itself may do so in a module that it imports; it counts as clear only where it imports nothing but
    well-known packages.
    """
    names = builtin_names()
    if names is None:
        return None
    for plugin in plugins:
        path = os.path.expanduser(plugin)
        if not os.path.isfile(path):
            return None
        source = Path(path).read_text(encoding='utf-8', errors='replace')
        own, unclear = _keys(source)
        if unclear or not (own or _imports_well_known_only(source)):
            return None
        names |= own
    return names
