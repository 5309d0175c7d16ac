"""Following and stopping a job that the page started (import tier 0; psutil, which ms-swift's page needs too, is imported where it is used)."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from swift_megatron_grpo.hooks import command_line
from swift_megatron_grpo.hooks.doors import WORKER

STOP_SIGNAL = signal.SIGUSR1
"""A worker that gets it saves a checkpoint after the optimizer step that is under way, and the run ends with exit code 0 (interruption.py)."""
WAIT_S = 15.0
"""How long the stop button waits for that before it returns."""
GRACE_S = 120.0
"""How long the run has for that before it is ended."""
TERM_S = 10.0
"""How long a run that was told to end has before it is killed."""
LOG_LINES = 100
POLL_S = 0.5


def is_ours(cmdline: Sequence[str]) -> bool:
    """Whether a process's command line is `swift rlhf` with this backend, in the process that the user (or the page) started."""
    found = command_line.rlhf_arguments(list(cmdline[1:]), [])
    return found is not None and found[0] == 'parent' and asks_for_megatron(found[1])


def asks_for_megatron(words: Sequence[str]) -> bool:
    """Whether the arguments of a `swift rlhf` that has started name this backend."""
    return command_line.asked_backend(words) == 'megatron'


def pid_of(task: str | None) -> int | None:
    """The process of one entry of the page's task list, `pid:12/create:.../cmd:...`; None where it names none."""
    head = (task or '').split('/', 1)[0]
    return int(head[4:]) if head.startswith('pid:') and head[4:].isdigit() else None


def process_of(task: str | None) -> Any:
    """The live psutil.Process of a task, where it is a job of ours; None otherwise. The process decides, not the text that the page sends."""
    import psutil

    pid = pid_of(task)
    if pid is None:
        return None
    try:
        process = psutil.Process(pid)
        return process if process.status() != psutil.STATUS_ZOMBIE and is_ours(process.cmdline()) else None
    except psutil.Error:
        return None


def workers_of(process: Any) -> list[Any]:
    """The training processes of a job on this machine, one a rank: those that run the worker file for the job's output_dir.

    Torchrun, which starts them, has the worker file on its command line too, and they outlive it when it is killed.
    """
    import psutil

    try:
        output = command_line.last_value(process.cmdline(), 'output_dir')
    except psutil.Error:
        return []
    found = {}
    for candidate in psutil.process_iter():
        try:
            words = candidate.cmdline()
            if runs_worker(words) and command_line.last_value(words, 'output_dir') == output:
                found[candidate.pid] = (candidate, candidate.ppid())
        except psutil.Error:
            continue
    return [worker for worker, parent in found.values() if parent not in found]  # without what a worker forked


def runs_worker(cmdline: Sequence[str]) -> bool:
    """Whether a command line is `python [options] worker.py ...`."""
    return next((word for word in cmdline[1:] if not word.startswith('-')), '') == str(WORKER)


def family_of(process: Any) -> list[Any]:
    """A job's process, everything that it started, and its workers with everything that they started."""
    import psutil

    family = {}
    for root in (process, *workers_of(process)):
        with contextlib.suppress(psutil.Error):
            family.update({member.pid: member for member in (root, *root.children(recursive=True))})
    return list(family.values())


class Stopper:
    """The stop button: the first press asks the run to save and end, the second ends it; a run that does not end in time is ended too."""

    def __init__(self, wait_s: float = WAIT_S, grace_s: float = GRACE_S, term_s: float = TERM_S) -> None:
        self.wait_s, self.grace_s, self.term_s = wait_s, grace_s, term_s
        self._asked: dict[int, threading.Timer] = {}

    def stop(self, process: Any) -> bool:
        """Returns whether the run is over, with all its processes. Blocks for `wait_s`, or until it was killed."""
        import psutil

        workers = workers_of(process)
        if process.pid in self._asked or not workers:  # asked before, or nothing is being trained yet and there is nothing to save
            timer = self._asked.pop(process.pid, None)
            if timer is not None:
                timer.cancel()
            end(family_of(process), self.term_s)
            return True
        family = family_of(process)
        timer = threading.Timer(self.grace_s, self._too_late, (process.pid, family))
        timer.daemon = True
        self._asked[process.pid] = timer
        timer.start()
        for worker in workers:
            with contextlib.suppress(psutil.Error):  # it has ended in between
                worker.send_signal(STOP_SIGNAL)
        _, left = psutil.wait_procs(family, timeout=self.wait_s)
        if not left:
            self._asked.pop(process.pid).cancel()
        return not left

    def _too_late(self, pid: int, family: list[Any]) -> None:
        if self._asked.pop(pid, None) is not None:
            end(family, self.term_s)


def end(family: list[Any], term_s: float) -> None:
    """End a job's processes: SIGTERM to all of them, then SIGKILL to what is left."""
    import psutil

    left = family
    for number in (signal.SIGTERM, signal.SIGKILL):
        for member in left:
            with contextlib.suppress(psutil.Error):
                member.send_signal(number)
        _, left = psutil.wait_procs(left, timeout=term_s)


class Tail:
    """The last lines of a log that grows. A progress bar, which rewrites its line, is one line."""

    def __init__(self, path: str, lines: int = LOG_LINES) -> None:
        self.path = path
        self._offset = 0
        self._rest = b''
        self._lines: collections.deque[str] = collections.deque(maxlen=lines)

    def read(self) -> bool:
        """Take in what was written since the last time; whether there was anything."""
        try:
            with open(self.path, 'rb') as file:
                file.seek(self._offset)
                new = file.read()
        except OSError:
            return False
        self._offset += len(new)
        *whole, self._rest = (self._rest + new).split(b'\n')
        self._lines.extend(_last_state(line) for line in whole)
        return bool(new)

    @property
    def text(self) -> str:
        last = _last_state(self._rest)
        return '\n'.join([*self._lines, last] if last else self._lines)


def _last_state(line: bytes) -> str:
    """What a terminal would show of a line that was rewritten with carriage returns."""
    states = [state for state in line.split(b'\r') if state.strip()]
    return states[-1].decode('utf-8', errors='replace') if states else ''


def follow(
    log_file: str, is_alive: Callable[[], bool], is_stopped: Callable[[], bool], events: Callable[[], Any], poll_s: float = POLL_S
) -> Iterator[tuple[str, bool]]:
    """(text of the log, whether the curves have new points), whenever one of them changed; ends with the job or when asked to.

    ms-swift's own loop ends after 25 s without a line, which loading a model or one long generation takes, and takes a whole core while a
    progress bar's line is unfinished.
    """
    tail, drawn = Tail(log_file), None
    while True:
        goes_on = is_alive()  # before the last look, so that the last words are shown
        changed, now = tail.read(), events()
        if changed or now != drawn:
            yield tail.text, now != drawn
            drawn = now
        if not goes_on or is_stopped():
            return
        time.sleep(poll_s)


def event_files(folder: str) -> list[tuple[str, int]]:
    """TensorBoard's files in a folder and their sizes."""
    if not os.path.isdir(folder):
        return []
    return sorted((entry.name, entry.stat().st_size) for entry in os.scandir(folder) if entry.name.startswith('events.out'))
