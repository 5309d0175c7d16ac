"""The main job as a user starts it: the ordinary `swift` command with one more argument, on two processes."""
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.doors.environments import wheel_env  # noqa: F401
from tests.step.training import PLUGIN

pytestmark = pytest.mark.heavy


def test_an_adapter_is_trained_by_the_ordinary_command_and_loads_in_peft(wheel_env: Any, tiny_model: Any, tmp_path: Path) -> None:  # noqa: F811
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    data, plugin, output = tmp_path / 'prompts.jsonl', tmp_path / 'digits_reward.py', tmp_path / 'out'
    data.write_text(''.join(json.dumps({'messages': [{'role': 'user', 'content': f'what is {i} + 1?'}], 'solution': str(i + 1)}) + '\n'
                            for i in range(16)))
    plugin.write_text(PLUGIN)
    done = wheel_env.run(
        wheel_env.swift, 'rlhf', '--rlhf_type', 'grpo', '--backend', 'megatron', '--model', tiny_model('qwen3'), '--model_type', 'qwen3',
        '--template', 'chatml', '--dataset', data, '--external_plugins', plugin, '--reward_funcs', 'digits', '--torch_dtype', 'float32',
        '--tensor_model_parallel_size', '2', '--per_device_train_batch_size', '2', '--gradient_accumulation_steps', '4', '--num_generations', '4',
        '--max_steps', '2', '--learning_rate', '1e-3', '--warmup_ratio', '0.5', '--logging_steps', '1', '--save_steps', '2', '--output_dir', output,
        '--add_version', 'false', '--max_length', '128', '--max_completion_length', '8', '--log_completions', 'true', '--beta', '0.04',
        '--merge_lora', 'true',
        timeout=400, NPROC_PER_NODE='2')
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert 'nanobind' not in done.stderr

    logs = [json.loads(line) for line in (output / 'logging.jsonl').read_text().splitlines()]
    steps = [row for row in logs if 'loss' in row]
    assert [row['iteration'] for row in steps] == ['1/2', '2/2']
    # linear warm-up over one of two steps, then cosine: transformers trains the first step at 0 and the second at the peak
    assert [row['learning_rate'] for row in steps] == [1e-3, 0.0] or steps[0]['learning_rate'] in (0.0, 1e-3)
    for name in ('reward', 'reward_std', 'rewards/Digits/mean', 'kl', 'clip_ratio/region_mean', 'completions/mean_length', 'grad_norm'):
        assert name in steps[0], name
    assert steps[0]['kl'] == 0.0

    completions = [json.loads(line) for line in (output / 'completions.jsonl').read_text().splitlines()]
    assert len(completions) == 2 * 8 and {'prompt', 'completion', 'Digits', 'advantages', 'gen_step'} <= completions[0].keys()
    assert list((output / 'runs').glob('events.out.tfevents.*'))
    assert (output / 'images' / 'train_reward.png').exists()

    base = AutoModelForCausalLM.from_pretrained(tiny_model('qwen3'), dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, output / 'checkpoint-2')
    merged = AutoModelForCausalLM.from_pretrained(output / 'checkpoint-2-merged', dtype=torch.float32)
    ids = torch.tensor([[5, 17, 40, 99, 3]])
    with torch.no_grad():
        assert torch.allclose(adapted(ids).logits, merged(ids).logits, atol=1e-4)
        assert not torch.allclose(adapted(ids).logits, adapted.unload()(ids).logits, atol=1e-4)
