"""Whole trainings against servers without an engine: their answers follow from the seed, so that runs can be compared number by number."""
import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rollouts.servers import free_port
from tests.step.training import arguments, train

pytestmark = [pytest.mark.heavy, pytest.mark.skipif(importlib.util.find_spec('vllm') is None, reason='vLLM is not installed')]

SECONDS = 400.
REWARD = '''
import json, os, time
from swift.rewards import ORM, orms

class Noted(ORM):
    """Counts the digits of an answer, and writes down what it was called with and when."""

    def __call__(self, completions, prompt_id, **kwargs):
        with open(os.path.join(os.path.dirname(__file__), 'calls.jsonl'), 'a') as file:
            file.write(json.dumps({'at': time.monotonic(), 'prompts': list(prompt_id)}) + '\\n')
        return [sum(letter.isdigit() for letter in text) / 10 for text in completions]

orms['noted'] = Noted
'''
ASYNC = {'async_generate': 'true', 'rollout_importance_sampling_mode': 'token_truncate'}


def training(work: Path, model: Path, *, num_servers: int = 1, ends_at_batch: int = -1, returns: bool = False, slow: float = 0.0,
             **changes: Any) -> dict[str, Any]:
    """A run of four steps.

    Args:
        ends_at_batch: the last server is gone when it is asked so often.
        returns: it is started anew at once.
        slow: seconds that the last server takes for an answer. Several servers take a moment each, so that every one of them gets its share.
    """
    from tests.rollouts.fake_server import FakeServer
    servers = [FakeServer(free_port()) for _ in range(num_servers)]
    everyone = list(servers)
    for server in servers:
        server.random_answers = True
        server.answer_after = 0.3 if num_servers > 1 else 0.0
    servers[-1].answer_after += slow
    servers[-1].ends_at_batch = ends_at_batch

    def start_anew() -> None:
        everyone.append(FakeServer(servers[-1].port))
        everyone[-1].random_answers = True
        everyone[-1].answer_after = 0.3

    if returns:
        servers[-1].on_end = start_anew
    work.mkdir(parents=True, exist_ok=True)
    (work / 'noted_reward.py').write_text(REWARD)
    argv = arguments(work, model, external_plugins=work / 'noted_reward.py', reward_funcs='noted', save_rollouts=work / 'rollouts',
                     use_vllm='true', vllm_mode='server', vllm_server_host=['127.0.0.1'] * num_servers,
                     vllm_server_port=[server.port for server in servers], vllm_server_group_port=[free_port() for _ in servers],
                     max_completion_length=16, **changes)
    error, outcome = '', None
    try:
        outcome = train(argv)
    except Exception as caught:
        error = f'{type(caught).__name__}: {caught}'
    for server in everyone:
        server.end()
    return {'error': error, 'logs': outcome.logs if outcome else [], 'weights': outcome.weights if outcome else {},
            'batches': [server.batches for server in everyone], 'held': [len(server.weights) for server in everyone],
            'events': [server.events for server in everyone],
            'calls': [json.loads(line) for line in (work / 'calls.jsonl').read_text().splitlines()],
            'versions': [sorted({json.loads(line)['policy_version'] for line in path.read_text().splitlines()[1:]})
                         for path in sorted((work / 'rollouts').glob('*.jsonl'))]}


PLANS: dict[str, dict[str, Any]] = {
    'synchronous': {},
    'staleness 0': {**ASYNC, 'max_staleness': 0},
    'ahead': ASYNC,
    'ahead, two steps': {**ASYNC, 'steps_per_generation': 2, 'global_batch_size': 4, 'train_iters': 8},
    'ahead, interrupted': {**ASYNC, 'eval_steps': 2, 'eval_iters': 1, 'save_strategy': 'steps', 'save_steps': 2, 'split_dataset_ratio': 0.1},
    'lost': {'ends_at_batch': 3, 'save_strategy': 'steps', 'save_steps': 100},
    'one of two lost': {'num_servers': 2, 'ends_at_batch': 2},
    'lost and back': {'num_servers': 2, 'ends_at_batch': 2, 'returns': True},
    'by group': {'num_servers': 2, 'slow': 1.2, 'reward_batch': 'group'},
}


