"""Image models: the gradient of transformers, in every layout, on prompts with one image, several and none."""
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny_vision
from tests.step.images import SIZES, image_arguments, reference_gradients, write_rollouts
from tests.step.test_layouts import assert_same
from tests.step.training import Outcome, train

pytestmark = [pytest.mark.heavy, pytest.mark.skipif(importlib.util.find_spec('qwen_vl_utils') is None, reason='qwen_vl_utils is not installed')]

KINDS = ('qwen2_vl', 'qwen2_5_vl', 'qwen3_vl', 'internvl_hf')
# One step, nothing but the gradient: what the weights lose is lr times it. A large rate, so that little of it is rounded away.
RATE = 64.0
PLAIN = {'optimizer': 'sgd', 'sgd_momentum': 0.0, 'lr': RATE, 'min_lr': RATE, 'lr_decay_style': 'constant', 'weight_decay': 0.0, 'clip_grad': 0.0,
         'use_distributed_optimizer': 'false', 'train_iters': 1}
SGD = {'optimizer': 'sgd', 'sgd_momentum': 0.5, 'lr': 0.1, 'min_lr': 0.05, 'use_distributed_optimizer': 'false', 'train_iters': 2}


@pytest.fixture(scope='module')
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root, built = tmp_path_factory.mktemp('vision'), {}

    def build(kind: str) -> Path:
        if kind not in built:
            built[kind] = tiny_vision.build(kind, root / kind)
        return built[kind]

    return build


@pytest.fixture(scope='module')
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('image-rollouts')
    return write_rollouts(folder / 'rollouts', tiny_vision.write_images(folder / 'images', SIZES), generations=2)


