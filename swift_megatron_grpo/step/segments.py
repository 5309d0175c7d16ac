"""Sums over the sequences of a flat token vector (import tier 1).

A flat vector holds the completion tokens of S sequences one after the other, in order and without padding; `ids_C` says to which
sequence each belongs. A sequence may have no token. All functions are pure, run where their tensors are, never wait for the device,
and may be called by any rank. On CUDA the order in which index_add adds may change the last bit of a sum.
"""
from __future__ import annotations

import torch


def segment_sum(values_C: torch.Tensor, ids_C: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """Sum of each sequence's values, [S]; 0 for a sequence without tokens. Differentiable."""
    return values_C.new_zeros(num_sequences).index_add(0, ids_C, values_C)


def segment_count(mask_C: torch.Tensor, ids_C: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """How many entries of the bool vector are true in each sequence, float32 [S]."""
    return segment_sum(mask_C.to(torch.float32), ids_C, num_sequences)


def segment_mean(values_C: torch.Tensor, mask_C: torch.Tensor, ids_C: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """Mean over the unmasked tokens of each sequence, [S]; 0 where there is none. Differentiable.

    Example: values [1, 3, 5], mask [1, 1, 0], ids [0, 0, 1], two sequences: [2, 0].
    """
    total_S = segment_sum(torch.where(mask_C, values_C, torch.zeros_like(values_C)), ids_C, num_sequences)
    return total_S / segment_count(mask_C, ids_C, num_sequences).clamp(min=1.0)


def segment_logsumexp(values_C: torch.Tensor, mask_C: torch.Tensor, ids_C: torch.Tensor, num_segments: int) -> torch.Tensor:
    """log(1 + sum of exp(values)) over the unmasked entries of each segment, [segments]; 0 where there is none.

    The 1 is the zero logit of losses such as REAL. Stable for large values: the maximum is taken out first.
    """
    masked_C = torch.where(mask_C, values_C, torch.full_like(values_C, float('-inf')))
    # The zero logit takes part in the maximum, so it is never below 0 and never -inf.
    peak = values_C.new_zeros(num_segments).scatter_reduce(0, ids_C, masked_C, reduce='amax', include_self=True)
    total = segment_sum(torch.exp(masked_C - peak[ids_C]), ids_C, num_segments) + torch.exp(-peak)
    return peak + torch.log(total)


def discounted_suffix_sum(values_C: torch.Tensor, ids_C: torch.Tensor, discount: float) -> torch.Tensor:
    """y_t = sum over u >= t of discount ** (u - t) * x_u, within each sequence; [C].

    Distances count the tokens of the flat vector. The tokens of a sequence must stand together. The window doubles from round to round
    (1, 2, 4, ... tokens), so a vector of C tokens takes log2(C) rounds and no [C, C] matrix.

    Example: values [1, 1, 1, 8], ids [0, 0, 0, 1], discount 0.5: [1.75, 1.5, 1, 8].
    """
    result_C = values_C.clone()
    reach = 1
    while reach < values_C.numel():
        same = ids_C[reach:] == ids_C[:-reach]
        added = torch.where(same, result_C[reach:], torch.zeros_like(result_C[reach:])) * discount**reach
        result_C = torch.cat([result_C[:-reach] + added, result_C[-reach:]])
        reach *= 2
    return result_C
