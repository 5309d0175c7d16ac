"""The batch arithmetic: the documentation's numbers, the units of both worlds, one verdict a batch."""

import pytest

from swift_megatron_grpo.args.batch_plan import resolve_batch


def batch(world_size=8, tp=1, pp=1, cp=1, ulysses=1, **given):
    return resolve_batch(given, world_size=world_size, tp=tp, pp=pp, cp=cp, ulysses=ulysses)


def test_the_documentations_formulas_give_its_numbers():
    plan = batch(global_batch_size=128, steps_per_generation=4, num_generations=8, micro_batch_size=4).plan
    assert plan.dp_size == 8
    assert plan.gradient_accumulation_steps == 4
    assert plan.global_batch_size == 128
    assert plan.generation_batch_size == 512
    assert plan.num_rollout_prompts == 64
    assert plan.num_train_prompts == 16
    assert plan.num_prompts_per_dp_group == 2


# batch, steps, G, dp, micro, ranks of the model; verdict of documented, of exact; what the refusal names
VERDICTS = [
    (128, 4, 8, 8, 4, 1, False, True, ['global_batch_size 256', 'micro_batch_size 1 or 2']),
    (128, 1, 8, 8, 4, 1, False, True, ['global_batch_size 256', 'micro_batch_size 1 or 2']),
    (8, 1, 8, 1, 8, 1, False, True, ['global_batch_size 64', 'micro_batch_size 1']),
    (16, 1, 8, 2, 2, 1, False, True, ['global_batch_size 32', 'micro_batch_size 1']),
    (16, 1, 8, 4, 1, 1, False, True, ['global_batch_size 32', 'num_generations 2 or 4']),
    (12, 1, 8, 1, 1, 1, False, False, ['generation_batch_size is 8 or 16', 'num_generations 4 or 6 or 12']),
    (4, 1, 4, 1, 1, 8, True, True, []),
]


@pytest.mark.parametrize(('size', 'steps', 'group', 'dp', 'micro', 'model_ranks', 'documented', 'exact', 'names'), VERDICTS)
def test_each_batch_has_one_verdict_and_a_refusal_names_the_nearest_valid_values(
    size, steps, group, dp, micro, model_ranks, documented, exact, names
):
    given = {'global_batch_size': size, 'steps_per_generation': steps, 'num_generations': group, 'micro_batch_size': micro}
    result = batch(dp * model_ranks, tp=model_ranks, **given)
    assert (result.errors == []) == documented
    for name in names:
        assert name in result.errors[0], result.errors[0]
    if not documented and exact:
        assert '--batch_check exact' in result.errors[0]
    assert (batch(dp * model_ranks, tp=model_ranks, batch_check='exact', **given).errors == []) == exact


def test_a_batch_in_the_names_of_swift_rlhf_is_held_to_what_the_data_path_needs():
    given = {'per_device_train_batch_size': 4, 'gradient_accumulation_steps': 4, 'num_generations': 8}
    result = batch(8, **given)  # an ordinary script: 2 prompts a DP group, micro-batches of 4
    assert (result.errors, result.plan.batch_check) == ([], 'exact')
    assert 'num_prompts_per_dp_group 2 is not a whole multiple of micro_batch_size 4' in result.plan.notes[-1]
    assert batch(8, batch_check='auto', **given).plan == result.plan
    assert batch(8, batch_check='exact', **given).plan.notes == []  # asked for by name: nothing to say
    assert 'documented condition' in batch(8, batch_check='documented', **given).errors[0]
    assert 'documented condition' in batch(8, global_batch_size=128, **given).errors[0]
    assert batch(8, per_device_train_batch_size=1, gradient_accumulation_steps=8, num_generations=8).plan.notes == []


def test_the_nearest_valid_values_are_valid():
    for given in (
        {'global_batch_size': 256, 'num_generations': 8, 'micro_batch_size': 4},
        {'global_batch_size': 128, 'num_generations': 8, 'micro_batch_size': 2},
        {'global_batch_size': 128, 'num_generations': 4, 'micro_batch_size': 4},
        {'global_batch_size': 128, 'num_generations': 2, 'micro_batch_size': 4},
    ):
        assert batch(**given).errors == [], given


