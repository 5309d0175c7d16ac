"""Router replay R3 with real vLLM: the experts that it chose come with the rollouts, and training goes to them."""
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.rank_pool import RankPool
from tests.rollouts.test_colocate import VLLM
from tests.step.training import arguments

pytestmark = [pytest.mark.heavy, pytest.mark.skipif(importlib.util.find_spec('vllm') is None, reason='vLLM is not installed')]


def train_on_routes(argv: list[str]) -> dict[str, Any]:
    from tests.rollouts.running import trainer_and_data
    trainer, datasets = trainer_and_data(argv)
    from swift_megatron_grpo.step.forward import collect_logprobs
    collect, seen = trainer.collect, {}

    def watched(index: int) -> Any:
        generation = collect(index)
        rollouts = generation.scored.rollouts
        seen['shapes'] = {tuple(rollout.routed_experts.shape)[1:] for rollout in rollouts}
        seen['lengths'] = [(rollout.routed_experts.shape[0], rollout.num_prompt_tokens + rollout.num_response_tokens) for rollout in rollouts]
        step = generation.steps[0]
        (replayed_K, _), = collect_logprobs(trainer.policy, [step], trainer.device)
        with trainer.policy.free_routing():
            (free_K, _), = collect_logprobs(trainer.policy, [step], trainer.device)
        seen['replayed'] = float((replayed_K - step.table.rollout_logprobs_K).abs().max())
        seen['free'] = float((free_K - replayed_K).abs().max())
        return generation

    trainer.collect = watched
    trainer.train(*datasets)
    return seen


def test_vllm_brings_the_experts_of_each_token_and_training_follows_them(tiny_model: Any, tmp_path: Path) -> None:
    model = tiny_model('qwen3_moe', moe_intermediate_size=64)
    argv = arguments(tmp_path, model, **VLLM, model_type='qwen3_moe', router_replay_mode='R3', moe_router_load_balancing_type='none', train_iters=1)
    with RankPool(max_world=1) as pool:  # vLLM leaves global state in a process: a rank of its own
        seen = pool.run(train_on_routes, argv, world_size=1, deadline=400.)[0]
    assert seen['shapes'] == {(4, 2)}, 'layers, experts of a token'
    assert all(given in (tokens, tokens - 1) for given, tokens in seen['lengths'])
    assert seen['replayed'] < 2e-5, 'the routes are those of the same weights'
    assert seen['free'] < 2e-5
