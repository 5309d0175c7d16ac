"""Conversations of several turns: what carries loss, what rewards see, and what happens when a tool breaks."""
import json
from pathlib import Path
from typing import Any

import pytest

from tests.step.training import arguments, train

PLUGIN = Path(__file__).with_name('conversation.py')
TALK = {'multi_turn_scheduler': 'two_turns', 'max_turns': 3, 'reward_funcs': 'turns', 'train_iters': 2, 'max_completion_length': 12,
        'rollout_importance_sampling_mode': 'token_truncate'}


def run(ranks: Any, tiny_model: Any, tmp_path: Path, world_size: int = 1, **changes: Any) -> tuple[Any, list[dict[str, Any]]]:
    values = {**TALK, **changes}
    argv = arguments(tmp_path, tiny_model('qwen3'), save_rollouts=tmp_path / 'rollouts', **values)
    argv[argv.index('--external_plugins') + 1:argv.index('--external_plugins') + 2] = [argv[argv.index('--external_plugins') + 1], str(PLUGIN)]
    outcome = ranks.run(train, argv, world_size=world_size, deadline=300.)[-1]
    rows = [json.loads(line) for line in (tmp_path / 'rollouts' / 'generation-000000.jsonl').read_text().splitlines()]
    return outcome, rows[1:]


@pytest.mark.parametrize('world_size', [1, 2])
def test_two_turns_are_sampled_rewarded_and_trained(ranks: Any, tiny_model: Any, tmp_path: Path, world_size: int) -> None:
    outcome, rows = run(ranks, tiny_model, tmp_path, world_size)
    assert outcome.column('reward') == [2.0, 2.0]
    assert len(rows) == 8
    for row in rows:
        assert [message['role'] for message in row['messages']][-4:] == ['user', 'assistant', 'user', 'assistant']
        assert row['messages'][-2]['content'] == 'again'
        assert len(row['response_token_ids']) == 2
        assert row['rollout_infos'] == {'num_turns': 2, 'seen': len(row['response_token_ids'][0])}
        assert [len(turn) for turn in row['rollout_logprobs']] == [len(turn) for turn in row['response_token_ids']]
    assert len({json.dumps(row['response_token_ids']) for row in rows}) > 4  # seeds differ between rollouts
    # The trainer's log-probabilities of the same tokens, after the environment's ones: the engine's, or tokens were shifted.
    assert abs(outcome.column('rollout_correction/kl')[0]) < 1e-4
    sampled = sum(len(turn) for row in rows for turn in row['response_token_ids'])
    assert outcome.column('completions/mean_length')[0] == pytest.approx(sampled / 8)


def test_max_turns_ends_a_conversation(ranks: Any, tiny_model: Any, tmp_path: Path) -> None:
    outcome, rows = run(ranks, tiny_model, tmp_path, max_turns=1)
    assert outcome.column('reward') == [1.0, 1.0]
    assert all(len(row['response_token_ids']) == 1 for row in rows)


def test_an_environment_rewards_what_it_saw(ranks: Any, tiny_model: Any, tmp_path: Path) -> None:
    outcome, rows = run(ranks, tiny_model, tmp_path, multi_turn_scheduler='gym_scheduler', gym_env='counting', use_gym_env='true',
                        reward_funcs=None)
    assert outcome.column('reward') == [1.25, 1.25]
    for row in rows:
        assert row['rollout_infos']['step_rewards'] == [0.25, 1.0]
        assert row['messages'][0] == {'role': 'system', 'content': 'be brief'}
        assert row['messages'][-2]['content'] == 'more'


def test_a_tool_that_breaks_ends_the_run_with_its_name(ranks: Any, tiny_model: Any, tmp_path: Path) -> None:
    data = tmp_path / 'prompts.jsonl'
    data.write_text(''.join(json.dumps({'messages': [{'role': 'user', 'content': f'{i}?'}], 'solution': 'fail' if i == 1 else 'ok'}) + '\n'
                            for i in range(4)))
    with pytest.raises(Exception, match='multi_turn_scheduler two_turns raised ValueError: the tool broke'):
        run(ranks, tiny_model, tmp_path, train_iters=4)