def test_steps_per_generation_counts_micro_steps_beside_the_names_of_swift_rlhf():
    result = batch(4, per_device_train_batch_size=4, gradient_accumulation_steps=4, steps_per_generation=4, num_generations=4)
    assert (result.plan.steps_per_generation, result.plan.generation_batch_size) == (1, 64)
    result = batch(4, per_device_train_batch_size=4, gradient_accumulation_steps=2, steps_per_generation=8, num_generations=4)
    assert (result.plan.steps_per_generation, result.plan.swift_steps_per_generation) == (4, 8)
    result = batch(4, per_device_train_batch_size=2, steps_per_generation=3, num_generations=2)
    assert (result.plan.steps_per_generation, result.plan.generation_batch_size) == (3, 24)


def test_steps_per_generation_counts_optimizer_steps_beside_the_names_of_megatron():
    result = batch(4, micro_batch_size=4, global_batch_size=64, steps_per_generation=4, num_generations=4)
    assert (result.plan.steps_per_generation, result.plan.generation_batch_size) == (4, 256)
    assert result.plan.gradient_accumulation_steps == 4
    assert result.plan.swift_steps_per_generation == 16
    assert 'beside micro_batch_size and global_batch_size counts optimizer steps' in result.plan.notes[0]


def test_steps_that_are_no_multiple_of_the_accumulation_are_refused_with_the_nearest_ones():
    result = batch(4, per_device_train_batch_size=1, gradient_accumulation_steps=4, steps_per_generation=6)
    assert len(result.errors) == 1
    assert 'nearest valid values are 4 or 8' in result.errors[0]


def test_the_default_is_one_optimizer_step_a_generation():
    result = batch(8, per_device_train_batch_size=1, gradient_accumulation_steps=8)
    assert (result.plan.steps_per_generation, result.plan.swift_steps_per_generation) == (1, 8)


def test_model_parallel_shrinks_the_global_batch_by_the_documented_formula_and_names_both_ways_to_keep_it():
    result = batch(8, tp=4, per_device_train_batch_size=1, gradient_accumulation_steps=8)
    assert result.plan.global_batch_size == 16
    assert result.plan.swift_global_batch_size == 64
    assert '--keep_global_batch true, or --gradient_accumulation_steps 32' in result.plan.notes[-1]
    kept = batch(8, tp=4, per_device_train_batch_size=1, gradient_accumulation_steps=8, keep_global_batch=True)
    assert (kept.plan.global_batch_size, kept.plan.gradient_accumulation_steps) == (64, 32)
    by_hand = batch(8, tp=4, per_device_train_batch_size=1, gradient_accumulation_steps=32)
    assert by_hand.plan.global_batch_size == 64


def test_the_kept_batch_keeps_the_optimizer_steps_of_a_generation():
    given = {'per_device_train_batch_size': 1, 'gradient_accumulation_steps': 4, 'steps_per_generation': 8, 'num_generations': 8}
    assert batch(8, **given).plan.steps_per_generation == 2
    kept = batch(8, tp=2, keep_global_batch=True, **given)
    assert (kept.plan.steps_per_generation, kept.plan.generation_batch_size) == (2, 64)


def test_a_global_batch_by_hand_wins_where_it_is_consistent():
    assert batch(4, per_device_train_batch_size=2, global_batch_size=64, num_generations=4).plan.gradient_accumulation_steps == 8
    result = batch(4, micro_batch_size=2, global_batch_size=60, num_generations=4)
    assert 'nearest valid global_batch_size is 56 or 64' in result.errors[0]
    result = batch(4, micro_batch_size=2, global_batch_size=64, gradient_accumulation_steps=4, num_generations=4)
    assert '64' in result.errors[0]
    assert 'give gradient_accumulation_steps 8' in result.errors[0]


def test_a_generation_size_is_in_completions_in_both_worlds():
    result = batch(2, per_device_train_batch_size=2, gradient_accumulation_steps=2, generation_batch_size=32)
    assert (result.plan.global_batch_size, result.plan.steps_per_generation) == (8, 4)
    result = batch(2, per_device_train_batch_size=2, gradient_accumulation_steps=2, generation_batch_size=36)
    assert 'nearest valid values are 32 or 40' in result.errors[0]


