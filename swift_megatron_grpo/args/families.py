"""Which model families ms-swift and mcore-bridge know, read from their source texts without importing anything (import tier 0).

ms-swift calls a family by a model type, which it finds by the `architectures` of config.json; mcore-bridge lists the model types that it converts.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Families:
    """architectures: class name in config.json -> ms-swift's model types. convertible: model types that mcore-bridge knows.
    models: names of models without their organisation, in small letters, by which ms-swift finds the type before it reads config.json."""

    architectures: dict[str, set[str]] = field(default_factory=dict)
    convertible: set[str] = field(default_factory=set)
    models: set[str] = field(default_factory=set)


def unknown_family(families: Families, config: Mapping[str, Any], model_type: str | None) -> str | None:
    """The model type of a model that mcore-bridge cannot convert; None where it can, or where that cannot be told.

    model_type: as given with --model_type; else ms-swift goes by the architectures, of which one convertible match is enough.
    """
    if model_type is not None:
        types = {model_type} if model_type in set().union(*families.architectures.values()) else set()
    else:
        named = config.get('architectures')
        types = set().union(*(families.architectures.get(name, set()) for name in (named if isinstance(named, list) else []) if isinstance(name, str)))
    return None if not types or types & families.convertible else str(model_type or config.get('model_type') or min(types))


def types_to_choose(families: Families, config: Mapping[str, Any], model: str) -> list[str]:
    """The model types between which ms-swift cannot decide, sorted; empty where it can, or where that cannot be told.

    model: as given with --model. Its last part decides where ms-swift lists a model of that name, config.json where it does not.
    """
    named = config.get('architectures')
    first = named[0] if isinstance(named, list) and named else None
    types = families.architectures.get(first, set()) if isinstance(first, str) else set()
    return [] if len(types) < 2 or _model_name(model) in families.models else sorted(types)


def _model_name(model: str) -> str:
    """As ms-swift reads a name: the cache folders of both hubs hold it inside, ModelScope's with ___ for a dot."""
    cached = re.search('/models(?:--|/)(?:.+?--)?(.+?)/snapshots/', model)
    return (cached[1] if cached else model.rstrip('/').rsplit('/', 1)[-1].replace('___', '.')).lower()


@functools.cache
def known_families() -> Families | None:
    """None where one of both is not installed or its source has another shape."""
    families = Families()
    constants = dict(_constants('swift', 'model/constant.py'))
    for function, call in _calls('swift', 'model/models'):
        if function == 'Model':
            named = [keyword.value for keyword in call.keywords if keyword.arg in ('ms_model_id', 'hf_model_id', 'model_path')]
            names = [value.value for value in (*call.args[:3], *named) if isinstance(value, ast.Constant)]
            families.models.update(name.rsplit('/', 1)[-1].lower() for name in names if isinstance(name, str))
        name = _text(call.args[0], constants) if function.endswith('ModelMeta') and call.args else None
        if name is None:
            continue
        options = {keyword.arg: keyword.value for keyword in call.keywords}
        if 'mcore_model_type' in options:
            families.convertible.add(name)
        for architecture in getattr(options.get('architectures'), 'elts', []):
            families.architectures.setdefault(ast.literal_eval(architecture), set()).add(name)
    listed = set()
    for folder in ('model/gpts', 'model/mm_gpts'):
        for function, call in _calls('mcore_bridge', folder):
            if function.endswith('ModelMeta') and len(call.args) > 1 and isinstance(call.args[1], ast.List):
                listed |= set(ast.literal_eval(call.args[1]))
    families.convertible.update(listed)
    return families if families.architectures and listed else None


def _text(node: ast.expr, constants: Mapping[str, str]) -> str | None:
    """The string that an expression is: a literal, or a constant of one of ms-swift's classes."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return constants.get(node.attr) if isinstance(node, ast.Attribute) else None


def _calls(package: str, folder: str) -> Iterator[tuple[str, ast.Call]]:
    """All calls in the files of a folder of what has a plain name, with that name."""
    for path in sorted(_folder(package, folder)):
        for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                yield node.func.id, node


def _constants(package: str, file: str) -> Iterator[tuple[str, str]]:
    for path in _folder(package, str(Path(file).parent), Path(file).name):
        for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        yield target.id, node.value.value


def _folder(package: str, folder: str, pattern: str = '*.py') -> Sequence[Path]:
    spec = importlib.util.find_spec(package)  # finding a top-level package imports nothing
    roots = (spec.submodule_search_locations or ()) if spec is not None else ()
    return [path for root in roots for path in (Path(root) / folder).glob(pattern)]
