"""`swift rollout` servers for tests: ms-swift's own command, bound to 127.0.0.1, ended by their own process group."""
import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swift_megatron_grpo.ports import free_port

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def environment() -> dict[str, str]:
    """As a user's shell has it, with this tree first."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith('VLLM_')}
    return {**kept, 'OMP_NUM_THREADS': '1', 'HF_HUB_OFFLINE': '1', 'USE_HF': '1', 'MODELSCOPE_OFFLINE': '1', 'GLOO_SOCKET_IFNAME': 'lo',
            'PYTHONPATH': os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get('PYTHONPATH')])])}


class FakeProcess:
    """A server without an engine (fake_server.py) in a process of its own, to be killed by its id."""

    def __init__(self, answer_after: float = 0.0) -> None:
        self.port = free_port()
        self.process = subprocess.Popen([sys.executable, '-m', 'tests.rollouts.fake_server', str(self.port), str(answer_after)], cwd=REPOSITORY,
                                        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=environment(), start_new_session=True)
        self.wait_for('ready')

    def wait_for(self, words: str) -> str:
        """The next line that has `words` in it."""
        for line in self.process.stdout:
            if words in line:
                return line
        raise RuntimeError(f'the server ended without saying {words!r}')

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@dataclass
class Server:
    process: subprocess.Popen
    port: int
    log: Path

    def wait_until_ready(self, seconds: float = 480.) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None:
                break
            with contextlib.suppress(OSError), urllib.request.urlopen(f'http://127.0.0.1:{self.port}/health/', timeout=2) as answer:
                if answer.status == 200:
                    return
            time.sleep(0.5)
        raise RuntimeError('the rollout server did not start:\n' + self.log.read_text(errors='replace')[-3000:])

    def end(self) -> None:
        """This server and the engine processes that it started; it leads a process group of its own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def start(model: Path, folder: Path, *, port: int | None = None, **arguments: Any) -> Server:
    port = port or free_port()
    values = {'model': model, 'model_type': 'qwen3', 'template': 'chatml', 'use_hf': 'true', 'host': '127.0.0.1', 'port': port,
              'torch_dtype': 'float32', 'vllm_max_model_len': 256, 'vllm_enforce_eager': 'true', **arguments}
    log = folder / f'server-{port}-{time.monotonic_ns()}.log'
    command = [sys.executable, '-m', 'swift.cli.main', 'rollout', *(str(x) for name, value in values.items() for x in (f'--{name}', value))]
    with open(log, 'wb') as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
                                   env=environment())
    return Server(process=process, port=port, log=log)
