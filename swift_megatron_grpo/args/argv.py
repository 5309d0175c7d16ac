"""The command line into named values: YAML and JSON files, option syntax, unknown names (import tier 0)."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import UserError
from . import values
from .fields import all_fields
from .names import unknown_message

_NUMBER = re.compile(r'^-\d+$|^-\d*\.\d+$|^-?(\d+(\.\d*)?|\.\d+)[eE][+-]?\d+$')


@dataclasses.dataclass(kw_only=True, slots=True)
class Given:
    """One argument as it was typed."""

    name: str  # the field's own name
    typed: str  # what stood on the command line, without the dashes
    value: Any


def expand_config(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[list[str], dict[str, str], list[str]]:
    """Replace a .yaml, .yml or .json first argument by its content, as the `swift` command does.

    Returns (arguments, environment, warnings). The key ENV fills variables that are not set. Nothing is executed and the process's own
    environment is not touched. Raises UserError where the file is missing or not a mapping.
    """
    argv, environment = list(argv), dict(environ)
    warnings: list[str] = []
    if not argv or not argv[0].lower().endswith(('.yaml', '.yml', '.json')) or argv[0].startswith('-'):
        return argv, environment, warnings
    config = read_config(argv[0])
    env = config.pop('ENV', None) or {}
    for key, value in env.items():
        if key not in environment:
            environment[key] = str(value)
        elif environment[key] != str(value):
            warnings.append(f'{key} is {environment[key]!r} in the environment and {str(value)!r} in {argv[0]}; the environment wins.')
    return config_argv(config) + argv[1:], environment, warnings


def read_config(path: str) -> dict[str, Any]:
    """The mapping in a YAML or JSON file. Raises UserError."""
    try:
        with open(path, encoding='utf-8') as file:
            text = file.read()
    except OSError as error:
        raise UserError(f'The configuration file {path} cannot be read: {error.strerror}.') from None
    return parse_config(text, path)


def parse_config(text: str, path: str) -> dict[str, Any]:
    """The mapping in a text that came from ``path``: JSON where the name says so, YAML (which JSON is part of) else. Raises UserError."""
    if path.lower().endswith('.json'):
        try:
            config = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f'{path} is not valid JSON: {error}.') from None
    else:
        config = _load_yaml(path, text)
    if not isinstance(config, dict):
        raise UserError(f'{path} holds {type(config).__name__}; a mapping of argument names to values is needed.')
    return dict(config)


def _load_yaml(path: str, text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise UserError(
            f'Reading {path} needs PyYAML (pip install pyyaml); ms-swift requires it too. A .json file works without.'
        ) from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f'{path} is not valid YAML: {error}.') from None


def config_argv(config: Mapping[str, Any]) -> list[str]:
    """A mapping to command-line words, as the `swift` command writes them: lists as several words, mappings as JSON."""
    argv: list[str] = []
    for key, value in config.items():
        argv.append(f'--{key}')
        if isinstance(value, list):
            argv += [str(item) for item in value]
        elif isinstance(value, dict):
            argv.append(json.dumps(value, ensure_ascii=False))
        else:
            argv.append(str(value))
    return argv


def looks_ours(argv: Sequence[str]) -> bool:
    """Whether a command asks for this backend: `--backend` with any value but transformers, or `--rlhf_type megatron_grpo`.

    `swift rlhf` has no `--backend`, so every value is ours to accept or to refuse; a mistyped one must not fall through to the
    transformers trainer, where the web UI's --ignore_args_error would make it a log line.
    """
    given = {name.replace('-', '_'): words for name, words in split(argv)[0]}
    if given.get('rlhf_type') == ['megatron_grpo']:
        return True
    return 'backend' in given and given['backend'] != ['transformers']


def split(argv: Sequence[str]) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """Command-line words to (name, words) pairs and the words before the first name. A negative number is a value."""
    pairs: list[tuple[str, list[str]]] = []
    stray: list[str] = []
    for word in argv:
        if word.startswith('--') and len(word) > 2:
            name, equals, value = word[2:].partition('=')
            pairs.append((name, [value] if equals else []))
        elif word.startswith('-') and len(word) > 1 and not _NUMBER.match(word) and not word.startswith('- '):
            pairs.append((word, []))
        elif pairs:
            pairs[-1][1].append(word)
        else:
            stray.append(word)
    return pairs, stray


def read(argv: Sequence[str]) -> tuple[list[Given], list[str], list[str]]:
    """All arguments of a command. Returns (given, warnings, errors); the last of a repeated argument counts, as with argparse."""
    table = all_fields()
    pairs, stray = split(argv)
    given: dict[str, Given] = {}
    warnings: list[str] = []
    errors: list[str] = []
    if stray:
        errors.append(f'These words stand before the first argument and belong to none: {" ".join(stray)}.')
    for typed, words in pairs:
        if typed.startswith('-'):
            errors.append(f'{typed} is not an argument; long names with two dashes are used. ' + unknown_message(typed.lstrip('-')))
            continue
        name = typed.replace('-', '_')
        if name.startswith('no_') and name not in table and name[3:] in table and table[name[3:]].type == 'bool' and not words:
            name, words = name[3:], ['false']
        if name not in table:
            errors.append(unknown_message(typed, words))
            continue
        field = table[name]
        if not field.is_list and len(words) > 1:
            errors.append(f'--{typed} takes one value; {" ".join(words)!r} are {len(words)}. Quote it, or check for a missing name.')
            continue
        try:
            value = values.parse(field, words)
        except ValueError as error:
            shown = f'is {" ".join(words)!r}' if words else 'has no value'
            errors.append(f'--{typed} {shown}; it takes {error}.' + _nearest_choice(field.choices, words))
            continue
        if name in given and given[name].value != value:
            warnings.append(f'--{name} is given twice ({given[name].value!r}, {value!r}); the last one counts.')
        given[name] = Given(name=name, typed=typed, value=value)
    return list(given.values()), warnings, errors


def _nearest_choice(choices: Sequence[str], words: Sequence[str]) -> str:
    import difflib

    close = difflib.get_close_matches(words[0].lower(), choices, n=1, cutoff=0.5) if words and choices else []
    return f' Did you mean {close[0]}?' if close else ''


def world_size_of(environ: Mapping[str, str]) -> tuple[int, str]:
    """Number of processes that this environment starts, and which variables say so. Raises UserError for what is not a number."""

    def number(key: str) -> int:
        text = environ[key]
        if not text:
            raise UserError(f'{key} is set and empty in the environment; it is a number of processes or machines, 1 or more.')
        if not re.fullmatch(r'\d+', text) or int(text) < 1:
            raise UserError(f'{key} is {text!r} in the environment; it is a number of processes or machines, 1 or more.')
        return int(text)

    if 'LOCAL_RANK' in environ and 'WORLD_SIZE' in environ:
        return number('WORLD_SIZE'), 'WORLD_SIZE of torchrun'
    nodes = number('NNODES') if 'NNODES' in environ else 1
    if 'NPROC_PER_NODE' in environ:
        if environ['NPROC_PER_NODE'] in ('gpu', 'auto'):
            return count_devices(environ) * nodes, f'NPROC_PER_NODE {environ["NPROC_PER_NODE"]} of this machine'
        return number('NPROC_PER_NODE') * nodes, 'NPROC_PER_NODE x NNODES' if 'NNODES' in environ else 'NPROC_PER_NODE'
    if 'NNODES' in environ:
        return nodes, 'NNODES'
    return 1, ''


def count_devices(environ: Mapping[str, str]) -> int:
    """Accelerators that a process on this machine would see. Raises UserError where there are none."""
    if environ.get('CUDA_VISIBLE_DEVICES'):
        return len([entry for entry in environ['CUDA_VISIBLE_DEVICES'].split(',') if entry.strip()])
    from .doctor import accelerators

    found = len(accelerators())
    if not found:
        raise UserError(f'NPROC_PER_NODE is {environ["NPROC_PER_NODE"]!r}, and this machine has no accelerator to count; give a number.')
    return found
