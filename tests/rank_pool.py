"""Ranks for tests: a few worker processes that are started once and run many cases, in worlds of different sizes.

A worker activates the CPU platform and imports megatron once (about ten seconds on two cores); a case then costs what it computes. A case
is a function of a test module; every rank calls it with the same arguments inside a fresh gloo process group:

    def summed(factor):
        x = torch.full((1,), float(dist.get_rank() + 1)); dist.all_reduce(x)
        return x.item() * factor

    def test_sum(ranks):
        assert ranks.run(summed, 10, world_size=2) == [30.0, 30.0]

An exception on a rank is raised again in the test, with that rank's traceback and the last lines it printed. A rank that does not answer
within the deadline is killed by its process id and replaced. No process and no file outlives the pool.
"""
import contextlib
import gc
import importlib
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
GRACE_SECONDS = 10.  # for the other ranks of a case after one has failed: gloo tells them by then that a peer is gone
START_SECONDS = 180.
TAIL_LINES = 15


class RankFailure(RuntimeError):
    """A rank did not answer, or failed with something that cannot be pickled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What a worker is asked to run. `function` is 'module:qualified.name'."""
    function: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rank: int
    world_size: int
    port: int
    store: str
    seconds: float
    search_path: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a worker sends back: a pickled value, or a pickled exception (None where it cannot be pickled) with its traceback."""
    value: bytes | None
    error: bytes | None
    text: str
    trace: str


def _name_of(function: Callable[..., Any] | str) -> str:
    if isinstance(function, str):
        return function
    if '<' in function.__qualname__:
        raise ValueError(f'{function.__qualname__}: a case must be a function of a module; ranks import it by name')
    return f'{function.__module__}:{function.__qualname__}'


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return probe.getsockname()[1]


class _Worker:
    """One process, seen from the test's side."""

    def __init__(self, index: int, directory: Path) -> None:
        self.index = index
        self.log = directory / f'rank{index}-{time.monotonic_ns()}.log'
        ask_out, ask_in = os.pipe()
        tell_out, tell_in = os.pipe()
        environment = dict(os.environ, OMP_NUM_THREADS='1', GLOO_SOCKET_IFNAME='lo', HF_HUB_OFFLINE='1', USE_HF='1', MODELSCOPE_OFFLINE='1',
                           PYTHONPATH=os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get('PYTHONPATH')])]))
        with open(self.log, 'wb') as log:
            self.process = subprocess.Popen(
                [sys.executable, '-u', '-m', 'tests.rank_pool', str(ask_out), str(tell_in), str(directory)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                pass_fds=(ask_out, tell_in), cwd=REPOSITORY, env=environment, start_new_session=True)
        os.close(ask_out)
        os.close(tell_in)
        self.ask = connection.Connection(ask_in, readable=False)
        self.tell = connection.Connection(tell_out, writable=False)
        self.ready = False

    def tail(self) -> str:
        with contextlib.suppress(OSError):
            return '\n'.join(self.log.read_text(errors='replace').splitlines()[-TAIL_LINES:])
        return ''

    def stop(self, seconds: float) -> None:
        """Ask it to end, then kill it (and what it started: it leads a session of its own)."""
        with contextlib.suppress(OSError):
            self.ask.close()
        if seconds > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.tell.close()


class RankPool:
    """Up to `max_world` worker processes; they start when a case first needs them and stay until `close()`."""

    def __init__(self, max_world: int = 4) -> None:
        self.max_world = max_world
        self._workers: dict[int, _Worker] = {}
        self._directory: Path | None = None
        self._cases = 0

    def run(self, function: Callable[..., Any] | str, *args: Any, world_size: int, deadline: float = 240., **kwargs: Any) -> list[Any]:
        """Call `function(*args, **kwargs)` on ranks 0 to world_size-1 at once; returns their results in rank order.

        Raises what the first failing rank raised; RankFailure after `deadline` seconds (start of new workers not counted).
        """
        if not 1 <= world_size <= self.max_world:
            raise ValueError(f'world_size {world_size}: this pool has 1 to {self.max_world} ranks')
        self._start(world_size)
        self._cases += 1
        port, store = _free_port(), str(self._directory / f'store{self._cases}')
        for rank in range(world_size):
            case = Case(function=_name_of(function), args=args, kwargs=kwargs, rank=rank, world_size=world_size, port=port, store=store,
                        seconds=deadline, search_path=list(sys.path))
            self._workers[rank].ask.send_bytes(pickle.dumps(case))
        answers, order = self._collect(range(world_size), deadline)
        failed = [rank for rank in order if answers[rank].error is not None or answers[rank].value is None]
        missing = [rank for rank in range(world_size) if rank not in answers]
        if failed:
            self._raise(failed[0], answers[failed[0]], missing)
        if missing:
            raise RankFailure(f'rank(s) {missing} of {world_size} did not answer within {deadline:.0f} s in {_name_of(function)}')
        return [pickle.loads(answers[rank].value) for rank in range(world_size)]

    def close(self) -> None:
        """End all workers and remove the pool's files. The pool can be used again afterwards."""
        for worker in self._workers.values():
            with contextlib.suppress(OSError):
                worker.ask.close()
        for worker in self._workers.values():
            worker.stop(2.)
        self._workers.clear()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def __enter__(self) -> 'RankPool':
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def _start(self, world_size: int) -> None:
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix='rank-pool-'))
        for index in range(world_size):
            if index in self._workers and self._workers[index].process.poll() is not None:
                self._drop(index)
            if index not in self._workers:
                self._workers[index] = _Worker(index, self._directory)
        new = [index for index in range(world_size) if not self._workers[index].ready]
        answers, _ = self._collect(new, START_SECONDS, kill=False)
        for index in new:
            if index not in answers or answers[index].error is not None:
                text = answers[index].trace if index in answers else self._workers[index].tail()
                self._drop(index)
                raise RankFailure(f'worker {index} did not start:\n{text}')
            self._workers[index].ready = True

    def _drop(self, index: int) -> None:
        self._workers.pop(index).stop(0.)

    def _collect(self, indices: Any, seconds: float, kill: bool = True) -> tuple[dict[int, Answer], list[int]]:
        """Answers by rank and the order in which they came; whoever has not answered in time is killed and forgotten."""
        waiting = {self._workers[index].tell: index for index in indices}
        answers: dict[int, Answer] = {}
        end = time.monotonic() + seconds
        failed = False
        while waiting and time.monotonic() < end:
            for pipe in connection.wait(list(waiting), max(0., end - time.monotonic())):
                index = waiting.pop(pipe)
                try:
                    answer = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    code = self._workers[index].process.wait()
                    text = f'worker {index} died with exit code {code}; it printed last:\n{self._workers[index].tail()}'
                    answer = Answer(value=None, error=None, text=text, trace='')
                answers[index] = answer
                if answer.value is None and not failed:
                    failed = True
                    end = min(end, time.monotonic() + GRACE_SECONDS)
        if kill:
            for index in waiting.values():
                self._drop(index)
        return answers, list(answers)

    def _raise(self, rank: int, answer: Answer, missing: list[int]) -> None:
        note = f'on rank {rank}:\n{answer.trace}'
        if rank in self._workers:
            note += f'\nrank {rank} printed last:\n{self._workers[rank].tail()}'
        if missing:
            note += f'\nrank(s) {missing} did not come back and were ended'
        error: BaseException = RankFailure(answer.text)
        if answer.error is not None:
            with contextlib.suppress(Exception):
                error = pickle.loads(answer.error)
        error.add_note(note)
        raise error


