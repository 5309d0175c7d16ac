"""Whole trainings against a server without an engine: its answers follow from the seed, so that runs can be compared number by number."""
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.rollouts.servers import free_port
from tests.step.training import arguments, train

pytestmark = [pytest.mark.heavy, pytest.mark.skipif(importlib.util.find_spec('vllm') is None, reason='vLLM is not installed')]


def training(work: Path, model: Path, *, ends_at_batch: int = -1, **changes: Any) -> dict[str, Any]:
    """A run of four steps. `ends_at_batch`: the server is gone when it is asked so often."""
    from tests.rollouts.fake_server import FakeServer
    server = FakeServer(free_port())
    server.random_answers = True
    server.ends_at_batch = ends_at_batch
    argv = arguments(work, model, use_vllm='true', vllm_mode='server', vllm_server_host='127.0.0.1', vllm_server_port=server.port,
                     vllm_server_group_port=free_port(), max_completion_length=16, train_iters=4, **changes)
    error, logs = '', []
    try:
        logs = train(argv).logs
    except Exception as caught:
        error = f'{type(caught).__name__}: {caught}'
    result = {'logs': logs, 'batches': server.batches, 'weights': len(server.weights), 'error': error}
    server.end()
    return result


PLANS: list[dict[str, Any]] = [
    {},
    {'async_generate': 'true', 'allow_uncorrected_async': 'true', 'max_staleness': 0},
    {'async_generate': 'true', 'allow_uncorrected_async': 'true'},
    {'ends_at_batch': 3, 'save_strategy': 'steps', 'save_steps': 100},
]


@pytest.fixture(scope='module')
def results(ranks: Any, tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    work = tmp_path_factory.mktemp('served')
    model = tiny_model('qwen3')
    return [ranks.run(training, work / str(number), model, **plan, world_size=1, deadline=400.)[0] for number, plan in enumerate(PLANS)], work


def column(result: dict[str, Any], name: str) -> list[float]:
    return [row[name] for row in result['logs']]


def test_a_run_asks_once_a_generation_and_sends_every_weight(results: Any) -> None:
    plain = results[0][0]
    assert plain['error'] == '' and plain['batches'] == 4 and plain['weights'] == 47
    assert len(set(column(plain, 'reward'))) > 1


def test_with_staleness_0_an_asynchronous_run_is_the_synchronous_one(results: Any) -> None:
    plain, none_ahead = results[0][:2]
    for name in ('reward', 'loss', 'grad_norm', 'completions/mean_length'):
        assert column(none_ahead, name) == column(plain, name)
    assert column(none_ahead, 'rollout/staleness') == [0.0, 0.0, 0.0, 0.0]


def test_staleness_is_one_generation_and_no_request_is_made_for_nothing(results: Any) -> None:
    ahead = results[0][2]
    assert column(ahead, 'rollout/staleness') == [0.0, 1.0, 1.0, 1.0]
    assert ahead['batches'] == 4
    assert column(ahead, 'reward') == column(results[0][0], 'reward')  # the same answers, as this server's do not depend on weights


def test_a_server_that_ends_leaves_a_checkpoint_and_a_named_error(results: Any) -> None:
    lost, work = results[0][3], results[1]
    folder = work / '3' / 'out' / 'checkpoint-2'
    assert lost['error'].startswith('RunError: Sampling of a generation: no rollout server is left (')
    assert lost['error'].endswith(f'The run stops after 2 optimizer steps; {folder} holds them, go on with --resume_from_checkpoint.')
    assert (folder / 'trainer_state.json').exists()
