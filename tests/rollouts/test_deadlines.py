"""Nothing hangs: what a reward function does on one rank, and a rank that is gone, end every rank with one named error, soon."""
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from swift_megatron_grpo.deadlines import deadline
from tests.step.training import arguments, train

REPOSITORY = Path(__file__).resolve().parent.parent.parent

PLUGIN = '''
import os, time
from swift.rewards import ORM, orms

class Broken(ORM):
    def __call__(self, completions, kind, **kwargs):
        values = [1.0 * len(text) for text in completions]
        what = kind[0] if os.environ['RANK'] == '1' else 'fine'
        if what == 'raises':
            raise KeyError('no such column')
        if what == 'nothing':
            return None
        if what == 'nan':
            return values[:-1] + [float('nan')]
        if what == 'short':
            return values[:-1]
        if what == 'none':
            return [None] * len(values)
        if what == 'sleeps':
            time.sleep(600)
        if what == 'dies':
            os._exit(3)
        return values

orms['broken'] = Broken
'''


def command_line(tmp_path: Path, model: Path, kind: str, **changes: Any) -> list[str]:
    (tmp_path / 'prompts.jsonl').write_text(''.join(
        json.dumps({'messages': [{'role': 'user', 'content': f'{i} + 1?'}], 'kind': kind}) + '\n' for i in range(8)))
    (tmp_path / f'broken_{kind}.py').write_text(PLUGIN)
    return arguments(tmp_path, model, external_plugins=tmp_path / f'broken_{kind}.py', reward_funcs='broken', micro_batch_size=2, train_iters=1,
                     max_completion_length=8, **changes)


@pytest.mark.parametrize('kind, words', [
    ('raises', "Sampling failed on rank 1: reward function Broken raised KeyError: 'no such column'"),
    ('nothing', 'Sampling failed on rank 1: reward function Broken returned a NoneType for 4 rollouts'),
    ('nan', 'Sampling failed on rank 1: reward function Broken returned nan for a rollout of prompt'),
    ('short', 'Sampling failed on rank 1: reward function Broken returned 3 values for 4 rollouts'),
])
def test_what_a_reward_function_does_wrong_on_one_rank_is_everyones_error(ranks: Any, tiny_model: Any, tmp_path: Path, kind: str,
                                                                          words: str) -> None:
    results = ranks.run(error_of, command_line(tmp_path, tiny_model('qwen3'), kind), world_size=2)
    assert len(set(results)) == 1
    assert words in results[0]


def error_of(argv: list[str]) -> str:
    try:
        train(argv)
    except Exception as error:
        return f'{type(error).__name__}: {error}'
    return ''


def test_none_means_that_a_reward_function_does_not_apply(ranks: Any, tiny_model: Any, tmp_path: Path) -> None:
    outcome = ranks.run(train, command_line(tmp_path, tiny_model('qwen3'), 'none'), world_size=2)[-1]
    assert len(outcome.logs) == 1 and outcome.column('reward')[0] > 0


@pytest.mark.heavy
@pytest.mark.parametrize('kind, seconds, words', [
    ('sleeps', 3.0, 'ERROR: Reward functions did not end within 3 s on rank 1 (reward function Broken)'),
    ('dies', 600.0, ''),
])
def test_a_rank_that_blocks_or_dies_ends_all_ranks(tiny_model: Any, tmp_path: Path, kind: str, seconds: float, words: str) -> None:
    argv = command_line(tmp_path, tiny_model('qwen3'), kind, reward_timeout=seconds)
    environment = dict(os.environ, PYTHONPATH=str(REPOSITORY), OMP_NUM_THREADS='1', HF_HUB_OFFLINE='1', USE_HF='1', MODELSCOPE_OFFLINE='1',
                       GLOO_SOCKET_IFNAME='lo')
    process = subprocess.Popen(
        [sys.executable, '-m', 'torch.distributed.run', '--nproc_per_node', '2', '--rdzv-backend', 'c10d', '--rdzv-endpoint', '127.0.0.1:0',
         str(REPOSITORY / 'swift_megatron_grpo/hooks/worker.py'), *argv], env=environment, cwd=tmp_path, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True)
    lines: list[tuple[float, str]] = []

    def read() -> None:
        for line in process.stdout:
            lines.append((time.monotonic(), line))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        code = process.wait(240)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        pytest.fail('the ranks did not end:\n' + ''.join(line for _, line in lines)[-3000:])
    ended = time.monotonic()
    reader.join(5)
    output = ''.join(line for _, line in lines)
    assert code != 0 and words in output
    started = next((moment for moment, line in lines if 'Train:' in line), None)
    assert started is not None, output[-3000:]
    assert ended - started < 60  # sampling, the deadline, and the launcher's end of the other rank


def test_a_deadline_shows_where_the_process_is_stuck() -> None:
    program = '''
import time
from swift_megatron_grpo.deadlines import deadline

def stuck_here():
    time.sleep(600)

with deadline('A phase', 0.2, rank=0):
    stuck_here()
'''
    done = subprocess.run([sys.executable, '-c', program], cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert 'ERROR: A phase did not end within 0.2 s on rank 0' in done.stderr and 'in stuck_here' in done.stderr


def hung_in_the_second_step(argv: list[str]) -> list[str]:
    """Rank 1 stays in the optimizer of the second step for longer than --step_timeout; what the watchdogs say instead of ending the process."""
    import functools

    import torch.distributed as dist

    from tests.rollouts.running import trainer_and_data
    trainer, datasets = trainer_and_data(argv)
    from swift_megatron_grpo import trainer as module
    said: list[str] = []
    real, module.deadline = module.deadline, functools.partial(deadline, on_expiry=said.append)
    step = trainer.optimizer.step

    def slow_step() -> Any:
        if trainer.state.iteration == 1 and dist.get_rank() == 1:
            time.sleep(4)
        return step()

    def train_step(batch: Any) -> Any:
        trainer.args.step_timeout = 2.0 if trainer.state.iteration == 1 else 600.0
        return type(trainer).train_step(trainer, batch)

    trainer.optimizer.step, trainer.train_step = slow_step, train_step
    try:
        trainer.train(*datasets)
    finally:
        module.deadline = real
        trainer.__dict__.pop('train_step')
    return said


def test_a_rank_that_hangs_in_a_step_is_named_on_every_rank_with_what_was_done_last(ranks: Any, tiny_model: Any, tmp_path: Path) -> None:
    argv = arguments(tmp_path, tiny_model('qwen3'), micro_batch_size=2, train_iters=2, max_completion_length=8)
    for rank, said in enumerate(ranks.run(hung_in_the_second_step, argv, world_size=2)):
        assert said == [f'Optimizer step 2 did not end within 2 s on rank {rank} (last done: gradients; 2 forward passes of micro-batches were begun)'
                        '. The run stops here; the last complete checkpoint is kept.']


def test_a_deadline_says_what_was_done_last() -> None:
    said: list[str] = []
    with deadline('Reward functions', 0.05, rank=3, detail=lambda: 'reward function X', on_expiry=said.append):
        time.sleep(0.3)
    assert said == ['Reward functions did not end within 0.05 s on rank 3 (reward function X). The run stops here; the last complete '
                    'checkpoint is kept.']


def test_a_deadline_that_is_kept_says_nothing() -> None:
    said: list[str] = []
    with deadline('Reward functions', 0.2, rank=0, on_expiry=said.append):
        pass
    with deadline('Reward functions', 0.0, rank=0, on_expiry=said.append):  # 0: none
        time.sleep(0.05)
    time.sleep(0.4)
    assert said == []
