"""Router replay: training goes to the experts that the old pass chose, layer by layer, in every layout."""
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from swift_megatron_grpo.errors import RunError, UserError
from tests.step.training import Outcome, arguments, train, write_rollouts

SGD = {'optimizer': 'sgd', 'sgd_momentum': 0.0, 'lr': 1.0, 'min_lr': 1.0, 'lr_decay_style': 'constant', 'use_distributed_optimizer': 'false',
       'clip_grad': 1.0}
KIND = {'model_type': 'qwen3_moe', 'moe_router_load_balancing_type': 'none', 'generation_batch_size': 16, 'train_iters': 2, **SGD}


def _add_routes(path: Path) -> None:
    """Experts of each token and layer as an engine would give them: drawn at random, so that no router would choose them by itself."""
    from tests import tiny_models
    tokenizer, rng = tiny_models.tokenizer(), random.Random(4)
    head, *lines = path.read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows:
        prompt = tokenizer.encode(f'<|im_start|>user\n{row["messages"][0]["content"]}<|im_end|>\n<|im_start|>assistant\n')
        count = len(prompt) + sum(map(len, row['response_token_ids']))
        row['routed_experts'] = [[rng.sample(range(4), 2) for _ in range(4)] for _ in range(count)]
    path.write_text('\n'.join([head, *map(json.dumps, rows)]) + '\n')