def test_sequence_parallel_of_swift_keeps_generation_size_and_optimizer_steps():
    # swift rlhf, 8 processes, sequence_parallel_size 2: its trainer doubles the accumulation, since two processes share a micro-batch
    script = {'per_device_train_batch_size': 1, 'gradient_accumulation_steps': 4, 'num_generations': 4}
    plan = batch(8, cp=2, ulysses=2, **script).plan
    assert (plan.global_batch_size, plan.steps_per_generation, plan.generation_batch_size) == (32, 1, 32)
    assert (plan.gradient_accumulation_steps, plan.swift_global_batch_size) == (8, 32)
    assert plan.notes[0].startswith('sequence_parallel_size 2 multiplies gradient_accumulation_steps 4, as in swift rlhf')
    alone = batch(8, **script).plan
    assert (alone.global_batch_size, alone.generation_batch_size) == (32, 32)
    twice = batch(8, cp=2, ulysses=2, **script, steps_per_generation=8).plan
    assert (twice.global_batch_size, twice.steps_per_generation, twice.generation_batch_size) == (32, 2, 64)


def test_sequence_parallel_beside_tensor_parallel_names_the_accumulation_that_keeps_the_batch():
    script = {'per_device_train_batch_size': 1, 'num_generations': 4, 'steps_per_generation': 8}
    plan = batch(8, tp=2, cp=2, ulysses=2, gradient_accumulation_steps=4, **script).plan
    assert (plan.global_batch_size, plan.steps_per_generation) == (16, 2)
    assert '--gradient_accumulation_steps 8 with --steps_per_generation 16' in plan.notes[-1]
    script['steps_per_generation'] = 16
    by_hand = batch(8, tp=2, cp=2, ulysses=2, gradient_accumulation_steps=8, **script).plan
    assert (by_hand.global_batch_size, by_hand.steps_per_generation) == (32, 2)


def test_sampling_in_parts_is_refused_with_the_setting_that_is_the_same_training():
    result = batch(4, per_device_train_batch_size=1, gradient_accumulation_steps=4, generation_batch_size=4, num_generations=4)
    assert 'swift rlhf would sample 4 times for one optimizer step, from the same weights: 16 is the same training.' in result.errors[0]
    result = batch(8, per_device_train_batch_size=4, gradient_accumulation_steps=8, steps_per_generation=4)
    assert 'swift rlhf would sample 2 times for one optimizer step, from the same weights: 8 is the same training.' in result.errors[0]
    result = batch(8, per_device_train_batch_size=4, gradient_accumulation_steps=4, steps_per_generation=6)
    assert 'same training' not in result.errors[0]


def test_a_batch_that_parallelism_made_too_small_names_the_switch_that_keeps_it():
    result = batch(8, tp=4, per_device_train_batch_size=1, num_generations=8)
    assert 'Under data parallel alone the script had 8: --keep_global_batch true keeps it.' in result.errors[0]
    assert batch(8, tp=4, per_device_train_batch_size=1, num_generations=8, keep_global_batch=True).errors == []
    assert '--keep_global_batch' not in batch(8, tp=4, per_device_train_batch_size=1, num_generations=5).errors[0]


def test_a_generation_size_that_is_kept_says_how_many_optimizer_steps_it_feeds_now():
    given = {'per_device_train_batch_size': 1, 'gradient_accumulation_steps': 4, 'generation_batch_size': 64}
    result = batch(8, tp=4, **given)
    assert (result.plan.steps_per_generation, result.plan.generation_batch_size) == (8, 64)
    assert 'it feeds 8 optimizer steps, and 2 under data parallel alone' in result.warnings[-1]
    kept = batch(8, tp=4, keep_global_batch=True, **given)
    assert (kept.plan.steps_per_generation, kept.warnings) == (2, [])


def test_a_batch_of_swift_that_the_documentation_of_megatron_refuses_is_no_warning():
    result = batch(8, per_device_train_batch_size=4, gradient_accumulation_steps=4, num_generations=8)
    assert (result.warnings, len(result.plan.notes)) == ([], 1)


def test_ranks_that_do_not_divide_are_refused_with_numbers_that_do():
    result = batch(6, tp=4)
    assert result.plan is None
    assert 'Start 4 or 8 processes' in result.errors[0]


def test_sizes_below_one_are_refused():
    assert batch(2, num_generations=0).errors == ['--num_generations is 0; it is 1 or more.']
