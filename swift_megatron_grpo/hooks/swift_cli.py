"""Stands for `swift.cli.main` and `swift.pipelines` in a process that is `swift rlhf --backend megatron` and nothing else.

The finder serves this file under those names (see autoload.py); the console script and ms-swift's own cli/rlhf.py import it without
knowing. Import tier 0.
"""

import sys


def cli_main() -> int:
    """`swift rlhf ...` in the process that the user started: check, answer a dry run or start the workers. Returns the exit code."""
    from swift_megatron_grpo.hooks.doors import run_command

    return run_command(sys.argv[2:])


def rlhf_main(args: list[str] | None = None) -> None:
    """ms-swift's cli/rlhf.py, started by ms-swift itself or by somebody's torchrun: check, and become the worker."""
    from swift_megatron_grpo.hooks.doors import become_worker

    become_worker(sys.argv[1:] if args is None else list(args))


if __name__ == '__main__':
    sys.exit(cli_main())
