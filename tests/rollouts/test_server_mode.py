"""A real `swift rollout` server: trained against, one generation ahead, with an adapter, and ended in the middle."""
import importlib.util
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rollouts.running import greedy_of_transformers, trainer_and_data
from tests.rollouts.servers import FakeProcess, Server, free_port, start
from tests.step.training import arguments, train

pytestmark = [pytest.mark.heavy, pytest.mark.skipif(importlib.util.find_spec('vllm') is None, reason='vLLM is not installed')]

LORA = {'tuner_type': 'lora', 'lora_rank': 4, 'target_modules': 'all-linear', 'lr': 1e-2}
PROMPTS = ('what is 1 + 1?', 'compute 17 - 9')


@pytest.fixture(scope='module')
def model(tiny_model: Any) -> Path:
    return tiny_model('qwen3')


@pytest.fixture(scope='module')
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """One that takes whole models and one that takes adapters; they start together."""
    folder = tmp_path_factory.mktemp('servers')
    running = [start(model, folder), start(model, folder, vllm_enable_lora='true', vllm_max_lora_rank=8)]
    try:
        for one in running:
            one.wait_until_ready()
        yield running
    finally:
        for one in running:
            one.end()


@pytest.fixture(scope='module')
def server(servers: list[Server]) -> Server:
    return servers[0]


@pytest.fixture(scope='module')
def adapter_server(servers: list[Server]) -> Server:
    return servers[1]


def served(server: Server, **changes: Any) -> dict[str, Any]:
    return {'use_vllm': 'true', 'vllm_mode': 'server', 'vllm_server_host': '127.0.0.1', 'vllm_server_port': server.port,
            'vllm_server_group_port': free_port(), 'max_completion_length': 16, 'train_iters': 3, **changes}


def greedy_of(trainer: Any) -> list[tuple[list[int], list[float]]]:
    from swift.infer_engine.protocol import RolloutInferRequest

    from swift_megatron_grpo.engines import Sampling
    requests = [RolloutInferRequest(messages=[{'role': 'user', 'content': text}]) for text in PROMPTS]
    outputs = trainer.engine.generate(requests, Sampling(temperature=0.0, max_tokens=12))
    return [(list(output.response.choices[0].token_ids), [item['logprob'] for item in output.response.choices[0].logprobs['content']])
            for output in outputs]


def train_and_ask(argv: list[str]) -> dict[str, Any]:
    """A training; then the weights of its end are sent, and greedy answers are asked for."""
    trainer, datasets = trainer_and_data(argv)
    trainer.sync.max_bucket_bytes = 50_000
    close, trainer.engine.close = trainer.engine.close, lambda: None
    trainer.train(*datasets)
    trainer.sync_weights()
    from swift_megatron_grpo.sync import merged_for_export
    with merged_for_export(trainer.unwrapped_models):
        weights = {name: tensor.clone() for name, tensor in trainer.bridge.export_weights(trainer.unwrapped_models)}
    result = {'greedy': greedy_of(trainer), 'weights': weights, 'kind': trainer.sync.last_kind, 'buckets': trainer.sync.num_buckets}
    close()
    return result


def check_answers(model: Path, results: list[dict[str, Any]]) -> None:
    result = results[-1]
    assert all(other['greedy'] == result['greedy'] for other in results)
    expected = greedy_of_transformers(model, result['weights'], PROMPTS, 12)
    assert [tokens for tokens, _ in result['greedy']] == [tokens for tokens, _ in expected]
    for (_, got), (_, want) in zip(result['greedy'], expected):
        assert got == pytest.approx(want, abs=1e-4)


def test_after_training_the_server_answers_as_transformers_does(ranks: Any, model: Path, server: Server, tmp_path: Path) -> None:
    argv = arguments(tmp_path, model, **served(server, tensor_model_parallel_size=2))
    results = ranks.run(train_and_ask, argv, world_size=2, deadline=400.)
    assert results[0]['kind'] == 'full' and results[0]['buckets'] > 3
    check_answers(model, results)


