"""A checkpoint can be gone on from in another layout: the rest of the run is that of the run that was never stopped.

With Adam, so that its moments must arrive where they belong; at a learning rate at which rounding of entries without a gradient stays below the
tolerance (tests/step/test_layouts.py)."""
import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests import families
from tests.step.test_layouts import assert_same
from tests.step.training import Outcome, arguments, train, write_rollouts

COMMON = {'train_iters': 4, 'generation_batch_size': 16, 'beta': 0.04, 'lr': 1e-5, 'min_lr': 1e-6}
RESHARDABLE = {'use_distributed_optimizer': 'true', 'dist_ckpt_optim_fully_reshardable': 'true'}
TP2, PP2 = {'tensor_model_parallel_size': 2, 'sequence_parallel': 'true'}, {'pipeline_model_parallel_size': 2}
EP2 = {'expert_model_parallel_size': 2, 'micro_batch_size': 2}
EXPERTS = {'model_type': 'qwen3_moe', 'moe_router_load_balancing_type': 'none'}
LORA = {'tuner_type': 'lora', 'target_modules': 'all-linear', 'lora_rank': 4}

# saved in, gone on in: (processes, arguments)
CHANGES = {
    'one-tp2': ((1, {}), (2, TP2)),
    'tp2-pp2': ((2, TP2), (2, PP2)),
    'pp2-dp2': ((2, PP2), (2, {'micro_batch_size': 2})),
    'dp2-vpp2': ((2, {'micro_batch_size': 2}), (2, {**PP2, 'virtual_pipeline_model_parallel_size': 2})),
    'tp2-pp2-one': ((4, {**TP2, **PP2}), (1, {})),
}


@pytest.fixture(scope='module')
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rollouts(tmp_path_factory.mktemp('rollouts'), generations=2, prompts=4, num_generations=4)


@pytest.fixture(scope='module')
def run(ranks: Any, rollouts: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    work = tmp_path_factory.mktemp('resumed')
    known: dict[str, tuple[Outcome, Path]] = {}

    def run_it(model: Path, world_size: int, function: Any = train, **changes: Any) -> tuple[Outcome, Path]:
        key = f'{model} {world_size} {function} {sorted(changes.items())}'
        if key not in known:
            folder = work / str(len(known))
            argv = arguments(work, model, rollouts, **{**COMMON, **changes, 'output_dir': folder})
            known[key] = ranks.run(function, argv, world_size=world_size, deadline=300.)[-1], folder
        return known[key]

    return run_it


def check(run: Any, model: Path, before: tuple[int, dict[str, Any]], after: tuple[int, dict[str, Any]], stop: int, *, resume: Any = train,
          **common: Any) -> None:
    straight, _ = run(model, 1, **common)
    world_size, layout = before
    _, folder = run(model, world_size, **{**common, **layout}, save_strategy='steps', save_steps=1)
    checkpoint = folder / f'checkpoint-{stop}'
    assert json.loads((checkpoint / 'trainer_state.json').read_text())['updates_in_generation'] == stop % 2
    world_size, layout = after
    resumed, _ = run(model, world_size, resume, **{**common, **layout}, resume_from_checkpoint=checkpoint)
    assert len(resumed.logs) == 4 - stop
    assert_same(resumed, dataclasses.replace(straight, logs=straight.logs[stop:]))


@pytest.mark.parametrize('stop', [2, 3], ids=['at a border', 'inside a generation'])
@pytest.mark.parametrize('change', CHANGES)
def test_a_run_goes_on_in_another_layout(run: Any, tiny_model: Any, change: str, stop: int) -> None:
    before, after = CHANGES[change]
    check(run, tiny_model('qwen3'), before, after, stop, **RESHARDABLE)


@pytest.mark.parametrize('before, after', [((2, TP2), (2, PP2)), ((1, {}), (2, TP2))], ids=['tp2-pp2', 'one-tp2'])
def test_adapters_go_on_in_another_layout(run: Any, tiny_model: Any, before: Any, after: Any) -> None:
    check(run, tiny_model('qwen3'), before, after, 3, **RESHARDABLE, **LORA)


@pytest.mark.parametrize('tuner', [{}, LORA], ids=['full', 'lora'])
def test_experts_go_on_in_another_layout(run: Any, tiny_model: Any, tuner: dict[str, Any]) -> None:
    check(run, tiny_model('qwen3_moe'), (2, EP2), (4, {**EP2, **TP2, **PP2}), 2, **RESHARDABLE, **tuner, **EXPERTS)


def test_glm4_saves_and_goes_on_under_tensor_parallelism(run: Any, tiny_model: Any) -> None:
    kind, model_type, fields = families.FAMILIES['glm4']
    model = tiny_model(kind, **{**fields, 'attention_bias': False})  # the bias of keys has no gradient but rounding
    check(run, model, (2, TP2), (2, {**TP2, **PP2, 'tensor_model_parallel_size': 1, 'sequence_parallel': 'false'}), 2, **RESHARDABLE,
          model_type=model_type)


def test_without_the_distributed_optimizer_any_checkpoint_can(run: Any, tiny_model: Any) -> None:
    check(run, tiny_model('qwen3'), (2, TP2), (2, PP2), 2, use_distributed_optimizer='false')


def test_data_parallel_ranks_may_be_more_or_fewer_in_any_checkpoint(run: Any, tiny_model: Any) -> None:
    check(run, tiny_model('qwen3'), (2, {'micro_batch_size': 2}), (1, {}), 3, use_distributed_optimizer='true')


def train_without_moments(argv: list[str]) -> Outcome:
    """As if none had been read."""
    from swift_megatron_grpo.trainer import MegatronGRPOTrainer
    load = MegatronGRPOTrainer._load_checkpoint

    def load_and_forget(self: Any) -> None:
        load(self)
        for part in self.optimizer.chained_optimizers:
            for state in part.optimizer.state.values():
                state['exp_avg'].zero_()

    with mock.patch.object(MegatronGRPOTrainer, '_load_checkpoint', load_and_forget):
        return train(argv)


def test_moments_that_do_not_arrive_are_seen(run: Any, tiny_model: Any) -> None:
    with pytest.raises(AssertionError, match=r'weight: \d|(loss|grad_norm) of step 1'):
        check(run, tiny_model('qwen3'), (1, {}), (2, TP2), 2, resume=train_without_moments, **RESHARDABLE)
