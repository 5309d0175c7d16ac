"""What a family's attention and experts cannot be divided into (import tier 0). Each check gives complete messages.

The limits are those of Transformer Engine (2.9) and Megatron-Core (0.16), which show them while the model is built or at the first forward pass;
docs/models.md lists them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .model_checks import WITH_SINKS
from .translation import Translation


def family_limits(t: Translation, text: Mapping[str, Any]) -> None:
    """`text`: the language model's part of config.json."""
    if text.get('model_type') in WITH_SINKS:
        _sinks(t)
    if text.get('kv_lora_rank'):
        _latent_attention(t)


def _sinks(t: Translation) -> None:
    model = t.effective('model')
    cp, exchange = t.effective('context_parallel_size'), t.effective('cp_comm_type')
    if cp > 1 and exchange != 'a2a':
        t.errors.append(f'--context_parallel_size {cp} with the attention sinks and sliding windows of {model} needs --cp_comm_type a2a: Transformer Engine '
                        f'has no attention for them with {exchange or "p2p"}.')
    etp = t.effective('expert_tensor_parallel_size')
    if etp > 1:
        t.errors.append(f'--expert_tensor_parallel_size {etp} would split each expert of {model}, and Megatron-Core refuses that for experts with biases. '
                        'Use --expert_model_parallel_size, and leave it out.')


def _latent_attention(t: Translation) -> None:
    cp, exchange = t.effective('context_parallel_size'), t.effective('cp_comm_type')
    if cp > 1 and exchange in ('a2a', 'all_gather'):
        t.errors.append(f'--cp_comm_type {exchange} does not go with the latent attention of {t.effective("model")}, whose keys and values differ in '
                        'width: Transformer Engine divides it over context-parallel ranks with p2p only. Leave --cp_comm_type out.')