@pytest.fixture(scope='module')
def run(ranks: Any, tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`run('ahead')`: the result of that plan, run once."""
    work = tmp_path_factory.mktemp('served')
    results: dict[str, dict[str, Any]] = {}

    def result(name: str) -> dict[str, Any]:
        if name not in results:
            values = {'train_iters': 4, **PLANS[name]}
            results[name] = ranks.run(training, work / name.replace(', ', '-').replace(' ', '-'), tiny_model('qwen3'), **values, world_size=1,
                                      deadline=SECONDS)[0]
        return results[name]

    return result


def column(result: dict[str, Any], name: str) -> list[float]:
    return [row[name] for row in result['logs'] if name in row]


def is_the_same_training(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one['error'] == other['error'] == ''
    for name in ('reward', 'loss', 'grad_norm', 'completions/mean_length'):
        assert column(one, name) == column(other, name), name
    assert one['weights'].keys() == other['weights'].keys()
    assert all(torch.equal(weight, other['weights'][name]) for name, weight in one['weights'].items())


def test_a_run_asks_once_a_generation_and_sends_every_weight(run: Any) -> None:
    plain = run('synchronous')
    assert plain['error'] == '' and plain['batches'] == [4] and plain['held'] == [47]
    assert len(set(column(plain, 'reward'))) > 1 and plain['versions'] == [[0], [1], [2], [3]]
    assert [len(call['prompts']) for call in plain['calls']] == [8, 8, 8, 8]


def test_with_staleness_0_an_asynchronous_run_is_the_synchronous_one(run: Any) -> None:
    none_ahead = run('staleness 0')
    is_the_same_training(none_ahead, run('synchronous'))
    assert column(none_ahead, 'rollout/staleness') == [0.0, 0.0, 0.0, 0.0] and none_ahead['versions'] == [[0], [1], [2], [3]]


def test_staleness_is_one_generation_and_no_request_is_made_for_nothing(run: Any) -> None:
    ahead = run('ahead')
    assert ahead['error'] == ''
    assert column(ahead, 'rollout/staleness') == [0.0, 1.0, 1.0, 1.0]
    assert ahead['versions'] == [[0], [0], [1], [2]]  # generation k + 1 is sampled by the weights that generation k starts with
    assert ahead['batches'] == [4]
    assert column(ahead, 'reward') == column(run('synchronous'), 'reward')  # the same answers, as this server's do not depend on weights


def test_the_bound_counts_what_the_engine_gets_one_version_a_generation(run: Any) -> None:
    ahead = run('ahead, two steps')
    assert ahead['error'] == ''
    # In optimizer steps: two a generation.
    assert ahead['versions'] == [[0], [0], [2], [4]] and column(ahead, 'rollout/staleness') == [0.0, 2.0, 2.0, 2.0]


def test_a_generation_in_flight_is_waited_for_by_evaluation_checkpoint_and_sync(run: Any) -> None:
    result = run('ahead, interrupted')
    assert result['error'] == ''
    events = result['events'][0]
    assert [event['sampling'] for event in events if event['what'] == 'bucket'] == [0] * sum(event['what'] == 'bucket' for event in events)
    # What is sampled, and by which weights: generations 0 and 1, then 2 ahead of the second step; evaluation with the weights of step 2.
    assert [(event['version'], event['count']) for event in events if event['what'] == 'infer'] == [
        (0, 8), (0, 8), (1, 8), (2, 8), (2, 8), (4, 8)]
    assert result['versions'] == [[0], [0], [1], [2]]


def test_a_server_that_ends_leaves_a_checkpoint_and_a_named_error(run: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    lost = run('lost')
    assert lost['error'].startswith('RunError: Sampling of a generation: no rollout server is left (')
    folder = Path(lost['error'].split('optimizer steps; ')[1].split(' holds them')[0])
    assert folder.name == 'checkpoint-2' and folder.parent.parent.name == 'lost'
    assert lost['error'].endswith(f'The run stops after 2 optimizer steps; {folder} holds them, go on with --resume_from_checkpoint.')
    assert (folder / 'trainer_state.json').exists()
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith('.saving')] == []


def test_the_requests_of_a_server_that_ends_are_sampled_by_the_other_and_nothing_changes(run: Any) -> None:
    lost = run('one of two lost')
    is_the_same_training(lost, run('synchronous'))
    # One batch each of the first two generations, the lost one again, then whole generations.
    assert lost['batches'] == [1 + 2 + 1 + 1, 2]


def test_a_server_that_comes_back_gets_all_weights_and_requests_again(run: Any) -> None:
    back = run('lost and back')
    is_the_same_training(back, run('synchronous'))
    assert len(back['batches']) == 3 and back['held'] == [47, 47, 47]
    asked = [event for event in back['events'][2] if event['what'] == 'infer']
    assert asked and all(event['version'] >= 1 for event in asked)


def test_rewards_by_group_start_beside_the_generation_and_change_nothing(run: Any) -> None:
    grouped = run('by group')
    is_the_same_training(grouped, run('synchronous'))
    assert [len(set(call['prompts'])) for call in grouped['calls']] == [1] * 8 and [len(call['prompts']) for call in grouped['calls']] == [4] * 8
    answered = [event['at'] for event in grouped['events'][1] if event['what'] == 'answered']  # the slow server's, one a generation
    first = [grouped['calls'][number]['at'] for number in (0, 2, 4, 6)]
    assert len(answered) == 4 and all(call < answer - 0.5 for call, answer in zip(first, answered))
    assert len(column(grouped, 'profiling/Time taken: reward/Noted')) == 4


def test_uncorrected_asynchronous_training_is_refused_without_the_switch(ranks: Any, tiny_model: Any, tmp_path: Path) -> None:
    argv = arguments(tmp_path, tiny_model('qwen3'), use_vllm='true', vllm_mode='server', vllm_server_host='127.0.0.1', vllm_server_port=1,
                     async_generate='true')
    error, seconds = ranks.run(refusal, argv, world_size=1)[0]
    assert error.startswith('UserError: --async_generate true trains on rollouts of earlier weights. Give --rollout_importance_sampling_mode')
    assert '--allow_uncorrected_async true' in error


def refusal(argv: list[str]) -> tuple[str, float]:
    started = time.monotonic()
    try:
        train(argv)
    except Exception as error:
        return f'{type(error).__name__}: {error}', time.monotonic() - started
    return '', 0.0