def test_a_server_with_an_adapter_answers_as_base_and_adapter_do(ranks: Any, model: Path, adapter_server: Server, tmp_path: Path) -> None:
    argv = arguments(tmp_path, model, **served(adapter_server, **LORA))
    results = ranks.run(train_and_ask, argv, world_size=1, deadline=400.)
    assert results[0]['kind'] == 'adapter'
    check_answers(model, results)


def test_a_server_of_adapters_is_refused_by_a_run_that_sends_none(ranks: Any, model: Path, adapter_server: Server, tmp_path: Path) -> None:
    error = ranks.run(error_of, arguments(tmp_path, model, **served(adapter_server)), world_size=1, deadline=200.)[0]
    assert error.startswith('UserError: The rollout server runs with vllm_enable_lora true, but --tuner_type full sends no adapter')


def test_one_generation_ahead(ranks: Any, model: Path, server: Server, tmp_path: Path) -> None:
    def run(**changes: Any) -> Any:
        argv = arguments(tmp_path, model, **served(server, train_iters=4, rollout_importance_sampling_mode='token_truncate', **changes))
        return ranks.run(train, argv, world_size=1, deadline=400.)[-1]

    plain = run()
    none_ahead = run(async_generate='true', max_staleness=0)
    assert none_ahead.column('loss') == plain.column('loss') and none_ahead.column('reward') == plain.column('reward')
    assert all(torch.equal(weight, none_ahead.weights[name]) for name, weight in plain.weights.items())
    assert none_ahead.column('rollout/staleness') == [0.0, 0.0, 0.0, 0.0]
    ahead = run(async_generate='true')
    assert ahead.column('rollout/staleness') == [0.0, 1.0, 1.0, 1.0]
    assert ahead.column('reward')[0] == plain.column('reward')[0] and ahead.column('reward')[2:] != plain.column('reward')[2:]


def train_and_lose_it(argv: list[str], pid: int) -> dict[str, Any]:
    """The server's process group is killed while it samples the second generation."""
    import torch.distributed as dist
    trainer, datasets = trainer_and_data(argv)
    start_phase = trainer.engine.start

    def start(requests: Any, sampling: Any) -> Any:
        pending = start_phase(requests, sampling)
        if dist.get_rank() == dist.get_world_size() - 1 and trainer.state.iteration == 1:
            threading.Timer(0.05, os.killpg, (pid, signal.SIGKILL)).start()
        return pending

    trainer.engine.start = start
    try:
        trainer.train(*datasets)
    except Exception as error:
        return {'type': type(error).__name__, 'error': str(error), 'iteration': trainer.state.iteration}
    return {'type': '', 'error': '', 'iteration': trainer.state.iteration}


def test_a_server_that_is_killed_leaves_a_checkpoint_and_a_named_error(ranks: Any, model: Path, adapter_server: Server,
                                                                       tmp_path: Path) -> None:  # the last test of this server
    argv = arguments(tmp_path, model, **served(adapter_server, **LORA, max_completion_length=200, max_length=32, save_strategy='steps',
                                               save_steps=100, tensor_model_parallel_size=2))
    results = ranks.run(train_and_lose_it, argv, adapter_server.process.pid, world_size=2, deadline=300.)
    for result in results:
        assert result['type'] == 'RunError' and result['iteration'] == 1, result
        assert 'no rollout server is left' in result['error'] and 'stops after 1 optimizer steps' in result['error']
    folder = tmp_path / 'out' / 'checkpoint-1'
    assert str(folder) in results[0]['error'] and (folder / 'trainer_state.json').exists()


