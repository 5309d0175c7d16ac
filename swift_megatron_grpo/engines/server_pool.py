"""Rollout servers: who gets which requests, and what happens when one is gone (import tier 0: standard library only).

The pool knows nothing of HTTP or of weights; `RolloutServer` is what it needs of a server (engines/rollout_server.py has the real one). Only
one process of a run talks to servers. A server answers one batch at a time, so every server has one thread that takes the next batch when it
is free: a fast server gets more.
"""
from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..errors import RunError


class EngineLost(RunError):
    """No rollout server is left, or none answered in time. Raised on every rank alike; the run saves a checkpoint and stops."""


class ServerGone(RuntimeError):
    """This server cannot be used any more: it ended, does not answer, or does not hold the weights that it should."""


class RolloutServer(Protocol):
    """One server. Methods raise ServerGone when it cannot be used, and any other exception when the request was at fault or may be repeated."""
    name: str

    def answer(self, requests: Sequence[Any], config: Any, version: int, seconds: float) -> list[Any]:
        """Blocks; all answers were sampled by weights of `version`."""

    def is_back(self) -> bool:
        """Whether a server that was dropped can be connected again. Quick."""

    def connect(self) -> None:
        """Opens the way for weights; afterwards the server holds no version."""


@dataclass(kw_only=True, slots=True)
class Batch:
    """Requests start .. start + len(requests) - 1 of a phase."""
    start: int
    requests: Sequence[Any]
    failures: list[str] = field(default_factory=list)


