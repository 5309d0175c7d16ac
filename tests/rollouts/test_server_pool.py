"""Who gets which requests, and what happens when a server is gone (doubles; the real server is in test_server_mode.py)."""
import threading
import time
from typing import Any

import pytest

from swift_megatron_grpo.engines.server_pool import EngineLost, ServerGone, ServerPool, split
from swift_megatron_grpo.errors import RunError


class Server:
    """Answers request r with (name, r, version). `script`: what the next calls do: an exception to raise, seconds to take, or None."""

    def __init__(self, name: str, script: list[Any] | None = None, version: int = 3) -> None:
        self.name = name
        self.script = script or []
        self.held = version
        self.batches: list[list[Any]] = []
        self.back = False
        self.connected = 0

    def answer(self, requests, config, version, seconds):
        self.batches.append(list(requests))
        step = self.script.pop(0) if self.script else None
        if isinstance(step, Exception):
            raise step
        if isinstance(step, float):
            time.sleep(step)
        if self.held != version:
            raise ServerGone(f'it holds weights of version {self.held}, not {version}')
        return [(self.name, request, config) for request in requests]

    def is_back(self) -> bool:
        return self.back

    def connect(self) -> None:
        self.connected += 1


def pool_of(*servers: Server, **kwargs: Any) -> tuple[ServerPool, list[str]]:
    said: list[str] = []
    return ServerPool(servers, say=said.append, backoff=0.01, **kwargs), said


def ask(pool: ServerPool, count: int = 8, unit: int = 2, seconds: float = 20.0, version: int = 3) -> list[Any]:
    return pool.answers(list(range(count)), lambda start: start, version=version, unit=unit, seconds=seconds)


@pytest.mark.parametrize('arguments, sizes', [
    ((12, 1, 2), [12]),  # one server: everything at once, it batches by itself
    ((12, 2, 2), [2, 4, 2, 4]),
    ((4, 2, 4), [4]),  # one group is not cut
    ((7, 2, 2), [2, 2, 2, 1]),
])
def test_batches_are_whole_groups(arguments: tuple[int, int, int], sizes: list[int]) -> None:
    ranges = split(*arguments)
    assert [len(part) for part in ranges] == sizes
    assert [i for part in ranges for i in part] == list(range(arguments[0]))


def test_answers_come_in_the_order_of_the_requests() -> None:
    pool, _ = pool_of(Server('a'), Server('b'))
    assert [answer[1] for answer in ask(pool)] == list(range(8))


def test_a_batch_is_sampled_with_the_seed_of_its_first_request() -> None:
    pool, _ = pool_of(Server('a'), Server('b'))
    assert [answer[2] for answer in ask(pool)] == [0, 0, 2, 2, 4, 4, 6, 6]


def test_a_fast_server_gets_more() -> None:
    slow, fast = Server('slow', script=[0.6]), Server('fast')
    pool, _ = pool_of(slow, fast)
    ask(pool)
    assert (len(slow.batches), len(fast.batches)) == (1, 3)


def test_a_dead_server_is_dropped_and_its_requests_go_to_the_others() -> None:
    dead, well = Server('dead', script=[ServerGone('its engine ended')]), Server('well')
    pool, said = pool_of(dead, well)
    assert [answer[:2] for answer in ask(pool)] == [('well', i) for i in range(8)]
    assert [server.name for server in pool.alive] == ['well']
    assert said == ['rollout server dead is dropped: its engine ended']
    ask(pool)
    assert len(dead.batches) == 1


def test_none_left_is_a_named_error() -> None:
    pool, _ = pool_of(Server('a', script=[ServerGone('its engine ended')]), Server('b', script=[ServerGone('no answer within 7 s')]))
    with pytest.raises(EngineLost, match=r'no rollout server is left \(.*a: its engine ended.*\)'):
        ask(pool)


def test_an_answer_of_other_weights_is_not_taken() -> None:
    stale, fresh = Server('stale', version=2), Server('fresh')
    pool, said = pool_of(stale, fresh)
    assert {answer[0] for answer in ask(pool)} == {'fresh'}
    assert said == ['rollout server stale is dropped: it holds weights of version 2, not 3']


def test_an_error_is_tried_again_with_growing_pauses() -> None:
    server = Server('a', script=[ConnectionError('reset'), ConnectionError('reset')])
    pool, said = pool_of(server)
    assert len(ask(pool)) == 8
    assert len(server.batches) == 3 and said == []


def test_a_request_that_always_fails_ends_with_its_error() -> None:
    pool, _ = pool_of(Server('a', script=[RuntimeError('status 500: too long')] * 9), retries=2)
    with pytest.raises(RunError, match='failed 3 times; last at a: RuntimeError: status 500: too long') as error:
        ask(pool)
    assert not isinstance(error.value, EngineLost)


def test_a_server_that_never_answers_ends_in_a_named_timeout() -> None:
    pool, _ = pool_of(Server('a', script=[30.0]))
    start = time.monotonic()
    with pytest.raises(EngineLost, match=r'did not end within 0.5 s \(--rollout_timeout\); 1 batches are open at a'):
        ask(pool, seconds=0.5)
    assert time.monotonic() - start < 3


def test_a_server_that_is_back_is_connected_again() -> None:
    first, second = Server('first'), Server('second')
    pool, said = pool_of(first, second)
    pool.drop(first, 'its engine ended')
    assert pool.reconnect() == 0 and first.connected == 0
    first.back = True
    assert pool.reconnect() == 1 and first.connected == 1
    assert [server.name for server in pool.alive] == ['first', 'second']
    assert said[-1] == 'rollout server first is back; it gets all weights now'


def test_a_server_that_fails_in_a_sync_is_dropped_and_the_others_go_on() -> None:
    pool, _ = pool_of(Server('a'), Server('b'))
    reached: list[str] = []
    lock = threading.Lock()

    def action(server: Server) -> None:
        if server.name == 'a':
            raise ConnectionError('closed')
        with lock:
            reached.append(server.name)

    pool.each('Weight sync', action)
    assert reached == ['b'] and [server.name for server in pool.alive] == ['b']
    pool.drop(pool.servers[1], 'gone')
    with pytest.raises(EngineLost, match='Weight sync: no rollout server is left'):
        pool.each('Weight sync', action)
