"""The whole command, as a user gives it, against a server that is killed by its process id: one named error, a checkpoint, nothing left behind."""
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.rollouts.servers import FakeProcess, environment, free_port
from tests.step.training import arguments

pytestmark = [pytest.mark.heavy, pytest.mark.skipif(importlib.util.find_spec('vllm') is None, reason='vLLM is not installed')]


def processes_of(session: int) -> list[str]:
    """Command lines of what still runs in a session."""
    found = []
    for folder in Path('/proc').iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / 'stat').read_text().rpartition(')')[2].split()
                if int(fields[3]) == session and fields[0] != 'Z':
                    found.append((folder / 'cmdline').read_text().replace('\0', ' '))
            except OSError:
                continue  # it ended meanwhile
    return found


def test_a_killed_server_ends_the_command_with_a_checkpoint_and_leaves_no_process(tiny_model: Any, tmp_path: Path) -> None:
    server = FakeProcess(answer_after=2.0)
    argv = arguments(tmp_path, tiny_model('qwen3'), use_vllm='true', vllm_mode='server', vllm_server_host='127.0.0.1',
                     vllm_server_port=server.port, vllm_server_group_port=free_port(), max_completion_length=16, train_iters=4,
                     save_strategy='steps', save_steps=100)
    log = tmp_path / 'command.log'
    with open(log, 'wb') as out:
        command = subprocess.Popen([sys.executable, '-m', 'swift.cli.main', 'rlhf', *argv], stdin=subprocess.DEVNULL, stdout=out,
                                   stderr=subprocess.STDOUT, cwd=tmp_path, start_new_session=True,
                                   env={**environment(), 'NPROC_PER_NODE': '2', 'MASTER_PORT': str(free_port())})
    try:
        server.wait_for('"infer"')
        server.wait_for('"infer"')  # the second generation is being sampled
        server.kill()
        killed = time.monotonic()
        code = command.wait(120)
        took = time.monotonic() - killed
        left = processes_of(command.pid)
    finally:
        server.kill()
        if command.poll() is None:
            os.killpg(command.pid, 9)
            command.wait()
    output = log.read_text(errors='replace')
    assert code == 1, output[-3000:]
    folder = tmp_path / 'out' / 'checkpoint-1'
    assert 'no rollout server is left' in output and f'The run stops after 1 optimizer steps; {folder} holds them' in output, output[-3000:]
    assert (folder / 'trainer_state.json').exists() and (folder / 'latest_checkpointed_iteration.txt').exists()
    assert [path.name for path in (tmp_path / 'out').iterdir() if path.name.startswith('.saving')] == []
    assert left == [] and took < 60
