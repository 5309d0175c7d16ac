"""A run as a whole: what it needs, that it goes on exactly where it stopped, and what its first step looks like."""
import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from swift_megatron_grpo.errors import UserError
from tests.step.training import Outcome, arguments, train, train_and_stop, write_rollouts


@pytest.fixture(scope='module')
def run(ranks: Any, tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    work = tmp_path_factory.mktemp('runs')

    def run_it(name: str, world_size: int = 1, rollouts: Path | None = None, **changes: Any) -> tuple[Outcome, Path]:
        folder = work / name
        argv = arguments(work, tiny_model('qwen3'), rollouts, output_dir=folder, **changes)
        return ranks.run(train, argv, world_size=world_size, deadline=300.)[-1], folder

    return run_it


@pytest.fixture(scope='module')
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rollouts(tmp_path_factory.mktemp('rollouts'), generations=3, prompts=4, num_generations=4)


def test_a_resumed_run_is_the_undisturbed_run_to_the_bit_at_a_border_and_inside_a_generation(run: Any) -> None:
    changes = {'train_iters': 4, 'generation_batch_size': 16, 'beta': 0.04, 'save_strategy': 'steps', 'save_steps': 1, 'max_completion_length': 8}
    straight, folder = run('straight', **changes)
    assert len(straight.logs) == 4
    for stopped_after in (2, 3):  # two optimizer steps a generation: 2 is a border, 3 is inside
        resumed, _ = run(f'resumed-{stopped_after}', **{**changes, 'save_strategy': 'no'},
                         resume_from_checkpoint=folder / f'checkpoint-{stopped_after}')
        for name in ('loss', 'grad_norm', 'learning_rate', 'kl'):
            assert resumed.column(name) == straight.column(name)[stopped_after:], name
        for name, weight in straight.weights.items():
            assert torch.equal(resumed.weights[name], weight), name


def test_a_checkpoint_that_has_lost_a_file_is_named(run: Any, tmp_path: Path) -> None:
    changes = {'train_iters': 1, 'max_completion_length': 4}
    _, folder = run('to-be-halved', **changes, save_strategy='steps', save_steps=1)
    half = shutil.copytree(folder / 'checkpoint-1', tmp_path / 'half')
    for part in half.glob('iter_*/*.distcp'):
        part.unlink()
    with pytest.raises(UserError, match=r'The checkpoint to go on from cannot be read: .*distcp.*earlier'):
        run('from-half', **{**changes, 'train_iters': 2}, resume_from_checkpoint=half)


@pytest.mark.parametrize('momentum', [0.0, 0.5])
def test_sgd_resumes_to_the_bit_too(run: Any, momentum: float) -> None:
    changes = {'train_iters': 3, 'save_strategy': 'steps', 'save_steps': 1, 'max_completion_length': 8, 'optimizer': 'sgd', 'sgd_momentum': momentum,
               'lr': 0.1, 'min_lr': 0.05}
    straight, folder = run(f'sgd-{momentum}', **changes)
    resumed, _ = run(f'sgd-{momentum}-resumed', **{**changes, 'save_strategy': 'no'}, resume_from_checkpoint=folder / 'checkpoint-2')
    assert straight.column('grad_norm')[2] > 0.0
    for name in ('loss', 'grad_norm'):
        assert resumed.column(name) == straight.column(name)[2:], name
    for name, weight in straight.weights.items():
        assert torch.equal(resumed.weights[name], weight), name


def test_a_run_that_one_rank_is_asked_to_stop_saves_on_all_ranks_and_can_be_gone_on_from(run: Any, ranks: Any, tiny_model: Any,
                                                                                         tmp_path: Path) -> None:
    changes = {'train_iters': 6, 'generation_batch_size': 16, 'save_strategy': 'steps', 'save_steps': 100, 'max_completion_length': 8}
    argv = arguments(tmp_path, tiny_model('qwen3'), **changes)
    stopped = ranks.run(train_and_stop, argv, 3, 0, world_size=2, deadline=300.)[-1]
    checkpoint = tmp_path / 'out' / 'checkpoint-3'
    assert [path.name for path in (tmp_path / 'out').glob('checkpoint-*')] == ['checkpoint-3']
    assert len(stopped.logs) == 3
    state = json.loads((checkpoint / 'trainer_state.json').read_text())
    assert (state['iteration'], state['generation'], state['updates_in_generation']) == (3, 1, 1)  # inside the second generation
    resumed, _ = run('after-a-stop', world_size=2, **{**changes, 'save_strategy': 'no', 'train_iters': 4}, resume_from_checkpoint=checkpoint)
    assert len(resumed.logs) == 1


def pools_started_for_data(argv: list[str]) -> list[int]:
    import multiprocess
    from accelerate import PartialState
    PartialState(cpu=True)
    from swift_megatron_grpo.pipeline import MegatronGRPO
    pool, sizes = multiprocess.Pool, []

    def counted(size: int) -> Any:
        sizes.append(size)
        return pool(size)

    with mock.patch.object(multiprocess, 'Pool', counted):
        MegatronGRPO(argv)._prepare_dataset()
    return sizes


@pytest.mark.parametrize('num_proc, pools', [(1, []), (2, [2, 2])])
def test_data_are_prepared_in_the_rank_itself_unless_several_processes_are_asked_for(ranks: Any, tiny_model: Any, tmp_path: Path, num_proc: int,
                                                                                    pools: list[int]) -> None:
    argv = arguments(tmp_path, tiny_model('qwen3'), dataset_num_proc=num_proc)
    assert ranks.run(pools_started_for_data, argv, world_size=1) == [pools]  # twice: the solution is set aside first


def train_and_watch_helpers(argv: list[str]) -> tuple[int, list[str]]:
    """How many helper processes were started with a fresh interpreter, and which processes are left."""
    import multiprocessing.managers as managers
    import psutil
    with mock.patch.object(managers.BaseManager, 'start', autospec=True, side_effect=managers.BaseManager.start) as start:
        train(argv)
    left = [' '.join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    return start.call_count, [line for line in left if 'resource_tracker' not in line]


def test_a_checkpoint_starts_no_helper_process_and_leaves_none(ranks: Any, tiny_model: Any, tmp_path: Path) -> None:
    # one that is left would outlive a rank that is killed
    argv = arguments(tmp_path, tiny_model('qwen3'), train_iters=1, save_strategy='steps', save_steps=1, max_completion_length=4)
    assert ranks.run(train_and_watch_helpers, argv, world_size=1, deadline=300.) == [(0, [])]
    assert (tmp_path / 'out' / 'checkpoint-1').is_dir()


def test_the_first_ratio_of_a_generation_is_exactly_one_and_the_later_ones_are_not(run: Any, rollouts: Path) -> None:
    outcome, _ = run('ratio', rollouts=rollouts, train_iters=4, generation_batch_size=16, temperature=0.9)
    assert outcome.log_ratios[0] == 0.0 and outcome.log_ratios[2] == 0.0
    assert outcome.log_ratios[1] > 1e-4 and outcome.log_ratios[3] > 1e-4


def test_the_divergence_from_the_reference_is_exactly_zero_before_the_first_update(run: Any, rollouts: Path) -> None:
    outcome, _ = run('kl', rollouts=rollouts, train_iters=2, global_batch_size=16, beta=0.04)
    assert outcome.column('kl')[0] == 0.0
    assert outcome.column('kl')[1] > 1e-6


@pytest.mark.parametrize('changes, forwards, reference_forwards', [
    ({'beta': 0.0}, 4, 0),  # on-policy, 4 micro-batches: nothing but the training forward
    ({'beta': 0.04}, 4, 4),
    ({'beta': 0.0, 'global_batch_size': 4, 'train_iters': 4}, 8, 0),  # 4 optimizer steps: one old pass
    ({'beta': 0.0, 'num_iterations': 2, 'train_iters': 2}, 12, 0),  # each trained twice, old once
])
def test_no_forward_is_run_that_is_not_needed(run: Any, rollouts: Path, changes: dict[str, Any], forwards: int,
                                              reference_forwards: int) -> None:
    values = {'generation_batch_size': 16, 'global_batch_size': 16, 'train_iters': 1, 'micro_batch_size': 4,
              'padding_free': 'false', **changes}
    outcome, _ = run(f'count-{sorted(changes.items())}'.replace(' ', '').replace("'", ''), rollouts=rollouts, **values)
    assert (outcome.forwards, outcome.reference_forwards) == (forwards, reference_forwards)


def test_dropout_and_rank_stabilised_scaling_of_an_adapter_have_an_effect(run: Any, rollouts: Path) -> None:
    lora = {'rollouts': rollouts, 'tuner_type': 'lora', 'lora_rank': 4, 'train_iters': 1, 'global_batch_size': 16, 'clip_grad': 100.0}
    plain, _ = run('adapter', **lora)
    dropped, _ = run('adapter-dropout', **lora, lora_dropout=0.5)
    stabilised, _ = run('adapter-rslora', **lora, use_rslora='true')
    assert abs(dropped.column('grad_norm')[0] / plain.column('grad_norm')[0] - 1) > 1e-3
    # B starts at zero, so only B has a gradient, and it is proportional to the scaling: alpha / sqrt(r) against alpha / r
    assert stabilised.column('grad_norm')[0] == pytest.approx(2 * plain.column('grad_norm')[0], rel=1e-4)


STEP_REWARD = '''
from swift.rewards import ORM, orms


class NearestToTwo(ORM):

    def __call__(self, completions, trainer_state, **kwargs):
        return [-abs(trainer_state.global_step - 2.0)] * len(completions)


orms['nearest_to_two'] = NearestToTwo
'''


def evaluations(outcome: Outcome) -> list[float]:
    return [row['eval_reward'] for row in outcome.logs if 'eval_reward' in row]


def test_a_run_ends_early_evaluates_at_the_start_and_waits_with_evaluations(run: Any, tmp_path: Path) -> None:
    """The reward is best after two optimizer steps; checkpoints 3 and 4 bring nothing better."""
    plugin = tmp_path / 'nearest_to_two_again.py'
    plugin.write_text(STEP_REWARD.replace('nearest_to_two', 'nearest_again'))
    val = tmp_path / 'val.jsonl'
    val.write_text('{"messages": [{"role": "user", "content": "1 + 1?"}], "solution": "2"}\n' * 2)
    changes = {'external_plugins': plugin, 'reward_funcs': 'nearest_again', 'val_dataset': val, 'eval_strategy': 'steps', 'eval_steps': 1,
               'save_strategy': 'steps', 'save_steps': 1, 'max_completion_length': 4, 'dynamic_sample': 'false', 'train_iters': 9}
    outcome, folder = run('early', **changes, early_stop_interval=2, eval_on_start='true')
    assert sorted(path.name for path in folder.glob('checkpoint-*')) == [f'checkpoint-{n}' for n in (1, 2, 3, 4)]
    assert evaluations(outcome) == [-2.0, -1.0, 0.0, -1.0, -2.0]
    # A resumed run goes on counting: it has waited for one checkpoint already.
    again, folder_again = run('early-again', **changes, early_stop_interval=2, resume_from_checkpoint=folder / 'checkpoint-3')
    assert evaluations(again) == [-2.0] and [path.name for path in folder_again.glob('checkpoint-*')] == ['checkpoint-4']
    late, _ = run('late', **{**changes, 'train_iters': 3}, eval_delay=2)
    assert evaluations(late) == [0.0, -1.0]


def test_evaluations_by_epochs_wait_end_the_run_and_go_on_in_a_resumed_one(run: Any, tmp_path: Path) -> None:
    """Two optimizer steps an epoch; the reward is best after the first epoch."""
    plugin = tmp_path / 'nearest_by_epochs.py'
    plugin.write_text(STEP_REWARD.replace('nearest_to_two', 'nearest_by_epochs'))
    data = tmp_path / 'four.jsonl'
    data.write_text('{"messages": [{"role": "user", "content": "1 + 1?"}], "solution": "2"}\n' * 4)
    changes = {'external_plugins': plugin, 'reward_funcs': 'nearest_by_epochs', 'dataset': data, 'val_dataset': data, 'eval_strategy': 'epoch',
               'save_strategy': 'epoch', 'train_iters': None, 'max_completion_length': 4, 'dynamic_sample': 'false', 'early_stop_interval': 2}
    outcome, folder = run('epochs', **changes, num_train_epochs=5, eval_on_start='true')
    assert evaluations(outcome) == [-2.0, 0.0, -2.0, -4.0]
    assert checkpoints(folder) == ['checkpoint-2', 'checkpoint-4', 'checkpoint-6']
    again, folder_again = run('epochs-again', **changes, num_train_epochs=5, eval_on_start='true', resume_from_checkpoint=folder / 'checkpoint-4')
    assert evaluations(again) == [-2.0, -4.0] and checkpoints(folder_again) == ['checkpoint-6']
    # An epoch and a half is three steps. What was saved before has no evaluation, and neither counts as better nor as no better.
    late, late_folder = run('epochs-late', **changes, num_train_epochs=3, eval_delay=1.5)
    assert evaluations(late) == [-2.0, -4.0]
    assert [waited(late_folder, step) for step in (2, 4, 6)] == [(None, 0), (-2.0, 0), (-2.0, 1)]
    # The one at the start is asked for by its own name, does not wait and is no checkpoint's.
    resumed, resumed_folder = run('epochs-late-again', **changes, num_train_epochs=2, eval_delay=1.5, eval_on_start='true',
                                  resume_from_checkpoint=late_folder / 'checkpoint-2')
    assert evaluations(resumed) == [0.0, -2.0] and waited(resumed_folder, 4) == (-2.0, 0)


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob('checkpoint-*'))


def waited(folder: Path, step: int) -> tuple[float | None, int]:
    state = json.loads((folder / f'checkpoint-{step}' / 'trainer_state.json').read_text())
    return state['best_metric'], state['saves_without_gain']


def test_the_best_checkpoint_is_kept_and_is_the_last_one_at_the_end_also_of_a_resumed_run(run: Any, tmp_path: Path) -> None:
    plugin = tmp_path / 'nearest_to_two.py'
    plugin.write_text(STEP_REWARD)
    val = tmp_path / 'val.jsonl'
    val.write_text('{"messages": [{"role": "user", "content": "1 + 1?"}], "solution": "2"}\n' * 2)
    changes = {'external_plugins': plugin, 'reward_funcs': 'nearest_to_two', 'val_dataset': val, 'eval_strategy': 'steps', 'eval_steps': 1,
               'save_strategy': 'steps', 'save_steps': 1, 'save_total_limit': 2, 'max_completion_length': 4, 'metric_for_best_model': 'eval_reward',
               'load_best_model_at_end': 'true', 'dynamic_sample': 'false'}
    _, folder = run('best', train_iters=3, **changes)
    assert sorted(path.name for path in folder.glob('checkpoint-*')) == ['checkpoint-2', 'checkpoint-3']
    assert (folder / 'last-checkpoint').readlink() == Path('checkpoint-2')
    state = json.loads((folder / 'checkpoint-3' / 'trainer_state.json').read_text())
    assert (state['best_metric'], state['best_global_step']) == (0.0, 2)
    run('best', train_iters=4, **changes, resume_from_checkpoint=folder / 'checkpoint-3')
    assert sorted(path.name for path in folder.glob('checkpoint-*')) == ['checkpoint-2', 'checkpoint-4']
    assert (folder / 'last-checkpoint').readlink() == Path('checkpoint-2')


def where_the_best_is(output_dir: str, resumed_from: str | None, step: int | None) -> str | None:
    from types import SimpleNamespace

    from swift_megatron_grpo import checkpoint
    state = SimpleNamespace(best_global_step=step, best_model_checkpoint=None)
    checkpoint.find_best(SimpleNamespace(output_dir=output_dir, resume_from_checkpoint=resumed_from), state)
    return state.best_model_checkpoint


def test_the_best_checkpoint_of_a_resumed_run_may_be_in_the_folder_of_the_first(ranks: Any, tmp_path: Path) -> None:
    first, second = tmp_path / 'first', tmp_path / 'second'
    (first / 'checkpoint-2').mkdir(parents=True)
    second.mkdir()

    def found(step: int | None, resumed_from: Path | None = first / 'checkpoint-4') -> str | None:
        return ranks.run(where_the_best_is, str(second), None if resumed_from is None else str(resumed_from), step, world_size=1)[0]

    assert found(2) == str(first / 'checkpoint-2')
    assert found(2, None) is None and found(3) is None and found(None) is None
    (second / 'checkpoint-2').mkdir()
    assert found(2) == str(second / 'checkpoint-2')
