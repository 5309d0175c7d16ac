"""Each family with a real vLLM in the training processes: what it samples from is the policy, before and after every weight has moved.

One process hosts the engines one after another: importing vLLM takes longer than a run.
"""
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny_vision
from tests.families import FAMILIES
from tests.rank_pool import RankPool
from tests.step.images import image_arguments
from tests.trainer.test_families import arguments_of
from tests.trainer.test_image_runs import SIZES as IMAGE_SIZES
from tests.trainer.test_image_runs import dataset as image_dataset

pytestmark = [pytest.mark.heavy, pytest.mark.skipif(importlib.util.find_spec('vllm') is None, reason='vLLM is not installed')]

VLLM = {'use_vllm': 'true', 'vllm_mode': 'colocate', 'vllm_enforce_eager': 'true', 'vllm_max_model_len': 128, 'verify_weight_sync': 1,
        'vllm_engine_kwargs': '{"kv_cache_memory_bytes": 67108864}', 'save_strategy': 'no', 'save_steps': None}
# What vLLM wants of a model. Its CPU build decodes latent attention of DeepSeek's own size only; gpt-oss has YaRN positions.
SIZES: dict[str, dict[str, Any]] = {
    'deepseek_v3': {'kv_lora_rank': 512, 'qk_rope_head_dim': 64},
    'gpt_oss': {'rope_parameters': {'rope_type': 'yarn', 'rope_theta': 10000., 'factor': 4.0, 'original_max_position_embeddings': 16,
                                    'beta_fast': 32.0, 'beta_slow': 1.0, 'truncate': False}},
}
# vLLM has no model of its own for these and runs transformers' in it, where experts have other names: log-probabilities tell, checksums do not.
BY_TRANSFORMERS = ('dots1', )
IMAGES = tuple(tiny_vision.KINDS)
ATTENTION = {'gpt_oss': {'attention_backend': 'fused'}}  # flash has no sinks


@pytest.fixture(scope='module')
def engine_ranks() -> Iterator[RankPool]:
    """An engine leaves global state in its process."""
    with RankPool(max_world=1) as pool:
        yield pool


def sample_twice(argv: list[str]) -> dict[str, Any]:
    """Trains two steps, and moves every weight after the first. Of each generation the largest difference between the engine's log-probabilities and
    the trainer's; how far the move took the trainer's; names of weights whose checksums were not compared."""
    import swift_megatron_grpo.sync as sync
    from swift_megatron_grpo.step.forward import collect_logprobs
    from tests.rollouts.running import trainer_and_data
    trainer, datasets = trainer_and_data(argv)
    collect, train_step, compare = trainer.collect, trainer.train_step, sync.differences
    out: dict[str, Any] = {'differences': [], 'moves': [], 'uncovered': []}

    def own_of(step: Any) -> torch.Tensor:
        return collect_logprobs(trainer.policy, [step], trainer.device)[0][0]

    def watched_collect(index: int) -> Any:
        generation = collect(index)
        step, = generation.steps
        out['differences'].append(float((step.table.rollout_logprobs_K - own_of(step)).abs().max()))
        return generation

    def watched_step(step: Any) -> Any:
        result = train_step(step)
        before_K = own_of(step)
        move(trainer.unwrapped_models)
        out['moves'].append(float((own_of(step) - before_K).abs().max()))
        return result

    def watched_differences(*args: Any) -> Any:
        wrong, uncovered = compare(*args)
        out['uncovered'] += uncovered
        return wrong, uncovered

    trainer.collect, trainer.train_step, sync.differences = watched_collect, watched_step, watched_differences
    try:
        trainer.train(*datasets)
    finally:
        sync.differences = compare
        trainer.engine.close()
    return out


@torch.no_grad()
def move(models: list[Any]) -> None:
    """Noise on every parameter, and on the bias by which routers choose."""
    generator = torch.Generator().manual_seed(5)
    for model in models:
        for name, weight in sorted([*model.named_parameters(), *(item for item in model.named_buffers() if item[0].endswith('expert_bias'))]):
            weight.add_(torch.randn(weight.shape, generator=generator) * (0.3 if name.endswith('expert_bias') else 0.05))


@pytest.mark.parametrize('family', FAMILIES)
def test_vllm_samples_from_the_policy_after_every_weight_has_moved(engine_ranks: Any, tiny_model: Any, tmp_path: Path, family: str) -> None:
    kind = FAMILIES[family][0]
    model, argv = arguments_of(tiny_model, family, tmp_path, sizes=SIZES.get(kind, {}), **VLLM, **ATTENTION.get(kind, {}))
    out = engine_ranks.run(sample_twice, argv, world_size=1, deadline=300.)[0]
    assert len(out['differences']) == 2 and max(out['differences']) < 2e-5
    assert out['moves'][0] > 0.1
    assert out['uncovered'] == [] or family in BY_TRANSFORMERS, 'the checksum of each weight was compared'


@pytest.mark.skipif(importlib.util.find_spec('qwen_vl_utils') is None, reason='qwen_vl_utils is not installed')
@pytest.mark.parametrize('kind', IMAGES)
def test_vllm_sees_images_as_the_policy_does_after_every_weight_has_moved(engine_ranks: Any, tmp_path: Path, kind: str) -> None:
    model = tiny_vision.build(kind, tmp_path / kind)
    argv = image_arguments(tmp_path, model, kind, None, dataset=image_dataset(tmp_path, IMAGE_SIZES), max_completion_length=10, num_generations=4,
                           **{**VLLM, 'vllm_max_model_len': 512})
    out = engine_ranks.run(sample_twice, argv, world_size=1, deadline=300.)[0]
    assert len(out['differences']) == 2 and max(out['differences']) < 2e-5
    assert out['moves'][0] > 0.1
    assert out['uncovered'] == []


def latent_attention_on_amx() -> bool:
    """Whether kv_b_proj has its weight after vLLM has packed it as it does on a CPU with AMX."""
    from types import SimpleNamespace

    from swift_megatron_grpo.cpu import vllm_plugin
    vllm_plugin.register()
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    layer = SimpleNamespace(impl=SimpleNamespace(process_weights_after_loading=lambda act_dtype: None), is_amx_bmm_enabled=True,
                            kv_b_proj=torch.nn.Linear(4, 6))
    MLAAttention.process_weights_after_loading(layer, torch.float32)
    return layer.kv_b_proj.weight.shape == (6, 4)


def test_latent_attention_can_be_loaded_again_on_a_cpu_with_amx(engine_ranks: Any) -> None:
    assert engine_ranks.run(latent_attention_on_amx, world_size=1, deadline=300.) == [True]
