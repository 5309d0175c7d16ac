"""Weights of the completion tokens, fixed before the optimizer step begins (import tier 1: torch).

The loss of a micro-batch is the sum of weight * objective over its tokens. The weights come from counts over the whole optimizer step,
so it cannot matter how the tokens are spread over micro-batches and ranks.
"""
from __future__ import annotations

import torch

from .loss import resolve_loss


def token_weights(loss_type: str,
                  *,
                  lengths_S: torch.Tensor,
                  truncated_S: torch.Tensor,
                  overlong_filter: bool,
                  max_completion_length: int) -> torch.Tensor:
    """Weight of each of the K completion tokens of one optimizer step, float32 [K], on the device of `lengths_S`.

    Pure, no communication; every rank that passes the same counts gets the same weights. Rules, by the loss's `weighting`:

    | weighting | weight of an unmasked token | losses |
    |---|---|---|
    | sequence_mean | 1 / (S * own length) | grpo, sapo, gmpo |
    | sequence_sum | 1 / S | luspo (the length times the sequence mean) |
    | unmasked_token_mean | 1 / (unmasked tokens of the step) | bnpo, real (its KL term) |
    | token_mean | 1 / (all completion tokens of the step) | dapo, cispo, fipo |
    | max_length | 1 / (S * max_completion_length) | dr_grpo |

    With `overlong_filter` the tokens of truncated sequences weigh 0. As in ms-swift's trainer, only unmasked_token_mean divides by
    less then: S counts every sequence, also empty and truncated ones, and token_mean counts tokens before the filter. Where nothing is
    left all weights are 0, never NaN. ms-swift's trainer takes the tokens of a whole generation in token_mean, which makes the loss of each
    of n optimizer steps a generation n times smaller; here they are those of the step.

    Args:
        lengths_S: int64, completion tokens of each sequence of the step; 0 is allowed.
        truncated_S: bool, sequence stopped at the length limit.
        max_completion_length: tokens; used by max_length only.

    Example: grpo, lengths [3, 1]: [1/6, 1/6, 1/6, 1/2].
    """
    device = lengths_S.device
    weighting = resolve_loss(loss_type).weighting
    num_sequences = max(lengths_S.numel(), 1)
    sequence_of_token_K = torch.repeat_interleave(torch.arange(lengths_S.numel(), device=device), lengths_S)
    unmasked_S = ~truncated_S if overlong_filter else torch.ones_like(truncated_S)
    lengths_S = lengths_S.to(torch.float64)
    ones_S = torch.ones_like(lengths_S)

    if weighting == 'sequence_mean':
        weights_S = 1.0 / (num_sequences * lengths_S.clamp(min=1.0))
    elif weighting == 'sequence_sum':
        weights_S = ones_S / num_sequences
    elif weighting == 'unmasked_token_mean':
        weights_S = ones_S / (lengths_S * unmasked_S).sum().clamp(min=1.0)
    elif weighting == 'token_mean':
        weights_S = ones_S / lengths_S.sum().clamp(min=1.0)
    else:
        assert weighting == 'max_length', weighting
        weights_S = ones_S / (num_sequences * max_completion_length)
    return (weights_S * unmasked_S)[sequence_of_token_K].to(torch.float32)


def distillation_weights(lengths_S: torch.Tensor, truncated_S: torch.Tensor, *, overlong_filter: bool) -> torch.Tensor:
    """Weight of each token in the distillation term of SDAR, float32 [K]: 1 / (unmasked tokens of the step), whatever the policy loss is."""
    return token_weights('bnpo', lengths_S=lengths_S, truncated_S=truncated_S, overlong_filter=overlong_filter, max_completion_length=1)
