"""Names in the registries of ms-swift, read from source text without importing anything (import tier 0)."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

# registry: where ms-swift fills it
REGISTRIES = {
    'orms': 'rewards/orm.py',
    'rm_plugins': 'rewards/rm_plugin.py',
    'multi_turns': 'rollout/multi_turn.py',
    'envs': 'rollout/gym_env.py',
}
# argument: where ms-swift lists its values, as constants of classes, and the function by which a plugin adds one
CONSTANTS = {
    'model_type': ('model/constant.py', 'register_model'),
    'template': ('template/constant.py', 'register_template'),
}
_WELL_KNOWN = sys.stdlib_module_names | {'swift', 'swift_megatron_grpo', 'torch', 'numpy', 'transformers', 'datasets', 'PIL', 'requests'}

# by which a plugin runs a module that no import statement names
_RUNS_OTHER_TEXT = ('import_module', '__import__', 'spec_from', 'runpy', 'exec(', 'eval(')


@functools.cache
def builtin_names(registry: str) -> frozenset[str] | None:
    """The keys of a registry of ms-swift; None where ms-swift is not installed or its source has another shape."""
    source = _source_of_swift(REGISTRIES[registry])
    return None if source is None else frozenset(_keys(source, registry)[0]) or None


def _source_of_swift(name: str) -> str | None:
    spec = importlib.util.find_spec('swift')  # finding a top-level package imports nothing
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        source = Path(folder) / name
        if source.is_file():
            return source.read_text(encoding='utf-8')
    return None


@functools.cache
def constants(argument: str) -> frozenset[str] | None:
    """What ms-swift itself takes for `--model_type` or `--template`; None where ms-swift is not installed or its source has another shape."""
    source = _source_of_swift(CONSTANTS[argument][0])
    classes = [node for node in ast.parse(source or '').body if isinstance(node, ast.ClassDef)]
    return frozenset(
        node.value.value
        for body in classes
        for node in body.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ) or None


def _keys(source: str, registry: str) -> tuple[set[str], bool]:
    """(names registered in a source text, whether it registers some that cannot be read off)."""
    names: set[str] = set()
    unclear = False
    tree = _parsed(source)
    if tree is None:
        return names, True
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if _is(target, registry) and isinstance(node.value, ast.Dict):
                    names |= {key.value for key in node.value.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
                elif isinstance(target, ast.Subscript) and _is(target.value, registry):
                    if isinstance(target.slice, ast.Constant) and isinstance(target.slice.value, str):
                        names.add(target.slice.value)
                    else:
                        unclear = True
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ('update', 'setdefault'):
            unclear = unclear or _is(node.func.value, registry)
    return names, unclear


def _is(node: ast.expr, registry: str) -> bool:
    """Whether an expression is the registry, by its own name or as an attribute of a module."""
    return (isinstance(node, ast.Name) and node.id == registry) or (isinstance(node, ast.Attribute) and node.attr == registry)


def _parsed(source: str) -> ast.Module | None:
    """None for what is no Python, or nests deeper than Python reads."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _imports_well_known_only(source: str) -> bool:
    """Whether a source text imports only packages that fill no registry, and runs no other text."""
    tree = _parsed(source)
    if tree is None or any(word in source for word in _RUNS_OTHER_TEXT):
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            if node.level or (node.module or '').split('.')[0] not in _WELL_KNOWN:
                return False
        elif isinstance(node, ast.Import) and any(alias.name.split('.')[0] not in _WELL_KNOWN for alias in node.names):
            return False
    return True


def known_names(registry: str, plugins: Sequence[str], name: str) -> set[str] | None:
    """All names of a registry that a run with these plugin files would know; None where that cannot be told from the text.

    A plugin that registers none itself may do so in a module that it imports; it counts as clear only where it imports nothing but
    well-known packages. One that has `name` in its text may register it in a way that is not read here (`orms |= ...`, another word for orms).
    """
    builtin = builtin_names(registry)
    if builtin is None:
        return None
    names = set(builtin)
    for plugin in plugins:
        path = os.path.expanduser(plugin)
        if not os.path.isfile(path):
            return None
        source = Path(path).read_text(encoding='utf-8', errors='replace')
        own, unclear = _keys(source, registry)
        if unclear or (name in source and name not in own) or not (own or _imports_well_known_only(source)):
            return None
        names |= own
    return names


def may_register(name: str, plugins: Sequence[str]) -> bool:
    """Whether a plugin file can register `name`: it has it in its text, imports more than well-known packages, or cannot be read."""
    for plugin in plugins:
        try:
            source = Path(os.path.expanduser(plugin)).read_text(encoding='utf-8', errors='replace')
        except (OSError, ValueError):
            return True
        if name in source or not _imports_well_known_only(source):
            return True
    return False


def unknown_name(argument: str, name: str, registry: str, plugins: Sequence[str] | None) -> list[str]:
    """One message where a name is neither built in nor registered by a plugin, as far as their texts tell; an empty list else."""
    known = known_names(registry, plugins or [], name)
    if known is None or name in known:
        return []
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return [
        f'--{argument} names {name!r}, which is neither built in nor registered by a plugin.'
        + (f' Did you mean {close[0]}?' if close else '')
        + f' Known here: {", ".join(sorted(known))}. One of your own: --external_plugins FILE.py with {registry}[{name!r}] = ...'
    ]


def unknown_constant(argument: str, name: str, plugins: Sequence[str]) -> list[str]:
    """One message where ms-swift does not list a model type or template, and no plugin can have registered it; an empty list else."""
    known = constants(argument)
    if known is None or name in known or may_register(CONSTANTS[argument][1], plugins):
        return []
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return [
        f'--{argument} {name!r} is not one that ms-swift knows.'
        + (f' Did you mean {" or ".join(close)}?' if close else '')
        + f' Leave it out, and ms-swift takes what fits the model; one of your own comes from an external plugin that calls {CONSTANTS[argument][1]}.'
    ]
