"""A training with parts that leave the device: the same numbers, and every byte is back."""
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.step.training import arguments, train


def memory_of_a_policy(argv: list[str]) -> dict[str, Any]:
    """Builds the trainer, walks through all stages; what is allocated in each, and whether every weight came back as it was."""
    from accelerate import PartialState
    PartialState(cpu=True)
    from swift_megatron_grpo.pipeline import MegatronGRPO
    from swift_megatron_grpo.residency import Stage
    pipeline = MegatronGRPO(argv)
    train_dataset, val_dataset = pipeline._prepare_dataset()
    pipeline.args.init_iters(train_dataset, val_dataset)
    trainer = pipeline.prepare_trainer()

    def bytes_of(name: str) -> int:
        return sum(getattr(buffer, name).untyped_storage().nbytes() for model in trainer.wrapped_models for buffer in model.buffers)

    before = {name: p.detach().clone() for model in trainer.wrapped_models for name, p in model.named_parameters()}
    sizes = {}
    for stage in (Stage.EXPORTING, Stage.LOADING, Stage.GENERATING, Stage.TRAINING):
        trainer.residency.to(stage)
        engine = sum(p.untyped_storage().nbytes() for p in trainer.engine.engine.model.parameters())
        sizes[stage.name] = (bytes_of('param_data') > 0, bytes_of('grad_data') > 0, engine > 0)
    after = {name: p.detach() for model in trainer.wrapped_models for name, p in model.named_parameters()}
    trainer.engine.close()
    return {'sizes': sizes, 'equal': all(torch.equal(before[name], after[name]) for name in before)}


def test_bytes_leave_and_come_back(ranks: Any, tiny_model: Any, tmp_path: Path) -> None:
    argv = arguments(tmp_path, tiny_model('qwen3'), offload_model='true', offload_optimizer='true', offload_bridge='true', sleep_level=2)
    result = ranks.run(memory_of_a_policy, argv, world_size=1)[0]
    assert result['sizes'] == {  # policy, gradients, engine
        'EXPORTING': (True, False, False),
        'LOADING': (False, False, True),
        'GENERATING': (False, False, True),
        'TRAINING': (True, True, False),
    }
    assert result['equal']


@pytest.mark.heavy
@pytest.mark.parametrize('tuner', ['full', 'lora'])
def test_a_training_with_offloading_is_the_same_training(ranks: Any, tiny_model: Any, tmp_path: Path, tuner: str) -> None:
    model = tiny_model('qwen3')
    plain = {'train_iters': 3, 'temperature': 0.9, 'tuner_type': tuner}
    if tuner == 'lora':
        plain |= {'lora_rank': 4, 'beta': 0.1}
    expected = ranks.run(train, arguments(tmp_path, model, **plain), world_size=1, deadline=300.)[-1]
    flags = {'offload_model': 'true', 'offload_optimizer': 'true'}
    for more in ({'offload_bridge': 'true', 'sleep_level': 2}, {'sleep_level': 1}, {}):
        got = ranks.run(train, arguments(tmp_path, model, **plain, **flags, **more), world_size=1, deadline=300.)[-1]
        assert got.column('loss') == expected.column('loss') and got.column('reward') == expected.column('reward'), more
        assert got.weights.keys() == expected.weights.keys()
        assert all(torch.equal(got.weights[name], weight) for name, weight in expected.weights.items()), more


@pytest.mark.heavy
def test_two_ranks_offload_alike(ranks: Any, tiny_model: Any, tmp_path: Path) -> None:
    model = tiny_model('qwen3')
    layout = {'tensor_model_parallel_size': 2, 'beta': 0.1}
    expected = ranks.run(train, arguments(tmp_path, model, **layout), world_size=2, deadline=300.)[-1]
    got = ranks.run(train, arguments(tmp_path, model, **layout, offload_model='true', offload_optimizer='true', offload_bridge='true',
                                     sleep_level=2), world_size=2, deadline=300.)[-1]
    assert got.column('loss') == expected.column('loss')
    assert all(torch.equal(got.weights[name], weight) for name, weight in expected.weights.items())
