"""A fresh adapter has the same factors in every layout, bit for bit, whatever they belong to; one that was loaded keeps its own."""
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rollouts.running import trainer_of
from tests.step.training import arguments, train, write_rollouts

LORA = {'tuner_type': 'lora', 'lora_rank': 4, 'lora_alpha': 16, 'target_modules': 'all-linear'}
EXPERTS = {'model_type': 'qwen3_moe', 'moe_router_load_balancing_type': 'none'}
LATENT = {'model_type': 'deepseek_v3', 'moe_router_load_balancing_type': 'none'}
TP, PP, EP = 'tensor_model_parallel_size', 'pipeline_model_parallel_size', 'expert_model_parallel_size'
SP = {'sequence_parallel': 'true'}

# what is adapted -> (model, what the tiny model has, arguments, layouts by (world size, arguments))
ADAPTED: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, tuple[int, dict[str, Any]]]]] = {
    'dense': ('qwen3', {}, {}, {
        'vpp2-pp2': (2, {PP: 2, 'virtual_pipeline_model_parallel_size': 2}),
        'pp2-uneven': (2, {PP: 2, 'decoder_first_pipeline_num_layers': 1}),
        'pp3-uneven': (3, {PP: 3, 'decoder_first_pipeline_num_layers': 1, 'decoder_last_pipeline_num_layers': 1, 'micro_batch_size': 2}),
        'tp2-sp-vpp2-pp2': (4, {TP: 2, **SP, PP: 2, 'virtual_pipeline_model_parallel_size': 2}),
    }),
    'latent-attention': ('deepseek_v3', {}, LATENT, {
        'tp2-sp': (2, {TP: 2, 'expert_tensor_parallel_size': 1, **SP}),
        'pp2-uneven-ep2': (4, {PP: 2, 'decoder_first_pipeline_num_layers': 1, EP: 2}),
    }),
    'router': ('qwen3_moe', {}, {**EXPERTS, 'target_modules': ['all-linear', 'all-router']}, {'tp2-sp-pp2': (4, {TP: 2, **SP, PP: 2})}),
}


def drawn(argv: list[str]) -> dict[str, torch.Tensor]:
    """The adapter of a trainer that has done nothing yet, by its names in a checkpoint. All ranks, collective; every rank has it whole."""
    trainer = trainer_of(argv)
    return {name: tensor.clone() for name, tensor in trainer.bridge.export_weights(trainer.unwrapped_models, peft_format=True)}


@pytest.fixture(scope='module')
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rollouts(tmp_path_factory.mktemp('rollouts'), generations=2, prompts=2, num_generations=4)


@pytest.mark.parametrize('kind', ADAPTED)
def test_a_fresh_adapter_is_the_same_in_every_layout_of(ranks: Any, tiny_model: Any, rollouts: Path, tmp_path: Path, kind: str) -> None:
    family, shape, changes, layouts = ADAPTED[kind]
    model = tiny_model(family, **shape)

    def adapter(world_size: int = 1, **sizes: Any) -> dict[str, torch.Tensor]:
        return ranks.run(drawn, arguments(tmp_path, model, rollouts, **{**LORA, **changes, **sizes}), world_size=world_size)[-1]

    expected = adapter()
    factors = {name: tensor for name, tensor in expected.items() if 'lora_A' in name}
    assert all(0 < float(tensor.abs().max()) <= tensor.shape[1]**-0.5 for tensor in factors.values())
    assert not any(tensor.any() for name, tensor in expected.items() if 'lora_B' in name)
    for layout, (world_size, sizes) in layouts.items():
        got = adapter(world_size, **sizes)
        assert got.keys() == expected.keys(), layout
        wrong = [name for name in expected if not torch.equal(got[name], expected[name])]
        assert not wrong, (layout, len(wrong), wrong[:4])


def test_a_loaded_adapter_is_not_drawn_anew(ranks: Any, tiny_model: Any, rollouts: Path, tmp_path: Path) -> None:
    """Also with another seed than that of the run it comes from."""
    from safetensors.torch import load_file
    model = tiny_model('qwen3')
    argv = {**LORA, 'train_iters': 2, 'save_strategy': 'steps', 'save_steps': 2}
    ranks.run(train, arguments(tmp_path, model, rollouts, **argv), world_size=1)
    checkpoint = tmp_path / 'out' / 'checkpoint-2'
    expected = load_file(checkpoint / 'adapter_model.safetensors')
    fresh = ranks.run(drawn, arguments(tmp_path, model, rollouts, **LORA), world_size=1)[0]
    assert fresh.keys() == expected.keys() and not any(torch.equal(fresh[name], tensor) for name, tensor in expected.items())
    ways = {'resumed': (1, {'resume_from_checkpoint': checkpoint}),
            'model only': (1, {'resume_from_checkpoint': checkpoint, 'resume_only_model': 'true'}),
            'adapters': (2, {'adapters': checkpoint, PP: 2, 'virtual_pipeline_model_parallel_size': 2})}
    for way, (world_size, changes) in ways.items():
        got = ranks.run(drawn, arguments(tmp_path, model, rollouts, **{**LORA, **changes, 'seed': 7}), world_size=world_size)[-1]
        assert [name for name in expected if not torch.equal(got[name], expected[name])] == [], way
