"""Finding the training commands in a script or a configuration file, and writing them back with this backend (import tier 0)."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import UserError
from .argv import config_argv, parse_config, split
from .shell import Command, ScriptReader

# What a `megatron rlhf` command means by saying nothing, where `swift rlhf` means something else.
MEGATRON_DEFAULTS = (
    ('tuner_type', 'full'),
    ('use_vllm', 'true'),
    ('padding_free', 'true'),
    ('recompute_granularity', 'selective'),
    ('dataloader_num_workers', '4'),
)


@dataclasses.dataclass(kw_only=True, slots=True)
class Found:
    """One training command. ``argv`` is what follows `swift rlhf`.

    ``insert_at`` is the offset behind which --backend belongs, ``end_at`` the one behind its last word.
    """

    argv: list[str]
    environment: dict[str, str]
    folder: str
    line: int
    insert_at: int
    end_at: int
    program_span: tuple[int, int] | None  # the words `megatron` of a `megatron rlhf` command
    has_backend: bool
    extra: list[str]  # arguments that keep the meaning of a `megatron rlhf` command


@dataclasses.dataclass(kw_only=True, slots=True)
class Script:
    """What a file holds: training commands, rollout servers (as lines to show), and notes on what could not be known."""

    text: str
    found: list[Found]
    servers: list[str]
    notes: list[str]


def read_script(text: str, environ: Mapping[str, str], name: str = '') -> Script:
    """All training commands of a shell script, which lies at ``name`` where that is known. Nothing is executed."""
    reader = ScriptReader(text, environ, name)
    script = Script(text=text, found=[], servers=[], notes=[])
    for command in reader.read():
        words = command.words
        start = _program(words)
        if start is None:
            if words[0].startswith('--'):
                line = text.count('\n', 0, command.spans[0][0]) + 1
                script.notes.append(
                    f'Line {line} begins with {words[0]}: a comment, a blank line or a missing backslash before it ends the command above.'
                )
            continue
        kind = words[start]
        rest, spans = words[start + 1 :], command.spans[start + 1 :]
        if kind == 'rollout':
            script.servers.append('swift rollout ' + ' '.join(rest))
        elif kind == 'rlhf':
            script.found.append(_found(text, command, start, rest, spans))
    script.notes += reader.notes
    return script


def _program(words: list[str]) -> int | None:
    """The index of the word `rlhf` or `rollout` (or of the file that stands for it), behind any launcher."""
    for index, word in enumerate(words):
        base = os.path.basename(word)
        following = words[index + 1].replace('_', '-') if index + 1 < len(words) else ''
        if (base in ('swift', 'megatron') or word == 'swift.cli.main' or word.endswith('swift/cli/main.py')) and following in (
            'rlhf',
            'rollout',
        ):
            return index + 1
        if base in ('rlhf.py', 'rollout.py') and 'cli' in word:
            words[index] = base[:-3]
            return index
        if word in ('swift.cli.rlhf', 'swift.cli.rollout'):
            words[index] = word.rsplit('.', 1)[1]
            return index
    return None


def _found(text: str, command: Command, start: int, rest: list[str], spans: list[tuple[int, int]]) -> Found:
    before = command.words[:start]
    environment = {**command.environment, **_launcher(before)}
    if 'env' in before:
        for word in before[before.index('env') :]:
            name, equals, value = word.partition('=')
            if equals and name.isidentifier():
                environment[name] = value
    config_first = bool(rest) and rest[0].lower().endswith(('.yaml', '.yml', '.json')) and not rest[0].startswith('-')
    names = {name.replace('-', '_') for name, _ in split(rest)[0]}
    megatron = bool(before) and os.path.basename(before[-1]) == 'megatron'
    extra = [word for name, value in _meant_by_megatron(rest) if name not in names for word in (f'--{name}', value)] if megatron else []
    return Found(
        argv=rest,
        environment=environment,
        folder=command.folder,
        line=text.count('\n', 0, command.spans[start][0]) + 1,
        insert_at=spans[0][1] if config_first else command.spans[start][1],
        end_at=command.spans[-1][1],
        program_span=command.spans[start - 1] if megatron else None,
        has_backend='backend' in names,
        extra=extra,
    )


def _meant_by_megatron(argv: list[str]) -> list[tuple[str, str]]:
    """What this `megatron rlhf` command means by saying nothing: defaults that differ, and those that depend on what it says."""
    given = {name.replace('-', '_'): words for name, words in split(argv)[0]}
    meant = list(MEGATRON_DEFAULTS)
    if given.get('multi_turn_scheduler'):
        meant.append(('loss_scale', 'last_round'))
    meant += [(f'{logger}_project', 'megatron-swift') for logger in ('wandb', 'swanlab') if logger in given.get('report_to', [])]
    if given.get('tuner_type') == ['lora']:
        meant.append(('merge_lora', 'true'))
    model = next((words[0] for name in ('model', 'mcore_model') if (words := given.get(name))), '')
    if os.path.basename(model.rstrip('/')).strip('.'):
        meant.append(('output_dir', f'megatron_output/{os.path.basename(model.rstrip("/"))}'))
    return meant


def _launcher(words: list[str]) -> dict[str, str]:
    """What torchrun's own options say about the number of processes, as the variables that ms-swift reads."""
    names = {
        'nproc_per_node': 'NPROC_PER_NODE',
        'nnodes': 'NNODES',
        'num_processes': 'NPROC_PER_NODE',
        'num_machines': 'NNODES',
        'num_gpus': 'NPROC_PER_NODE',
    }
    result = {}
    for name, values in split(words)[0]:
        key = names.get(name.lstrip('-').replace('-', '_'))
        if key is not None and values and values[0].isdigit():
            result[key] = values[0]
    if 'accelerate' in (os.path.basename(word) for word in words) and {'NPROC_PER_NODE', 'NNODES'} <= set(result):
        # accelerate counts the processes of all machines
        result['NPROC_PER_NODE'] = str(int(result['NPROC_PER_NODE']) // int(result['NNODES']))
    return result


def write_script(script: Script, more: Sequence[str] = ()) -> str:
    """The script with ` --backend megatron` behind each `swift rlhf` and ``more`` at the end of the command, where it wins over what stands
    before it; nothing else is changed (`megatron rlhf` becomes `swift rlhf`)."""
    changes: set[tuple[int, int, str]] = set()  # a function that is called twice stands in the file once
    for item in script.found:
        words = [] if item.has_backend else ['--backend', 'megatron']
        words += item.extra
        if words:
            changes.add((item.insert_at, item.insert_at, ' ' + ' '.join(words)))
        if more:
            changes.add(
                (max(item.end_at, item.insert_at), max(item.end_at, item.insert_at), ''.join(' ' + shlex.quote(word) for word in more))
            )
        if item.program_span is not None:
            changes.add((*item.program_span, 'swift'))
    text = script.text
    # from the end; at one place --backend comes first
    for start, end, new in sorted(changes, key=lambda change: (change[0], not change[2].startswith(' --backend')), reverse=True):
        text = text[:start] + new + text[end:]
    return text


def read_yaml(path: str, environ: Mapping[str, str]) -> Script:
    """A YAML or JSON file of arguments as a script with one command."""
    try:
        with open(path, encoding='utf-8') as file:
            return read_yaml_text(file.read(), path, environ)
    except OSError as error:
        raise UserError(f'The configuration file {path} cannot be read: {error.strerror}.') from None


def read_yaml_text(text: str, path: str, environ: Mapping[str, str]) -> Script:
    """The same for a text that was read from ``path``."""
    config = parse_config(text, path)
    environment = dict(environ)
    for key, value in (config.pop('ENV', None) or {}).items():
        environment.setdefault(key, str(value))
    found = Found(
        argv=config_argv(config),
        environment=environment,
        folder='',
        line=1,
        insert_at=0,
        end_at=0,
        program_span=None,
        has_backend='backend' in config,
        extra=[],
    )
    return Script(text=text, found=[found], servers=[], notes=[])


def write_yaml(script: Script, path: str, more: Sequence[str] = ()) -> str:
    """The file with one key more, backend: megatron, beside rlhf_type where it stands, and those of ``more``; nothing else is changed.

    Raises UserError where ``more`` names a key that the file has: it would stand there twice.
    """
    item = script.found[0]
    here = {name for name, _ in split(item.argv)[0]}
    added: dict[str, Any] = {} if item.has_backend else {'backend': 'megatron'}
    for name, words in split(more)[0]:
        if name.replace('-', '_') in here:
            raise UserError(f'{path} has {name.replace("-", "_")} already; change it there, {" ".join(words)} is not written beside it.')
        added[name.replace('-', '_')] = [_scalar(word) for word in words] if len(words) > 1 else _scalar(words[0]) if words else True
    if not added:
        return script.text
    opening = re.match(r'(?:\s*(?:#.*|---)?\n)*\s*\{', script.text)
    if opening is not None:  # JSON, or YAML in its manner
        rest = script.text[opening.end() :]
        blank = rest[: len(rest) - len(rest.lstrip())]
        quote = '' if re.match(r'[\w-]+\s*:', rest.lstrip()) else '"'
        return (
            script.text[: opening.end()]
            + ''.join(f'{blank}{quote}{name}{quote}: {_written(value, quote)},' for name, value in added.items())
            + rest
        )
    match = re.search(r'^["\']?rlhf_type["\']?\s*:.*$', script.text, flags=re.MULTILINE)
    lines = ''.join(f'\n{name}: {_written(value, "")}' for name, value in added.items())
    if match is None:
        return script.text.rstrip('\n') + lines + '\n'
    end = match.end() - match.group().endswith('\r')
    return script.text[:end] + (lines.replace('\n', '\r\n') if end < match.end() else lines) + script.text[end:]


def _scalar(word: str) -> Any:
    """A word of the command line as JSON would have it: numbers and truth values by themselves."""
    try:
        value = json.loads(word)
    except ValueError:
        return word
    return value if isinstance(value, (bool, int, float)) else word


def _written(value: Any, quote: str) -> str:
    plain = isinstance(value, str) and not quote and re.fullmatch(r'[A-Za-z][\w./-]*', value) and value.lower() not in _YAML_WORDS
    return str(value) if plain else json.dumps(value, ensure_ascii=False)


_YAML_WORDS = ('true', 'false', 'yes', 'no', 'on', 'off', 'null', 'y', 'n')
