"""Which of vLLM's parameters holds a weight of a checkpoint (import tier 1; reads attributes that vLLM's models have)."""
from __future__ import annotations

from collections.abc import Collection
from typing import Any

# vLLM's models say what they fuse; mixtures add gate_up_proj while they are built, and some leave these out.
_ALWAYS_FUSED = {'gate_up_proj': ['gate_proj', 'up_proj'], 'qkv_proj': ['q_proj', 'k_proj', 'v_proj']}
_EXPERT_HOLDERS = {'gate_proj': 'w13_weight', 'up_proj': 'w13_weight', 'down_proj': 'w2_weight', 'w1': 'w13_weight', 'w3': 'w13_weight',
                   'w2': 'w2_weight'}


def holder_of(name: str, model: Any, parameters: Collection[str]) -> str:
    """vLLM's name for the holder of `name`, or `name` itself where none is found. Pure.

    Example: 'model.layers.0.self_attn.k_proj.weight' -> 'model.layers.0.self_attn.qkv_proj.weight', under LoRA
    'model.layers.0.self_attn.qkv_proj.base_layer.weight'.

    Args:
        model: vLLM's model; `packed_modules_mapping` and `hf_to_vllm_mapper` are read where it has them.
        parameters: names of its parameters.
    """
    mapper = getattr(model, 'hf_to_vllm_mapper', None)
    if mapper is not None:
        mapped = list(mapper.apply_list([name]))
        name = mapped[0] if mapped else name
    prefix, separator, rest = name.partition('.experts.')
    number, _, leaf = rest.partition('.')
    if separator and number.isdigit():
        end = _EXPERT_HOLDERS.get(leaf.split('.')[0], leaf)
        return next((candidate for candidate in parameters if candidate.startswith(prefix + separator) and candidate.endswith(end)), name)
    if separator and not leaf:  # gpt-oss: all experts in one tensor, whose name vLLM's mapper knows
        return next((candidate for candidate in parameters if candidate.startswith(prefix + separator) and candidate.endswith('.' + rest)), name)
    fused = {**_ALWAYS_FUSED, **(getattr(model, 'packed_modules_mapping', None) or {})}
    parts = name.split('.')
    for whole, members in fused.items():
        if len(parts) > 1 and parts[-2] in members:
            candidate = '.'.join([*parts[:-2], whole, parts[-1]])
            if candidate in parameters or _with_base(candidate) in parameters:
                parts[-2] = whole
                break
    candidate = '.'.join(parts)
    return candidate if candidate in parameters else (_with_base(candidate) if _with_base(candidate) in parameters else name)


def _with_base(name: str) -> str:
    module, _, leaf = name.rpartition('.')
    return f'{module}.base_layer.{leaf}'