def split(num_requests: int, num_servers: int, unit: int) -> list[range]:
    """Batches of whole units (groups): one a server where there is one server, else about two a server, so that load can even out. Pure.

    Example: 12 requests, 2 servers, groups of 2: ranges of 4, 4, 4.
    """
    units = -(-num_requests // unit)
    parts = min(units, 1 if num_servers == 1 else 2 * num_servers)
    bounds = [min(i * units // parts * unit, num_requests) for i in range(parts + 1)]
    return [range(a, b) for a, b in itertools.pairwise(bounds) if b > a]


class ServerPool:
    """Args:
        servers: connected or not.
        retries: how often a batch is tried again after an error that is not the server's end, waiting backoff, 2 backoff, 4 backoff, ...
        backoff: seconds.
        say: receives one line for each server that is dropped or comes back.
    """

    def __init__(self, servers: Sequence[RolloutServer], *, say: Callable[[str], None], retries: int = 3, backoff: float = 0.5):
        self.servers = list(servers)
        self.say = say
        self.retries = retries
        self.backoff = backoff
        self.lost: dict[str, str] = {}  # server -> why it is not used now
        self._lock = threading.Lock()

    @property
    def alive(self) -> list[RolloutServer]:
        with self._lock:
            return [server for server in self.servers if server.name not in self.lost]

    def start(self) -> None:
        """Connects all servers; all of them have to be there. Raises RunError that names the first one that is not."""

        def connect(server: RolloutServer) -> None:
            server.connect()

        for server, error in self._together(connect, self.servers):
            raise RunError(f'Rollout server {server.name} could not be connected: {error}')

    def reconnect(self) -> int:
        """Connects servers that were lost and are back; returns how many. They hold no weights yet."""
        count = 0
        for server in [s for s in self.servers if s.name in self.lost]:
            if not server.is_back():
                continue
            try:
                server.connect()
            except Exception as error:
                self.say(f'rollout server {server.name} answers again but could not be connected: {error}')
                continue
            with self._lock:
                del self.lost[server.name]
            self.say(f'rollout server {server.name} is back; it gets all weights now')
            count += 1
        return count

    def drop(self, server: RolloutServer, why: str) -> None:
        with self._lock:
            if server.name in self.lost:
                return
            self.lost[server.name] = why
        self.say(f'rollout server {server.name} is dropped: {why}')

    def each(self, phase: str, action: Callable[[Any], Any]) -> None:
        """`action(server)` for every server that is alive, at once. One that fails is dropped. Raises EngineLost when none is left."""
        for server, error in self._together(action, self.alive):
            self.drop(server, f'{phase}: {error}')
        if not self.alive:
            raise EngineLost(f'{phase}: no rollout server is left ({self._why()}).')

    def answers(self, requests: Sequence[Any], config_of: Callable[[int], Any], *, version: int, unit: int, seconds: float,
                arrived: Callable[[int, list[Any]], None] = lambda start, answers: None) -> list[Any]:
        """All answers, in the order of the requests. Blocks.

        Args:
            config_of: number of a batch's first request -> the sampling configuration of the batch.
            version: answers of other weights are not taken.
            unit: requests that should stay together (a group shares its prompt).
            seconds: deadline of the whole phase.
            arrived: called from a server's thread with each batch as it comes: number of its first request, answers. Once a request.

        Raises:
            EngineLost: no server is left, or the deadline passed.
            RunError: a batch failed on every try.
        """
        return _Phase(self, requests, config_of, version, unit, seconds, arrived).run()

    def _together(self, action: Callable[[Any], Any], servers: Sequence[RolloutServer]) -> list[tuple[RolloutServer, Exception]]:
        failed: list[tuple[RolloutServer, Exception]] = []

        def guarded(server: RolloutServer) -> None:
            try:
                action(server)
            except Exception as error:
                failed.append((server, error))

        if len(servers) == 1:
            guarded(servers[0])
            return failed
        threads = [threading.Thread(target=guarded, args=(server, ), daemon=True) for server in servers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return failed

    def _why(self) -> str:
        return '; '.join(f'{name}: {why}' for name, why in self.lost.items()) or 'none was configured'


class _Phase:
    """One call of `ServerPool.answers`."""

    def __init__(self, pool: ServerPool, requests: Sequence[Any], config_of: Callable[[int], Any], version: int, unit: int,
                 seconds: float, arrived: Callable[[int, list[Any]], None]):
        self.pool = pool
        self.arrived = arrived
        self.config_of = config_of
        self.version = version
        self.seconds = seconds
        self.end = time.monotonic() + seconds
        self.results: list[Any] = [None] * len(requests)
        self.waiting: queue.Queue[Batch] = queue.Queue()
        ranges = split(len(requests), max(len(pool.alive), 1), unit)
        for part in ranges:
            self.waiting.put(Batch(start=part.start, requests=requests[part.start:part.stop]))
        self.left = len(ranges)
        self.fatal: str | None = None
        self.changed = threading.Condition()

    def run(self) -> list[Any]:
        servers = self.pool.alive
        self.working = len(servers)
        for server in servers:
            threading.Thread(target=self._serve, args=(server, ), daemon=True, name=f'rollout {server.name}').start()
        with self.changed:
            while self.left and self.fatal is None and self.working and time.monotonic() < self.end:
                self.changed.wait(min(1.0, max(0.0, self.end - time.monotonic())))
            done, fatal, working = self.left == 0, self.fatal, self.working
            self.closed = True
        if done:
            return self.results
        if fatal is not None:
            raise RunError(fatal)
        if not working:
            raise EngineLost(f'Sampling of a generation: no rollout server is left ({self.pool._why()}).')
        names = ', '.join(server.name for server in self.pool.alive)
        raise EngineLost(f'Sampling of a generation did not end within {self.seconds:g} s (--rollout_timeout); {self.left} batches are open '
                         f'at {names}.')

    closed = False

    def _serve(self, server: RolloutServer) -> None:
        try:
            while not self.closed and self.left and self.fatal is None:
                try:
                    batch = self.waiting.get(timeout=0.05)
                except queue.Empty:
                    continue  # another server may still give a batch back
                if not self._serve_batch(server, batch):
                    return
        finally:
            with self.changed:
                self.working -= 1
                self.changed.notify_all()

    def _serve_batch(self, server: RolloutServer, batch: Batch) -> bool:
        """False: the server is gone; the batch waits for another one."""
        try:
            answers = server.answer(batch.requests, self.config_of(batch.start), self.version, max(self.end - time.monotonic(), 0.1))
            if len(answers) != len(batch.requests):
                raise RuntimeError(f'{len(answers)} answers to {len(batch.requests)} requests')
        except ServerGone as error:
            self.waiting.put(batch)
            self.pool.drop(server, str(error))
            return False
        except Exception as error:
            batch.failures.append(f'{server.name}: {type(error).__name__}: {error}')
            if len(batch.failures) > self.pool.retries:
                with self.changed:
                    self.fatal = (f'Sampling of a generation: a batch of {len(batch.requests)} requests failed {len(batch.failures)} times; '
                                  f'last at {batch.failures[-1]}')
                    self.changed.notify_all()
                return True
            time.sleep(min(self.pool.backoff * 2**(len(batch.failures) - 1), max(self.end - time.monotonic(), 0.0)))
            self.waiting.put(batch)
            return True
        with self.changed:
            if not self.closed:
                self.results[batch.start:batch.start + len(answers)] = answers
                self.arrived(batch.start, answers)
                self.left -= 1
            self.changed.notify_all()
        return True
