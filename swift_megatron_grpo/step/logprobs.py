"""Log-probabilities and entropies of completion tokens, vocabulary-parallel, in chunks (import tier 2: megatron for the output layer).

The model is asked for hidden states only; the output layer then runs over the C positions that predict a completion token, never over a
prompt. Chunk by chunk: logits -> float32 -> temperature -> log-probability and entropy, with one all-reduce of the maximum and one of
three sums. In training each chunk is recomputed in the backward pass (torch.utils.checkpoint), so at no time do more logits exist than
those of one chunk, and the gradient is written into that chunk's own buffer. New, old and reference passes all come through here: the
first importance ratio of a generation is 1 to the bit in float32.
"""
from __future__ import annotations

import torch
import torch.distributed as dist
from collections.abc import Callable
from torch.utils.checkpoint import checkpoint
from typing import Any

# About 64 Mi logits (256 MiB in float32) exist at once.
CHUNK_LOGITS = 2**26


def chunk_tokens(vocab_share: int) -> int:
    """How many positions the output layer sees at once, from this rank's share v of the vocabulary."""
    return max(64, min(8192, CHUNK_LOGITS // max(vocab_share, 1)))


class _VocabParallelLogProbs(torch.autograd.Function):
    """log softmax at the target, and entropy, from vocabulary-parallel logits [C, v]. The entropy carries no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_Cv: torch.Tensor,
        targets_C: torch.Tensor,
        temperature: float,
        vocab_start: int,
        vocab_size: int,
        group: dist.ProcessGroup | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scaled = logits_Cv.float()
        if scaled.data_ptr() == logits_Cv.data_ptr():
            scaled = scaled.clone()  # float32 model: the linear layer's output belongs to autograd
        if temperature != 1.0:
            scaled.div_(temperature)
        v = scaled.shape[-1]
        num_real = min(max(vocab_size - vocab_start, 0), v)
        if num_real < v:  # rows that only pad the vocabulary to a multiple of the tensor-parallel size carry no mass
            scaled[:, num_real:] = float('-inf')
        peak_C = scaled.max(dim=-1).values
        if group is not None:
            dist.all_reduce(peak_C, op=dist.ReduceOp.MAX, group=group)
        scaled.sub_(peak_C[:, None])
        local_C = targets_C - vocab_start
        mine_C = (local_C >= 0) & (local_C < v)
        local_C = local_C.clamp(0, v - 1)
        target_C = torch.where(mine_C, scaled.gather(-1, local_C[:, None])[:, 0], scaled.new_zeros(()))
        exp = scaled.exp()
        # exp * scaled is 0 * -inf for padding: leave padding out of the sum
        weighted_C = (exp[:, :num_real] * scaled[:, :num_real]).sum(-1)
        sums_3C = torch.stack([exp.sum(-1), target_C, weighted_C])
        if group is not None:
            dist.all_reduce(sums_3C, group=group)
        total_C, target_C, weighted_C = sums_3C
        log_total_C = total_C.log()
        probs = exp.div_(total_C[:, None])
        ctx.save_for_backward(probs, local_C, mine_C)
        ctx.temperature = temperature
        ctx.dtype = logits_Cv.dtype
        entropy_C = log_total_C - weighted_C / total_C
        ctx.mark_non_differentiable(entropy_C)
        return target_C - log_total_C, entropy_C

    @staticmethod
    def backward(ctx: Any, grad_C: torch.Tensor, _entropy: torch.Tensor | None) -> tuple[Any, ...]:
        probs, local_C, mine_C = ctx.saved_tensors
        grad = probs.mul_(-grad_C[:, None])  # in place: the probabilities are not needed again
        grad.scatter_add_(-1, local_C[:, None], torch.where(mine_C, grad_C, grad_C.new_zeros(()))[:, None])
        if ctx.temperature != 1.0:
            grad.div_(ctx.temperature)
        return grad.to(ctx.dtype), None, None, None, None, None


def vocab_parallel_logprobs(
    logits_Cv: torch.Tensor,
    targets_C: torch.Tensor,
    *,
    temperature: float = 1.0,
    vocab_start: int = 0,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target and entropy of each distribution.

    Args:
        logits_Cv: this rank's share of the logits, [C, v], any float dtype.
        targets_C: int64 token ids in the whole vocabulary, equal on all ranks of the group.
        temperature: the logits are divided by it, in float32.
        vocab_start: first token id of this rank's share.
        vocab_size: size V of the real vocabulary; shares may be padded beyond it.
        group: tensor-parallel group; None means the whole vocabulary is here. All its ranks must call (collective).

    Returns:
        (logprobs_C, entropies_C), float32, equal on all ranks of the group. Only the first carries a gradient.
    """
    return _VocabParallelLogProbs.apply(logits_Cv, targets_C, temperature, vocab_start, vocab_size, group)


def chunked_logprobs(
    output_layer: Callable[[torch.Tensor], torch.Tensor],
    hidden_Ch: torch.Tensor,
    targets_C: torch.Tensor,
    *,
    vocab_share: int,
    temperature: float,
    vocab_start: int,
    vocab_size: int,
    group: dist.ProcessGroup | None,
    draws: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`vocab_parallel_logprobs` of output_layer(hidden), a chunk of positions at a time.

    All ranks of the tensor-parallel group, collective, with equal C. Where a gradient is needed a chunk's logits are computed again in the
    backward pass instead of being kept. C may be 0: the result is then empty, and the caller keeps the graph alive.
    draws: the output layer draws random numbers (dropout of an adapter), and has to draw the same ones again.
    """

    def one_chunk(hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return vocab_parallel_logprobs(
            output_layer(hidden), targets, temperature=temperature, vocab_start=vocab_start, vocab_size=vocab_size, group=group)

    size = chunk_tokens(vocab_share)
    logprobs, entropies = [], []
    recompute = torch.is_grad_enabled()
    for start in range(0, targets_C.numel(), size):
        hidden, targets = hidden_Ch[start:start + size], targets_C[start:start + size]
        if recompute:
            chunk_logprobs, chunk_entropies = checkpoint(one_chunk, hidden, targets, use_reentrant=False, preserve_rng_state=draws)
        else:
            chunk_logprobs, chunk_entropies = one_chunk(hidden, targets)
        logprobs.append(chunk_logprobs)
        entropies.append(chunk_entropies.detach())
    if not logprobs:
        empty = hidden_Ch.new_zeros(0, dtype=torch.float32)
        return empty, empty
    return torch.cat(logprobs), torch.cat(entropies)
