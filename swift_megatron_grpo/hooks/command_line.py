"""What a process was asked for, read from its command line (import tier 0: standard library only).

Nothing here judges an argument: that is `args.resolve`. These functions answer three questions: is this process `swift rlhf`, does it
ask for our backend, and what do the arguments look like once a leading YAML or JSON file is written out.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from swift_megatron_grpo.errors import UserError

Backend = Literal['', 'megatron', 'transformers'] | str
CONFIG_SUFFIXES = ('.yaml', '.yml', '.json')


def rlhf_arguments(argv: Sequence[str], orig_argv: Sequence[str]) -> tuple[str, list[str]] | None:
    """What follows `swift rlhf`, and which of its two processes this is; None for any other process.

    `argv` is `sys.argv` and `orig_argv` is `sys.orig_argv`: while `python -m` looks for its module, `sys.argv[0]` is '-m' and only the
    latter names the module.

    >>> rlhf_arguments(['/env/bin/swift', 'rlhf', '--model', 'm'], [])
    ('parent', ['--model', 'm'])
    >>> rlhf_arguments(['/env/lib/swift/cli/rlhf.py', '--model', 'm'], [])
    ('child', ['--model', 'm'])
    """
    if not argv:
        return None
    program, rest = argv[0], list(argv[1:])
    if program == '-m':
        module = orig_argv[list(orig_argv).index('-m') + 1] if '-m' in orig_argv[:-1] else ''
        is_parent, is_child = module == 'swift.cli.main', module == 'swift.cli.rlhf'
    else:
        parts = Path(program).parts
        is_parent = bool(parts) and parts[-1] in ('swift', 'swift.exe', 'swift-script.py')
        is_child = parts[-3:] == ('swift', 'cli', 'rlhf.py')
    if is_child:
        return 'child', rest
    if is_parent and rest and rest[0].replace('_', '-') == 'rlhf':
        return 'parent', rest[1:]
    return None


def expand_config(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Write out a leading configuration file as ms-swift does, without touching the process.

    Returns the arguments and the environment variables that the file adds: its `ENV` entries that are not set yet, and
    SWIFT_CONFIG_FILE. Raises UserError for a file that cannot be read.
    """
    argv = list(argv)
    if not argv or not argv[0].endswith(CONFIG_SUFFIXES):
        return argv, {}
    config = read_config(argv[0])
    env = {str(key): str(value) for key, value in (config.pop('ENV', None) or {}).items() if key not in environ}
    env['SWIFT_CONFIG_FILE'] = argv[0]
    written: list[str] = []
    for key, value in config.items():
        written.append(f'--{key}')
        if isinstance(value, list):
            written += [str(item) for item in value]
        elif isinstance(value, dict):
            written.append(json.dumps(value, ensure_ascii=False))
        else:
            written.append(str(value))
    return written + argv[1:], env


def read_config(path: str) -> dict:
    """The mapping in a YAML or JSON file. Raises UserError when it is missing, malformed, or not a mapping."""
    try:
        text = Path(path).read_text(encoding='utf-8')
    except OSError as error:
        raise UserError(f'the configuration file {path!r} cannot be read: {error.strerror}; the path is relative to {os.getcwd()!r}') from None
    try:
        if path.endswith('.json'):
            config = json.loads(text)
        else:
            import yaml

            config = yaml.safe_load(text)
    except ImportError:
        raise UserError(f'{path!r} is YAML and PyYAML is not installed: `pip install pyyaml`, or give the file as .json') from None
    except Exception as error:  # yaml.YAMLError and json.JSONDecodeError share no base but Exception
        raise UserError(f'the configuration file {path!r} cannot be parsed: {error}') from None
    if not isinstance(config, dict):
        raise UserError(f'the configuration file {path!r} must hold one mapping of argument names to values, got {type(config).__name__}')
    return config


def asked_backend(argv: Sequence[str]) -> Backend:
    """The backend that the arguments name: '' when none is named, else the last value given (the last one wins in ms-swift).

    `--rlhf_type megatron_grpo` names 'megatron'. A leading configuration file is looked into; one that cannot be read names nothing
    here, since ms-swift's own message about it is the right one.

    >>> asked_backend(['--backend', 'transformers', '--backend=megatron'])
    'megatron'
    """
    try:
        arguments, _ = expand_config(argv, {})
    except UserError:
        arguments = list(argv)
    backend = last_value(arguments, 'backend')
    if backend is None and last_value(arguments, 'rlhf_type') == 'megatron_grpo':
        return 'megatron'
    return backend or ''


def last_value(argv: Sequence[str], name: str) -> str | None:
    """Value of the last `--name value`, `--name=value` (underscores or hyphens); None when it is not there, '' when no value follows."""
    found = None
    for index, token in enumerate(argv):
        if not token.startswith('--'):
            continue
        key, equals, value = token[2:].partition('=')
        if key.replace('-', '_') != name:
            continue
        if equals:
            found = value
        else:
            following = argv[index + 1] if index + 1 < len(argv) else ''
            found = '' if following.startswith('--') else following
    return found


def without(argv: Sequence[str], name: str) -> list[str]:
    """The arguments without any `--name value` or `--name=value`."""
    kept: list[str] = []
    skip = False
    for index, token in enumerate(argv):
        if skip:
            skip = False
            continue
        key, equals, _ = token[2:].partition('=')
        if token.startswith('--') and key.replace('-', '_') == name:
            skip = not equals and index + 1 < len(argv) and not argv[index + 1].startswith('--')
            continue
        kept.append(token)
    return kept
