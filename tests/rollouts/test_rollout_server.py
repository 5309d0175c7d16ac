"""The connection to a server, against one without an engine (see fake_server.py): versions, restarts, errors. No vLLM engine is started."""
import importlib.util
import time
from typing import Any

import pytest
import torch

from tests.rollouts.servers import free_port

pytestmark = [pytest.mark.heavy, pytest.mark.skipif(importlib.util.find_spec('vllm') is None, reason='vLLM is not installed')]

WEIGHTS = [('a', torch.arange(6.).reshape(2, 3)), ('b', torch.ones(4, dtype=torch.bfloat16)), ('c', torch.full((5, ), 2.))]


def engine_of(*ports: int, **changes: Any) -> Any:
    """The engine of a run of one rank."""
    from types import SimpleNamespace

    from swift_megatron_grpo.engines import EngineGroup
    from swift_megatron_grpo.engines.vllm_server import VllmServerEngine
    args = SimpleNamespace(**{
        'vllm_server_base_url': None, 'vllm_server_host': ['127.0.0.1'] * len(ports), 'vllm_server_port': list(ports),
        'vllm_server_group_port': [free_port() for _ in ports], 'vllm_server_timeout': 5.0, 'server_timeout': 4.0, 'sync_timeout': 10.0,
        'rollout_timeout': 20.0, 'num_generations': 2, 'use_gym_env': None, 'tuner_type': 'full', 'vllm_enable_lora': False, 'lora_rank': 8,
        **changes})
    return VllmServerEngine(args, EngineGroup(index=0, count=1, rank=0, size=1), torch.device('cpu'))


def ask(engine: Any, count: int = 4) -> list[str]:
    from swift.infer_engine.protocol import RolloutInferRequest

    from swift_megatron_grpo.engines import Sampling
    requests = [RolloutInferRequest(messages=[{'role': 'user', 'content': str(i)}]) for i in range(count)]
    return [output.response.choices[0].message.content for output in engine.generate(requests, Sampling(temperature=1.0, max_tokens=4))]


def send(engine: Any, version: int, max_bytes: int = 1 << 20) -> int:
    from swift_megatron_grpo.engines.base import buckets
    engine.begin_sync()
    return engine.load_weights(buckets(iter(WEIGHTS), max_bytes), version)


def weights_arrive() -> dict[str, Any]:
    from tests.rollouts.fake_server import FakeServer
    server = FakeServer(free_port())
    engine = engine_of(server.port)
    out: dict[str, Any] = {'counts': [], 'transfers': [], 'equal': []}
    try:
        ask(engine)
    except Exception as error:
        out['before'] = f'{type(error).__name__}: {error}'
    for version, size in ((1, 1), (2, 32), (3, 1 << 20)):
        server.weights.clear()
        server.transfers = 0
        out['counts'].append(send(engine, version, size))
        out['transfers'].append(server.transfers)
        out['equal'].append(all(torch.equal(server.weights[name], tensor) for name, tensor in WEIGHTS))
    out['resets'] = server.resets[-3:]
    out['answers'] = ask(engine)
    server.statuses = [500, 200]
    out['after an error'] = ask(engine)
    engine.close()
    server.wait()
    out['closed'] = server.communicator is None
    server.end()
    return out


def test_weights_arrive_in_buckets_of_any_size(ranks: Any) -> None:
    out = ranks.run(weights_arrive, world_size=1, deadline=300.)[0]
    assert out['before'] == 'RunError: Rollout was asked of servers that do not hold a complete set of weights.'
    assert out['counts'] == [3, 3, 3] and out['transfers'] == [3, 2, 1] and out['equal'] == [True, True, True]
    assert out['resets'] == ['reset_prefix_cache', 'reset_mm_cache', 'reset_encoder_cache']
    assert out['answers'] == ['3', '3', '3', '3'] and out['after an error'] == ['3', '3', '3', '3']
    assert out['closed']