def lose_one_in_a_sync(argv: list[str], pid: int) -> dict[str, Any]:
    """Two servers; the second one is killed between two buckets of the second sync."""
    trainer, datasets = trainer_and_data(argv)
    trainer.sync.max_bucket_bytes = 50_000
    load_weights, close = trainer.engine.load_weights, trainer.engine.close
    state: dict[str, Any] = {}

    def load(buckets: Any, version: int) -> int:

        def interrupted() -> Any:
            for number, bucket in enumerate(buckets):
                if version == 1 and number == 2:
                    os.killpg(pid, signal.SIGKILL)
                    time.sleep(0.5)
                yield bucket

        count = load_weights(interrupted(), version)
        state[version] = sorted(server.name for server in trainer.engine.pool.alive)
        return count

    def looked_at() -> None:
        state['lost'] = dict(trainer.engine.pool.lost)
        close()

    trainer.engine.load_weights, trainer.engine.close = load, looked_at
    trainer.train(*datasets)
    return {**state, 'iteration': trainer.state.iteration}


def test_a_server_that_is_killed_in_a_sync_is_dropped_and_the_run_goes_on(ranks: Any, model: Path, server: Server, tmp_path: Path) -> None:
    second = FakeProcess()
    try:
        argv = arguments(tmp_path, model, **served(server, vllm_server_host=['127.0.0.1', '127.0.0.1'],
                                                   vllm_server_port=[server.port, second.port],
                                                   vllm_server_group_port=[free_port(), free_port()]))
        state = ranks.run(lose_one_in_a_sync, argv, second.process.pid, world_size=1, deadline=300.)[0]
    finally:
        second.kill()
    both = sorted(f'http://127.0.0.1:{port}' for port in (server.port, second.port))
    one = [f'http://127.0.0.1:{server.port}']
    assert (state[0], state[1], state[2]) == (both, one, one) and state['iteration'] == 3
    assert list(state['lost']) == [f'http://127.0.0.1:{second.port}'] and state['lost'][f'http://127.0.0.1:{second.port}'].startswith('Weight sync')


def error_of(argv: list[str]) -> str:
    try:
        trainer, datasets = trainer_and_data(argv)
        trainer.train(*datasets)
    except Exception as error:
        return f'{type(error).__name__}: {error}'
    return ''


def test_a_wrong_group_port_ends_in_a_named_timeout(ranks: Any, model: Path, server: Server, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(('0.0.0.0', 0))
        taken.listen()
        port = taken.getsockname()[1]
        argv = arguments(tmp_path, model, **served(server, vllm_server_group_port=port, sync_timeout=8))
        error = ranks.run(error_of, argv, world_size=1, deadline=200.)[0]
    assert f'the group for weights on port {port} (--vllm_server_group_port) did not end within 8 s' in error
    assert error.startswith(f'RunError: Rollout server http://127.0.0.1:{server.port} could not be connected')


def freeze_while_sampling(argv: list[str], pid: int) -> dict[str, Any]:
    trainer, datasets = trainer_and_data(argv)
    start_phase = trainer.engine.start

    def start(requests: Any, sampling: Any) -> Any:
        if trainer.state.iteration == 1:
            os.killpg(pid, signal.SIGSTOP)
        return start_phase(requests, sampling)

    trainer.engine.start = start
    started = time.monotonic()
    try:
        trainer.train(*datasets)
    except Exception as error:
        return {'error': f'{type(error).__name__}: {error}', 'seconds': time.monotonic() - started}
    return {'error': '', 'seconds': 0.0}


def test_a_server_that_falls_silent_is_dropped(ranks: Any, model: Path, server: Server, tmp_path: Path) -> None:  # the last test of this server
    argv = arguments(tmp_path, model, **served(server, server_timeout=4, save_strategy='no'))
    result = ranks.run(freeze_while_sampling, argv, server.process.pid, world_size=1, deadline=300.)[0]
    assert result['error'].startswith('RunError: Sampling of a generation: no rollout server is left'), result
    assert '4 s' in result['error'] and 'stops after 1 optimizer steps.' in result['error']
