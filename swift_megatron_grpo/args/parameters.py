"""Counting parameters from config.json alone (import tier 0; pure).

The model is cut into parts that one layout treats alike: what TP shards, what it replicates, and what EP shards. Shapes follow the released
modelling code of each family; the tests compare the sums with the published counts of Qwen3-30B-A3B, Qwen3-235B-A22B, DeepSeek-V3,
Qwen2.5-72B and Qwen2.5-VL-72B.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .model_files import text_config

# Families whose attention projections carry a bias although config.json does not say so.
_QKV_BIAS = ('qwen2', 'qwen2_moe', 'qwen2_vl', 'qwen2_5_vl', 'internlm2', 'chatglm')
_QK_NORM = ('qwen3', 'qwen3_moe', 'qwen3_vl', 'qwen3_vl_moe', 'qwen3_vl_text', 'qwen3_vl_moe_text', 'glm4_moe', 'olmoe')


@dataclasses.dataclass(kw_only=True, slots=True)
class LayerCount:
    """Parameters of one decoder layer. ``sharded`` is divided by TP, ``experts`` by EP x ETP, ``replicated`` is on every rank."""

    sharded: int
    replicated: int
    experts: int = 0
    lora_per_rank: int = 0  # adapter parameters for rank 1 on every linear layer outside the experts
    lora_experts_per_rank: int = 0
    active: int = 0  # parameters that one token passes through
    token_width: int = 0  # values per token kept for the backward pass inside the layer, divided by TP

    @property
    def total(self) -> int:
        return self.sharded + self.replicated + self.experts


@dataclasses.dataclass(kw_only=True, slots=True)
class ModelCount:
    """A model by parts. ``embedding`` and ``output`` are divided by TP; ``vision`` is on every rank of the first stage."""

    hidden_size: int
    vocab_size: int
    num_heads: int
    layers: list[LayerCount]
    embedding: int
    output: int  # 0 where it is tied to the embedding
    final_norm: int
    vision: int
    tied: bool

    @property
    def total(self) -> int:
        return sum(layer.total for layer in self.layers) + self.embedding + self.output + self.final_norm + self.vision

    @property
    def active(self) -> int:
        return sum(layer.active for layer in self.layers) + self.embedding + self.output + self.final_norm + self.vision


def count(config: Mapping[str, Any]) -> ModelCount | None:
    """The parts of a model, or None where config.json lacks the sizes of a decoder."""
    text = text_config(dict(config))
    needed = ('hidden_size', 'num_hidden_layers', 'num_attention_heads', 'vocab_size')
    if any(not isinstance(text.get(name), int) for name in needed):
        return None
    hidden, num_layers, vocab = text['hidden_size'], text['num_hidden_layers'], text['vocab_size']
    tied = bool(config.get('tie_word_embeddings', text.get('tie_word_embeddings', False)))
    layers = [_layer(text, index) for index in range(num_layers)]
    return ModelCount(
        hidden_size=hidden,
        vocab_size=vocab,
        num_heads=text['num_attention_heads'],
        layers=layers,
        embedding=vocab * hidden,
        output=0 if tied else vocab * hidden,
        final_norm=hidden,
        vision=count_vision(config, hidden),
        tied=tied,
    )


def _layer(text: Mapping[str, Any], index: int) -> LayerCount:
    hidden = text['hidden_size']
    attention = _mla(text) if text.get('kv_lora_rank') else _attention(text)
    layer = LayerCount(
        sharded=attention['sharded'],
        replicated=attention['replicated'] + 2 * hidden,
        lora_per_rank=attention['lora'],
        token_width=attention['width'],
    )
    if _is_moe_layer(text, index):
        _add_experts(layer, text, hidden)
    else:
        width = text.get('intermediate_size') or 4 * hidden
        _add_mlp(layer, hidden, width, bias=bool(text.get('mlp_bias', False)))
    layer.active = layer.active or layer.sharded + layer.replicated
    return layer


def _attention(text: Mapping[str, Any]) -> dict[str, int]:
    hidden, heads = text['hidden_size'], text['num_attention_heads']
    groups = text.get('num_key_value_heads') or text.get('multi_query_group_num') or heads
    dim = text.get('head_dim') or text.get('kv_channels') or hidden // heads
    q, kv = heads * dim, 2 * groups * dim
    family = str(text.get('model_type', ''))
    bias = bool(text.get('attention_bias', family in _QKV_BIAS) or text.get('add_qkv_bias') or text.get('qkv_bias'))
    output_bias = bool(text.get('attention_bias')) and family not in ('glm4_moe',)
    return {
        'sharded': hidden * (q + kv) + q * hidden + (q + kv if bias else 0),
        'replicated': (2 * dim if family in _QK_NORM else 0) + (hidden if output_bias else 0),
        'lora': hidden + q + kv + q + hidden,
        'width': q + kv + q,
    }


def _mla(text: Mapping[str, Any]) -> dict[str, int]:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): low-rank queries and keys/values beside a shared rotary key."""
    hidden, heads = text['hidden_size'], text['num_attention_heads']
    nope, rope, value = text['qk_nope_head_dim'], text['qk_rope_head_dim'], text['v_head_dim']
    kv_rank, q_rank = text['kv_lora_rank'], text.get('q_lora_rank')
    q_out, kv_out, o_in = heads * (nope + rope), heads * (nope + value), heads * value
    down = hidden * (kv_rank + rope)
    up = kv_rank * kv_out + o_in * hidden
    norms = kv_rank
    lora = hidden + kv_rank + rope + kv_rank + kv_out + o_in + hidden
    if q_rank:
        down += hidden * q_rank
        up += q_rank * q_out
        norms += q_rank
        lora += hidden + q_rank + q_rank + q_out
    else:
        up += hidden * q_out
        lora += hidden + q_out
    return {'sharded': up, 'replicated': down + norms, 'lora': lora, 'width': q_out + kv_out + o_in}


