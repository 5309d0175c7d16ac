"""A run that is asked to stop saves and ends (import tier 0: standard library only).

SIGUSR1 to one worker is enough: the ranks agree after each optimizer step. The stop button of `swift web-ui` sends it, and a scheduler can
(`kill -USR1 <pid of a worker>`). SIGTERM stays what it is everywhere: the end of the process.
"""
from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

STOP_SIGNAL = signal.SIGUSR1


class StopRequest:
    """Whether some rank of the run got the signal. Built on every rank, in the main thread."""

    def __init__(self) -> None:
        self.is_agreed = False
        self._here = False
        if threading.current_thread() is threading.main_thread():
            signal.signal(STOP_SIGNAL, self._note)

    def _note(self, number: int, frame: Any) -> None:
        self._here = True

    def agree(self, on_any_rank: Callable[[bool], bool]) -> bool:
        """All ranks, collective: `on_any_rank` says whether a rank brings True. Once agreed it stays so."""
        self.is_agreed = on_any_rank(self._here)
        return self.is_agreed
