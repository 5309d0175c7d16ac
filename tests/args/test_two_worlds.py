"""The plan's numbers are those of `swift rlhf`, which is asked itself."""

import json

import pytest

from swift_megatron_grpo.args import lr, resolve
from swift_megatron_grpo.args.fields import all_fields
from swift_megatron_grpo.args.own import OWN_FIELDS

from . import cases
from .conftest import other_errors, steps_of, worker_plans, write_prompts

pytestmark = pytest.mark.slow


def test_every_field_of_both_worlds_has_a_row_with_the_right_default(upstream):
    table = all_fields()
    swift, megatron = dict(upstream['swift']), dict(upstream['megatron'])
    assert len(swift) == 481
    assert len(megatron) == 414
    own_new = {field.name for field in OWN_FIELDS if not field.overrides}
    # fields that this package gives to the worker are in the table as its own, whichever world had them before
    assert {name for name, field in table.items() if field.worlds in ('both', 'swift')} == set(swift) - own_new
    assert {name for name, field in table.items() if field.worlds in ('both', 'megatron')} == set(megatron)
    for name, default in swift.items():
        assert table[name].swift_default == default, name
    for name, default in megatron.items():
        assert table[name].megatron_default == default, name


def test_the_worker_has_the_own_fields_with_their_defaults_and_no_others(upstream):
    worker, megatron = dict(upstream['worker']), dict(upstream['megatron'])
    expected = {field.name: field.default for field in OWN_FIELDS if not field.door_only}
    assert {name: worker[name] for name in expected} == expected
    assert set(worker) == set(megatron) | set(expected)


@pytest.mark.parametrize('index', range(len(cases.SCRIPTS)), ids=[name for name, *_ in cases.SCRIPTS])
def test_ten_scripts_have_the_same_effective_numbers_in_both_worlds(index, upstream, workplace):
    _, text, world_size, prompts = cases.SCRIPTS[index]
    write_prompts(workplace / 'data.jsonl', prompts)
    argv = [
        '--rlhf_type',
        'grpo',
        '--backend',
        'megatron',
        '--model',
        'tiny',
        '--dataset',
        'data.jsonl',
        '--reward_funcs',
        'accuracy',
        '--batch_check',
        'exact',
    ]
    plan = resolve(argv + text.split(), {'NPROC_PER_NODE': str(world_size)})
    assert other_errors(plan) == []
    expected = upstream['scripts'][index]
    values = {row.name: row.value for row in plan.arguments}
    schedule, batch = plan.schedule, plan.batch_plan
    assert values['tuner_type'] == expected['tuner_type']
    assert values['beta'] == expected['beta']
    assert values['lr'] == expected['learning_rate']
    assert values.get('clip_grad', 1.0) == expected['max_grad_norm']
    assert values.get('weight_decay', 0.1) == expected['weight_decay']
    assert batch.global_batch_size == expected['global_batch_size']
    assert batch.generation_batch_size == expected['generation_batch_size']
    assert schedule.prompts_per_epoch == expected['prompts_per_epoch']
    assert schedule.optimizer_steps_per_epoch == expected['optimizer_steps_per_epoch']
    assert schedule.optimizer_steps == expected['optimizer_steps']
    rates = [schedule.learning_rate[f'step_{name}'] for name in ('0', '1', 'half', 'last')]
    assert rates == pytest.approx(expected['rates'], abs=1e-9 * expected['learning_rate'])


def test_every_schedule_and_every_argument_of_one_is_among_the_cases():
    asked = {(kind, name) for kind, *_, kwargs in cases.SCHEDULES for name in kwargs}
    assert {kind for kind, *_ in cases.SCHEDULES} == set(lr.SCHEDULES)
    assert asked == {(kind, name) for kind, names in lr.KWARGS.items() for name in names}
    warmups = {(steps > 0, ratio > 0) for _, _, steps, ratio, *_ in cases.SCHEDULES}
    assert warmups == {(False, False), (True, False), (False, True)}


def test_the_schedules_are_those_of_transformers(upstream):
    for case, expected in zip(cases.SCHEDULES, upstream['transformers_rates']):
        kind, peak, steps, ratio, total, kwargs = case
        warmup = lr.num_warmup_steps(steps, ratio, total)
        rates = [peak * lr.factor(kind, step, warmup=warmup, total=total, lr=peak, kwargs=kwargs) for step in steps_of(total)]
        assert rates == pytest.approx(expected, abs=1e-9 * peak), case


def test_the_megatron_spelling_gives_the_same_rates_or_says_that_it_differs(upstream):
    equal, different = 0, 0
    for case, hf, megatron in zip(cases.SCHEDULES, upstream['transformers_rates'], upstream['megatron_rates']):
        kind, peak, steps, ratio, total, kwargs = case
        _, notes = lr.megatron_spelling(kind, lr=peak, kwargs=kwargs, warmup_steps=steps, warmup_ratio=ratio, total=total)
        same = megatron is not None and megatron == pytest.approx(hf, abs=1e-9 * peak)
        if same:
            equal += 1
        else:
            different += 1
            assert notes, (case, hf, megatron)
    assert (equal > 100, different > 20) == (True, True), (equal, different)


def test_the_worker_reads_its_command_line_as_it_was_meant(upstream):
    plans = worker_plans()
    assert len([word for word in plans[0].worker_argv if word.startswith('--')]) > 300
    for plan, (values, rest) in zip(plans, upstream['worker_reads']):
        assert rest == []
        for name, value in values.items():
            meant = plan.effective[name]
            if isinstance(value, str) and isinstance(meant, (dict, list)):
                value = json.loads(value)
            # one number for a list of numbers: Megatron takes both
            assert value in (meant, [meant]), name
