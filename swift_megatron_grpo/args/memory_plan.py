"""The memory estimate of one command (import tier 0)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import memory
from .model_files import text_config
from .parameters import count
from .plan import BatchPlan
from .translation import Translation

# Prompts have no length before the data is read; max_length is only their upper bound, and its default is the model's context.
ASSUMED_PROMPT = 1024


def estimate_for(t: Translation, batch: BatchPlan, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The estimate, or None where config.json does not describe a decoder."""
    model = count(config)
    if model is None:
        return None
    tokens, source = token_budget(t, batch)
    full = t.effective('tuner_type') == 'full'
    colocated = bool(t.effective('use_vllm')) and t.effective('vllm_mode') == 'colocate'
    settings = memory.Settings(
        tp=t.effective('tensor_model_parallel_size'),
        pp=t.effective('pipeline_model_parallel_size'),
        vpp=t.effective('virtual_pipeline_model_parallel_size') or 1,
        cp=t.effective('context_parallel_size'),
        ep=t.effective('expert_model_parallel_size'),
        etp=t.effective('expert_tensor_parallel_size'),
        dp=batch.dp_size,
        sequence_parallel=bool(t.effective('sequence_parallel')) and t.effective('tensor_model_parallel_size') > 1,
        full=full,
        lora_rank=t.effective('lora_rank'),
        bytes_per_value=bytes_per_value(t, config),
        distributed_optimizer=bool(t.effective('use_distributed_optimizer')),
        optimizer=t.effective('optimizer'),
        has_reference=t.effective('beta') != 0,
        recompute=t.effective('recompute_granularity'),
        tokens=tokens,
        num_micro_batches=batch.gradient_accumulation_steps,
        trains_vision=full and not t.effective('freeze_vit'),
        optimizer_on_host=bool(t.effective('optimizer_cpu_offload')),
        vllm_share=t.effective('vllm_gpu_memory_utilization') if colocated else 0.0,
        engine_sleeps=bool(t.effective('sleep_level')),
        offload_model=bool(t.effective('offload_model')),
        offload_optimizer=bool(t.effective('offload_optimizer')),
    )
    result = memory.estimate(model, settings)
    result['tokens_per_micro_batch'] = tokens
    result['formula'].append(f'tokens of a micro-batch = {source}')
    result['smallest_layout'] = memory.smallest_layout(
        config, full=settings.full, has_reference=settings.has_reference, tokens=settings.tokens, lora_rank=settings.lora_rank
    )
    if not result['fits']:
        _does_not_fit(t, result, settings)
    return result


def token_budget(t: Translation, batch: BatchPlan) -> tuple[int, str]:
    """(tokens of the largest micro-batch, how it was found)."""
    budget = t.effective('max_tokens_per_micro_batch')
    if budget is not None:
        return budget, f'max_tokens_per_micro_batch {budget}'
    completion, limit = t.effective('max_completion_length'), t.effective('vllm_max_model_len')
    prompt = t.effective('max_length')
    if prompt is not None:
        longest, words = prompt + completion, f'max_length {prompt} + max_completion_length {completion}'
    else:
        longest, words = ASSUMED_PROMPT + completion, f'prompts of {ASSUMED_PROMPT} (assumed) + max_completion_length {completion}'
    if limit is not None and limit < longest:
        longest, words = limit, f'vllm_max_model_len {limit}'
    return batch.micro_batch_size * longest, f'micro_batch_size {batch.micro_batch_size} x ({words})'


def bytes_per_value(t: Translation, config: Mapping[str, Any]) -> int:
    """2 for bf16 and fp16, 4 for fp32.

    ms-swift takes torch_dtype, else the type in config.json, else bfloat16; float32 without a word on fp16 is fp16 mixed precision.
    """
    if t.effective('bf16') or t.effective('fp16'):
        return 2
    text = text_config(dict(config))
    dtype = str(t.effective('torch_dtype') or text.get('torch_dtype') or text.get('dtype') or 'bfloat16').removeprefix('torch.')
    if dtype != 'float32':
        return 2
    if t.effective('fp16') is None:
        t.warnings.append(
            'float32 without --fp16 is fp16 mixed precision in ms-swift on an accelerator, in both worlds. For 32-bit training: --torch_dtype '
            'float32 --fp16 false --bf16 false.'
        )
        return 2
    return 4


def _does_not_fit(t: Translation, result: dict[str, Any], settings: memory.Settings) -> None:
    best = result['smallest_layout']
    need = f'{result["total_bytes"] / 1e9:.0f} GB of {result["device_bytes"] / 1e9:.0f} GB'
    ways = []
    if settings.vllm_share and not settings.engine_sleeps and result['train_bytes'] - result['vllm'] <= result['device_bytes']:
        ways.append('--sleep_level 1 frees the engine while training')
    if result['rollout_bytes'] > result['device_bytes'] and not settings.offload_model:
        ways.append('--offload_model true --offload_optimizer true frees the trainer while sampling')
    if settings.recompute != 'full':
        ways.append('--recompute_granularity full --recompute_method uniform --recompute_num_layers 1 keeps one input a layer')
    if best is not None:
        ways.append(
            f'the fewest devices that hold training alone (full recomputation): {best["devices"]} (TP {best["tp"]}, PP {best["pp"]}, EP {best["ep"]})'
        )
    t.warnings.append(f'The estimate is {need} a device: it does not fit.' + (f' What would help: {"; ".join(ways)}.' if ways else ''))
