"""Ranks for tests: a few worker processes that are started once and run many cases, in worlds of different sizes.

A worker is a fork of one process that has activated the CPU platform and imported what a run imports (fifteen seconds, once a session; it has no
thread, no process group and no engine). So a new worker costs milliseconds, and a case what it computes. A case is a function of a test module;
every rank calls it with the same arguments inside a fresh gloo process group:

    def summed(factor):
        x = torch.full((1,), float(dist.get_rank() + 1)); dist.all_reduce(x)
        return x.item() * factor

    def test_sum(ranks):
        assert ranks.run(summed, 10, world_size=2) == [30.0, 30.0]

An exception on a rank is raised again in the test, with that rank's traceback and the last lines it printed. A rank that does not answer
within the deadline is killed by its process id and replaced. No process and no file outlives the pool.
"""
import atexit
import contextlib
import gc
import importlib
import importlib.util
import os
import pickle
import select
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
from typing import Any, NoReturn

from swift_megatron_grpo.ports import free_port

REPOSITORY = Path(__file__).resolve().parent.parent
GRACE_SECONDS = 10.  # for the other ranks of a case after one has failed: gloo tells them by then that a peer is gone
START_SECONDS = 480.  # imports of twenty seconds, on a machine that does much else
TAIL_LINES = 15
# Most cases need the first, and several pools the second. Imports alone: no thread that a fork would lose, no state of a run.
PRELOADED = ['swift_megatron_grpo.pipeline', *(['swift.infer_engine.grpo_vllm_engine'] if importlib.util.find_spec('vllm') else [])]


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


class _ForkServer:
    """The process that workers are forks of, seen from the test's side; one for each process that has pools. It ends with that process."""

    _of_process: dict[int, '_ForkServer'] = {}
    _failure: dict[int, str] = {}  # what cannot be imported is told at once to each of hundreds of tests

    @classmethod
    def get(cls) -> '_ForkServer':
        """The one of this process. Started where there is none, or where it has died."""
        server = cls._of_process.get(os.getpid())
        if os.getpid() in cls._failure:
            raise RankFailure(cls._failure[os.getpid()])
        if server is None or server.process.poll() is not None:
            server = cls._of_process[os.getpid()] = cls()
            atexit.register(server.close)
        return server

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        self.log = tempfile.TemporaryFile(prefix='rank-pool-')  # noqa: SIM115
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, '-u', '-m', 'tests.rank_pool', str(theirs.fileno()), str(os.getpid()), *PRELOADED],
                stdin=subprocess.DEVNULL, stdout=self.log, stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),), cwd=REPOSITORY, env=_environment(), start_new_session=True)
        self.channel = connection.Connection(os.dup(self.socket.fileno()))
        answer: Answer | None = None
        if self.channel.poll(START_SECONDS):
            with contextlib.suppress(EOFError):
                answer = pickle.loads(self.channel.recv_bytes())
        if answer is None or answer.error is not None:
            text = answer.trace if answer is not None else self.tail()
            self.close()
            failure = f'the process that ranks are forks of did not start:\n{text}'
            if answer is not None:
                self._failure[os.getpid()] = failure
            raise RankFailure(failure)

    def tail(self) -> str:
        size = os.fstat(self.log.fileno()).st_size
        return '\n'.join(os.pread(self.log.fileno(), 20_000, max(0, size - 20_000)).decode(errors='replace').splitlines()[-TAIL_LINES:])

    def fork(self, what: str, told: Any, descriptors: list[int]) -> int:
        """The process id of a new process, which leads a session of its own.

        'work', the pool's directory, [ask, tell, log]: a worker, which reads cases from `ask`, writes answers to `tell` and prints to `log`.
        'command', the words after the program's name, [output, errors]: what hooks/worker.py does with them.
        """
        try:
            self.channel.send_bytes(pickle.dumps((what, told, _environment())))
            socket.send_fds(self.socket, [b'-'], descriptors)
            return pickle.loads(self.channel.recv_bytes())
        except (OSError, EOFError):
            raise RankFailure(f'the process that ranks are forks of has died; it printed last:\n{self.tail()}') from None

    def reap(self, pid: int) -> int:
        """The exit code of a worker (-signal where a signal ended it); waits for its end."""
        self.channel.send_bytes(pickle.dumps(('reap', pid)))
        return pickle.loads(self.channel.recv_bytes())

    def close(self) -> None:
        """It ends when its channel does; its workers end with it or before."""
        self.channel.close()
        self.socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5.)
        self.process.kill()
        self.process.wait()
        self.log.close()


def _environment() -> dict[str, str]:
    """This process's variables as they are now, with what each worker needs."""
    return dict(os.environ, OMP_NUM_THREADS='1', GLOO_SOCKET_IFNAME='lo', HF_HUB_OFFLINE='1', USE_HF='1', MODELSCOPE_OFFLINE='1',
                PYTHONPATH=os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get('PYTHONPATH')])]))


class _Process:
    """A process that is the fork server's child: what subprocess.Popen is for one's own."""

    def __init__(self, server: _ForkServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server
        self._end = os.pidfd_open(pid)

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.)
        return None

    def wait(self, seconds: float | None = None) -> int:
        """The exit code. Raises subprocess.TimeoutExpired where the process goes on for longer than `seconds`."""
        if self.returncode is None:
            if not select.select([self._end], [], [], seconds)[0]:
                raise subprocess.TimeoutExpired(f'rank {self.pid}', seconds or 0.)
            os.close(self._end)
            self.returncode = -signal.SIGKILL
            with contextlib.suppress(OSError, EOFError):  # where the fork server was killed, nobody knows the code
                self.returncode = self._server.reap(self.pid)
        return self.returncode


