"""Finding the training commands in a script or a configuration file, and writing them back with this backend (import tier 0)."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping

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
    """One training command. ``argv`` is what follows `swift rlhf`; ``insert_at`` is the offset behind which --backend belongs."""

    argv: list[str]
    environment: dict[str, str]
    folder: str
    line: int
    insert_at: int
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
    extra = [word for name, value in MEGATRON_DEFAULTS if name not in names for word in (f'--{name}', value)] if megatron else []
    return Found(
        argv=rest,
        environment=environment,
        folder=command.folder,
        line=text.count('\n', 0, command.spans[start][0]) + 1,
        insert_at=spans[0][1] if config_first else command.spans[start][1],
        program_span=command.spans[start - 1] if megatron else None,
        has_backend='backend' in names,
        extra=extra,
    )


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


def write_script(script: Script) -> str:
    """The script with ` --backend megatron` behind each `swift rlhf`, and nothing else changed (`megatron rlhf` becomes `swift rlhf`)."""
    changes: set[tuple[int, int, str]] = set()  # a function that is called twice stands in the file once
    for item in script.found:
        words = [] if item.has_backend else ['--backend', 'megatron']
        words += item.extra
        if words:
            changes.add((item.insert_at, item.insert_at, ' ' + ' '.join(words)))
        if item.program_span is not None:
            changes.add((*item.program_span, 'swift'))
    text = script.text
    for start, end, new in sorted(changes, reverse=True):
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
        program_span=None,
        has_backend='backend' in config,
        extra=[],
    )
    return Script(text=text, found=[found], servers=[], notes=[])


def write_yaml(script: Script, path: str) -> str:
    """The file with one key more, and nothing else changed: backend: megatron, beside rlhf_type where it stands."""
    if script.found[0].has_backend:
        return script.text
    opening = re.match(r'(?:\s*(?:#.*|---)?\n)*\s*\{', script.text)
    if opening is not None:  # JSON, or YAML in its manner
        blank = re.match(r'\s*', script.text[opening.end() :])
        key = 'backend: megatron' if re.match(r'[\w-]+\s*:', script.text[opening.end() :].lstrip()) else '"backend": "megatron"'
        return script.text[: opening.end()] + (blank.group() if blank else '') + key + ',' + (script.text[opening.end() :] or '')
    match = re.search(r'^["\']?rlhf_type["\']?\s*:.*$', script.text, flags=re.MULTILINE)
    if match is None:
        return script.text.rstrip('\n') + '\nbackend: megatron\n'
    end = match.end() - match.group().endswith('\r')
    return script.text[:end] + ('\r' if end < match.end() else '') + '\nbackend: megatron' + script.text[end:]
