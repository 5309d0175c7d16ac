"""Models that mcore-bridge would build otherwise than they are (import tier 0: reads a configuration object). docs/models.md lists them."""
from __future__ import annotations

from typing import Any

from .errors import UserError

# mcore-bridge hands the window of these families on to Megatron-Core; of all others it drops it.
_WINDOWS_KEPT = ('gpt_oss', 'gemma4', 'gemma4_unified', 'muse_glimmer', 'deepseek_v4', 'deepseek_v41')


def refuse_lost_windows(config: Any, longest: int | None) -> None:
    """Raises UserError for a model with sliding-window attention that would be trained without it. Pure.

    Args:
        config: transformers' configuration of the model.
        longest: tokens of the longest sequence of the run; None: no bound is known. A window that is never left changes nothing.
    """
    if config.model_type in _WINDOWS_KEPT:
        return
    text = config.get_text_config()
    window = getattr(text, 'sliding_window', None)
    kinds = getattr(text, 'layer_types', None)
    slides = 'sliding_attention' in kinds if kinds is not None else bool(getattr(text, 'use_sliding_window', window is not None))
    if not slides or window is None or (longest is not None and longest <= window):
        return
    raise UserError(f'{config.model_type}: attention of this model is limited to the last {window} tokens, and mcore-bridge would train it without that '
                    f'limit, on sequences of up to {longest or "any number of"} tokens. Keep max_length + max_completion_length within {window}, or '
                    'set use_sliding_window to false in its config.json, if it was trained so.')


def unknown_model(model: str, model_type: str | None, known: list[str]) -> UserError:
    """For a family that mcore-bridge has no conversion of."""
    return UserError(f'{model}: mcore-bridge, which builds the Megatron model and converts its weights, does not know the family '
                     f'{model_type or "of this model"}. It knows {", ".join(known)}. Train it without --backend megatron.')
