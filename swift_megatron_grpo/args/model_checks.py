"""Models that would be built otherwise than they are, or not at all (import tier 0: reads a config.json). docs/models.md lists them."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import UserError
from .model_files import text_config

# mcore-bridge hands the window of these families on to Megatron-Core; of all others it drops it.
_WINDOWS_KEPT = ('gpt_oss', 'gemma4', 'gemma4_unified', 'muse_glimmer', 'deepseek_v4', 'deepseek_v41')
# Families with a learned sink in each attention head, which flash attention has no place for.
WITH_SINKS = ('gpt_oss', )
# Families whose checkpoints hold all experts of a layer in one tensor; mcore-bridge writes their adapters by expert.
_EXPERTS_IN_ONE = ('gpt_oss', 'qwen3_vl_moe', 'llama4', 'gemma4')


def problems(config: Mapping[str, Any], *, longest: int | None, attention_backend: str) -> list[str]:
    """Why this model cannot be trained with these settings; empty where it can. Pure.

    Args:
        config: the model's config.json.
        longest: tokens of the longest sequence of the run; None: no bound is known. A window that is never left changes nothing.
        attention_backend: as Megatron-Core calls it.
    """
    found = []
    family, window = str(config.get('model_type')), _window(config)
    if family not in _WINDOWS_KEPT and window is not None and (longest is None or longest > window):
        found.append(
            f'{family}: attention of this model is limited to the last {window} tokens, and mcore-bridge would train it without that limit, on '
            f'sequences of up to {longest or "any number of"} tokens. Keep max_length + max_completion_length within {window}, or set '
            'use_sliding_window to false in its config.json, if it was trained so.')
    if family in WITH_SINKS and attention_backend.startswith('flash'):
        found.append(f'{family}: its attention has learned sinks, and --attention_backend {attention_backend} knows none. Give --attention_backend '
                     'fused (cuDNN), or unfused, which does without packing (--padding_free false).')
    return found


def adapts_experts(target_modules: Sequence[str]) -> bool:
    """Whether LoRA goes to the matrices of experts, in a model that has some. Pure. target_modules: Megatron's names, or one pattern."""
    return any(name == 'all-linear' or 'linear_fc' in name or 'experts' in name for name in target_modules)


def adapter_warning(config: Mapping[str, Any], target_modules: Sequence[str]) -> str | None:
    """What is to be known of an adapter of this model that is written without a merged model; None where there is nothing. Pure."""
    family = str(config.get('model_type'))
    if family not in _EXPERTS_IN_ONE or not adapts_experts(target_modules):
        return None
    return (f'{family}: adapters of experts are written one an expert, and PEFT and vLLM know the experts of this family as one tensor: they cannot '
            'read them, a resumed run can. Give --merge_lora true for a model to use elsewhere.')


def refuse(config: Mapping[str, Any], *, longest: int | None, attention_backend: str) -> None:
    """Raises UserError with all of `problems`. Every rank, before a model is built."""
    found = problems(config, longest=longest, attention_backend=attention_backend)
    if found:
        raise UserError('\n'.join(found))


def _window(config: Mapping[str, Any]) -> int | None:
    """Tokens that a layer looks back at most; None where each layer sees all of them."""
    text = text_config(dict(config))
    window, kinds = text.get('sliding_window'), text.get('layer_types')
    if kinds is not None:
        slides = 'sliding_attention' in kinds
    else:
        slides = bool(text.get('use_sliding_window', window is not None))
        first, layers = text.get('max_window_layers'), text.get('num_hidden_layers')  # layers below `first` see everything
        if slides and isinstance(first, int) and isinstance(layers, int):
            slides = first < layers
    return window if slides else None


def unknown_model(model: str, model_type: str | None, known: list[str]) -> UserError:
    """For a family that mcore-bridge has no conversion of."""
    hint = (' A Mistral without a sliding window is a Llama: with "model_type": "llama" and "architectures": ["LlamaForCausalLM"] in its config.json, and '
            '--model_type llama, it trains as one.') if model_type == 'mistral' else ''
    return UserError(f'{model}: mcore-bridge, which builds the Megatron model and converts its weights, does not know the family '
                     f'{model_type or "of this model"}. It knows {", ".join(known)}. Train it without --backend megatron.{hint}')
