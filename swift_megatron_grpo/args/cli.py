"""The command `swift-megatron-grpo` (import tier 0): plan an existing script, and say what is installed."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence

from .. import compare
from ..errors import UserError
from . import scripts
from .doctor import report as doctor_report
from .fields import all_fields
from .names import unknown_message
from .own import OWN_BY_NAME, OWN_FIELDS
from .plan import Plan
from .report import render_json, render_text
from .resolver import resolve


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Exit code 0: all is well; 1: two runs differ; 2: the command would not start, or the input cannot be read."""
    parser = argparse.ArgumentParser(prog='swift-megatron-grpo', description='GRPO on Megatron-Core for ms-swift.', allow_abbrev=False)
    commands = parser.add_subparsers(dest='command', required=True)
    plan = commands.add_parser(
        'plan',
        help='show what a script or YAML file becomes with --backend megatron; nothing is executed',
        epilog='Any other argument is added to the command, and to what --write writes: --tensor_model_parallel_size 4.',
        allow_abbrev=False,
    )
    plan.add_argument('file', help='FILE.sh, FILE.yaml, FILE.json, or - for standard input')
    plan.add_argument('--write', metavar='OUT', help='write the file with --backend megatron, the added arguments, and no other change')
    plan.add_argument('--json', action='store_true', help='print one JSON object a command')
    plan.add_argument('--world_size', '--world-size', type=int, help='number of processes, where the script does not say it')
    commands.add_parser('doctor', help='what is installed, what is missing, and how to get it')
    explain = commands.add_parser('arguments', help="what one argument becomes, or the list of this package's own", allow_abbrev=False)
    explain.add_argument('names', nargs='*', metavar='NAME', help='names with or without dashes')
    both = commands.add_parser('compare', help='whether two runs made the same optimizer steps, from what they logged', allow_abbrev=False)
    both.add_argument('runs', nargs=2, metavar='RUN', help='output folder of a run, or its logging.jsonl')
    both.add_argument('--tolerance', type=_tolerance, default=1e-5, help='largest difference that counts as equal (default 1e-5, which holds in float32)')
    options, more = parser.parse_known_args(argv)
    if more and options.command in ('doctor', 'compare'):
        parser.error(f'unknown arguments: {" ".join(more)}')
    try:
        if options.command == 'arguments':
            return _explain([*options.names, *more])
        if options.command == 'compare':
            text, agree = compare.report(options.runs, options.tolerance)
            print(text)
            return 0 if agree else 1
        if options.command == 'doctor':
            text, healthy = doctor_report()
            print(text)
            return 0 if healthy else 2
        return _plan(options, [word for word in more if word != '--'])
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 0


def _explain(names: Sequence[str]) -> int:
    """One paragraph a name; without names, the own arguments. Code 2 where a name does not exist."""
    table = all_fields()
    code = 0
    for name in [word.lstrip('-').replace('-', '_') for word in names] or [own.name for own in OWN_FIELDS]:
        if name not in table:
            print(unknown_message(name))
            code = 2
            continue
        field = table[name]
        target = f' -> {field.target}' if field.target else ''
        kind = ', '.join(field.choices) if field.choices else field.type
        meaning = OWN_BY_NAME[name].help if name in OWN_BY_NAME else field.reason
        print(f'--{name} ({kind}; default {field.default}): {field.action}{target}' + (f'. {meaning}' if meaning else ''))
    return code


def _tolerance(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f'{text}: a difference is 0 or more, and finite')
    return value


def _plan(options: argparse.Namespace, more: list[str]) -> int:
    script, is_yaml = _read(options.file)
    if not script.found:
        raise UserError(
            f'{options.file} starts no `swift rlhf` (or `megatron rlhf`) command.'
            + (f' It starts: {script.servers[0]}.' if script.servers else '')
        )
    written = list(more)
    if options.world_size is not None:
        more = [*more, '--world_size', str(options.world_size)]
    plans: list[tuple[scripts.Found, Plan]] = []
    for item in script.found:
        argv = [
            *item.argv,
            *([] if item.has_backend else ['--backend', 'megatron']),
            *item.extra,
            *more,
            '--dry_run',
            'json' if options.json else 'true',
        ]
        with _inside(item.folder, script.notes):
            plans.append((item, resolve(argv, item.environment, elsewhere=True)))
    _print(options, script, plans)
    if options.write:
        text = scripts.write_yaml(script, options.file, written) if is_yaml else scripts.write_script(script, written)
        with open(options.write + '.part', 'w', encoding='utf-8') as file:  # never half a script: OUT can be the file that was read
            file.write(text)
        if not is_yaml and options.file != '-':
            os.chmod(options.write + '.part', os.stat(options.file).st_mode & 0o777)
        os.replace(options.write + '.part', options.write)
        print(f'Wrote {options.write}.', file=sys.stderr)
    return 0 if all(plan.ok for _, plan in plans) else 2


def _read(name: str) -> tuple[scripts.Script, bool]:
    if name == '-':
        text = sys.stdin.read()
        script = scripts.read_script(text, os.environ)
        if not script.found and re.search(r'^["\s{]*rlhf_type"?\s*:', text, flags=re.MULTILINE):
            return scripts.read_yaml_text(text, 'standard input', os.environ), True
        return script, False
    if name.lower().endswith(('.yaml', '.yml', '.json')):
        return scripts.read_yaml(name, os.environ), True
    try:
        with open(name, encoding='utf-8', newline='') as file:
            text = file.read()
        script = scripts.read_script(text.replace('\r\n', '\n'), os.environ, name)
        if '\r\n' in text:
            script.notes.append(f"{name}: lines end with CR LF, as on Windows, and bash takes the CR for a part of the last word: sed -i 's/\\r$//' {name}")
        return script, False
    except OSError as error:
        raise UserError(f'{name} cannot be read: {error.strerror}.') from None
    except UnicodeDecodeError:
        raise UserError(f'{name} is not a text file.') from None


@contextlib.contextmanager
def _inside(folder: str, notes: list[str]) -> Iterator[None]:
    """Relative paths mean what they mean after the script's own `cd`."""
    if folder and os.path.isdir(folder):
        here = os.getcwd()
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(here)
        return
    if folder:
        notes.append(f'The script changes to {folder}, which does not exist here; relative paths are looked up in this folder.')
    yield


def _print(options: argparse.Namespace, script: scripts.Script, plans: list[tuple[scripts.Found, Plan]]) -> None:
    if options.json:
        objects = [json.loads(render_json(plan)) for _, plan in plans]
        for item in objects:
            item['notes'], item['servers'] = script.notes, script.servers
        print(json.dumps(objects[0] if len(objects) == 1 else objects, ensure_ascii=False, indent=2))
        return
    for server in script.servers:
        print(f'Rollout server in the same file, started as it is: {server}\n')
    for item, plan in plans:
        print(f'{options.file}, line {item.line}')
        print(render_text(plan))
        print()
    for note in script.notes:
        print(f'note: {note}')


if __name__ == '__main__':
    sys.exit(main())
