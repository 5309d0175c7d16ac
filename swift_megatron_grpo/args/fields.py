"""Every argument that the two worlds know, as data (import tier 0: standard library only).

The rows lie in ``table/`` as text, one argument a line, eight columns between bars:

    name | worlds | type | default in swift rlhf | default in megatron rlhf | action | target | reason

``worlds`` is both, swift or megatron. ``type`` is int, float, bool, str, json, list[str], list[int] or list[float], with the allowed
values in braces where they are fixed. Defaults are JSON. ``action`` is what becomes of a value that was given: kept, renamed or
converted (to ``target``), no_effect, or refused (unless the value is the default, which asks for nothing).
"""
from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

from .own import OWN_FIELDS
from .table import megatron, model_data, rlhf, training

ACTIONS = ('kept', 'renamed', 'converted', 'no_effect', 'refused')


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """One argument: its type, its default in each world, and what becomes of it (see the module's docstring for the columns)."""
    name: str
    worlds: str  # both, swift, megatron, own
    type: str
    choices: tuple[str, ...]
    swift_default: Any
    megatron_default: Any
    action: str
    target: str
    reason: str
    door_only: bool = False

    @property
    def in_worker(self) -> bool:
        """Whether the worker's dataclass has a field of this name."""
        return self.worlds in ('both', 'megatron', 'own') and not self.door_only

    @property
    def is_list(self) -> bool:
        return self.type.startswith('list')

    @property
    def default(self) -> Any:
        """What `swift rlhf` takes where nothing is given; Megatron's default for names that only Megatron has."""
        return self.megatron_default if self.worlds == 'megatron' else self.swift_default


def _parse_row(line: str) -> Field:
    name, worlds, type_, swift_default, megatron_default, action, target, reason = (part.strip() for part in line.split(' | ', 7))
    choices: tuple[str, ...] = ()
    if '{' in type_:
        type_, _, allowed = type_.rstrip('}').partition('{')
        choices = tuple(allowed.split(','))
    assert action in ACTIONS, line
    return Field(
        name=name,
        worlds=worlds,
        type=type_,
        choices=choices,
        swift_default=None if swift_default == '-' else json.loads(swift_default),
        megatron_default=None if megatron_default == '-' else json.loads(megatron_default),
        action=action,
        target='' if target == '-' else target,
        reason=reason)


@functools.cache
def all_fields() -> dict[str, Field]:
    """Name to field, for all names of `swift rlhf`, `megatron rlhf` and this package, in the order of the table."""
    table: dict[str, Field] = {}
    for module in (training, model_data, rlhf, megatron):
        for line in module.ROWS.strip().splitlines():
            # a row without a reason ends in a bar whose space was stripped
            field = _parse_row(line + ' ' if line.endswith('|') else line)
            assert field.name not in table, field.name
            table[field.name] = field
    for own in OWN_FIELDS:
        if own.name in table:
            known = table[own.name]
            choices = own.choices if own.overrides and own.choices else known.choices
            table[own.name] = dataclasses.replace(known, worlds='both' if own.overrides else 'own', choices=choices)
        else:
            table[own.name] = Field(own.name, 'own', own.type, own.choices, own.default, own.default, 'kept', '', own.help, own.door_only)
    return table
