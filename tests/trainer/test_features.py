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

    def run_it(name: str, world_size: int = 1, rollouts: Path | None = None, function: Any = train, model: str = 'qwen3', **changes: Any) -> tuple[Any, Path]:
        folder = work / name
        argv = arguments(work, tiny_model(model), rollouts, output_dir=folder, **changes)
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
    straight, folder = run('moving', rollouts=rollouts, **MOVING)
    start = _weights(tiny_model('qwen3'))
    steps = {n: (_weights(folder / f'checkpoint-{n}'), _weights(folder / f'checkpoint-{n}' / 'reference')) for n in (1, 2, 3, 4)}
    for name, weight in start.items():
        assert torch.equal(steps[1][1][name], weight), 'not yet'
        assert torch.allclose(steps[2][1][name], 0.25 * steps[2][0][name] + 0.75 * weight, atol=1e-7)
        assert torch.equal(steps[3][1][name], steps[2][1][name])
        assert torch.allclose(steps[4][1][name], 0.25 * steps[4][0][name] + 0.75 * steps[2][1][name], atol=1e-7)
    assert straight.column('kl')[0] == 0.0
    resumed, _ = run('moving-resumed', rollouts=rollouts, **{**MOVING, 'save_strategy': 'no'}, resume_from_checkpoint=folder / 'checkpoint-3')
    assert resumed.column('kl') == straight.column('kl')[3:]
    still, _ = run('still', rollouts=rollouts, **{**MOVING, 'sync_ref_model': 'false', 'save_strategy': 'no'})
    assert still.column('kl')[:2] == straight.column('kl')[:2] and still.column('kl')[2] > straight.column('kl')[2], 'it came nearer'
    with pytest.raises(UserError, match="has no folder 'reference'"):
        run('moving-from-still', rollouts=rollouts, **MOVING, resume_from_checkpoint=_without_reference(folder / 'checkpoint-1'))


def _without_reference(checkpoint: Path) -> Path:
    import shutil
    shutil.rmtree(checkpoint / 'reference')
    return checkpoint


