"""What is logged of routers is a mean over the micro-batches that there were."""
from pathlib import Path
from typing import Any

from tests.step.training import arguments, train, write_rollouts


def test_the_load_balancing_loss_does_not_grow_with_the_number_of_micro_batches(ranks: Any, tiny_model: Any, tmp_path: Path) -> None:
    """It is 1 where experts share tokens and probability evenly, which a random router nearly does, and at most num_experts / top-k."""
    rollouts = write_rollouts(tmp_path / 'rollouts', generations=1, prompts=4, num_generations=4)
    argv = arguments(tmp_path, tiny_model('qwen3_moe'), rollouts, model_type='qwen3_moe', moe_router_load_balancing_type='aux_loss', moe_aux_loss_coeff=0.01,
                     train_iters=1, global_batch_size=16, micro_batch_size=16, max_tokens_per_micro_batch=24)
    outcome, = ranks.run(train, argv, world_size=1, deadline=300.)
    assert outcome.forwards > 4
    assert 0.8 < outcome.column('load_balancing_loss')[0] <= 2.0
