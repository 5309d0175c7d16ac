"""Bad input ends with one clear error, exit code not 0, soon, and leaves no half-written checkpoint. Whole processes: two ranks as a user starts
them, and single ranks that are forks."""
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.rank_pool import REPOSITORY, run_worker
from tests.step.training import arguments

pytestmark = pytest.mark.heavy

RAISING = '''
from swift.rewards import ORM, orms


class Raising(ORM):

    def __call__(self, completions, solution=None, **kwargs):
        raise ZeroDivisionError('no answer is worth this')


class Short(ORM):

    def __call__(self, completions, **kwargs):
        return [1.0]


orms['raising'] = Raising
orms['short'] = Short
'''


def launch(argv: list[str], processes: int) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, 'PYTHONPATH': str(REPOSITORY), 'OMP_NUM_THREADS': '1', 'HF_HUB_OFFLINE': '1', 'USE_HF': '1',
                   'MODELSCOPE_OFFLINE': '1'}
    return subprocess.run([sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', str(processes),
                           str(REPOSITORY / 'swift_megatron_grpo/hooks/worker.py'), *argv], env=environment, text=True, capture_output=True, timeout=300)


def test_a_reward_function_that_raises_stops_both_ranks_with_its_name(tiny_model: Any, tmp_path: Path) -> None:
    plugin = tmp_path / 'raising_reward.py'
    plugin.write_text(RAISING)
    argv = arguments(tmp_path, tiny_model('qwen3'), external_plugins=plugin, reward_funcs='raising', micro_batch_size=2, save_strategy='steps',
                     save_steps=1)
    done = launch(argv, processes=2)
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith('error:')]
    assert errors, done.stderr[-3000:]
    assert all('Raising' in line and 'no answer is worth this' in line and 'raising_reward.py' in line for line in errors)
    assert not list((tmp_path / 'out').glob('*checkpoint*'))


def test_a_reward_function_that_returns_too_few_values_is_named_with_both_counts(tiny_model: Any, tmp_path: Path) -> None:
    plugin = tmp_path / 'short_reward.py'
    plugin.write_text(RAISING)
    done = run_worker(arguments(tmp_path, tiny_model('qwen3'), external_plugins=plugin, reward_funcs='short'))
    assert done.returncode == 1
    assert 'reward function Short returned 1 values for 8 rollouts' in done.stderr


def test_a_row_that_is_no_json_is_named_with_its_file_and_line(tiny_model: Any, tmp_path: Path) -> None:
    """Without a plan before it, as for rows behind the part of a large file that a plan reads."""
    argv = arguments(tmp_path, tiny_model('qwen3'))
    data = Path(argv[argv.index('--dataset') + 1])
    with data.open('a', encoding='utf-8') as file:
        file.write("{'messages': []}\n")
    rows = len(data.read_text(encoding='utf-8').splitlines())
    done = run_worker(argv)
    assert done.returncode == 2
    assert f'{data}, line {rows}: no JSON (Expecting property name enclosed in double quotes, column 2): ' in done.stderr
    assert 'Traceback' not in done.stderr


def test_a_data_set_of_which_no_row_can_be_used_is_named(tiny_model: Any, tmp_path: Path) -> None:
    data = tmp_path / 'empty.jsonl'
    data.write_text('{"messages": [], "solution": "2"}\n' * 8, encoding='utf-8')
    done = run_worker(arguments(tmp_path, tiny_model('qwen3'), dataset=data))
    assert done.returncode == 2
    assert f'{data}: no row can be used. A row needs `messages`' in done.stderr
    assert 'Traceback' not in done.stderr


def test_an_adapter_that_does_not_fit_is_named_with_its_model(tiny_model: Any, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file
    adapter = tmp_path / 'adapter'
    adapter.mkdir()
    save_file({'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight': torch.zeros(8, 17)}, adapter / 'adapter_model.safetensors')
    (adapter / 'adapter_config.json').write_text('{"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"], "base_model_name_or_path": "some/model"}')
    done = run_worker(arguments(tmp_path, tiny_model('qwen3'), tuner_type='lora', adapters=adapter))
    assert done.returncode == 2
    assert f'--adapters {adapter} does not fit' in done.stderr
    assert 'It was trained on some/model.' in done.stderr
    assert 'Traceback' not in done.stderr


@pytest.mark.parametrize('changes, words', [
    ({'reward_funcs': 'digitz'}, ("unknown reward function 'digitz'", 'digits')),
    ({'async_save': 'true'}, ('--async_save True', 'not available')),
])
def test_what_cannot_work_is_refused_before_a_model_is_built(tiny_model: Any, tmp_path: Path, changes: dict[str, Any],
                                                             words: tuple[str, ...]) -> None:
    done = run_worker(arguments(tmp_path, tiny_model('qwen3'), **changes))
    assert done.returncode == 2
    assert all(word in done.stderr for word in words), done.stderr[-2000:]
    assert 'Traceback' not in done.stderr
