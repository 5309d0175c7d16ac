"""Starting the workers and passing signals and exit codes on (import tier 0: standard library only)."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

TORCHRUN = Path(__file__).with_name('torchrun.py')
INTERRUPT_GRACE_S = 10.0
"""After Ctrl-C the workers, which got it too, have this long to end before they are told to."""


def torchrun_arguments(environ: Mapping[str, str]) -> list[str] | None:
    """Torchrun's arguments from ms-swift's environment variables; None when neither NPROC_PER_NODE nor NNODES is set.

    >>> torchrun_arguments({'NPROC_PER_NODE': '2', 'MASTER_PORT': '29501'})
    ['--nproc_per_node', '2', '--master_port', '29501']
    """
    if 'NPROC_PER_NODE' not in environ and 'NNODES' not in environ:
        return None
    names = ('NPROC_PER_NODE', 'MASTER_PORT', 'NNODES', 'NODE_RANK', 'MASTER_ADDR')
    return [token for name in names if name in environ for token in (f'--{name.lower()}', environ[name])]


def run(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the command to its end and return its exit code (128 + n when signal n ended it, as shells have it).

    SIGTERM and SIGHUP are passed on. Ctrl-C reaches the workers through the terminal; they are terminated when that is not enough.
    """
    process = subprocess.Popen(list(command), env=dict(environ))
    forwarded: list[int] = []

    def forward(number, frame) -> None:
        forwarded.append(number)
        process.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGHUP)} if _in_main_thread() else {}
    try:
        code = _wait(process)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _wait(process: subprocess.Popen) -> int:
    try:
        return process.wait()
    except KeyboardInterrupt:
        deadline = time.monotonic() + INTERRUPT_GRACE_S
        while time.monotonic() < deadline:
            try:
                return process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except KeyboardInterrupt:  # an impatient second Ctrl-C: the workers got it as well
                break
            except subprocess.TimeoutExpired:
                break
        process.terminate()
        try:
            return process.wait(timeout=INTERRUPT_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def _in_main_thread() -> bool:
    import threading

    return threading.current_thread() is threading.main_thread()


def leave(code: int) -> None:
    """End this process now, with its output written and without waiting for threads or collectives of a broken group."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
