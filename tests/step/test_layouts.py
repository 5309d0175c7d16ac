"""The same gradient in every layout: loss, gradient norm and every weight after two optimizer steps equal the one-process run."""
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.step.training import Outcome, arguments, train, write_rollouts

TOLERANCE = 1e-5
# Adam divides each entry of the gradient by its own size: an entry that is zero but for rounding moves by up to the learning rate, in a
# direction that rounding decides. With SGD the weights show the gradient itself.
SGD = {'optimizer': 'sgd', 'sgd_momentum': 0.5, 'lr': 0.1, 'min_lr': 0.05, 'use_distributed_optimizer': 'false'}


@pytest.fixture(scope='module')
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rollouts(tmp_path_factory.mktemp('rollouts'), generations=2, prompts=2, num_generations=4)


@pytest.fixture(scope='module')
def run(ranks: Any, rollouts: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    work = tmp_path_factory.mktemp('layouts')
    known: dict[str, Outcome] = {}

    def run_layout(model: Path, world_size: int = 1, **changes: Any) -> Outcome:
        key = f'{model} {world_size} {sorted(changes.items())}'
        if key not in known:
            known[key] = ranks.run(train, arguments(work, model, rollouts, **changes), world_size=world_size, deadline=300.)[-1]
        return known[key]

    return run_layout


def assert_same(got: Outcome, expected: Outcome) -> None:
    for name in ('loss', 'grad_norm', 'learning_rate'):
        for step, (a, b) in enumerate(zip(got.column(name), expected.column(name), strict=True)):
            assert a == pytest.approx(b, rel=TOLERANCE, abs=TOLERANCE), f'{name} of step {step}'
    assert got.weights.keys() == expected.weights.keys()
    errors = {name: float((got.weights[name] - weight).abs().max() / weight.abs().max()) for name, weight in expected.weights.items()}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < TOLERANCE, f'{worst}: {errors[worst]:.1e}'


def marked(layouts: dict[str, Any], quick: set[str]) -> list[Any]:
    """One layout of each kind stays in the quick suite."""
    return [pytest.param(layout, marks=pytest.mark.quick if layout in quick else ()) for layout in layouts]


DENSE = {
    'tp2': (2, {'tensor_model_parallel_size': 2}),
    'tp2-sp': (2, {'tensor_model_parallel_size': 2, 'sequence_parallel': 'true'}),
    'pp2': (2, {'pipeline_model_parallel_size': 2}),
    'cp2': (2, {'context_parallel_size': 2}),
    'dp2': (2, {'micro_batch_size': 2}),
    'vpp2-pp2': (2, {'pipeline_model_parallel_size': 2, 'virtual_pipeline_model_parallel_size': 2}),
    'tp2-pp2': (4, {'tensor_model_parallel_size': 2, 'pipeline_model_parallel_size': 2}),
    'tp2-cp2': (4, {'tensor_model_parallel_size': 2, 'context_parallel_size': 2}),
    'tp2-sp-cp2': (4, {'tensor_model_parallel_size': 2, 'sequence_parallel': 'true', 'context_parallel_size': 2}),
    'pp2-dp2': (4, {'pipeline_model_parallel_size': 2, 'micro_batch_size': 2}),
    'cp2-dp2': (4, {'context_parallel_size': 2, 'micro_batch_size': 2}),
    'micro1': (1, {'micro_batch_size': 1}),
    'unpacked': (1, {'padding_free': 'false'}),
    'budget': (1, {'max_tokens_per_micro_batch': 100}),
}


@pytest.mark.parametrize('layout', marked(DENSE, quick={'tp2-sp', 'pp2', 'cp2', 'dp2'}))
def test_a_dense_model_trains_alike_in(run: Any, tiny_model: Any, layout: str) -> None:
    model = tiny_model('qwen3')
    world_size, changes = DENSE[layout]
    expected = run(model, **SGD)
    assert len(expected.logs) == 2 and expected.column('grad_norm')[0] > 0.1
    assert_same(run(model, world_size, **SGD, **changes), expected)


def test_adam_at_the_learning_rate_of_grpo(run: Any, tiny_model: Any) -> None:
    model, adam = tiny_model('qwen3'), {'lr': 1e-5, 'min_lr': 1e-6}
    assert_same(run(model, 4, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, **adam), run(model, **adam))


EXPERTS = {
    'ep2-dp2': (2, {'expert_model_parallel_size': 2, 'micro_batch_size': 2}),
    'ep2-tp2-sp': (2, {'expert_model_parallel_size': 2, 'tensor_model_parallel_size': 2, 'sequence_parallel': 'true'}),
    'etp2-tp2-sp': (2, {'tensor_model_parallel_size': 2, 'expert_tensor_parallel_size': 2, 'sequence_parallel': 'true'}),
    'ep2-tp2-etp2-sp': (4, {'expert_model_parallel_size': 2, 'tensor_model_parallel_size': 2, 'expert_tensor_parallel_size': 2,
                            'sequence_parallel': 'true', 'micro_batch_size': 2}),
    'ep2-pp2': (4, {'expert_model_parallel_size': 2, 'pipeline_model_parallel_size': 2, 'micro_batch_size': 2}),
    'ep2-cp2': (2, {'expert_model_parallel_size': 2, 'context_parallel_size': 2}),
}


@pytest.mark.parametrize('layout', marked(EXPERTS, quick={'ep2-tp2-sp'}))
def test_a_mixture_of_experts_trains_alike_in(run: Any, tiny_model: Any, layout: str) -> None:
    model, kind = tiny_model('qwen3_moe'), {'model_type': 'qwen3_moe', 'moe_router_load_balancing_type': 'none'}
    world_size, changes = EXPERTS[layout]
    expected = run(model, **SGD, **kind)
    assert expected.column('grad_norm')[0] > 0.1
    assert_same(run(model, world_size, **SGD, **kind, **changes), expected)


LORA = {'tuner_type': 'lora', 'lora_rank': 4, 'lora_alpha': 16, 'beta': 0.04, **SGD}
ADAPTED = {
    'tp2-sp': (2, {'tensor_model_parallel_size': 2, 'sequence_parallel': 'true'}),
    'pp2-dp2': (4, {'pipeline_model_parallel_size': 2, 'micro_batch_size': 2}),
    'tp2-cp2': (4, {'tensor_model_parallel_size': 2, 'context_parallel_size': 2}),
    'vpp2-pp2': (2, {'pipeline_model_parallel_size': 2, 'virtual_pipeline_model_parallel_size': 2}),
}


@pytest.mark.parametrize('layout', ADAPTED)
def test_an_adapter_is_drawn_and_trains_alike_in(run: Any, tiny_model: Any, layout: str) -> None:
    """From the first draw: nothing is loaded. The second update sees the policy that the first one made."""
    model = tiny_model('qwen3')
    world_size, changes = ADAPTED[layout]
    expected = run(model, **LORA)
    assert expected.column('kl')[1] > 1e-6
    assert_same(run(model, world_size, **LORA, **changes), expected)


@pytest.mark.parametrize('layout', ['ep2', 'ep2-tp2-sp'])
def test_adapters_of_experts_are_drawn_and_train_alike_in(run: Any, tiny_model: Any, layout: str) -> None:
    model, kind = tiny_model('qwen3_moe'), {'model_type': 'qwen3_moe', 'moe_router_load_balancing_type': 'none', 'target_modules': 'all-linear'}
    world_size, changes = {'ep2': (2, {'expert_model_parallel_size': 2}), 'ep2-tp2-sp': (4, {
        'expert_model_parallel_size': 2, 'expert_tensor_parallel_size': 1, 'tensor_model_parallel_size': 2, 'sequence_parallel': 'true'})}[layout]
    expected = run(model, **{**LORA, **kind})
    assert_same(run(model, world_size, **{**LORA, **kind, **changes}), expected)


def factors(*names: str) -> list[torch.Tensor]:
    from swift_megatron_grpo.adapter_start import _whole
    return [_whole(name, 64, 400, 7) for name in names]


def test_a_factor_has_the_distribution_of_peft(ranks: Any) -> None:
    factor, again, other = ranks.run(factors, 'a', 'a', 'b', world_size=1)[0]
    reference = torch.nn.init.kaiming_uniform_(torch.empty(64, 400), a=5**0.5)
    assert torch.equal(factor, again) and not torch.equal(factor, other)
    assert factor.abs().max() <= 0.05 and float(factor.std()) == pytest.approx(float(reference.std()), rel=0.03)


SELECTED = {**LORA, 'use_rslora': 'true', 'target_modules': ['linear_qkv', 'linear_fc2'], 'modules_to_save': ['word_embeddings', 'output_layer']}


def test_chosen_modules_whole_modules_and_rank_stabilized_adapters_train_alike(run: Any, ranks: Any, rollouts: Path, tiny_model: Any,
                                                                                tmp_path: Path) -> None:
    model = tiny_model('qwen3')
    ranks.run(train, arguments(tmp_path, model, rollouts, **{**SELECTED, 'save_strategy': 'steps', 'save_steps': 1, 'train_iters': 1}), world_size=1)
    start = tmp_path / 'out' / 'checkpoint-1'
    expected = run(model, adapters=start, **SELECTED)
    from safetensors.torch import load_file
    base = load_file(model / 'model.safetensors')
    moved = {name for name, weight in expected.weights.items() if not torch.allclose(weight, base[name], atol=1e-7)}
    kinds = {name.removesuffix('.weight').split('.')[-1] for name in moved}
    assert kinds == {'q_proj', 'k_proj', 'v_proj', 'down_proj', 'embed_tokens', 'lm_head'}
    assert_same(run(model, 4, adapters=start, **SELECTED, tensor_model_parallel_size=2, pipeline_model_parallel_size=2), expected)


STAGES = {'tp2': {'tensor_model_parallel_size': 2}, 'pp2': {'pipeline_model_parallel_size': 2},
          'vpp2-pp2': {'pipeline_model_parallel_size': 2, 'virtual_pipeline_model_parallel_size': 2}}


@pytest.mark.parametrize('layout', STAGES)
def test_frozen_parts_stay_and_the_rest_trains_alike(run: Any, tiny_model: Any, layout: str) -> None:
    model = tiny_model('qwen3')
    frozen = {**SGD, 'freeze_parameters': ['embedding', 'decoder.layers.0', 'decoder.layers.1'], 'trainable_parameters': ['decoder.layers.1.mlp']}
    expected = run(model, **frozen)
    from safetensors.torch import load_file
    base = load_file(model / 'model.safetensors')
    still = {name for name, weight in expected.weights.items() if torch.equal(weight, base[name])}
    assert 'model.embed_tokens.weight' in still and 'model.layers.0.mlp.up_proj.weight' in still
    assert 'model.layers.1.self_attn.q_proj.weight' in still
    assert not still & {'model.layers.1.mlp.up_proj.weight', 'model.layers.2.self_attn.q_proj.weight', 'lm_head.weight'}
    assert_same(run(model, 2, **frozen, **STAGES[layout]), expected)


def test_a_vocabulary_that_tensor_parallel_ranks_cannot_share_evenly_trains_alike(run: Any, tiny_model: Any) -> None:
    model = tiny_model('qwen3', vocab_size=321)
    assert_same(run(model, 2, **SGD, tensor_model_parallel_size=2), run(model, **SGD))
