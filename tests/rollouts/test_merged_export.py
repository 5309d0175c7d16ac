"""LoRA without an adapter in the engine: what is exported is base + adapter, of every adapted layer, with one decoder layer merged at a time."""
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny_vision
from tests.rollouts.running import trainer_of
from tests.step.images import image_arguments
from tests.step.training import arguments

LORA = {'tuner_type': 'lora', 'lora_rank': 4, 'lora_alpha': 16, 'target_modules': 'all-linear'}


def exported(argv: list[str]) -> dict[str, Any]:
    """Weights before and after the adapters were moved, and whether a decoder layer was still merged when its weights came out."""
    from swift_megatron_grpo.sync import merged_for_export
    trainer = trainer_of(argv)
    before = {name: tensor.clone() for name, tensor in trainer.bridge.export_weights(trainer.unwrapped_models)}
    generator = torch.Generator().manual_seed(0)
    for model in trainer.unwrapped_models:
        for name, parameter in model.named_parameters():
            if 'lora_B' in name:
                parameter.data.normal_(std=0.1, generator=generator)
    bases = {name: parameter for model in trainer.unwrapped_models for name, parameter in model.named_parameters() if 'base_layer' in name}
    places = {name: parameter.data_ptr() for name, parameter in bases.items()}
    after, merged = {}, set()
    with merged_for_export(trainer.unwrapped_models):
        for name, tensor in trainer.bridge.export_weights(trainer.unwrapped_models):
            after[name] = tensor.clone()
            merged |= {base for base, parameter in bases.items() if parameter.data_ptr() != places[base] and 'decoder.layers' in base}
    back = all(parameter.data_ptr() == places[name] for name, parameter in bases.items())
    plain = dict(trainer.bridge.export_weights(trainer.unwrapped_models))
    return {'moved': {name for name in before if not torch.equal(before[name], after[name])}, 'names': sorted(before) == sorted(after),
            'merged_while_coming_out': merged, 'back': back and all(torch.equal(before[name], plain[name]) for name in before), 'adapted': list(bases)}


@pytest.mark.parametrize('model', ['qwen3', 'qwen3_moe'])
def test_each_decoder_layer_is_merged_while_it_is_read_and_no_longer(ranks: Any, tiny_model: Any, tmp_path: Path, model: str) -> None:
    argv = arguments(tmp_path, tiny_model(model), model_type=model, moe_router_load_balancing_type='none' if model == 'qwen3_moe' else None, **LORA)
    out = ranks.run(exported, argv, world_size=1)[0]
    assert out['names'] and out['back'] and out['merged_while_coming_out'] == set()
    kinds = {'q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj'}
    assert {name.split('.')[-2] for name in out['moved']} - {'gate'} == kinds
    assert len({name.split('.layers.')[1].split('.')[0] for name in out['moved']}) == 4, 'all four layers'


@pytest.mark.skipif(importlib.util.find_spec('qwen_vl_utils') is None, reason='qwen_vl_utils is not installed')
def test_adapters_of_a_vision_tower_that_is_trained_are_exported_too(ranks: Any, tmp_path: Path) -> None:
    folder = tiny_vision.build('qwen2_5_vl', tmp_path / 'model')
    argv = image_arguments(tmp_path, folder, 'qwen2_5_vl', None, **LORA, freeze_vit='false', freeze_aligner='false')
    out = ranks.run(exported, argv, world_size=1)[0]
    assert out['names'] and out['back']
    adapted = [name for name in out['adapted'] if 'visual' in name and name.endswith('weight')]
    moved = [name for name in out['moved'] if 'visual' in name]
    assert adapted and len(moved) == len(adapted), (adapted, moved)