def test_under_lora_the_reference_is_an_adapter_that_follows_the_policys(run: Any, rollouts: Path) -> None:
    lora = {'tuner_type': 'lora', 'lora_rank': 4, 'lora_alpha': 16}
    straight, folder = run('moving-lora', rollouts=rollouts, **MOVING, **lora)
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
    resumed, _ = run('moving-lora-resumed', rollouts=rollouts, **{**MOVING, **lora, 'save_strategy': 'no'},
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


# -- updates that are not finite --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Generation 1 holds a log-probability that is not a number: rollout 5, of prompt 1."""
    folder = write_rollouts(tmp_path_factory.mktemp('broken'), generations=3, prompts=2, num_generations=4)
    path = folder / 'generation-000001.jsonl'
    lines = path.read_text().splitlines()
    row = json.loads(lines[6])
    assert row['index'] == 5 and row['prompt_index'] == 1
    row['rollout_logprobs'][0][0] = float('nan')
    path.write_text('\n'.join([*lines[:6], json.dumps(row), *lines[7:]]) + '\n')
    return folder


BROKEN = {'rollout_importance_sampling_mode': 'token_truncate', 'train_iters': 3, 'save_strategy': 'steps', 'save_steps': 1}


def train_and_listen(argv: list[str]) -> tuple[Outcome | None, list[str]]:
    """The outcome, and what the trainer warned of."""
    import logging

    from swift_megatron_grpo import pipeline, trainer  # noqa: F401 (as a worker does: the pipeline first)
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    trainer.logger.addHandler(handler)
    try:
        return train(argv), warnings
    finally:
        trainer.logger.removeHandler(handler)


def test_an_update_that_is_not_finite_is_left_out_and_counted_and_its_prompt_named(run: Any, broken: Path) -> None:
    (outcome, warnings), folder = run('broken', rollouts=broken, function=train_and_listen, epsilon=0.3, loss_type='sapo', **BROKEN)
    assert outcome.column('skipped_updates') == [0, 1, 1]
    assert outcome.logs[1]['grad_norm'] != outcome.logs[1]['grad_norm'] and 'loss' not in outcome.logs[1]
    assert outcome.logs[0]['grad_norm'] > 0.0 and outcome.logs[2]['grad_norm'] > 0.0 and outcome.logs[2]['loss'] == outcome.logs[2]['loss']
    before, after, last = (_weights(folder / f'checkpoint-{step}') for step in (1, 2, 3))
    assert all(torch.equal(before[name], after[name]) for name in before), 'no weight moved'
    assert any(not torch.equal(after[name], last[name]) for name in after)
    # linear from 1e-3 to 1e-4 over 3 updates: 1e-3 before the first, and the schedule waits where an update is left out
    rates = outcome.column('learning_rate')
    assert rates == pytest.approx([7e-4, 7e-4, 4e-4], rel=1e-6)
    no_effect, report = [text for text in warnings if 'no effect' in text or 'Optimizer step' in text]  # ms-swift logs through it too
    assert no_effect == '--epsilon 0.3 has no effect with --loss_type sapo.'
    assert 'step 2' in report and 'rollout log-probability of rollout 5 (prompt 1)' in report and 'norm is nan' in report


def test_an_update_that_is_left_out_moves_no_router_bias_either(run: Any, broken: Path) -> None:
    _, folder = run('broken-router', rollouts=broken, **BROKEN, model='deepseek_v3', model_type='deepseek_v3',
                    moe_router_load_balancing_type='none')
    first, second, third = (_weights(folder / f'checkpoint-{step}') for step in (1, 2, 3))
    biases = [name for name in first if name.endswith('e_score_correction_bias')]
    assert biases and all(torch.equal(first[name], second[name]) for name in biases)
    assert all(not torch.equal(second[name], third[name]) for name in biases), 'a good update moves them'


def test_a_prompt_that_the_engine_saw_otherwise_is_said_once(run: Any, rollouts: Path) -> None:
    """The rollouts of the fixture say 20 tokens, whatever their prompt is."""
    (_, warnings), _ = run('other-prompts', 2, rollouts=rollouts, function=train_and_listen, train_iters=2)
    assert not any('behind a prompt' in text for text in warnings), 'this is the last rank; the first one speaks'
    (_, warnings), _ = run('other-prompts-alone', rollouts=rollouts, function=train_and_listen, train_iters=2)
    report, = [text for text in warnings if 'behind a prompt of 20 tokens' in text]
    assert 'rollout 0 (data set row 0)' in report and 'the same --template' in report
    (_, warnings), _ = run('same-prompts', function=train_and_listen, train_iters=1, max_completion_length=4)
    assert not any('behind a prompt' in text for text in warnings)


def test_a_row_that_shapes_its_prompt_is_sampled_behind_what_is_trained(run: Any, tmp_path: Path) -> None:
    """chat_template_kwargs of a row reach the engine, too."""
    data = tmp_path / 'prompts.jsonl'
    data.write_text('{"messages": [{"role": "user", "content": "1 + 1?"}], "chat_template_kwargs": {"response_prefix": "The answer is "}}\n' * 16)
    (_, warnings), folder = run('row-kwargs', function=train_and_listen, dataset=data, train_iters=1, max_completion_length=4,
                                save_rollouts=tmp_path / 'rollouts')
    assert not any('behind a prompt' in text for text in warnings)
    (_, _), _ = run('row-plain', function=train_and_listen, train_iters=1, max_completion_length=4, save_rollouts=tmp_path / 'plain',
                    dataset=_without(data, tmp_path))
    prompts = [json.loads((tmp_path / name / 'generation-000000.jsonl').read_text().splitlines()[1])['num_prompt_tokens'] for name in ('rollouts', 'plain')]
    assert prompts[0] > prompts[1] > 0


def _without(data: Path, folder: Path) -> Path:
    path = folder / 'plain.jsonl'
    path.write_text(''.join(json.dumps({'messages': json.loads(line)['messages']}) + '\n' for line in data.read_text().splitlines()))
    return path


def test_a_best_metric_that_no_evaluation_has_is_said_once(run: Any, tmp_path: Path) -> None:
    val = tmp_path / 'val.jsonl'
    val.write_text('{"messages": [{"role": "user", "content": "1 + 1?"}], "solution": "2"}\n' * 2)
    changes = {'val_dataset': val, 'eval_strategy': 'steps', 'eval_steps': 1, 'save_strategy': 'steps', 'save_steps': 1, 'max_completion_length': 4,
               'train_iters': 2, 'early_stop_interval': 1}
    (_, warnings), _ = run('no-such-metric', function=train_and_listen, metric_for_best_model='eval_accuracy', **changes)
    said, = [text for text in warnings if 'metric_for_best_model accuracy' in text]
    assert 'The evaluation has: ' in said and 'reward' in said
    (_, warnings), _ = run('a-metric', function=train_and_listen, **changes)
    assert not any('metric_for_best_model' in text for text in warnings)


def test_a_run_may_stop_instead_on_all_ranks_with_the_same_words(run: Any, broken: Path) -> None:
    with pytest.raises(RunError, match=r'step 2: the gradient norm is nan. Not finite: rollout log-probability of rollout 5 \(prompt 1\)'):
        run('stop', 2, rollouts=broken, nonfinite_update='stop', pipeline_model_parallel_size=2, **{**BROKEN, 'save_strategy': 'no'})


class _Optimizer:
    """As Megatron's: a step asks prepare_grads, then the norm, then updates."""

    def __init__(self, norms: list[float], overflows: tuple[bool, ...] = (False, ) * 9) -> None:
        self.norms, self.overflows, self.asked, self.updates = norms, list(overflows), 0, 0

    def prepare_grads(self) -> bool:
        return self.overflows.pop(0)

    def get_grad_norm(self) -> float:
        self.asked += 1
        return self.norms[self.asked - 1]

    def step(self) -> tuple[bool, float | None]:
        if self.prepare_grads():
            return False, None
        norm = self.get_grad_norm()
        self.updates += 1
        return True, norm


def gate() -> list[Any]:
    from swift_megatron_grpo.step.nonfinite import FiniteGate
    optimizer = _Optimizer([1.5, float('inf'), float('nan'), 2.5], (False, False, True, False, False))
    guard = FiniteGate(optimizer)
    return [(optimizer.step(), str(guard.norm_of_refused)) for _ in range(5)] + [optimizer.asked, optimizer.updates]


def test_the_gate_refuses_infinite_norms_and_asks_once_a_step(ranks: Any) -> None:
    got, = ranks.run(gate, world_size=1)
    assert got == [((True, 1.5), 'None'), ((False, None), 'inf'), ((False, None), 'None'), ((False, None), 'nan'), ((True, 2.5), 'None'), 4, 2]
