"""A deadline for every phase that can hang (import tier 0: standard library only).

A reward function that blocks, a collective that waits for a dead rank, a server that never answers: none of them can be interrupted from
Python. A watchdog thread prints one named error and ends this process; the launcher then ends the other ranks.
"""
from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Iterator

EXIT_CODE = 1


def _end_process(message: str) -> None:
    sys.stdout.flush()
    print(f'\nERROR: {message}', file=sys.stderr, flush=True)
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)  # this one is the watchdog's own
    sys.stderr.flush()
    os._exit(EXIT_CODE)


@contextlib.contextmanager
def deadline(phase: str, seconds: float, *, rank: int, detail: Callable[[], str] = str,
             on_expiry: Callable[[str], None] = _end_process) -> Iterator[None]:
    """Ends the process (exit code 1) if the body takes longer than `seconds`.

    Args:
        phase: named in the error, e.g. 'Reward functions'.
        seconds: the limit; 0 or less means none.
        rank: named in the error.
        detail: called on expiry; what was done last, e.g. which reward function was running.
        on_expiry: receives the message; tests put a recorder here.
    """
    if seconds <= 0:
        yield
        return

    def expire() -> None:
        last = detail()
        on_expiry(f'{phase} did not end within {seconds:g} s on rank {rank}' + (f' ({last})' if last else '') +
                  '. The run stops here; the last complete checkpoint is kept.')

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
