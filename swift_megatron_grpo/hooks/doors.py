"""From a command line to worker processes: the one place where a checked plan becomes a run (import tier 0: standard library only).

* `run_command`: the process that the user started. Checks once, prints each problem once, answers a dry run, starts the workers.
* `become_worker`: a process that somebody else's torchrun (or ms-swift's own command) started for this rank. Checks, prints on rank 0
  only, and replaces itself by the worker.
* `run_from_program`: `rlhf_main([...])` called by a user's own program. Checks, raises, runs the worker beside it.
"""

import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from swift_megatron_grpo.errors import RunError, UserError
from swift_megatron_grpo.hooks import command_line, launch

if TYPE_CHECKING:
    from swift_megatron_grpo.args import Plan

WORKER = Path(__file__).with_name('worker.py')
EXIT_USER_ERROR = 2
SILENT_RANK_GRACE_S = 5.0
"""A rank that does not print waits this long before it exits, so that the launcher does not end rank 0 in the middle of its message."""


def run_command(argv: Sequence[str]) -> int:
    """Run `swift rlhf <argv>` on Megatron from the user's own process. Returns the exit code: 0 worked, 2 wrong input, else the workers'."""
    if _asks_for_help(argv):
        print(help_text())
        return 0
    try:
        arguments, environ = _expand(argv)
        plan = resolve_ours(arguments, environ)
    except UserError as error:
        print(f'error: {error}', file=sys.stderr)
        return EXIT_USER_ERROR
    if plan.dry_run:
        return _answer_dry_run(plan)
    _print_problems(plan)
    if plan.errors:
        return EXIT_USER_ERROR
    command = worker_command(plan.worker_argv, environ)
    print(f'run sh: `{shlex.join(command)}`', flush=True)
    return launch.run(command, environ)


def become_worker(argv: Sequence[str]) -> None:
    """Replace this process by the worker of its rank, or exit with code 2 (0 after a dry run). Does not return.

    All ranks come to the same verdict since it follows from the command line and the environment that they share; rank 0 prints it.
    """
    rank = int(os.environ.get('RANK', '0'))
    if _asks_for_help(argv):
        if rank == 0:
            print(help_text(), flush=True)
        sys.exit(0)
    try:
        arguments, environ = _expand(argv)
        plan = resolve_ours(arguments, environ)
        problem = None
    except UserError as error:
        plan, problem = None, error
    if plan is not None and not plan.errors and not plan.dry_run:
        if rank == 0:
            _print_problems(plan)
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(sys.executable, [sys.executable, '-u', str(WORKER), *plan.worker_argv], environ)
    if rank != 0:
        time.sleep(SILENT_RANK_GRACE_S)
        sys.exit(EXIT_USER_ERROR if plan is None or plan.errors else 0)
    if plan is None:
        print(f'error: {problem}', file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    if plan.dry_run:
        sys.exit(_answer_dry_run(plan))
    _print_problems(plan)
    sys.exit(EXIT_USER_ERROR)


def run_from_program(argv: Sequence[str]) -> None:
    """Train for a program that called ms-swift's `rlhf_main(argv)`; the worker runs beside it with the same environment (also under
    torchrun). Raises UserError for wrong input and RunError when the worker fails.
    """
    arguments, environ = _expand(argv)
    plan = resolve_ours(arguments, environ)
    if plan.dry_run:
        if _answer_dry_run(plan):
            raise UserError('\n'.join(plan.errors))
        return
    if plan.errors:
        raise UserError('\n'.join(plan.errors))
    _print_problems(plan)
    code = launch.run([sys.executable, '-u', str(WORKER), *plan.worker_argv], environ)
    if code:
        raise RunError(f'the training process ended with exit code {code}; its own message is above')


def help_text() -> str:
    """What `swift rlhf --backend megatron --help` prints: this package's own arguments, and where the others are described."""
    from swift_megatron_grpo.args import OWN_FIELDS

    lines = [
        'usage: swift rlhf --rlhf_type grpo --backend megatron [arguments]',
        '',
        'Takes the arguments of `swift rlhf` with their meaning (`swift rlhf --rlhf_type grpo --help` lists them), the names of Megatron-Core',
        '(`megatron rlhf --help`), and these. What becomes of each stands in docs/arguments.md; --dry_run true shows it for one command.',
        '',
    ]
    for own in OWN_FIELDS:
        choices = f" {{{','.join(str(choice) for choice in own.choices)}}}" if own.choices else ''
        lines += [f'  --{own.name}{choices} (default: {own.default})', f'        {own.help}']
    return '\n'.join(lines)


def is_worker_process() -> bool:
    """Whether this process is a worker, or one that a worker spawned with its own command line (data loaders, engines)."""
    return bool(sys.argv) and Path(sys.argv[0]) == WORKER


def worker_command(worker_argv: Sequence[str], environ: dict[str, str]) -> list[str]:
    """The command that starts the workers: under torchrun when NPROC_PER_NODE or NNODES is set, as ms-swift has it, else one process."""
    torchrun = launch.torchrun_arguments(environ)
    if torchrun is None:
        return [sys.executable, '-u', str(WORKER), *worker_argv]
    return [sys.executable, '-u', str(launch.TORCHRUN), *torchrun, str(WORKER), *worker_argv]


def _asks_for_help(argv: Sequence[str]) -> bool:
    return '--help' in argv or '-h' in argv


def _expand(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    arguments, added = command_line.expand_config(argv, os.environ)
    return arguments, {**os.environ, **added}


def resolve_ours(arguments: list[str], environ: dict[str, str]) -> 'Plan':
    """The plan of arguments that ask for our backend. Raises UserError for a backend that nobody has; the rest stands in the plan."""
    backend = command_line.asked_backend(arguments)
    if backend != 'megatron':
        raise UserError(
            f"--backend {backend!r} is not known: 'megatron' trains on Megatron-Core, 'transformers' (or no --backend) is ms-swift's own"
            ' trainer; nothing was started'
        )
    from swift_megatron_grpo.args import resolve

    # Said once: earlier values of a repeated --backend do not count, and `megatron_grpo` is the same thing by another name.
    return resolve([*command_line.without(arguments, 'backend'), '--backend', 'megatron'], environ)


def _answer_dry_run(plan) -> int:
    from swift_megatron_grpo.args import report

    text = report.render_json(plan) if plan.dry_run == 'json' else report.render_text(plan)
    print(text, flush=True)
    return EXIT_USER_ERROR if plan.errors else 0


def _print_problems(plan) -> None:
    for warning in plan.warnings:
        print(f'warning: {warning}', file=sys.stderr)
    for error in plan.errors:
        print(f'error: {error}', file=sys.stderr)
    sys.stderr.flush()