def _is_moe_layer(text: Mapping[str, Any], index: int) -> bool:
    if not num_experts(text):
        return False
    if index in (text.get('mlp_only_layers') or []):
        return False
    if index < (text.get('first_k_dense_replace') or 0):
        return False
    if isinstance(text.get('moe_layers_enum'), str):
        return str(index) in text['moe_layers_enum'].split(',')
    step = text.get('decoder_sparse_step') or 1
    frequency = text.get('moe_layer_freq') or 1
    return (index + 1) % step == 0 and (not isinstance(frequency, int) or index % frequency == 0)


def num_experts(text: Mapping[str, Any]) -> int:
    """Routed experts of one layer; 0 for a dense model."""
    return next(
        (
            text[key]
            for key in ('num_experts', 'n_routed_experts', 'num_local_experts', 'moe_num_experts')
            if isinstance(text.get(key), int)
        ),
        0,
    )


def _add_mlp(layer: LayerCount, hidden: int, width: int, bias: bool = False) -> None:
    layer.sharded += 3 * hidden * width + (2 * width if bias else 0)
    layer.replicated += hidden if bias else 0
    layer.lora_per_rank += hidden + 2 * width + width + hidden
    layer.token_width += 3 * width


def _add_experts(layer: LayerCount, text: Mapping[str, Any], hidden: int) -> None:
    experts = num_experts(text)
    width = int(text.get('moe_intermediate_size') or text.get('intermediate_size') or 4 * hidden)
    top_k = text.get('num_experts_per_tok') or text.get('moe_topk') or 1
    layer.experts = experts * 3 * hidden * width
    layer.replicated += hidden * experts
    if text.get('topk_method') == 'noaux_tc' or str(text.get('model_type', '')).startswith(('deepseek_v3', 'glm4_moe')):
        layer.replicated += experts  # the router's correction bias
    layer.lora_experts_per_rank = experts * (hidden + 2 * width + width + hidden)
    shared = (text.get('n_shared_experts') or 0) * width or text.get('shared_expert_intermediate_size') or 0
    if shared:
        _add_mlp(layer, hidden, shared)
        if text.get('shared_expert_intermediate_size'):
            layer.replicated += hidden  # the shared expert's gate
    layer.token_width += 3 * width * top_k
    layer.active = layer.sharded + layer.replicated + layer.experts * top_k // experts


def count_vision(config: Mapping[str, Any], language_hidden: int) -> int:
    """Parameters of the vision tower and its connector; 0 for a language model.

    Exact for Qwen2-VL, Qwen2.5-VL and Qwen3-VL; other towers are counted as 4 h^2 + 2 h x intermediate a layer.
    """
    vision = config.get('vision_config')
    if not isinstance(vision, dict):
        thinker = config.get('thinker_config')
        return count_vision(thinker, language_hidden) if isinstance(thinker, dict) else 0
    family = str(vision.get('model_type') or config.get('model_type') or '')
    depth = vision.get('depth') or vision.get('num_hidden_layers') or 0
    width = vision.get('embed_dim') if family.startswith('qwen2_vl') else vision.get('hidden_size')
    if not isinstance(width, int) or not depth:
        return 0
    patch = 3 * (vision.get('temporal_patch_size') or 1) * int(vision.get('patch_size') or 14) ** 2 * width
    merged = width * int(vision.get('spatial_merge_size') or 1) ** 2
    out = vision.get('out_hidden_size') or (vision.get('hidden_size') if family.startswith('qwen2_vl') else None) or language_hidden
    attention = 4 * width * width + 4 * width
    if family.startswith('qwen2_5_vl'):
        inner = vision['intermediate_size']
        block = attention + 3 * width * inner + 2 * inner + width + 2 * width
        return patch + depth * block + width + merged * merged + merged + merged * out + out
    if family.startswith('qwen2_vl'):
        inner = int(width * vision.get('mlp_ratio', 4))
        block = attention + 2 * width * inner + inner + width + 4 * width
        return patch + depth * block + 2 * width + merged * merged + merged + merged * out + out
    inner = vision.get('intermediate_size') or 4 * width
    block = attention + 2 * width * inner + inner + width + 4 * width
    total = patch + width + depth * block
    if family.startswith('qwen3_vl'):
        total += int(vision.get('num_position_embeddings') or 0) * width
        merger = merged * merged + merged + merged * out + out
        return total + merger + 2 * width + len(vision.get('deepstack_visual_indexes') or []) * (merger + 2 * merged)
    return total + merged * language_hidden + language_hidden * language_hidden