# ---------------------------------------------------------------- the worker's side


def _end_with_parent(parent: int, directory: str) -> None:
    while os.getppid() == parent:
        time.sleep(1.)
    shutil.rmtree(directory, ignore_errors=True)
    os.killpg(os.getpid(), signal.SIGKILL)


def _remove_if_orphan(parent: int, directory: str) -> None:
    """The pipe is closed: by a pool that is closing, or because its process is gone, which shows a moment later."""
    for _ in range(10):
        if os.getppid() != parent:
            shutil.rmtree(directory, ignore_errors=True)
            return
        time.sleep(0.02)


def _resolve(name: str) -> Callable[..., Any]:
    module, _, qualname = name.partition(':')
    value: Any = importlib.import_module(module)
    for part in qualname.split('.'):
        value = getattr(value, part)
    return value


def _begin(case: Case) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    for path in case.search_path:
        if path not in sys.path:
            sys.path.append(path)
    os.environ.update(
        RANK=str(case.rank), LOCAL_RANK=str(case.rank), WORLD_SIZE=str(case.world_size), LOCAL_WORLD_SIZE=str(case.world_size),
        NPROC_PER_NODE=str(case.world_size), NNODES='1', NODE_RANK='0', MASTER_ADDR='127.0.0.1', MASTER_PORT=str(case.port))
    torch.manual_seed(0)
    dist.init_process_group('gloo', init_method=f'file://{case.store}', rank=case.rank, world_size=case.world_size,
                            timeout=timedelta(seconds=case.seconds))


