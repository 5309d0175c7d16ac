"""Ranks fall into Megatron's groups, and the run's length follows from data and batch."""

import pytest

from swift_megatron_grpo.args import resolve, schedule
from swift_megatron_grpo.args.layout import rank_groups

from .conftest import other_errors, write_prompts

ARGV = '--rlhf_type grpo --backend megatron --model some/model --dataset data.jsonl --reward_funcs accuracy --batch_check exact'


def plan_of(text, world_size):
    return resolve([*ARGV.split(), *text.split()], {'NPROC_PER_NODE': str(world_size)})


def test_the_first_axis_runs_fastest():
    sizes = (('tp', 2), ('cp', 1), ('dp', 2), ('pp', 2))
    assert rank_groups(sizes, 'tp') == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert rank_groups(sizes, 'dp') == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert rank_groups(sizes, 'pp') == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_groups_of_a_mixed_layout(workplace):
    plan = plan_of(
        '--tensor_model_parallel_size 2 --context_parallel_size 2 --pipeline_model_parallel_size 2 --expert_model_parallel_size 4 '
        '--vllm_mode colocate --vllm_tensor_parallel_size 4 --per_device_train_batch_size 8',
        16,
    )
    assert other_errors(plan) == []
    layout = plan.layout
    assert (layout.dp_size, layout.expert_dp_size) == (2, 2)
    assert layout.groups['tp'][:2] == [[0, 1], [2, 3]]
    assert layout.groups['cp'][:2] == [[0, 2], [1, 3]]
    assert layout.groups['dp'][:2] == [[0, 4], [1, 5]]
    assert layout.groups['pp'][:2] == [[0, 8], [1, 9]]
    # experts know no CP and ETP 1 here: EP over neighbours, their data parallel beside it
    assert layout.groups['ep'][:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert layout.groups['expert_dp'][:2] == [[0, 4], [1, 5]]
    assert layout.vllm['groups'] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]


@pytest.mark.slow
def test_groups_are_those_of_megatron():
    parallel_state = pytest.importorskip('megatron.core.parallel_state')
    for tp, cp, dp, pp in ((2, 1, 2, 2), (2, 2, 2, 2), (1, 2, 3, 2), (4, 1, 2, 1)):
        generator = parallel_state.RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order='tp-cp-ep-dp-pp')
        sizes = (('tp', tp), ('cp', cp), ('dp', dp), ('pp', pp))
        for axis, _ in sizes:
            assert sorted(rank_groups(sizes, axis)) == sorted(generator.get_ranks(axis)), (sizes, axis)
    expert = parallel_state.RankGenerator(tp=2, ep=2, dp=2, pp=2, cp=1, order='tp-cp-ep-dp-pp')
    sizes = (('etp', 2), ('ep', 2), ('expert_dp', 2), ('pp', 2))
    for ours, theirs in (('etp', 'tp'), ('ep', 'ep'), ('expert_dp', 'dp')):
        assert sorted(rank_groups(sizes, ours)) == sorted(expert.get_ranks(theirs))


def test_c15_too_few_prompts_are_an_error_and_five_for_two_epochs_are_two_steps(workplace):
    text = (
        '--per_device_train_batch_size 8 --gradient_accumulation_steps 4 --num_generations 8 --num_train_epochs 2 '
        '--lr_scheduler_type linear'
    )
    write_prompts(workplace / 'data.jsonl', 3)
    plan = plan_of(text, 1)
    assert len(other_errors(plan)) == 1
    assert 'The data has 3 prompts, and one generation takes 4' in plan.errors[0]
    write_prompts(workplace / 'data.jsonl', 5)
    plan = plan_of(text, 1)
    assert other_errors(plan) == []
    assert (plan.schedule.generations_per_epoch, plan.schedule.optimizer_steps, plan.schedule.samples) == (1, 2, 64)
    assert plan.schedule.learning_rate['step_last'] == pytest.approx(0.5e-4)


def test_rows_are_counted_as_ms_swift_takes_them(workplace):
    (workplace / 'a.json').write_text('[{"query": "1"}, {"query": "2"}]', encoding='utf-8')
    (workplace / 'b.csv').write_text('query,solution\n"1\n2",3\n4,5\n', encoding='utf-8')

    def prompts(dataset, more=''):
        return resolve(
            [*ARGV.replace('data.jsonl', dataset).split(), *f'--num_generations 2 --gradient_accumulation_steps 2 {more}'.split()], {}
        ).schedule.prompts

    assert prompts('data.jsonl') == 100
    assert prompts('data.jsonl#30') == 30
    assert prompts('data.jsonl#250') == 250
    assert prompts('data.jsonl a.json b.csv') == 104
    assert prompts('org/name#40 data.jsonl') == 140
    assert prompts('org/name') is None
    assert prompts('data.jsonl a.json', '--split_dataset_ratio 0.1') == 91, '10 of 100 and one of 2 are held out'
    assert prompts('data.jsonl', '--split_dataset_ratio 0.1 --eval_strategy no') == 100
    assert prompts('data.jsonl', '--streaming true --max_steps 3') is None


def test_steps_follow_from_generations_iterations_and_epochs(workplace):
    planned = plan_of(
        '--micro_batch_size 1 --global_batch_size 16 --steps_per_generation 2 --num_iterations 3 --num_train_epochs 1.5', 4
    ).schedule
    # 32 completions, 4 prompts a generation: 25 generations an epoch, 6 steps each
    assert (planned.generations_per_epoch, planned.optimizer_steps_per_epoch, planned.optimizer_steps) == (25, 150, 225)
    assert (planned.generations, planned.samples, planned.samples_per_epoch) == (38, 1216, 800)
    half = plan_of('--micro_batch_size 1 --global_batch_size 32 --num_train_epochs 0.5', 4).schedule
    assert (half.generations_per_epoch, half.optimizer_steps) == (25, 13), 'half of 25 steps, rounded up'
    bounded = plan_of('--micro_batch_size 1 --global_batch_size 16 --max_steps 7 --num_train_epochs 9', 4)
    assert (bounded.schedule.optimizer_steps, bounded.schedule.generations) == (7, 7)
    assert any('max_steps 7 wins over num_train_epochs 9' in warning for warning in bounded.warnings)


def test_a_large_file_is_counted_like_a_small_one(workplace, monkeypatch):
    (workplace / 'rows.jsonl').write_text(('{"a": 1}\n' * 3 + '\n\n{"b": 2}\n\n') * 1000 + '{"c": 3}', encoding='utf-8')
    assert schedule.count_rows('rows.jsonl') == 4001
    monkeypatch.setattr(schedule, '_EXACT_BYTES', 0)
    assert schedule.count_rows('rows.jsonl') == 4001
