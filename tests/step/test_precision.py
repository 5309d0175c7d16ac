"""bf16 with fp32 main parameters and gradients: close to fp32, and the first ratio of a generation still exactly 1."""
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.step.training import arguments, train, write_rollouts

pytestmark = pytest.mark.heavy

# Two optimizer steps a generation: old log-probabilities come from a pass of their own, in the precision of training.
RUN = {'steps_per_generation': 2, 'generation_batch_size': 16, 'global_batch_size': 8, 'train_iters': 2, 'lr': 1e-3, 'optimizer': 'sgd',
       'sgd_momentum': 0.0, 'weight_decay': 0.0, 'lr_decay_style': 'constant', 'beta': 0.04}
BF16 = {'torch_dtype': 'bfloat16', 'fp16': 'false', 'bf16': 'true'}


def train_and_look(argv: list[str]) -> tuple[Any, dict[str, Any]]:
    """The outcome; and the types of the main parameters and of the gradients that the optimizer gets."""
    from swift_megatron_grpo.pipeline import MegatronGRPOTrainer  # before the trainer's own module: arguments are parsed by type hints first
    seen: dict[str, Any] = {}
    original = MegatronGRPOTrainer.train_step

    def train_step(self: Any, step: Any) -> Any:
        result = original(self, step)
        parameters = [p for model in self.unwrapped_models for p in model.parameters()]
        seen['model'] = {str(p.dtype) for p in parameters}
        seen['gradients'] = {str(p.main_grad.dtype) for p in parameters}
        optimizers = getattr(self.optimizer, 'chained_optimizers', [self.optimizer])
        seen['main'] = {str(p.dtype) for optimizer in optimizers for group in optimizer.optimizer.param_groups for p in group['params']}
        return result

    MegatronGRPOTrainer.train_step = train_step
    try:
        return train(argv), seen
    finally:
        MegatronGRPOTrainer.train_step = original


@pytest.mark.parametrize('kind, world_size, layout', [('qwen3', 1, {}), ('qwen3_moe', 2, {'tensor_model_parallel_size': 2, 'sequence_parallel': 'true',
                                                                                         'expert_model_parallel_size': 2})])
def test_bf16_is_near_fp32_and_its_first_ratio_is_one(ranks: Any, tiny_model: Any, tmp_path: Path, kind: str, world_size: int,
                                                      layout: dict[str, Any]) -> None:
    model = tiny_model(kind)
    rollouts = write_rollouts(tmp_path / 'rollouts', generations=1, prompts=4, num_generations=4)
    changes = {**RUN, **layout, 'model_type': kind, **({'moe_router_load_balancing_type': 'none'} if kind == 'qwen3_moe' else {})}
    exact, _ = ranks.run(train_and_look, arguments(tmp_path, model, rollouts, **changes), world_size=world_size, deadline=300.)[-1]
    outcome, seen = ranks.run(train_and_look, arguments(tmp_path, model, rollouts, **changes, **BF16), world_size=world_size, deadline=300.)[-1]
    assert 'torch.bfloat16' in seen['model'] and seen['gradients'] == seen['main'] == {'torch.float32'}
    assert outcome.log_ratios[0] == exact.log_ratios[0] == 0.0
    # A bf16 number has 8 bits: 0.4% of itself. docs/models.md states these bounds.
    assert outcome.column('loss')[0] == pytest.approx(exact.column('loss')[0], abs=0.02)
    assert outcome.column('grad_norm')[0] == pytest.approx(exact.column('grad_norm')[0], rel=0.05)
    for name, weight in exact.weights.items():
        assert (outcome.weights[name].float() - weight).norm() / weight.norm() < 0.01, name
    assert {weight.dtype for name, weight in outcome.weights.items() if name.endswith('proj.weight')} == {torch.bfloat16}
