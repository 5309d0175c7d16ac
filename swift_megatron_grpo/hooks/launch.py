"""Starting the workers and passing signals and exit codes on (import tier 0: standard library only)."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

TORCHRUN = Path(__file__).with_name('torchrun.py')
INTERRUPT_GRACE_S = 40.0
"""After Ctrl-C the workers, which got it too, have this long to end before they are told to. Torchrun itself waits 30 s for its own."""
NO_TERMINAL_GRACE_S = 5.0
"""The same where no terminal can have sent the signal to the workers (kill -INT, a notebook, a scheduler)."""


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

    SIGTERM, SIGHUP and SIGUSR1 (the request to save and end) are passed on. Ctrl-C reaches the workers through the terminal; they are
    terminated when that is not enough. The handlers raise nothing: an exception between the end of the child and the reading of its
    status would lose the status.
    """
    process = subprocess.Popen(list(command), env=dict(environ))
    timers: list[threading.Timer] = []

    def forward(number, frame) -> None:
        process.send_signal(number)

    def interrupt(number, frame) -> None:
        if not timers:
            grace = INTERRUPT_GRACE_S if _is_in_front_of_a_terminal() else NO_TERMINAL_GRACE_S
            os.write(2, f'\ninterrupted: the workers end now, in {grace:.0f} s at most\n'.encode())
            for delay, act in ((grace, process.terminate), (grace + INTERRUPT_GRACE_S, process.kill)):
                timer = threading.Timer(delay, act)
                timer.daemon = True
                timer.start()
                timers.append(timer)

    handlers = {signal.SIGTERM: forward, signal.SIGHUP: forward, signal.SIGUSR1: forward, signal.SIGINT: interrupt}
    in_main_thread = threading.current_thread() is threading.main_thread()
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()} if in_main_thread else {}
    try:
        code = process.wait()
    finally:
        for timer in timers:
            timer.cancel()
        for number, handler in previous.items():
            signal.signal(number, handler)
    if timers and code:
        return 128 + signal.SIGINT  # whatever ended the child after Ctrl-C
    return code if code >= 0 else 128 - code


def _is_in_front_of_a_terminal() -> bool:
    """Whether Ctrl-C on a terminal goes to this process and its children."""
    try:
        terminal = os.open('/dev/tty', os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def leave(code: int) -> None:
    """End this process now, with its output written and without waiting for threads or collectives of a broken group."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
