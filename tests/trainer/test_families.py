"""Each family through GRPO: rollouts by transformers from synced weights, full and LoRA steps, and checkpoints that transformers reads back exactly."""
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import tiny_models
from tests.families import EXPERTS, FAMILIES
from tests.step.training import arguments

pytestmark = pytest.mark.heavy

TRAINED = list(FAMILIES)
RUN = {'train_iters': 2, 'save_strategy': 'steps', 'save_steps': 2, 'no_save_optim': 'true', 'no_save_rng': 'true', 'max_completion_length': 10,
       'num_generations': 4, 'temperature': 1.0, 'lr': 1e-3}


def train_and_compare(argv: list[str]) -> dict[str, Any]:
    """Trains; of each generation the largest difference between the engine's log-probabilities and the trainer's; the weights at the end."""
    from tests.rollouts.running import trainer_and_data
    trainer, datasets = trainer_and_data(argv)
    from swift_megatron_grpo.step.forward import collect_logprobs
    from swift_megatron_grpo.sync import merged_for_export
    collect, train_step, differences, norms = trainer.collect, trainer.train_step, [], []

    def watched_collect(index: int) -> Any:
        generation = collect(index)
        for step in generation.steps:
            (own_K, _), = collect_logprobs(trainer.policy, [step], trainer.device)
            differences.append(float((step.table.rollout_logprobs_K - own_K).abs().max()))
        return generation

    def watched_step(step: Any) -> Any:
        result = train_step(step)
        norms.append(float(result[1]))
        return result

    trainer.collect, trainer.train_step = watched_collect, watched_step
    trainer.train(*datasets)
    with merged_for_export(trainer.unwrapped_models):
        weights = {name: tensor.clone() for name, tensor in trainer.bridge.export_weights(trainer.unwrapped_models)}
    return {'differences': differences, 'norms': norms, 'weights': weights}


def arguments_of(tiny_model: Any, family: str, folder: Path, sizes: dict[str, Any] | None = None, **changes: Any) -> tuple[Path, list[str]]:
    kind, model_type, fields = FAMILIES[family]
    model = tiny_model(kind, **{**fields, **(sizes or {})})
    experts = {'moe_router_load_balancing_type': 'none'} if family in EXPERTS else {}
    if family == 'gpt_oss':  # attention sinks
        experts['attention_backend'] = 'unfused'
    return model, arguments(folder, model, None, **{**RUN, **experts, 'model_type': model_type, 'output_dir': folder / 'out', **changes})


@pytest.mark.parametrize('family', TRAINED)
def test_a_family_samples_trains_and_reloads(ranks: Any, tiny_model: Any, tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM
    model, argv = arguments_of(tiny_model, family, tmp_path)
    out = ranks.run(train_and_compare, argv, world_size=1, deadline=300.)[0]
    assert max(out['differences']) < 2e-5 and len(out['differences']) == 2
    # A generation whose rewards are all equal has no gradient.
    assert all(0.0 <= norm < math.inf for norm in out['norms']) and max(out['norms']) > 0.01, out['norms']
    base, stored = load_file(model / 'model.safetensors'), load_file(tmp_path / 'out' / 'checkpoint-2' / 'model.safetensors')
    assert sorted(stored) == sorted(base) == sorted(out['weights'])
    assert [name for name, weight in stored.items() if not torch.equal(weight, out['weights'][name])] == []
    assert any(not torch.equal(weight, base[name]) for name, weight in stored.items())
    reloaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / 'out' / 'checkpoint-2', dtype=torch.float32, output_loading_info=True)
    assert not info['missing_keys'] and not info['unexpected_keys'] and not info['mismatched_keys']
    from transformers.core_model_loading import revert_weight_conversion
    again = revert_weight_conversion(reloaded, dict(reloaded.state_dict()))
    assert [name for name, weight in stored.items() if not torch.equal(weight, again[name])] == []


def test_a_mistral_trains_as_the_llama_that_it_is(ranks: Any, tiny_model: Any, tmp_path: Path) -> None:
    """What the message about families without a conversion recommends."""
    import json
    import shutil

    from transformers import AutoModelForCausalLM
    tiny_models.KINDS.setdefault('mistral', ('MistralConfig', 'MistralForCausalLM', {'sliding_window': 64}, ()))
    mistral = tiny_model('mistral', sliding_window=None)
    model = tmp_path / 'model'
    shutil.copytree(mistral, model)
    config = json.loads((model / 'config.json').read_text())
    (model / 'config.json').write_text(json.dumps({**config, 'model_type': 'llama', 'architectures': ['LlamaForCausalLM']}))
    ids = torch.randint(3, 300, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits for folder in (mistral, model)]
    assert torch.equal(*logits)
    argv = arguments(tmp_path, model, None, **{**RUN, 'model_type': 'llama', 'output_dir': tmp_path / 'out'})
    out = ranks.run(train_and_compare, argv, world_size=1, deadline=300.)[0]
    assert max(out['differences']) < 2e-5 and max(out['norms']) > 0.01
    stored = load_file(tmp_path / 'out' / 'checkpoint-2' / 'model.safetensors')
    assert sorted(stored) == sorted(load_file(mistral / 'model.safetensors'))


def slot_of(weights: dict[str, torch.Tensor], module: str) -> torch.Tensor:
    """Where a checkpoint holds the (out, in) matrix of a module."""
    if f'{module}.weight' in weights:
        return weights[f'{module}.weight']
    layer, expert, leaf = re.fullmatch(r'(.*\.experts)\.(\d+)\.(\w+)', module).groups()  # gpt_oss: all experts, transposed
    matrix = weights[f'{layer}.{leaf}'][int(expert)].T
    # gate and up take turns in its rows, and follow each other in an adapter
    return matrix if leaf == 'down_proj' else matrix.unflatten(0, (-1, 2)).transpose(0, 1)


@pytest.mark.parametrize('family', TRAINED)
def test_a_familys_adapter_reloads_as_what_was_trained(ranks: Any, tiny_model: Any, tmp_path: Path, family: str) -> None:
    import json
    model, argv = arguments_of(tiny_model, family, tmp_path, tuner_type='lora', lora_rank=4, lora_alpha=16, target_modules='all-linear')
    out = ranks.run(train_and_compare, argv, world_size=1, deadline=300.)[0]
    assert max(out['differences']) < 2e-5
    folder = tmp_path / 'out' / 'checkpoint-2'
    base, adapter = load_file(model / 'model.safetensors'), load_file(folder / 'adapter_model.safetensors')
    config = json.loads((folder / 'adapter_config.json').read_text())
    assert config['base_model_name_or_path'] == str(model)
    scale = config['lora_alpha'] / 4
    merged = {name: weight.clone() for name, weight in base.items()}
    for name, factor in adapter.items():
        if name.endswith('lora_A.weight'):
            change = scale * adapter[name.replace('lora_A', 'lora_B')] @ factor
            slot = slot_of(merged, name.removeprefix('base_model.model.').removesuffix('.lora_A.weight'))
            slot.add_(change.reshape(slot.shape))
    moved = {name for name, weight in merged.items() if not torch.equal(weight, base[name])}
    assert any('self_attn' in name for name in moved) and any('mlp' in name or 'block_sparse_moe' in name for name in moved)
    assert family not in EXPERTS or any('.experts.' in name for name in moved), 'experts have adapters too'
    assert {name: float((out['weights'][name] - weight).abs().max()) for name, weight in merged.items()
            if not torch.allclose(out['weights'][name], weight, rtol=1e-6, atol=1e-6)} == {}