@pytest.fixture(scope='module')
def run(ranks: Any, tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    work = tmp_path_factory.mktemp('routing')
    rollouts = write_rollouts(work / 'rollouts', generations=1, prompts=4, num_generations=4)
    _add_routes(rollouts / 'generation-000000.jsonl')

    def run_it(world_size: int = 1, **changes: Any) -> tuple[Outcome, list[list[torch.Tensor]]]:
        argv = arguments(work, tiny_model('qwen3_moe'), rollouts, **{**KIND, **changes})
        return ranks.run(train_and_watch_routes, argv, world_size=world_size, deadline=300.)[-1]

    return run_it


def train_and_watch_routes(argv: list[str]) -> tuple[Outcome | None, list[list[torch.Tensor]]]:
    """The outcome; and of each forward of the policy, the experts that each router went to (top-k order ignored)."""
    from megatron.core.transformer.moe.router import TopKRouter
    seen: list[tuple[int, torch.Tensor]] = []
    original = TopKRouter.routing

    def routing(self: Any, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        probs, routing_map = original(self, logits, *args, **kwargs)
        if torch.is_grad_enabled() or not self.training:
            seen.append((self.layer_number, routing_map.detach().clone()))
        return probs, routing_map

    TopKRouter.routing = routing
    try:
        outcome = train(argv)
    finally:
        TopKRouter.routing = original
    forwards: list[list[torch.Tensor]] = []
    for layer, routes in seen:
        if layer == min(number for number, _ in seen):
            forwards.append([])
        forwards[-1].append(routes)
    return outcome, forwards


def _same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) == 4 and all(torch.equal(x, y) for x, y in zip(a, b))


def test_training_goes_where_the_old_pass_went_although_the_weights_have_moved(run: Any) -> None:
    # One micro-batch of 8 a step: forwards are old(step 0), old(step 1), train(step 0), train(step 1).
    free_outcome, free = run(micro_batch_size=8, recompute_granularity='none')
    outcome, replayed = run(micro_batch_size=8, recompute_granularity='none', router_replay_mode='R2')
    assert len(free) == len(replayed) == 4
    assert _same(free[2], free[0]) and not _same(free[3], free[1]), 'one update moves some tokens to other experts'
    assert _same(replayed[2], replayed[0]) and _same(replayed[3], replayed[1])
    assert all(not torch.equal(replayed[1][0], layer) for layer in replayed[1][1:]), 'each layer has routes of its own'
    assert outcome.column('grad_norm')[0] == pytest.approx(free_outcome.column('grad_norm')[0], rel=1e-6)
    assert outcome.column('grad_norm')[1] != pytest.approx(free_outcome.column('grad_norm')[1], rel=1e-4)


@pytest.mark.parametrize('world_size, changes', [
    (1, {'micro_batch_size': 2, 'recompute_granularity': 'full', 'recompute_method': 'uniform', 'recompute_num_layers': 1}),
    (2, {'micro_batch_size': 2, 'pipeline_model_parallel_size': 2, 'virtual_pipeline_model_parallel_size': 2, 'recompute_granularity': 'full',
         'recompute_method': 'uniform', 'recompute_num_layers': 1}),
    (2, {'micro_batch_size': 4, 'tensor_model_parallel_size': 2, 'sequence_parallel': 'true', 'expert_model_parallel_size': 2}),
], ids=['recomputed', 'vpp2-pp2-recomputed', 'tp2-sp-ep2'])
def test_replay_trains_alike_in(run: Any, world_size: int, changes: dict[str, Any]) -> None:
    expected, _ = run(micro_batch_size=8, recompute_granularity='none', router_replay_mode='R2')
    got, _ = run(world_size, **changes, router_replay_mode='R2')
    for name in ('loss', 'grad_norm'):
        assert got.column(name) == pytest.approx(expected.column(name), rel=1e-5, abs=1e-5), name
    errors = {name: float((got.weights[name] - weight).abs().max() / weight.abs().max()) for name, weight in expected.weights.items()}
    assert max(errors.values()) < 2e-5, max(errors, key=errors.__getitem__)


def test_a_missing_route_and_unequal_micro_batches_are_refused(ranks: Any, run: Any) -> None:
    with pytest.raises(RunError, match='2 layers route here, and 1 routes were recorded'):
        ranks.run(replay_without_a_route, world_size=1)
    with pytest.raises(UserError, match='leave out --max_tokens_per_forward_only_micro_batch 64'):
        run(router_replay_mode='R2', max_tokens_per_forward_only_micro_batch=64)


def replay_without_a_route() -> None:
    from types import SimpleNamespace

    from megatron.core.transformer.moe.router_replay import RouterReplay
    from swift_megatron_grpo.step.routing import RouteBook
    book = RouteBook('R2', SimpleNamespace(cp_size=1, tp_size=1))  # type: ignore[arg-type]
    layers = [SimpleNamespace(router_replay=RouterReplay(), layer_number=number) for number in (1, 2)]
    model = SimpleNamespace(modules=lambda: layers, vp_stage=None)
    with book.around_forward(SimpleNamespace(routes={0: [torch.zeros(3, 2), None]}), model, None):
        raise AssertionError('not reached')


def test_the_engines_routes_are_followed_token_by_token_and_layer_by_layer(run: Any, tmp_path: Path) -> None:
    outcome, forwards = run(micro_batch_size=1, recompute_granularity='none', padding_free='false', router_replay_mode='R3', global_batch_size=16, train_iters=1)
    path = next(Path(tmp_path).parent.glob('routing*/rollouts/generation-000000.jsonl'))
    wanted = {len(row['routed_experts']): row['routed_experts'] for row in map(json.loads, path.read_text().splitlines()[1:])}
    checked = 0
    for layers in forwards:
        routes = wanted.get(layers[0].shape[0])
        if routes is None:
            continue
        experts = [[sorted(map(int, layer[token].nonzero()[:, 0])) for layer in layers] for token in range(len(routes))]
        checked += experts == [[sorted(layer) for layer in token] for token in routes]
    assert checked >= len(wanted), 'one rollout of each length at least'
    assert outcome.column('grad_norm')[0] > 0.0


@pytest.mark.parametrize('world_size, changes', [
    (2, {'pipeline_model_parallel_size': 2}),
    (4, {'tensor_model_parallel_size': 2, 'sequence_parallel': 'true', 'context_parallel_size': 2, 'expert_model_parallel_size': 2}),
], ids=['pp2', 'tp2-sp-cp2-ep2'])
def test_the_engines_routes_train_alike_in(run: Any, world_size: int, changes: dict[str, Any]) -> None:
    expected, _ = run(micro_batch_size=4, router_replay_mode='R3')
    got, _ = run(world_size, micro_batch_size=2, router_replay_mode='R3', **changes)
    for name in ('loss', 'grad_norm'):
        assert got.column(name) == pytest.approx(expected.column(name), rel=1e-5, abs=1e-5), name
    free, _ = run(micro_batch_size=4)
    assert free.column('grad_norm')[0] != pytest.approx(expected.column('grad_norm')[0], rel=1e-3)


def routes_of(shape: tuple[int, ...] | None) -> list[int]:
    from swift_megatron_grpo.step.batch import rollout_routes
    from swift_megatron_grpo.types import Rollout
    rollout = Rollout(index=3, prompt_index=0, dataset_index=7, response_token_ids=[[1]], routed_experts=None if shape is None else torch.zeros(shape))
    return list(rollout_routes(rollout, 10).shape)


def test_routes_that_are_missing_or_of_other_tokens_are_refused_by_rollout(ranks: Any) -> None:
    assert ranks.run(routes_of, (9, 4, 2), world_size=1) == [[9, 4, 2]] and ranks.run(routes_of, (1, 10, 4, 2), world_size=1) == [[10, 4, 2]]
    with pytest.raises(RunError, match=r'no routes for rollout 3 \(data set row 7\)'):
        ranks.run(routes_of, None, world_size=1)
    with pytest.raises(RunError, match=r'has 10 tokens, and the engine gave routes of shape \(8, 4, 2\)'):
        ranks.run(routes_of, (8, 4, 2), world_size=1)
