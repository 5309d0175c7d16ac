"""The pool itself: results, worlds of several sizes, errors with their traceback, hung ranks, nothing left behind."""
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from swift_megatron_grpo.errors import UserError
from tests.rank_pool import REPOSITORY, RankFailure, RankPool


def summed(factor):
    x = torch.full((1, ), float(dist.get_rank() + 1))
    dist.all_reduce(x)
    return x.item() * factor


def identity():
    return os.getpid(), dist.get_world_size()


def fails_on(rank):
    if dist.get_rank() == rank:
        raise UserError(f'rank {rank} says no')
    dist.barrier()


def hangs_on(rank):
    if dist.get_rank() == rank:
        time.sleep(600)


def dies_on(rank):
    if dist.get_rank() == rank:
        os._exit(7)


def test_results_come_in_rank_order_and_worlds_may_differ(ranks):
    assert ranks.run(summed, 10, world_size=2) == [30.0, 30.0]
    assert ranks.run(summed, factor=10, world_size=1) == [10.0]
    assert ranks.run('tests.platform.test_rank_pool:summed', 1, world_size=2) == [3.0, 3.0]


def test_workers_are_started_once(ranks):
    first, second = (ranks.run(identity, world_size=2) for _ in range(2))
    assert first == second
    assert [world for _, world in first] == [2, 2]
    assert len({pid for pid, _ in first} | {os.getpid()}) == 3


def test_an_exception_keeps_its_type_and_names_its_rank(ranks):
    with pytest.raises(UserError, match='rank 1 says no') as caught:
        ranks.run(fails_on, 1, world_size=2)
    assert any('on rank 1' in note and 'fails_on' in note for note in caught.value.__notes__)
    assert ranks.run(summed, 10, world_size=2) == [30.0, 30.0]


def test_a_hung_or_dead_rank_is_replaced_within_the_deadline():
    with RankPool(max_world=2) as pool:
        before = pool.run(identity, world_size=2)
        start = time.monotonic()
        with pytest.raises(RankFailure, match=r'rank\(s\) \[1\] of 2 did not answer within 2 s'):
            pool.run(hangs_on, 1, world_size=2, deadline=2.)
        assert time.monotonic() - start < 60  # the rank hangs for ten minutes
        after = pool.run(identity, world_size=2)
        assert after[0] == before[0] and after[1] != before[1]
        with pytest.raises(RankFailure, match='exit code 7'):
            pool.run(dies_on, 1, world_size=2)
        assert pool.run(summed, 1, world_size=2) == [3.0, 3.0]
        directory, pids = pool._directory, [worker.process.pid for worker in pool._workers.values()]
        assert directory.is_dir() and len(pids) == 2
    assert not directory.exists()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


ABANDON = """
import os, signal
from tests.platform.test_rank_pool import identity
from tests import rank_pool
rank_pool.PRELOADED = []
pool = rank_pool.RankPool(max_world=1)
(pid, _), = pool.run(identity, world_size=1)
print(pid, rank_pool._ForkServer.get().process.pid, pool._directory, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_is_left_when_the_test_process_is_killed():
    done = subprocess.run([sys.executable, '-c', ABANDON], capture_output=True, text=True, timeout=300, check=False, cwd=REPOSITORY,
                          env=dict(os.environ, PYTHONPATH=str(REPOSITORY)))
    assert done.returncode == -9, done.stderr
    pid, server, directory = done.stdout.split()
    left = [Path(directory), Path(f'/proc/{pid}'), Path(f'/proc/{server}')]
    end = time.monotonic() + 20
    while time.monotonic() < end and any(path.exists() for path in left):
        time.sleep(0.05)
    assert not any(path.exists() for path in left)


def test_a_case_that_ranks_cannot_import_is_refused_at_once(ranks):
    with pytest.raises(ValueError, match='must be a function of a module'):
        ranks.run(lambda: 1, world_size=1)