class _Worker:
    """One process, seen from the test's side."""

    def __init__(self, index: int, directory: Path) -> None:
        self.index = index
        self.log = directory / f'rank{index}-{time.monotonic_ns()}.log'
        server = _ForkServer.get()
        ask_out, ask_in = os.pipe()
        tell_out, tell_in = os.pipe()
        with open(self.log, 'wb') as log:
            self.process = _Process(server, server.fork('work', str(directory), [ask_out, tell_in, log.fileno()]))
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
        port, store = free_port(), str(self._directory / f'store{self._cases}')
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


def run_worker(argv: list[str], seconds: float = 300.) -> subprocess.CompletedProcess[str]:
    """What `python swift_megatron_grpo/hooks/worker.py ARGV` does, as one rank, in a fork that need not import anything.

    For what a run says and how it ends; tests of the command itself start a real one.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        server = _ForkServer.get()
        process = _Process(server, server.fork('command', argv, [output.fileno(), errors.fileno()]))
        try:
            code = process.wait(seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode(errors='replace'))
    return subprocess.CompletedProcess(argv, code, *texts)


# ---------------------------------------------------------------- the worker's side


def _end_with_owner(owner: int, directory: str) -> None:
    """`owner` becomes readable when the test's process is gone."""
    select.select([owner], [], [])
    shutil.rmtree(directory, ignore_errors=True)
    os.killpg(os.getpid(), signal.SIGKILL)


def _remove_if_orphan(owner: int, directory: str) -> None:
    """The pipe is closed: by a pool that is closing, or because its process is gone, which shows a moment later."""
    if select.select([owner], [], [], 0.2)[0]:
        shutil.rmtree(directory, ignore_errors=True)


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
    for name in [name for name in os.environ if name.startswith('NVTE_')]:  # a case's attention backend is its own
        del os.environ[name]
    os.environ.update(
        RANK=str(case.rank), LOCAL_RANK=str(case.rank), WORLD_SIZE=str(case.world_size), LOCAL_WORLD_SIZE=str(case.world_size),
        NPROC_PER_NODE=str(case.world_size), NNODES='1', NODE_RANK='0', MASTER_ADDR='127.0.0.1', MASTER_PORT=str(case.port))
    torch.manual_seed(0)
    dist.init_process_group('gloo', init_method=f'file://{case.store}', rank=case.rank, world_size=case.world_size,
                            timeout=timedelta(seconds=case.seconds))
    # A case without any collective would be over, and its connections closed, while a peer is still making its own.
    dist.all_reduce(torch.zeros(1))


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


def _warm_up(preloaded: list[str]) -> Answer:
    try:
        import torch

        from swift_megatron_grpo import cpu
        cpu.activate()
        torch.set_num_threads(1)
        for module in preloaded:
            importlib.import_module(module)
        gc.collect()
        gc.freeze()  # a case's collections need not walk what is here for good, nor write into pages that the ranks share
        return Answer(value=b'', error=None, text='', trace='')
    except BaseException:
        return Answer(value=None, error=b'', text='', trace=traceback.format_exc())


def _serve(channel: connection.Connection, owner_pid: int, preloaded: list[str]) -> NoReturn:
    """The fork server: answers one request after the other, until the test's process closes the channel or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    owner = os.pidfd_open(owner_pid)
    given = set(os.environ)
    channel.send_bytes(pickle.dumps(_warm_up(preloaded)))
    while True:
        try:
            what, *rest = pickle.loads(channel.recv_bytes())
        except EOFError:
            os._exit(0)
        if what == 'reap':
            channel.send_bytes(pickle.dumps(os.waitstatus_to_exitcode(os.waitpid(rest[0], 0)[1])))
            continue
        told, environment = rest
        with socket.socket(fileno=os.dup(channel.fileno())) as end:
            _, descriptors, _, _ = socket.recv_fds(end, 1, 3)
        pid = os.fork()
        if pid == 0:
            channel.close()
            for name in given - environment.keys():
                os.environ.pop(name, None)
            os.environ.update(environment)
            _become(what, told, descriptors, owner)
        for descriptor in descriptors:
            os.close(descriptor)
        channel.send_bytes(pickle.dumps(pid))


def _become(what: str, told: Any, descriptors: list[int], owner: int) -> NoReturn:
    code = 1
    try:
        os.setsid()
        *pipes, output, errors = descriptors if what == 'command' else [*descriptors, descriptors[-1]]
        os.dup2(output, 1)
        os.dup2(errors, 2)
        if what == 'command':
            from swift_megatron_grpo.hooks import worker
            sys.argv = [worker.__file__, *told]
            worker.main()
        else:
            _work(connection.Connection(pipes[0], writable=False), connection.Connection(pipes[1], readable=False), owner, told)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _work(ask: connection.Connection, tell: connection.Connection, owner: int, directory: str) -> None:
    threading.Thread(target=_end_with_owner, args=(owner, directory), daemon=True).start()
    tell.send_bytes(pickle.dumps(Answer(value=b'', error=None, text='', trace='')))
    while True:
        try:
            case = pickle.loads(ask.recv_bytes())
        except EOFError:
            _remove_if_orphan(owner, directory)
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
    rank_pool._serve(connection.Connection(int(sys.argv[1])), int(sys.argv[2]), sys.argv[3:])
