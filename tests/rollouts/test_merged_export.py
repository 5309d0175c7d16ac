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


class Stop(Exception):
    pass


def interrupted(argv: list[str]) -> dict[str, Any]:
    """Merged exports, and syncs to an engine, whose consumer raises after some tensors; then a nested one; then whole ones."""
    from swift_megatron_grpo.sync import merged_for_export
    trainer = trainer_of(argv)
    trainer.sync.max_bucket_bytes = 100_000
    trainer.sync_weights()
    generator = torch.Generator().manual_seed(0)
    for model in trainer.unwrapped_models:
        for name, parameter in model.named_parameters():
            if 'lora_B' in name:
                parameter.data.normal_(std=0.1, generator=generator)
    parameters = [parameter for model in trainer.unwrapped_models for parameter in model.parameters()]
    before = [(parameter.data_ptr(), parameter.data.clone()) for parameter in parameters]

    def export() -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in trainer.bridge.export_weights(trainer.unwrapped_models)}

    def untouched() -> bool:
        return all(p.data_ptr() == place and torch.equal(p.data, value) for p, (place, value) in zip(parameters, before, strict=True))

    plain = export()
    with merged_for_export(trainer.unwrapped_models):
        merged = export()
    result: dict[str, Any] = {'tensors': len(merged), 'moved': sum(not torch.equal(merged[name], plain[name]) for name in merged), 'whole again': {}}
    for count in (1, 5, len(merged) // 2, len(merged) - 1):
        try:
            with merged_for_export(trainer.unwrapped_models):
                for number, _ in enumerate(trainer.bridge.export_weights(trainer.unwrapped_models), 1):
                    if number == count:
                        raise Stop
        except Stop as stop:
            kept = stop  # with its frames, in which the export stands still
            again = export()
            with merged_for_export(trainer.unwrapped_models):
                merged_again = export()
            result['whole again'][count] = (untouched() and equal(again, plain), equal(merged_again, merged))
            del kept
    engine, load = trainer.engine, trainer.engine.load_weights

    def breaks_off(buckets: Any, version: int) -> int:
        engine.version = -1
        next(iter(buckets))
        raise Stop

    engine.load_weights = breaks_off
    trainer.progress.policy_version = 1
    try:
        trainer.sync_weights()
    except Stop:
        result['after a broken sync'] = untouched()
    engine.load_weights = load
    trainer.sync_weights()
    held = dict(engine.engine.model.named_parameters())
    result['synced'] = engine.version == 1 and all(torch.equal(held[name], tensor) for name, tensor in merged.items())
    try:
        with merged_for_export(trainer.unwrapped_models):
            one = export()
            with merged_for_export(trainer.unwrapped_models):
                export()
    except RuntimeError as error:
        result['nested'] = (str(error), equal(one, merged) and untouched() and equal(export(), plain))
    return result


def equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return got.keys() == expected.keys() and all(torch.equal(got[name], tensor) for name, tensor in expected.items())


def test_an_export_that_breaks_off_leaves_the_weights_and_the_next_one_as_they_were(ranks: Any, tiny_model: Any, tmp_path: Path) -> None:
    argv = arguments(tmp_path, tiny_model('qwen3'), **LORA)
    out = ranks.run(interrupted, argv, world_size=1)[0]
    assert out['moved'] == 4 * 7 and out['tensors'] > out['moved']
    assert set(out['whole again'].values()) == {(True, True)} and len(out['whole again']) == 4
    assert out['after a broken sync'] and out['synced']
    message, as_before = out['nested']
    assert 'merged already' in message and as_before


@pytest.mark.skipif(importlib.util.find_spec('qwen_vl_utils') is None, reason='qwen_vl_utils is not installed')
def test_adapters_of_a_vision_tower_that_is_trained_are_exported_too(ranks: Any, tmp_path: Path) -> None:
    folder = tiny_vision.build('qwen2_5_vl', tmp_path / 'model')
    argv = image_arguments(tmp_path, folder, 'qwen2_5_vl', None, **LORA, freeze_vit='false', freeze_aligner='false')
    out = ranks.run(exported, argv, world_size=1)[0]
    assert out['names'] and out['back']
    adapted = [name for name in out['adapted'] if 'visual' in name and name.endswith('weight')]
    moved = [name for name in out['moved'] if 'visual' in name]
    assert adapted and len(moved) == len(adapted), (adapted, moved)
