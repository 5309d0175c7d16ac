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

KINDS = ('qwen2_vl', 'qwen2_5_vl', 'qwen3_vl')
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
    assert any('visual' in name for name in gradients)
    errors = {name: float(((base[name] - outcome.weights[name]) / RATE - gradient).norm() / gradient.norm()) for name, gradient in gradients.items()
              if gradient.norm() > 1e-6}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < 2e-5, f'{worst}: {errors[worst]:.1e}'
    norm = torch.stack([gradient.double().norm() for gradient in gradients.values()]).norm().item()
    assert outcome.column('grad_norm')[0] == pytest.approx(norm, rel=1e-5)


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


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('layout', LAYOUTS)
def test_an_image_model_trains_alike_in(run: Any, kind: str, layout: str) -> None:
    world_size, changes = LAYOUTS[layout]
    assert_same(run(kind, world_size, **{**SGD, **changes}), run(kind, **SGD))
