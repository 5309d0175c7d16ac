"""A whole run in one process equals a whole run of ms-swift's own transformers trainer on the same rollouts: loss, gradients, weights."""
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.step.training import arguments, train, write_rollouts

REPOSITORY = Path(__file__).resolve().parents[2]
# Two updates on one generation: the ratios of the first are 1, those of the second are not.
RUNS: dict[str, list[str]] = {
    'grpo': [],
    'bnpo': ['--loss_type', 'bnpo', '--overlong_filter', 'true'],
    'dr_grpo': ['--loss_type', 'dr_grpo', '--importance_sampling_level', 'sequence'],
    'dapo': ['--loss_type', 'dapo', '--epsilon_high', '0.001', '--epsilon', '0.001'],
    'cispo': ['--loss_type', 'cispo', '--epsilon_high', '1.001'],
    'sapo': ['--loss_type', 'sapo', '--advantage_estimator', 'rloo', '--kl_in_reward', 'true'],
    'truncated': ['--rollout_importance_sampling_mode', 'token_truncate', '--rollout_importance_sampling_threshold', '1.2'],
}  # ms-swift 4.6.0 refuses real and fipo in a whole run: it takes every run for one with a teacher. step/test_loss_against_ms_swift.py has them.
RATE = 0.05


def _fill_the_empty_completion(path: Path) -> None:
    """Ms-swift's trainer stops with a size mismatch where a completion has no token."""
    head, *lines = path.read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    rows[1].update(response_token_ids=[[17]], rollout_logprobs=[[-5.25]])
    path.write_text('\n'.join([head, *map(json.dumps, rows)]) + '\n')


@pytest.fixture(scope='module')
def theirs(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    work = tmp_path_factory.mktemp('theirs')
    rollouts = write_rollouts(work / 'rollouts', generations=1, prompts=2, num_generations=4)
    _fill_the_empty_completion(rollouts / 'generation-000000.jsonl')
    arguments(work, tiny_model('qwen3'))  # writes the prompts and the plug-in
    argv = {
        'rlhf_type': 'grpo', 'model': tiny_model('qwen3'), 'model_type': 'qwen3', 'template': 'chatml', 'dataset': work / 'prompts.jsonl',
        'external_plugins': work / 'digits_reward.py', 'reward_funcs': 'digits', 'torch_dtype': 'float32', 'fp16': 'false', 'bf16': 'false',
        'per_device_train_batch_size': 8, 'gradient_accumulation_steps': 1, 'num_generations': 4, 'max_steps': 2, 'num_iterations': 2,
        'learning_rate': RATE, 'lr_scheduler_type': 'constant', 'warmup_ratio': 0.0, 'optim': 'sgd', 'weight_decay': 0.0, 'max_grad_norm': 1e6,
        'logging_steps': 1, 'save_strategy': 'no', 'eval_strategy': 'no', 'split_dataset_ratio': 0.0, 'output_dir': work / 'out',
        'add_version': 'false', 'max_length': 256, 'max_completion_length': 32, 'dataset_num_proc': 1, 'dataloader_num_workers': 0,
        'load_from_cache_file': 'false', 'tuner_type': 'full', 'use_hf': 'true', 'check_model': 'false', 'temperature': 0.9, 'use_vllm': 'false',
        'beta': 0.04, 'report_to': 'none', 'gradient_checkpointing': 'false', 'attn_impl': 'eager', 'create_checkpoint_symlink': 'false',
    }
    task = {'argv': [text for name, value in argv.items() for text in (f'--{name}', str(value))], 'rollouts': str(rollouts), 'runs': RUNS,
            'output': str(work / 'results.pt')}
    (work / 'task.json').write_text(json.dumps(task))
    environment = {name: value for name, value in os.environ.items() if name not in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'NPROC_PER_NODE')}
    environment.update(PYTHONPATH=str(REPOSITORY), CUDA_VISIBLE_DEVICES='', OMP_NUM_THREADS='1', HF_HUB_OFFLINE='1', USE_HF='1')
    done = subprocess.run([sys.executable, '-m', 'tests.trainer.ms_swift_run', str(work / 'task.json')], cwd=REPOSITORY, env=environment,
                          capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return {'rollouts': rollouts, **torch.load(work / 'results.pt')}


@pytest.mark.parametrize('name', RUNS)
def test_a_run_equals_the_run_of_ms_swift_with(ranks: Any, tiny_model: Any, theirs: dict[str, Any], tmp_path: Path, name: str) -> None:
    expected = theirs[name]
    more = dict(zip((text.removeprefix('--') for text in RUNS[name][::2]), RUNS[name][1::2]))
    argv = arguments(tmp_path, tiny_model('qwen3'), theirs['rollouts'], **{
        'train_iters': 2, 'num_iterations': 2, 'micro_batch_size': 2, 'optimizer': 'sgd', 'sgd_momentum': 0.0, 'lr': RATE, 'min_lr': RATE,
        'lr_decay_style': 'constant', 'use_distributed_optimizer': 'false', 'weight_decay': 0.0, 'clip_grad': 1e6, 'beta': 0.04, **more})
    ours = ranks.run(train, argv, world_size=1, deadline=300.)[-1]
    assert ours.column('loss') == pytest.approx(expected['losses'], rel=1e-6, abs=1e-6)
    assert ours.column('grad_norm') == pytest.approx(expected['grad_norms'], rel=1e-5)
    assert ours.log_ratios[0] == 0.0 and ours.log_ratios[1] > 1e-4
    from safetensors.torch import load_file
    start = load_file(tiny_model('qwen3') / 'model.safetensors')
    for weight, value in expected['weights'].items():
        mine, other = (ours.weights[weight] - start[weight]) / RATE, (value - start[weight]) / RATE  # sums of two gradients
        # A difference of weights holds no more digits than the weights do.
        floor = 2e-7 * float(start[weight].abs().max()) / RATE
        assert float((mine - other).abs().max()) < 1e-5 * float(other.abs().max()) + floor, weight