class Engine:
    """Two ranks of one engine: both must bring the same requests."""

    def __init__(self, rank: int):
        from swift_megatron_grpo.engines import EngineGroup
        self.group = EngineGroup(index=0, count=1, rank=rank, size=2)
        self.calls: list[list[str]] = []

    def generate(self, requests, sampling):
        from swift.infer_engine.protocol import ChatCompletionResponse, ChatCompletionResponseChoice, ChatMessage, RolloutOutput, UsageInfo
        self.calls.append([request.uuid for request in requests])
        self.seeds = [*getattr(self, 'seeds', []), sampling.seed]
        self.limits = [*getattr(self, 'limits', []), sampling.limits]
        return [RolloutOutput(response=ChatCompletionResponse(
            model='', usage=UsageInfo(1, 1, 2), choices=[ChatCompletionResponseChoice(
                index=0, message=ChatMessage(role='assistant', content=request.uuid), finish_reason='stop', logprobs=None, token_ids=[5, 6])]))
            for request in requests]


def two_ranks(plugin: str, fail: bool, budget: int = 100) -> dict[str, Any]:
    import copy
    import torch.distributed as dist
    from swift.infer_engine.protocol import RolloutInferRequest
    from swift.utils import import_external_file
    from types import SimpleNamespace

    from swift_megatron_grpo.engines import Sampling
    from swift_megatron_grpo.step.turns import Turns
    import_external_file(plugin)
    rank = dist.get_rank()
    engine = Engine(rank)
    template = SimpleNamespace(tokenizer=SimpleNamespace(encode=lambda text, **kw: [], decode=lambda ids, **kw: str(ids)),
                               _get_response_prefix=lambda inputs: '')
    turns = Turns(SimpleNamespace(multi_turn_scheduler='two_turns', max_turns=3, gym_env=None, max_completion_length=budget, vllm_mode='colocate',
                                  completion_length_limit_scope='total' if budget < 100 else 'per_round'), template, engine)
    requests = [RolloutInferRequest(messages=[{'role': 'user', 'content': f'{i}'}], uuid=f'r{i}',
                                    data_dict={'solution': 'fail' if fail and i == 2 else ''}) for i in range(3)]
    part = range(0, 1) if rank == 0 else range(1, 3)
    try:
        outputs = turns.run(copy.deepcopy(requests), part, Sampling(temperature=1.0, max_tokens=4, seed=7))
    except Exception as error:
        return {'error': f'{type(error).__name__}: {error}'}
    return {'calls': engine.calls, 'seeds': engine.seeds, 'limits': engine.limits, 'answers': [output.messages[-1]['content'] for output in outputs],
            'ids': [output.response_token_ids for output in outputs]}


def test_the_ranks_of_an_engine_bring_their_turns_together(ranks: Any) -> None:
    results = ranks.run(two_ranks, str(PLUGIN), False, world_size=2)
    for result in results:
        assert result['calls'][:2] == [['r0', 'r1', 'r2'], ['r0', 'r1', 'r2']]
        assert result['seeds'][:2] == [7, 7 + 2**13]
    assert [result['answers'] for result in results] == [['r0'], ['r1', 'r2']]
    assert results[0]['ids'] == [[[5, 6], [5, 6]]]


def test_a_common_limit_is_what_earlier_turns_left(ranks: Any) -> None:
    # each turn of the double takes two tokens
    results = ranks.run(two_ranks, str(PLUGIN), False, 5, world_size=2)
    assert [result['limits'][:2] for result in results] == [[(), (3, 3, 3)]] * 2
    results = ranks.run(two_ranks, str(PLUGIN), False, 2, world_size=2)
    assert [result['calls'] for result in results] == [[['r0', 'r1', 'r2']]] * 2, 'nothing is left for a second turn'


def test_a_limit_of_all_rounds_together_bounds_the_sampled_tokens(ranks: Any, tiny_model: Any, tmp_path: Path) -> None:
    changes = {'rollout_importance_sampling_mode': None, 'train_iters': 1}
    _, each = run(ranks, tiny_model, tmp_path / 'each', **changes)
    _, together = run(ranks, tiny_model, tmp_path / 'together', completion_length_limit_scope='total', **changes)
    sizes = [[[len(turn) for turn in row['response_token_ids']] for row in rows] for rows in (each, together)]
    assert [first for first, *_ in sizes[0]] == [first for first, *_ in sizes[1]], 'the first round is the same'
    assert max(sum(turns) for turns in sizes[0]) > 12, 'otherwise nothing is tested'
    assert max(sum(turns) for turns in sizes[1]) == 12
    assert {len(turns) for turns in sizes[1] if turns[0] == 12} == {1}


def test_an_error_on_one_rank_of_an_engine_is_raised_on_all(ranks: Any) -> None:
    results = ranks.run(two_ranks, str(PLUGIN), True, world_size=2, deadline=60.)
    assert {result['error'] for result in results} == {
        'RunError: --multi_turn_scheduler two_turns raised ValueError: the tool broke'}
