"""Small configurations that users of other trainers paid for; each names what must hold."""
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from swift_megatron_grpo.errors import RunError, UserError
from tests.step.training import Outcome, arguments, train, write_rollouts

SGD = {'optimizer': 'sgd', 'sgd_momentum': 0.5, 'lr': 0.1, 'min_lr': 0.05, 'use_distributed_optimizer': 'false'}
INDEX_PLUGIN = '''
from swift.rewards import ORM, orms


class PromptIndex(ORM):
    """The reward is the index of the prompt: within a group all rewards are equal."""

    def __call__(self, completions, solution, **kwargs):
        return [float(value) for value in solution]


orms['prompt_index'] = PromptIndex
'''


@pytest.fixture(scope='module')
def run(ranks: Any, tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    work = tmp_path_factory.mktemp('cases')

    def run_it(name: str, world_size: int = 1, rollouts: Path | None = None, function: Any = train, **changes: Any) -> tuple[Any, Path]:
        folder = work / name
        folder.mkdir()
        argv = arguments(folder, tiny_model('qwen3'), rollouts, **{'output_dir': folder / 'out', **changes})
        return ranks.run(function, argv, world_size=world_size, deadline=400.)[-1], folder / 'out'

    return run_it


def _rewrite(path: Path, change: Any) -> None:
    """Applies `change` to every rollout of a frozen generation."""
    head, *lines = path.read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows:
        change(row)
    path.write_text('\n'.join([head, *map(json.dumps, rows)]) + '\n')


def test_groups_never_mix_prompts_with_pipeline_and_data_parallel_ranks(run: Any, tmp_path: Path) -> None:
    plugin = tmp_path / 'prompt_index_reward.py'
    plugin.write_text(INDEX_PLUGIN)
    outcome, folder = run('groups', 4, pipeline_model_parallel_size=2, global_batch_size=16, num_generations=8, micro_batch_size=1, train_iters=1,
                          external_plugins=plugin, reward_funcs='prompt_index', max_completion_length=2, log_completions='true')
    rows = [json.loads(line) for line in (folder / 'completions.jsonl').read_text().splitlines()]
    assert len(rows) == 16 and len({row['PromptIndex'] for row in rows}) == 2
    assert [row['advantages'] for row in rows] == [0.0] * 16
    assert outcome.column('reward_std') == [0.0] and outcome.column('grad_norm') == [0.0]


def watch_steps(argv: list[str]) -> tuple[Outcome | None, list[list[int]]]:
    """The outcome, and the rollouts of each update in the order of the updates."""
    from swift_megatron_grpo.step.learn import Learner
    order: list[list[int]] = []
    original = Learner.gradients

    def gradients(self: Any, step: Any, **kwargs: Any) -> Any:
        order.append(step.table.rollout_indices_S.tolist())
        return original(self, step, **kwargs)

    Learner.gradients = gradients  # type: ignore[method-assign]
    try:
        return train(argv), order
    finally:
        Learner.gradients = original  # type: ignore[method-assign]


def test_four_updates_a_generation_come_in_order_and_an_evaluation_between_them_changes_nothing(run: Any, tmp_path: Path) -> None:
    validation = tmp_path / 'validation.jsonl'
    validation.write_text(''.join(json.dumps({'messages': [{'role': 'user', 'content': f'what is {i} + 2?'}], 'solution': str(i + 2)}) + '\n'
                                  for i in range(3)))
    common = {'global_batch_size': 4, 'generation_batch_size': 16, 'train_iters': 4, 'max_completion_length': 4, 'lora_dropout': 0.0}
    (plain, order), _ = run('plain', function=watch_steps, **common)
    (evaluated, same_order), _ = run('evaluated', function=watch_steps, **common, val_dataset=validation, eval_steps=2, eval_strategy='steps',
                                     split_dataset_ratio=0.0)
    assert order == same_order == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    training = [row for row in evaluated.logs if 'loss' in row]
    evaluations = [row for row in evaluated.logs if 'eval_reward' in row]
    assert len(evaluations) == 2 and len(training) == 4
    for name in ('loss', 'grad_norm', 'learning_rate', 'reward'):
        assert [row.get(name) for row in training] == [row.get(name) for row in plain.logs], name
    assert all(torch.equal(evaluated.weights[name], weight) for name, weight in plain.weights.items())


def test_an_evaluation_in_batches_of_different_sizes_is_one_mean_over_all_of_it(run: Any, tmp_path: Path) -> None:
    (tmp_path / 'prompt_index_of_validation.py').write_text(INDEX_PLUGIN)
    validation = tmp_path / 'validation.jsonl'
    validation.write_text(''.join(json.dumps({'messages': [{'role': 'user', 'content': f'number {i}'}], 'solution': str(i)}) + '\n' for i in (0, 0, 9)))
    outcome, _ = run('uneven', global_batch_size=16, generation_batch_size=16, num_generations_eval=8, train_iters=1, max_completion_length=3,
                     external_plugins=tmp_path / 'prompt_index_of_validation.py', reward_funcs='prompt_index', val_dataset=validation,
                     split_dataset_ratio=0.0, eval_strategy='steps', eval_steps=1)
    evaluation, = [row for row in outcome.logs if 'eval_reward' in row]
    assert evaluation['eval_reward'] == 3.0 and evaluation['eval_rewards/PromptIndex/mean'] == 3.0
    assert evaluation['eval_frac_reward_zero_std'] == 1.0 and evaluation['eval_completions/max_length'] == 3.0


def test_a_log_window_holds_its_own_rewards_only_and_each_rollout_once(run: Any, tmp_path: Path) -> None:
    rollouts = write_rollouts(tmp_path / 'rollouts', generations=8, prompts=1, num_generations=4)
    for generation in range(8):
        _rewrite(rollouts / f'generation-{generation:06d}.jsonl', lambda row: row.update(rewards=[float(generation >= 4)]))
    outcome, folder = run('window', rollouts=rollouts, global_batch_size=4, train_iters=8, logging_steps=4, log_completions='true')
    # Logged after step 1, and after every fourth.
    assert outcome.column('reward') == [0.0, 0.0, 1.0] and outcome.column('rewards/Digits/mean') == [0.0, 0.0, 1.0]
    rows = [json.loads(line) for line in (folder / 'completions.jsonl').read_text().splitlines()]
    assert len(rows) == 32 and sum(row['Digits'] for row in rows) == 16


def test_too_few_prompts_are_refused_and_five_prompts_for_two_epochs_are_two_steps(run: Any, tmp_path: Path) -> None:
    data = tmp_path / 'few.jsonl'

    def prompts(count: int) -> Path:
        data.write_text(''.join(json.dumps({'messages': [{'role': 'user', 'content': f'what is {i} + 1?'}], 'solution': '1'}) + '\n' for i in range(count)))
        return data

    common = {'global_batch_size': 8, 'num_generations': 2, 'max_completion_length': 2, 'train_iters': None, 'num_train_epochs': 2,
              'lr_scheduler_type': 'linear', 'lr': 1e-3}
    with pytest.raises(UserError, match='The data set has 3 prompts, but one generation needs 4'):
        run('three', dataset=prompts(3), **common)
    outcome, _ = run('five', dataset=prompts(5), **common)
    assert len(outcome.logs) == 2
    assert outcome.column('learning_rate') == pytest.approx([5e-4, 0.0]), 'the rate after each step; the last one ends the schedule'
    assert outcome.column('epoch') == [1.0, 2.0]


def test_a_checkpoint_without_optimizer_state_is_not_gone_on_from(run: Any, tmp_path: Path) -> None:
    rollouts = write_rollouts(tmp_path / 'rollouts', generations=2, prompts=2, num_generations=4)
    _, folder = run('weights-only', rollouts=rollouts, train_iters=1, save_strategy='steps', save_steps=1, no_save_optim='true')
    with pytest.raises(UserError, match='without optimizer state'):
        run('refused', rollouts=rollouts, resume_from_checkpoint=folder / 'checkpoint-1')


FILTERED = {
    # The other group, of prompt 0, is the one whose rewards differ.
    'a group is truncated in whole': lambda row: row.update(finish_reason='length' if row['prompt_index'] == 1 else 'stop'),
    'everything is truncated': lambda row: row.update(finish_reason='length'),
    'the long ones are truncated': lambda row: row.update(finish_reason='length' if row['index'] in (6, 7) else 'stop'),
}


@pytest.mark.parametrize('case', FILTERED)
def test_filtered_and_empty_completions_train_alike_on_one_rank_and_on_two(run: Any, tmp_path: Path, case: str) -> None:
    rollouts = write_rollouts(tmp_path / 'rollouts', generations=1, prompts=2, num_generations=4)
    _rewrite(rollouts / 'generation-000000.jsonl', FILTERED[case])
    common = {'rollouts': rollouts, 'train_iters': 1, 'overlong_filter': 'true', 'loss_type': 'bnpo', **SGD}
    one, _ = run(f'{case}-1'.replace(' ', '-'), **common)
    two, _ = run(f'{case}-2'.replace(' ', '-'), 2, micro_batch_size=2, **common)
    assert two.column('skipped_updates') == [0]
    for name in ('loss', 'grad_norm'):
        assert two.column(name) == pytest.approx(one.column(name), rel=1e-5, abs=1e-6) and one.column(name)[0] == one.column(name)[0]
    assert (one.column('grad_norm')[0] > 0.0) == (case != 'everything is truncated')
    for name, weight in one.weights.items():
        assert torch.allclose(two.weights[name], weight, rtol=1e-5, atol=1e-6), name


def test_a_prompt_cut_from_the_left_is_trained_on_as_the_engine_saw_it(run: Any, tmp_path: Path) -> None:
    data = tmp_path / 'long.jsonl'
    data.write_text(''.join(json.dumps({'messages': [{'role': 'user', 'content': f'{"1 + 2 " * (3 + 9 * (i % 2))} is {i}?'}], 'solution': '1'}) + '\n'
                            for i in range(4)))
    outcome, _ = run('left', dataset=data, max_length=40, truncation_strategy='left', global_batch_size=8, num_generations=2, train_iters=1,
                     max_completion_length=4, log_rollout_offpolicy_metrics='true')
    # The engine's log-probabilities and the trainer's are of the same tokens after the same prompts.
    assert outcome.column('rollout_correction/log_ppl_abs_diff')[0] < 1e-4
    assert abs(outcome.column('rollout_correction/kl')[0]) < 1e-4


def test_a_prompt_that_is_too_long_and_groups_of_equal_rewards_are_replaced_in_a_run(run: Any, tmp_path: Path) -> None:
    data, plugin = tmp_path / 'mixed.jsonl', tmp_path / 'prompt_index_reward.py'
    rows = ['what is 1 + 1?', '1 + 2 ' * 40, *(f'what is {i} + 2?' for i in range(6))]
    data.write_text(''.join(json.dumps({'messages': [{'role': 'user', 'content': row}], 'solution': str(i)}) + '\n' for i, row in enumerate(rows)))
    plugin.write_text(INDEX_PLUGIN)
    outcome, folder = run('replaced', dataset=data, max_length=60, truncation_strategy='delete', dynamic_sample='true', max_resample_times=2,
                          global_batch_size=4, num_generations=2, train_iters=1, max_completion_length=2, external_plugins=plugin,
                          reward_funcs='prompt_index', dataset_shuffle='false', log_completions='true')
    log, = outcome.logs
    # Every group has equal rewards: the first round, and two more of two prompts each.
    assert (log['dynamic_sample/num_rounds'], log['dynamic_sample/num_sampled_groups'], log['dynamic_sample/frac_equal_groups']) == (3.0, 6.0, 1.0)
    assert log['truncation/replaced_prompts'] == 1.0 and log['grad_norm'] == 0.0
    completions = [json.loads(line) for line in (folder / 'completions.jsonl').read_text().splitlines()]
    prompts = [row['prompt'][-1]['content'] for row in completions]
    assert len(completions) == 4 and rows[0] == prompts[0] and rows[1] not in prompts


def test_a_stream_whose_rows_are_partly_left_out_goes_on_where_it_stopped(run: Any, tmp_path: Path) -> None:
    data = tmp_path / 'stream.jsonl'
    rows = ['1 + 2 ' * 40 if i in (1, 4, 5, 9) else f'what is {i} + 2?' for i in range(24)]
    data.write_text(''.join(json.dumps({'messages': [{'role': 'user', 'content': row}], 'solution': str(i)}) + '\n' for i, row in enumerate(rows)))
    changes = {'dataset': data, 'streaming': 'true', 'dataset_shuffle': 'false', 'max_length': 60, 'truncation_strategy': 'delete',
               'global_batch_size': 4, 'num_generations': 2, 'train_iters': 4, 'generation_batch_size': 8, 'max_completion_length': 4,
               'save_strategy': 'steps', 'save_steps': 1, 'log_completions': 'true'}
    straight, folder = run('stream', **changes)
    # of rows 0 to 6 three, of rows 7 to 11 one
    assert [row.get('truncation/replaced_prompts') for row in straight.logs] == [3.0, None, 1.0, None]
    assert 'epoch' not in straight.logs[0]
    for stopped_after in (1, 2):  # inside the first generation, and at its end
        resumed, again = run(f'stream-{stopped_after}', **changes, resume_from_checkpoint=folder / f'checkpoint-{stopped_after}')
        assert resumed.column('loss') == straight.column('loss')[stopped_after:]
        texts = [[json.loads(line)['prompt'] for line in (place / 'completions.jsonl').read_text().splitlines()][-8:] for place in (folder, again)]
        assert texts[0] == texts[1]
        for name, weight in straight.weights.items():
            assert torch.equal(resumed.weights[name], weight), name


@pytest.mark.parametrize('loss_scale', ['default', 'last_round'])
def test_answers_in_the_prompt_are_not_trained(run: Any, tmp_path: Path, loss_scale: str) -> None:
    conversation = [{'role': 'user', 'content': '1 2'}, {'role': 'assistant', 'content': '3'}, {'role': 'user', 'content': '4 5'}]
    data = tmp_path / 'history.jsonl'
    data.write_text((json.dumps({'messages': conversation}) + '\n') * 4)
    case = {'name': f'history-{loss_scale}', 'dataset': data, 'loss_scale': loss_scale, 'train_iters': 1}
    if loss_scale == 'last_round':
        assert torch.isfinite(torch.tensor(run(**case)[0].column('loss'))).all()
        return
    with pytest.raises(RunError, match=r'The prompt in data set row \d holds 1 answers of the assistant, and they carry loss'):
        run(**case)