def _release_wrapped_models() -> None:
    """Let go of what Megatron's DistributedDataParallel holds: its hooks sit on C++ nodes, where the collector cannot see the cycle.

    Each case would otherwise leave its model behind, and the process groups that it knows, with three threads a group.
    """
    if 'megatron.core.distributed.distributed_data_parallel' in sys.modules:
        from megatron.core.distributed import DistributedDataParallel
        for thing in gc.get_objects():
            if type(thing) is DistributedDataParallel:
                thing.__dict__.clear()


def _clean() -> None:
    """Leave no process group and no global state of megatron or accelerate for the next case."""
    import torch.distributed as dist
    _release_wrapped_models()
    if 'megatron.core.parallel_state' in sys.modules:
        from megatron.core import num_microbatches_calculator, parallel_state
        from megatron.core.tensor_parallel import random
        parallel_state.destroy_model_parallel()
        num_microbatches_calculator.unset_num_microbatches_calculator()
        random._CUDA_RNG_STATE_TRACKER = None
        random._CUDA_RNG_STATE_TRACKER_INITIALIZED = False
    if 'mcore_bridge.bridge.gpt_bridge' in sys.modules:
        # mcore-bridge keeps the first process group that it made, for good: a second world in one process would talk in it.
        bridge = sys.modules['mcore_bridge.bridge.gpt_bridge']
        bridge.EP_PP_GROUP = bridge.EP_PP_RANK = bridge.EP_PP_SIZE = None
    if 'mcore_bridge.bridge.gpt_bridge' in sys.modules:
        from mcore_bridge.bridge import gpt_bridge
        gpt_bridge.EP_PP_GROUP = gpt_bridge.EP_PP_RANK = gpt_bridge.EP_PP_SIZE = None  # of the case before
    if 'accelerate.state' in sys.modules:
        from accelerate.state import AcceleratorState, PartialState
        AcceleratorState._reset_state()
        PartialState._reset_state()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


def _run(case: Case) -> Answer:
    try:
        _begin(case)
        value = pickle.dumps(_resolve(case.function)(*case.args, **case.kwargs))
        return Answer(value=value, error=None, text='', trace='')
    except BaseException as error:
        trace = traceback.format_exc()
        pickled = None
        with contextlib.suppress(Exception):
            pickled = pickle.dumps(error)
            pickle.loads(pickled)
        return Answer(value=None, error=pickled, text=f'{type(error).__name__}: {error}', trace=trace)


def _warm_up() -> Answer:
    try:
        import torch

        from swift_megatron_grpo import cpu
        cpu.activate()
        torch.set_num_threads(1)
        return Answer(value=b'', error=None, text='', trace='')
    except BaseException:
        return Answer(value=None, error=b'', text='', trace=traceback.format_exc())


def _work(ask: connection.Connection, tell: connection.Connection, directory: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()
    threading.Thread(target=_end_with_parent, args=(parent, directory), daemon=True).start()
    tell.send_bytes(pickle.dumps(_warm_up()))
    while True:
        try:
            case = pickle.loads(ask.recv_bytes())
        except EOFError:
            _remove_if_orphan(parent, directory)
            return
        answer = _run(case)
        # The answer goes out before the clean-up, which waits for nobody; peers of a failed rank learn of it by the closed connections.
        if answer.value is None:
            _clean()
            tell.send_bytes(pickle.dumps(answer))
        else:
            tell.send_bytes(pickle.dumps(answer))
            _clean()


if __name__ == '__main__':
    # The classes that are pickled must carry the name under which the test knows this module.
    from tests import rank_pool
    rank_pool._work(connection.Connection(int(sys.argv[1]), writable=False), connection.Connection(int(sys.argv[2]), readable=False),
                    sys.argv[3])