@pytest.fixture(scope='module')
def run(ranks: Any, rollouts: Path, vision_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    work = tmp_path_factory.mktemp('image-runs')
    known: dict[str, Outcome] = {}

    def run_layout(kind: str, world_size: int = 1, **changes: Any) -> Outcome:
        key = f'{kind} {world_size} {sorted(changes.items())}'
        if key not in known:
            argv = image_arguments(work, vision_model(kind), kind, rollouts, **changes)
            known[key] = ranks.run(train, argv, world_size=world_size, deadline=300.)[-1]
        return known[key]

    return run_layout


@pytest.mark.parametrize('kind', KINDS)
def test_the_gradient_of_every_weight_is_the_one_of_transformers(run: Any, rollouts: Path, vision_model: Any, kind: str) -> None:
    from safetensors.torch import load_file
    folder = vision_model(kind)
    gradients, _ = reference_gradients(folder, kind, rollouts)
    outcome = run(kind, **PLAIN)
    base = load_file(folder / 'model.safetensors')
    assert outcome.weights.keys() == base.keys() == gradients.keys()
    assert any('visual' in name or 'vision_tower' in name for name in gradients)
    errors = {name: float(((base[name] - outcome.weights[name]) / RATE - gradient).norm() / gradient.norm()) for name, gradient in gradients.items()
              if gradient.norm() > 1e-6}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < 2e-5, f'{worst}: {errors[worst]:.1e}'
    norm = torch.stack([gradient.double().norm() for gradient in gradients.values()]).norm().item()
    assert outcome.column('grad_norm')[0] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize('kind', KINDS)
def test_a_checkpoint_is_what_was_trained_and_transformers_reads_it(ranks: Any, rollouts: Path, vision_model: Any, tmp_path: Path, kind: str) -> None:
    import transformers
    from safetensors.torch import load_file
    from transformers.core_model_loading import revert_weight_conversion
    argv = image_arguments(tmp_path, vision_model(kind), kind, rollouts, **{**PLAIN, 'lr': 0.1, 'min_lr': 0.1, 'save_strategy': 'steps', 'save_steps': 1})
    trained = ranks.run(train, argv, world_size=1, deadline=300.)[-1].weights
    folder = tmp_path / 'out' / 'checkpoint-1'
    stored, base = load_file(folder / 'model.safetensors'), load_file(vision_model(kind) / 'model.safetensors')
    assert sorted(stored) == sorted(base) == sorted(trained)
    assert [name for name, weight in stored.items() if not torch.equal(weight, trained[name])] == []
    assert any(not torch.equal(weight, base[name]) for name, weight in stored.items())
    model, info = getattr(transformers, tiny_vision.KINDS[kind][1]).from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info['missing_keys'] and not info['unexpected_keys'] and not info['mismatched_keys']
    again = revert_weight_conversion(model, dict(model.state_dict()))
    assert [name for name, weight in stored.items() if not torch.equal(weight, again[name])] == []


LAYOUTS = {
    'tp2': (2, {'tensor_model_parallel_size': 2}),
    'tp2-sp': (2, {'tensor_model_parallel_size': 2, 'sequence_parallel': 'true'}),
    'cp2': (2, {'context_parallel_size': 2}),
    'dp2': (2, {'micro_batch_size': 4}),
    'pp2': (2, {'pipeline_model_parallel_size': 2}),
    'micro1': (1, {'micro_batch_size': 1}),
    'unpacked': (1, {'padding_free': 'false', 'micro_batch_size': 4}),
    'unpacked-cp2': (2, {'padding_free': 'false', 'micro_batch_size': 4, 'context_parallel_size': 2}),
}


# The two older kinds differ in the vision tower only, which every rank of a stage holds whole.
RUNS = [('qwen3_vl', layout) for layout in LAYOUTS] + [('qwen2_5_vl', layout) for layout in ('tp2-sp', 'cp2', 'pp2', 'unpacked')]
RUNS += [('qwen2_vl', layout) for layout in ('tp2-sp', 'cp2', 'pp2')] + [('internvl_hf', layout) for layout in ('tp2-sp', 'cp2', 'pp2', 'unpacked')]


@pytest.mark.parametrize('kind, layout', RUNS)
def test_an_image_model_trains_alike_in(run: Any, kind: str, layout: str) -> None:
    world_size, changes = LAYOUTS[layout]
    assert_same(run(kind, world_size, **{**SGD, **changes}), run(kind, **SGD))


def part_of(name: str) -> str:
    """'vit', 'aligner' or 'llm', by checkpoint name."""
    if 'visual.' not in name:
        return 'llm'
    return 'aligner' if 'merger' in name else 'vit'


def moved_parts(outcome: Outcome, folder: Path) -> dict[str, bool]:
    """Of each part, whether all of its weights moved; a part of which some moved and some did not fails."""
    from safetensors.torch import load_file
    base = load_file(folder / 'model.safetensors')
    moved: dict[str, set[bool]] = {}
    for name, weight in base.items():
        moved.setdefault(part_of(name), set()).add(not torch.equal(weight, outcome.weights[name]))
    assert all(len(values) == 1 for values in moved.values()), moved
    return {part: values.pop() for part, values in moved.items()}


@pytest.mark.parametrize('freeze_vit, freeze_aligner, freeze_llm', [(True, True, False), (True, False, False), (False, True, True)])
def test_frozen_parts_stay_to_the_bit_and_the_others_move(run: Any, vision_model: Any, freeze_vit: bool, freeze_aligner: bool,
                                                          freeze_llm: bool) -> None:
    flags = {'freeze_vit': freeze_vit, 'freeze_aligner': freeze_aligner, 'freeze_llm': freeze_llm}
    outcome = run('qwen3_vl', **PLAIN, **{name: str(value).lower() for name, value in flags.items()})
    assert moved_parts(outcome, vision_model('qwen3_vl')) == {name.removeprefix('freeze_'): not value for name, value in flags.items()}


def test_vit_and_aligner_learn_at_rates_of_their_own(run: Any, rollouts: Path, vision_model: Any) -> None:
    from safetensors.torch import load_file
    folder = vision_model('qwen2_5_vl')
    gradients, _ = reference_gradients(folder, 'qwen2_5_vl', rollouts)
    outcome = run('qwen2_5_vl', **PLAIN, vit_lr=16.0, aligner_lr=32.0)
    base = load_file(folder / 'model.safetensors')
    rates = {'llm': RATE, 'vit': 16.0, 'aligner': 32.0}
    for name, gradient in gradients.items():
        if gradient.norm() > 1e-6:
            step = (base[name] - outcome.weights[name]) / rates[part_of(name)]
            assert float((step - gradient).norm() / gradient.norm()) < 1e-4, name


# Layouts in which the adapter of each kind is trained; the older two differ in the vision tower only.
ADAPTED = {
    'qwen2_vl': (2, {'pipeline_model_parallel_size': 2}),
    'qwen2_5_vl': (2, {'tensor_model_parallel_size': 2, 'sequence_parallel': 'true'}),
    'qwen3_vl': (4, {'tensor_model_parallel_size': 2, 'sequence_parallel': 'true', 'context_parallel_size': 2}),
    'internvl_hf': (2, {'tensor_model_parallel_size': 2, 'sequence_parallel': 'true'}),
}


@pytest.mark.parametrize('kind', ADAPTED)
def test_adapters_on_the_language_model_leave_the_images_encoder_and_train_alike(run: Any, ranks: Any, rollouts: Path, vision_model: Any,
                                                                                 tmp_path: Path, kind: str) -> None:
    from safetensors.torch import load_file
    folder = vision_model(kind)
    lora = {**SGD, 'tuner_type': 'lora', 'lora_rank': 4, 'lora_alpha': 16, 'beta': 0.04, 'freeze_vit': 'true', 'freeze_aligner': 'true'}
    argv = image_arguments(tmp_path, folder, kind, rollouts, **{**lora, 'save_strategy': 'steps', 'save_steps': 1, 'train_iters': 1})
    trained = ranks.run(train, argv, world_size=1, deadline=300.)[-1]
    start = tmp_path / 'out' / 'checkpoint-1'
    base, adapter = load_file(folder / 'model.safetensors'), load_file(start / 'adapter_model.safetensors')
    assert adapter and not any('visual' in name or 'vision_tower' in name for name in adapter)
    merged = merged_adapter(base, adapter, 16 / 4)
    assert {name for name, weight in merged.items() if not torch.allclose(weight, trained.weights[name], rtol=1e-6, atol=1e-6)} == set()
    expected = run(kind, **lora, adapters=start)
    moved = {name for name, weight in base.items() if not torch.equal(weight, expected.weights[name])}
    assert {name.removesuffix('.weight').split('.')[-1] for name in moved} == {'q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj',
                                                                               'down_proj'}
    assert not any('visual' in name or 'vision_tower' in name for name in moved)
    world_size, changes = ADAPTED[kind]
    assert_same(run(kind, world_size, **lora, adapters=start, **changes), expected)


def merged_adapter(base: dict[str, torch.Tensor], adapter: dict[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    """The base with a PEFT adapter of rank r in it: W + scale B A."""
    merged = dict(base)
    for name, factor in adapter.items():
        if name.endswith('lora_A.weight'):
            target = name.removeprefix('base_model.model.').removesuffix('.lora_A.weight') + '.weight'
            merged[target] = base[target] + scale * adapter[name.replace('lora_A', 'lora_B')] @ factor
    assert any(not torch.equal(weight, base[name]) for name, weight in merged.items())
    return merged
