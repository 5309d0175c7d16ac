"""Sizes of models that people name without having them (import tier 0).

The memory estimate needs a config.json, and a laptop that plans a run rarely has the checkpoint. These are the published sizes of common
families; the model's own config.json, where there is one, always wins, and the report says which was used.
"""

from __future__ import annotations

import re
from typing import Any

# hidden, layers, heads, key/value heads, MLP width, vocabulary, tied embeddings
_QWEN2_5 = {
    '0.5b': (896, 24, 14, 2, 4864, 151936, True),
    '1.5b': (1536, 28, 12, 2, 8960, 151936, True),
    '3b': (2048, 36, 16, 2, 11008, 151936, True),
    '7b': (3584, 28, 28, 4, 18944, 152064, False),
    '14b': (5120, 48, 40, 8, 13824, 152064, False),
    '32b': (5120, 64, 40, 8, 27648, 152064, False),
    '72b': (8192, 80, 64, 8, 29568, 152064, False),
}
_QWEN3 = {
    '0.6b': (1024, 28, 16, 8, 3072, 151936, True),
    '1.7b': (2048, 28, 16, 8, 6144, 151936, True),
    '4b': (2560, 36, 32, 8, 9728, 151936, True),
    '8b': (4096, 36, 32, 8, 12288, 151936, False),
    '14b': (5120, 40, 40, 8, 17408, 151936, False),
    '32b': (5120, 64, 64, 8, 25600, 151936, False),
}
_LLAMA = {'8b': (4096, 32, 32, 8, 14336, 128256, False), '70b': (8192, 80, 64, 8, 28672, 128256, False)}
_MOE = {
    '30b-a3b': {'hidden_size': 2048, 'moe_intermediate_size': 768, 'num_hidden_layers': 48, 'num_attention_heads': 32},
    '235b-a22b': {'hidden_size': 4096, 'moe_intermediate_size': 1536, 'num_hidden_layers': 94, 'num_attention_heads': 64},
}
_DEEPSEEK_V3 = {
    **{'model_type': 'deepseek_v3', 'vocab_size': 129280, 'tie_word_embeddings': False, 'torch_dtype': 'bfloat16'},
    **{'hidden_size': 7168, 'intermediate_size': 18432, 'moe_intermediate_size': 2048, 'num_hidden_layers': 61},
    **{'num_attention_heads': 128, 'q_lora_rank': 1536, 'kv_lora_rank': 512},
    **{'qk_nope_head_dim': 128, 'qk_rope_head_dim': 64, 'v_head_dim': 128},
    **{'n_routed_experts': 256, 'n_shared_experts': 1, 'num_experts_per_tok': 8, 'first_k_dense_replace': 3},
}
_DENSE_KEYS = (
    *('hidden_size', 'num_hidden_layers', 'num_attention_heads', 'num_key_value_heads'),
    *('intermediate_size', 'vocab_size', 'tie_word_embeddings'),
)


def _dense(family: str, sizes: tuple[int, ...], **more: Any) -> dict[str, Any]:
    return {'model_type': family, 'torch_dtype': 'bfloat16', **dict(zip(_DENSE_KEYS, sizes)), **more}


def known_config(name: str) -> dict[str, Any] | None:
    """The sizes of a model by its hub name, in the keys of config.json; None for a model that is not listed.

    Example: known_config('Qwen/Qwen3-8B')['num_hidden_layers'] == 36.
    """
    base = name.rsplit('/', 1)[-1].lower()
    if match := re.match(r'qwen2\.5-vl-(\d+(?:\.\d+)?b)(-instruct)?$', base):
        return _vision(match.group(1))
    if match := re.match(r'qwen2\.5-(?:math-|coder-)?(\d+(?:\.\d+)?b)(-instruct)?$', base):
        return _dense('qwen2', _QWEN2_5[match.group(1)]) if match.group(1) in _QWEN2_5 else None
    if match := re.match(r'qwen3-(30b-a3b|235b-a22b)(-\w+)*$', base):
        return {
            'model_type': 'qwen3_moe', **_MOE[match.group(1)], 'num_key_value_heads': 4, 'head_dim': 128, 'num_experts': 128,
            'num_experts_per_tok': 8, 'vocab_size': 151936, 'tie_word_embeddings': False, 'torch_dtype': 'bfloat16',
        }  # fmt: skip
    if match := re.match(r'qwen3-(\d+(?:\.\d+)?b)(-base|-instruct-2507|-thinking-2507)?$', base):
        return _dense('qwen3', _QWEN3[match.group(1)], head_dim=128) if match.group(1) in _QWEN3 else None
    if match := re.match(r'(?:meta-)?llama-3(?:\.[13])?-(8b|70b)(-instruct)?$', base):
        return _dense('llama', _LLAMA[match.group(1)])
    if re.match(r'deepseek-(v3|r1)(-\d+|-base|-zero|\.1)*$', base):
        return dict(_DEEPSEEK_V3)
    return None


def _vision(size: str) -> dict[str, Any] | None:
    if size not in ('3b', '7b', '32b', '72b'):
        return None
    text = _QWEN2_5[size]
    vision = {
        'depth': 32, 'hidden_size': 1280, 'intermediate_size': 3456 if size in ('32b', '72b') else 3420, 'num_heads': 16, 'patch_size': 14,
        'spatial_merge_size': 2, 'temporal_patch_size': 2, 'out_hidden_size': text[0],
    }  # fmt: skip
    return _dense('qwen2_5_vl', text, vision_config=vision)
