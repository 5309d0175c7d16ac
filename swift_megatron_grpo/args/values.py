"""Text to value and back, as the two parsers of ms-swift read it (import tier 0)."""

from __future__ import annotations

import json
import math
import os
import re
from typing import Any

from .fields import Field

TRUE, FALSE = ('true', 't', 'yes', 'y', '1'), ('false', 'f', 'no', 'n', '0')
NONE = ('None', 'none', 'null')
# YAML reads no, off and true as truth values, and they arrive here as the words of Python.
WORDS_OF_YAML = {
    'dry_run': {'True': 'true', 'False': 'false'},
    'eval_strategy': {'False': 'no'},
    'save_strategy': {'False': 'no'},
    'logging_strategy': {'False': 'no'},
    'verify_weight_sync': {'False': 'off', 'True': 'first'},
}


def parse_scalar(kind: str, text: str) -> Any:
    """One word to a value of ``kind`` (int, float, bool, str, json). Raises ValueError with what would be right."""
    if kind == 'bool':
        if text.lower() in TRUE:
            return True
        if text.lower() in FALSE:
            return False
        raise ValueError('true or false')
    if kind == 'int':
        if not re.fullmatch(r'[+-]?\d+', text.strip()):
            raise ValueError('a whole number')
        return int(text)
    if kind == 'float':
        try:
            number = float(text)
        except ValueError:
            raise ValueError('a number') from None
        if not math.isfinite(number):
            raise ValueError('a finite number')
        return number
    if kind == 'json':
        return parse_json(text)
    return text


def parse_json(text: str) -> Any:
    """A JSON object, also when it is named by the path of a .json file, as in ms-swift; other text is kept as it is."""
    stripped = text.strip()
    if stripped.endswith('.json') and os.path.isfile(stripped):
        with open(stripped, encoding='utf-8') as file:
            stripped = file.read().strip()
    if stripped.startswith(('{', '[')):
        try:
            return json.loads(stripped)
        except json.JSONDecodeError as error:
            raise ValueError(f'JSON ({error})') from None
    return text


def parse(field: Field, words: list[str]) -> Any:
    """The words after an argument's name to its value. Raises ValueError that says what would be right."""
    if field.is_list:
        if not words:
            raise ValueError('at least one value')
        kind = field.type[len('list[') : -1]
        return [parse_scalar(kind, word) for word in words]
    if not words and (field.type == 'bool' or field.name == 'dry_run'):
        return True if field.type == 'bool' else 'true'
    if len(words) != 1:
        raise ValueError('one value')
    word = words[0]
    # YAML files write a missing value as None, and so does the web UI. A word that the field itself allows keeps its meaning.
    if word in NONE and field.type != 'bool' and word not in field.choices and field.default is None:
        return None
    if field.name in WORDS_OF_YAML:
        word = WORDS_OF_YAML[field.name].get(word, word)
    value = parse_scalar(field.type, word)
    if field.choices and str(value) not in field.choices:
        raise ValueError('one of ' + ', '.join(field.choices))
    return value


def to_words(value: Any) -> list[str]:
    """A value to the words that both parsers read back as the same value."""
    if isinstance(value, bool):
        return ['true' if value else 'false']
    if isinstance(value, (list, tuple)):
        return [word for item in value for word in to_words(item)]
    if isinstance(value, dict):
        return [json.dumps(value, ensure_ascii=False)]
    if isinstance(value, float):
        return [repr(value)]
    return [str(value)]
