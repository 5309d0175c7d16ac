"""From the arguments that were given to the worker's values, one rule an argument (import tier 0).

A `Translation` is filled row by row: each given argument meets the action of its row in the table, and conversions are looked up in
``convert.CONVERTERS``. Nothing is dropped without a row in the report, and a value that asks for something that cannot be had is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .argv import Given
from .fields import Field, all_fields
from .plan import Argument

# Arguments whose numbers become one batch plan; they are reported from there.
BATCH_NAMES = (
    'per_device_train_batch_size',
    'micro_batch_size',
    'gradient_accumulation_steps',
    'global_batch_size',
    'steps_per_generation',
    'generation_batch_size',
    'keep_global_batch',
)


class Translation:
    """The state of one translation.

    ``given`` is what the user typed, by name; ``values`` are the worker's values that differ from its defaults or were given;
    ``source`` names the argument that set each of them.
    """

    def __init__(self, given: Sequence[Given], *, elsewhere: bool = False) -> None:
        self.elsewhere = elsewhere
        self.given = {item.name: item for item in given}
        self.values: dict[str, Any] = {}
        self.source: dict[str, str] = {}
        self.rows: list[Argument] = []
        self.warnings: list[str] = []
        self.errors: list[str] = []

    # -- reading

    def asked(self, name: str) -> Any:
        """What the user gave for ``name``, or None."""
        item = self.given.get(name)
        return None if item is None else item.value

    def effective(self, name: str) -> Any:
        """The worker's value for ``name``: set here, or the default that the worker has (for own fields: this package's)."""
        if name in self.values:
            return self.values[name]
        field = all_fields()[name]
        return field.megatron_default if field.worlds in ('both', 'megatron') else field.default

    def number(self, name: str) -> Any:
        """What `swift rlhf` would take for ``name``: given, or its default."""
        item = self.given.get(name)
        return all_fields()[name].default if item is None else item.value

    # -- writing

    def set(self, name: str, value: Any, source: str) -> bool:
        """Give the worker a value. Two sources that disagree are an error that shows both; returns whether the value stands."""
        if name in self.values and self.values[name] != value:
            self.errors.append(
                f'--{self.source[name]} gives {name} {self.values[name]!r}, and --{source} gives {value!r}. They are one setting here: '
                'leave one of them out, or make them equal.'
            )
            return False
        self.values[name] = value
        self.source[name] = source
        return True

    def default(self, name: str, value: Any, reason: str) -> None:
        """A value that nobody gave, where the two worlds' defaults differ; a value that was given stands."""
        if name not in self.values:
            self.values[name] = value
            self.source[name] = name
            self.rows.append(Argument(name=name, value=value, given_as='', action='default', reason=reason))

    def row(self, item: Given, action: str, *, name: str = '', value: Any = None, reason: str = '') -> None:
        self.rows.append(
            Argument(
                name=name or item.name,
                value=item.value if value is None else value,
                given_as=f'--{item.typed}',
                action=action,
                reason=reason,
            )
        )

    # -- the rules

    def run(self) -> None:
        """Apply the table to every given argument."""
        from .convert import CONVERTERS

        for item in self.given.values():
            field = all_fields()[item.name]
            if item.name in BATCH_NAMES:
                continue
            if item.name in CONVERTERS:
                CONVERTERS[item.name](self, item, field)
            else:
                _ACTIONS[field.action](self, item, field)

    def keep(self, item: Given, field: Field) -> None:
        if field.door_only:
            self.row(item, 'kept', reason='used before the workers start')
        elif self.set(item.name, item.value, item.name):
            self.row(item, 'kept')

    def rename(self, item: Given, field: Field) -> None:
        if item.value is None or item.value == []:
            self.row(item, 'no_effect', reason='no value')
        elif self.set(field.target, item.value, item.name):
            self.row(item, 'renamed', name=field.target, reason=field.reason)

    def ignore(self, item: Given, field: Field) -> None:
        self.row(item, 'no_effect', reason=field.reason)

    def refuse(self, item: Given, field: Field) -> None:
        if asks_for_nothing(field, item.value):
            self.row(item, 'no_effect', reason='the default, which asks for nothing')
            return
        self.row(item, 'refused', reason=field.reason)
        self.errors.append(f'--{item.name} {show(item.value)} does not work with --backend megatron: {field.reason}.')

    def convert(self, item: Given, field: Field) -> None:
        raise AssertionError(f'{field.name} is to be converted, and has no converter')


_ACTIONS = {
    'kept': Translation.keep,
    'renamed': Translation.rename,
    'no_effect': Translation.ignore,
    'refused': Translation.refuse,
    'converted': Translation.convert,
}


def asks_for_nothing(field: Field, value: Any) -> bool:
    """Whether a value of a refused argument is its default or an empty one."""
    return value in (field.default, None, '', [], False, 'none', 'None') or (value == 0 and not isinstance(value, bool))


def show(value: Any) -> str:
    """A value as it stands on a command line."""
    from .values import to_words

    return ' '.join(to_words(value))


def refuse(t: Translation, item: Given, message: str) -> None:
    """A row and an error for one argument that cannot be had."""
    t.row(item, 'refused', reason=message)
    t.errors.append(f'--{item.name} {show(item.value)} does not work with --backend megatron: {message}.')
