"""Real vLLM in the training processes: what it holds after a sync, and what it samples. An engine takes half a minute: few cases, many claims."""
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rollouts.running import greedy_of_transformers, trainer_of
from tests.step.training import arguments, train

pytestmark = [pytest.mark.heavy, pytest.mark.skipif(importlib.util.find_spec('vllm') is None, reason='vLLM is not installed')]

VLLM = {'use_vllm': 'true', 'vllm_mode': 'colocate', 'vllm_enforce_eager': 'true', 'vllm_max_model_len': 256, 'temperature': 0.9,
        'max_completion_length': 16}


def engine_state(engine: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in engine.engine.inner_model.named_parameters()}


def policy_bytes(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for model in trainer.unwrapped_models for name, parameter in model.named_parameters()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def disturb(trainer: Any, seed: int) -> None:
    """Another policy, the same on each rank that holds a weight."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for model in trainer.unwrapped_models:
            for name, parameter in sorted(model.named_parameters()):
                if parameter.requires_grad:
                    parameter.add_(torch.empty_like(parameter).fill_(float(torch.rand((), generator=generator)) * 0.02))


def full_weights(argv: list[str]) -> dict[str, Any]:
    """Syncs in buckets of 1 tensor, of a few, and at once; then a fault that the checksums have to find."""
    from swift_megatron_grpo.errors import RunError
    trainer = trainer_of(argv)
    out: dict[str, Any] = {}
    before = policy_bytes(trainer)
    states, transfers = [], []
    version = 0
    for megabytes in (1e-9, 0.05, 512):
        trainer.sync.max_bucket_bytes = int(megabytes * 2**20)
        version += 1
        count = trainer.sync.run(version)
        states.append(engine_state(trainer.engine))
        transfers.append(trainer.sync.num_buckets)
    out['count'], out['transfers'] = count, transfers
    out['buckets_equal'] = equal(states[0], states[1]) and equal(states[0], states[2])
    out['policy_untouched'] = equal(before, policy_bytes(trainer))
    disturb(trainer, 1)
    trainer.args.verify_weight_sync = '1'
    trainer.sync.run(version + 1)  # verified: checksums of every tensor
    out['changed'] = not equal(states[0], engine_state(trainer.engine))
    out['greedy'] = greedy_of_engine(trainer)
    asked = asked_of_vllm(trainer)
    out['asked'], out['limits'] = asked[:2], [one['max_tokens'] for one in asked[2:]]
    out['all_reduce'] = not trainer.engine.engine.engine_args.disable_custom_all_reduce
    with torch.no_grad():
        list(trainer.engine._parameters().values())[3].view(-1)[0] += 1.0
    exported = trainer.sync._export
    sums: dict[str, Any] = {}
    list(exported(sums))
    try:
        trainer.sync._verify(sums)
    except RunError as error:
        out['fault'] = str(error)
    out['weights'] = {name: tensor.clone() for name, tensor in trainer.bridge.export_weights(trainer.unwrapped_models)}
    trainer.engine.close()
    return out


def greedy_of_engine(trainer: Any) -> list[tuple[list[int], list[float]]]:
    from swift_megatron_grpo.engines import Sampling
    from swift_megatron_grpo.residency import Stage
    from swift.infer_engine.protocol import RolloutInferRequest
    trainer.residency.to(Stage.GENERATING)
    requests = [RolloutInferRequest(messages=[{'role': 'user', 'content': text}]) for text in ('what is 1 + 1?', 'compute 17 - 9')]
    outputs = trainer.engine.generate(requests, Sampling(temperature=0.0, max_tokens=12))
    return [(list(output.response.choices[0].token_ids), [item['logprob'] for item in output.response.choices[0].logprobs['content']])
            for output in outputs]


def asked_of_vllm(trainer: Any) -> list[dict[str, Any]]:
    """Sampling parameters as vLLM gets them, of two requests."""
    from swift.infer_engine.protocol import RolloutInferRequest

    from swift_megatron_grpo.engines import Sampling
    engine = trainer.engine.engine
    add, asked = engine._add_request, []

    def recorded(inputs: Any, config: Any, request_id: str, **kwargs: Any) -> Any:
        asked.append({name: getattr(config, name) for name in ('temperature', 'top_p', 'top_k', 'min_p', 'repetition_penalty', 'seed', 'max_tokens')} |
                     {'stop': list(config.stop), 'regex': config.structured_outputs.regex if config.structured_outputs else None})
        return add(inputs, config, request_id, **kwargs)

    engine._add_request = recorded
    request = RolloutInferRequest(messages=[{'role': 'user', 'content': 'hi'}])
    trainer.engine.generate([request, request], Sampling(temperature=0.7, max_tokens=3, top_p=0.8, top_k=7, min_p=0.05, repetition_penalty=1.2,
                                                         stop_words=('stop!', ), seed=11))
    # limits of its own for each request; a later call has none again
    trainer.engine.generate([request, request], Sampling(temperature=0.7, max_tokens=9, limits=(2, 5)))
    trainer.engine.generate([request], Sampling(temperature=0.7, max_tokens=4))
    engine._add_request = add
    return asked


@pytest.mark.parametrize('kind, world_size, layout', [
    ('qwen3', 1, {'vllm_disable_custom_all_reduce': 'false'}),
    ('qwen3_moe', 2, {'tensor_model_parallel_size': 2, 'vllm_tensor_parallel_size': 2}),
])
def test_a_sync_brings_the_same_weights_in_any_bucket_and_proves_it(ranks: Any, tiny_model: Any, tmp_path: Path, kind: str, world_size: int,
                                                                   layout: dict[str, Any]) -> None:
    model = tiny_model(kind)
    argv = arguments(tmp_path, model, **VLLM, **layout, model_type=kind)
    result = ranks.run(full_weights, argv, world_size=world_size, deadline=400.)
    for out in result:
        assert out['buckets_equal'] and out['policy_untouched'] and out['changed']
        assert out['transfers'][0] == out['count'] and 1 < out['transfers'][1] < out['count'] and out['transfers'][2] == 1
        assert 'did not arrive as it was sent' in out['fault'], out.get('fault')
        assert (out['limits'], out['all_reduce']) == ([2, 5, 4], 'vllm_disable_custom_all_reduce' in layout)
        for number, asked in enumerate(out['asked']):
            assert 'stop!' in asked.pop('stop')
            assert asked == {'temperature': 0.7, 'top_p': 0.8, 'top_k': 7, 'min_p': 0.05, 'repetition_penalty': 1.2, 'seed': 11 + number,
                             'max_tokens': 3, 'regex': None}
    tokens = [tokens for tokens, _ in result[0]['greedy']]
    expected = greedy_of_transformers(model, result[0]['weights'], ('what is 1 + 1?', 'compute 17 - 9'), 12)
    assert tokens == [row for row, _ in expected]
    for (_, got), (_, want) in zip(result[0]['greedy'], expected):
        assert got == pytest.approx(want, abs=1e-4)


def adapters(argv: list[str]) -> dict[str, Any]:
    """A run that goes on from a checkpoint: its adapter alone, twice; 50 merged syncs of the same policy."""
    trainer = trainer_of(argv)
    out: dict[str, Any] = {}
    before = policy_bytes(trainer)
    kinds, greedy = [], []
    for version in (1, 2, 3):
        trainer.sync.run(version)
        kinds.append(trainer.sync.last_kind)
        greedy.append(greedy_of_engine(trainer))
    out['kinds'], out['greedy'] = kinds, greedy
    out['policy_untouched'] = equal(before, policy_bytes(trainer))
    from swift_megatron_grpo.sync import merged_for_export
    with merged_for_export(trainer.unwrapped_models):
        out['weights'] = {name: tensor.clone() for name, tensor in trainer.bridge.export_weights(trainer.unwrapped_models)}
    for _ in range(50):
        with merged_for_export(trainer.unwrapped_models):
            for _name, _tensor in trainer.bridge.export_weights(trainer.unwrapped_models):
                pass
    out['policy_after_50'] = equal(before, policy_bytes(trainer))
    trainer.engine.close()
    return out


def test_an_adapter_is_served_as_base_and_one_adapter_each_time(ranks: Any, tiny_model: Any, tmp_path: Path) -> None:
    model = tiny_model('qwen3')
    lora = {'tuner_type': 'lora', 'lora_rank': 4, 'target_modules': 'all-linear', 'lr': 0.1, 'max_completion_length': 16}
    saving = {'train_iters': 1, 'save_strategy': 'steps', 'save_steps': 1}
    ranks.run(train, arguments(tmp_path, model, **lora, **saving), world_size=1)
    argv = arguments(tmp_path, model, **{**VLLM, **lora}, vllm_enable_lora='true', resume_from_checkpoint=tmp_path / 'out' / 'checkpoint-1')
    out = ranks.run(adapters, argv, world_size=1, deadline=400.)[0]
    assert out['kinds'] == ['full', 'adapter', 'adapter']
    assert out['policy_untouched'] and out['policy_after_50']
    expected = greedy_of_transformers(model, out['weights'], ('what is 1 + 1?', 'compute 17 - 9'), 12)
    base = greedy_of_transformers(model, {}, ('what is 1 + 1?', 'compute 17 - 9'), 12)
    assert [row for row, _ in expected] != [row for row, _ in base]  # the adapter matters
    for greedy in out['greedy']:
        assert [tokens for tokens, _ in greedy] == [row for row, _ in expected]
        for (_, got), (_, want) in zip(greedy, expected):
            assert got == pytest.approx(want, abs=1e-4)