def restarted() -> dict[str, Any]:
    """A server that was started anew between sync and sampling would answer with the weights that it was started with."""
    from tests.rollouts.fake_server import FakeServer
    ports = free_port(), free_port()
    servers = [FakeServer(port) for port in ports]
    engine = engine_of(*ports)
    send(engine, 1)
    out: dict[str, Any] = {'both': sorted(set(ask(engine)))}
    servers[0].end()
    servers[0] = FakeServer(ports[0])
    out['after the restart'] = ask(engine)
    out['lost'] = dict(engine.pool.lost)
    out['sent again'] = send(engine, 2)
    out['holds'] = len(servers[0].weights)
    out['lost now'] = dict(engine.pool.lost)
    out['again'] = sorted(set(ask(engine)))
    servers[0].end()
    servers[1].end()
    for name, action in (('sample', lambda: ask(engine)), ('sync', lambda: send(engine, 3))):
        start = time.monotonic()
        try:
            action()
        except Exception as error:
            out[name] = f'{type(error).__name__}: {error}'
        out[f'{name} seconds'] = time.monotonic() - start
    engine.close()
    return out


def test_a_server_that_was_started_anew_gets_all_weights_before_it_answers(ranks: Any) -> None:
    out = ranks.run(restarted, world_size=1, deadline=300.)[0]
    assert out['both'] == ['3']
    assert out['after the restart'] == ['3'] * 4  # all by the other one; this one would have said '0'
    assert len(out['lost']) == 1 and 'its engine ended' in next(iter(out['lost'].values()))
    assert (out['sent again'], out['holds'], out['lost now'], out['again']) == (3, 3, {}, ['3'])
    assert out['sample'].startswith('EngineLost: Sampling of a generation: no rollout server is left (')
    assert out['sync'].startswith('EngineLost: Weight sync: no rollout server is left (')
    assert out['sample seconds'] < 10 and out['sync seconds'] < 10


def late() -> dict[str, Any]:
    from tests.rollouts.fake_server import FakeServer
    server = FakeServer(free_port())
    engine = engine_of(server.port, rollout_timeout=1.0)
    send(engine, 1)
    server.answer_after = 3.0
    out: dict[str, Any] = {}
    start = time.monotonic()
    try:
        ask(engine)
    except Exception as error:
        out['error'] = f'{type(error).__name__}: {error}'
    out['seconds'] = time.monotonic() - start
    engine.close()
    server.end()
    return out


def test_a_server_that_never_answers_ends_in_a_named_timeout(ranks: Any) -> None:
    out = ranks.run(late, world_size=1, deadline=300.)[0]
    assert out['error'].startswith('EngineLost: Sampling of a generation') and out['seconds'] < 3


def replaced() -> dict[str, Any]:
    """Weights change while a request is being answered (another run took the server, say): the answer is not used."""
    from tests.rollouts.fake_server import FakeServer
    server = FakeServer(free_port())
    engine = engine_of(server.port)
    send(engine, 1)
    server.answer_after = 1.0
    import threading
    threading.Timer(0.3, engine.pool.servers[0]._set_version, (7, )).start()
    out: dict[str, Any] = {}
    try:
        ask(engine)
    except Exception as error:
        out['error'] = f'{type(error).__name__}: {error}'
    engine.close()
    server.end()
    return out


def test_an_answer_after_weights_were_replaced_is_not_taken(ranks: Any) -> None:
    assert 'its answer was sampled while its weights changed to version 7' in ranks.run(replaced, world_size=1, deadline=300.)[0]['error']


def nobody() -> str:
    try:
        engine_of(free_port(), vllm_server_timeout=1.0)
    except Exception as error:
        return f'{type(error).__name__}: {error}'
    return ''


def test_no_server_is_a_named_error(ranks: Any) -> None:
    assert 'did not answer within 1 s (--vllm_server_timeout). It is started with `swift rollout`' in ranks.run(nobody, world_size=1, deadline=300.)[0]


def given_up() -> list[Any]:
    """A transfer that blocks: its end is not waited for once the engine is known to be gone."""
    from swift_megatron_grpo.engines.rollout_server import within
    started = time.monotonic()
    out: list[Any] = [within(5.0, 'a sum', lambda: 1 + 1)]
    for seconds, lost in ((30.0, lambda: 'its engine ended' if time.monotonic() - started > 0.3 else None), (0.3, lambda: None)):
        try:
            within(seconds, 'a bucket of weights', lambda: time.sleep(20), lost=lost)
        except Exception as error:
            out.append(f'{type(error).__name__}: {error}')
    return [*out, time.monotonic() - started]


def test_a_transfer_to_a_server_that_ended_is_given_up_before_its_deadline(ranks: Any) -> None:
    value, gone, late, seconds = ranks.run(given_up, world_size=1)[0]
    assert value == 2 and gone == 'ServerGone: its engine ended' and late == 'TimeoutError: a bucket of weights did not end within 0.3 s'
    assert seconds < 5
