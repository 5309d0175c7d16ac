"""What a feature changes in a run: the moving reference, teachers, updates that are not finite."""
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from swift_megatron_grpo.errors import RunError, UserError
from tests.step.training import Outcome, arguments, train, write_rollouts

SGD = {'optimizer': 'sgd', 'sgd_momentum': 0.5, 'lr': 0.1, 'min_lr': 0.05, 'use_distributed_optimizer': 'false'}


@pytest.fixture(scope='module')
def run(ranks: Any, tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    work = tmp_path_factory.mktemp('features')

    def run_it(name: str, world_size: int = 1, rollouts: Path | None = None, function: Any = train, **changes: Any) -> tuple[Any, Path]:
        folder = work / name
        argv = arguments(work, tiny_model('qwen3'), rollouts, output_dir=folder, **changes)
        return ranks.run(function, argv, world_size=world_size, deadline=300.)[-1], folder

    return run_it


@pytest.fixture(scope='module')
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rollouts(tmp_path_factory.mktemp('rollouts'), generations=4, prompts=2, num_generations=4)


def _weights(folder: Path, name: str = 'model.safetensors') -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file
    return load_file(folder / name)


# -- the moving reference ---------------------------------------------------------------------------------------------------------------------

MOVING = {'sync_ref_model': 'true', 'ref_model_sync_steps': 2, 'ref_model_mixup_alpha': 0.25, 'beta': 0.04, 'save_strategy': 'steps', 'save_steps': 1,
          'train_iters': 4}


def test_a_full_reference_moves_a_quarter_of_the_way_every_second_step_and_resumes_exactly(run: Any, rollouts: Path, tiny_model: Any) -> None:
    straight, folder = run('moving', rollouts=rollouts, **MOVING, **SGD)
    start = _weights(tiny_model('qwen3'))
    steps = {n: (_weights(folder / f'checkpoint-{n}'), _weights(folder / f'checkpoint-{n}' / 'reference')) for n in (1, 2, 3, 4)}
    for name, weight in start.items():
        assert torch.equal(steps[1][1][name], weight), 'not yet'
        assert torch.allclose(steps[2][1][name], 0.25 * steps[2][0][name] + 0.75 * weight, atol=1e-7)
        assert torch.equal(steps[3][1][name], steps[2][1][name])
        assert torch.allclose(steps[4][1][name], 0.25 * steps[4][0][name] + 0.75 * steps[2][1][name], atol=1e-7)
    assert straight.column('kl')[0] == 0.0
    resumed, _ = run('moving-resumed', rollouts=rollouts, **{**MOVING, **SGD, 'save_strategy': 'no'}, resume_from_checkpoint=folder / 'checkpoint-3')
    assert resumed.column('kl') == straight.column('kl')[3:]
    still, _ = run('still', rollouts=rollouts, **{**MOVING, **SGD, 'sync_ref_model': 'false', 'save_strategy': 'no'})
    assert still.column('kl')[:2] == straight.column('kl')[:2] and still.column('kl')[2] > straight.column('kl')[2], 'it came nearer'
    with pytest.raises(UserError, match="has no folder 'reference'"):
        run('moving-from-still', rollouts=rollouts, **{**MOVING, **SGD}, resume_from_checkpoint=_without_reference(folder / 'checkpoint-1'))


def _without_reference(checkpoint: Path) -> Path:
    import shutil
    shutil.rmtree(checkpoint / 'reference')
    return checkpoint


def test_under_lora_the_reference_is_an_adapter_that_follows_the_policys(run: Any, rollouts: Path) -> None:
    lora = {'tuner_type': 'lora', 'lora_rank': 4, 'lora_alpha': 16}
    straight, folder = run('moving-lora', rollouts=rollouts, **MOVING, **SGD, **lora)
    names = 'adapter_model.safetensors'
    policy = {n: _weights(folder / f'checkpoint-{n}', names) for n in (1, 2, 4)}
    reference = {n: _weights(folder / f'checkpoint-{n}' / 'reference', names) for n in (1, 2, 3, 4)}
    assert reference[1].keys() == policy[1].keys()
    for name in policy[1]:
        if 'lora_B' in name:
            assert not reference[1][name].any() and policy[2][name].any()
            assert torch.allclose(reference[2][name], 0.25 * policy[2][name], atol=1e-8)
        assert torch.allclose(reference[4][name], 0.25 * policy[4][name] + 0.75 * reference[3][name], atol=1e-8)
    assert straight.column('kl')[0] == 0.0 and straight.column('kl')[2] > 0.0
    resumed, _ = run('moving-lora-resumed', rollouts=rollouts, **{**MOVING, **SGD, **lora, 'save_strategy': 'no'},
                     resume_from_checkpoint=folder / 'checkpoint-2')
    assert resumed.column('kl') == straight.column('kl')[2:] and resumed.column('loss') == straight.column('loss')[2:]


def test_the_divergence_of_two_adapters_is_positive_and_of_one_adapter_with_itself_zero(run: Any, rollouts: Path) -> None:
    lora = {'tuner_type': 'lora', 'lora_rank': 2, 'lora_alpha': 8, 'beta': 0.04, 'train_iters': 2, **SGD}
    _, folder = run('adapters', rollouts=rollouts, **lora, save_strategy='steps', save_steps=1)
    first, second = folder / 'checkpoint-1', folder / 'checkpoint-2'
    different, other = run('different', rollouts=rollouts, **{**lora, 'train_iters': 1, 'lr': 0.0, 'min_lr': 0.0}, adapters=second, ref_adapters=first,
                           save_strategy='steps', save_steps=1)
    same, _ = run('same', rollouts=rollouts, **{**lora, 'train_iters': 1}, adapters=second, ref_adapters=second)
    assert different.column('kl')[0] > 1e-8 and same.column('kl')[0] == 0.0
    loaded = _weights(other / 'checkpoint-1', 'adapter_model.safetensors')
    for name, weight in _weights(second, 'adapter_model.safetensors').items():
        assert torch.equal(loaded[name], weight), 'loading a reference changes no weight of the policy'
