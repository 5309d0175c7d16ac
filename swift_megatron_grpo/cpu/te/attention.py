"""Attention, one sequence at a time (import tier 2: Megatron's gather, with context parallelism).

Nothing here sees all packed tokens at once. A sequence is attended in blocks of query rows, and a mask exists only where torch cannot
express what is allowed: at most QUERY_BLOCK rows by the keys that those rows can reach.
"""
import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from swift_megatron_grpo.cpu.te.base import EngineModule, refuse_options

QUERY_BLOCK = 512  # rows of a mask; a bound on memory, without influence on the result


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Which keys a query may see: position j by position i when i - left <= j <= i + right (a bound of -1 is none)."""
    left: int
    right: int

    @classmethod
    def of(cls, mask_type: str, window: tuple[int, int] | None) -> 'Rule':
        """From Transformer Engine's mask type and window_size. Example: 'padding_causal', (127, 0) -> left 127, right 0."""
        left, right = (-1, -1) if window is None else window
        return cls(left=left, right=0 if 'causal' in mask_type else right)

    def reach(self, first: int, last: int, keys: int) -> tuple[int, int]:
        """Half-open range of keys that queries first..last (inclusive) can see, of `keys` in all."""
        low = 0 if self.left < 0 else max(0, first - self.left)
        high = keys if self.right < 0 else min(keys, last + self.right + 1)
        return low, max(low, high)

    def allowed(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
        """(rows, keys) booleans, or None when everything is allowed. query, key: positions, int64."""
        rows, columns = query[:, None], key[None]
        mask = None
        if self.right >= 0 and int(key[-1]) > int(query[0]) + self.right:
            mask = columns <= rows + self.right
        if self.left >= 0 and int(key[0]) < int(query[-1]) - self.left:
            inside = columns >= rows - self.left
            mask = inside if mask is None else mask & inside
        return mask


@dataclass(kw_only=True, slots=True)
class Softmax:
    """How scores become probabilities: scale, dropout, and an extra logit a head that takes mass and gives nothing ('sink')."""
    scale: float
    dropout: float
    sink: torch.Tensor | None  # (heads,), fp32

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> torch.Tensor:
        """q (B, h, n, d), k (B, g, m, d), v (B, g, m, e) -> (B, h, n, e). mask: boolean (True = seen) or an additive bias."""
        if self.sink is None:
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=self.dropout, is_causal=causal, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1])
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        scores = (q @ k.transpose(-1, -2)).float() * self.scale
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        sink = self.sink.view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        share = torch.cat([scores, sink.to(scores.dtype)], -1).softmax(-1)[..., :-1]
        return F.dropout(share, self.dropout).to(v.dtype) @ v


def _rows_with_nothing(mask: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Zero the rows of `out` that may see no key at all (padding), so that neither a value nor a gradient is undefined."""
    return out * mask.any(-1, keepdim=True).to(out.dtype)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, start: int, rule: Rule, softmax: Softmax,
           hidden: torch.Tensor | None = None, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Attention of the queries at positions start, start+1, ... to keys at positions 0, 1, ... of the same sequence.

    q (B, h, n, d), k (B, g, m, d), v (B, g, m, e); h a multiple of g. hidden: booleans that broadcast to (B, h, n, m), True = not seen.
    bias: added to the scaled scores, broadcasts likewise. Returns (B, h, n, e). Pure.
    """
    n, m = q.shape[2], k.shape[2]
    sink = softmax.sink is not None
    plain = hidden is None and bias is None and not sink
    if plain and rule.left < 0 and (rule.right < 0 or (rule.right == 0 and start == 0 and n == m)):
        return softmax(q, k, v, None, rule.right == 0)
    parts = []
    for first in range(0, n, QUERY_BLOCK):
        last = min(first + QUERY_BLOCK, n) - 1
        rows = slice(first, last + 1)
        low, high = rule.reach(start + first, start + last, m)
        if high == low:
            parts.append(q.new_zeros(*q.shape[:2], last + 1 - first, v.shape[3]))
            continue
        mask = rule.allowed(torch.arange(start + first, start + last + 1), torch.arange(low, high))
        mask = None if mask is None else mask[None, None]
        if hidden is not None:
            seen = ~(hidden[..., low:high] if hidden.shape[-2] == 1 else hidden[..., rows, low:high])
            mask = seen if mask is None else mask & seen
        empty = mask is not None and not bool(mask.any(-1).all())
        usable = mask | ~mask.any(-1, keepdim=True) if empty else mask
        if bias is not None:
            added = bias[..., low:high] if bias.shape[-2] == 1 else bias[..., rows, low:high]
            usable = added if usable is None else added.masked_fill(~usable, -math.inf)
        part = softmax(q[:, :, rows], k[:, :, low:high], v[:, :, low:high], usable, False)
        parts.append(_rows_with_nothing(mask, part) if empty else part)
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """One sequence in the buffer: `size` tokens beginning at `offset`, of which the first `length` are real. Global (all CP ranks)."""
    offset: int
    size: int
    length: int


def segments_of(real: torch.Tensor, padded: torch.Tensor | None) -> list[Segment]:
    """From cu_seqlens (and cu_seqlens_padded). Example: [0, 3, 5], [0, 4, 8] -> (0, 4, 3), (4, 4, 2)."""
    ends = real.tolist()
    bounds = ends if padded is None else padded.tolist()
    return [
        Segment(offset=bounds[i], size=bounds[i + 1] - bounds[i], length=min(ends[i + 1] - ends[i], bounds[i + 1] - bounds[i]))
        for i in range(len(bounds) - 1)
    ]


class DotProductAttention(EngineModule):
    """Scaled dot-product attention with Transformer Engine's arguments: sbhd, bshd and thd, GQA, windows, context parallelism."""

    def __init__(self, num_attention_heads: int, kv_channels: int | tuple[int, int], num_gqa_groups: int | None = None,
                 attention_dropout: float = 0., qkv_format: str = 'sbhd', attn_mask_type: str = 'causal',
                 window_size: tuple[int, int] | None = None, sequence_parallel: bool = False, tp_size: int = 1,
                 get_rng_state_tracker: Callable[[], Any] | None = None, tp_group: Any = None, layer_number: int | None = None,
                 attention_type: str = 'self', cp_group: Any = None, cp_global_ranks: list[int] | None = None, cp_stream: Any = None,
                 cp_comm_type: str = 'p2p', softmax_scale: float | None = None, softmax_type: str = 'vanilla', **options: Any) -> None:
        super().__init__()
        refuse_options('DotProductAttention', options)
        self.qkv_format, self.attn_mask_type, self.window_size = qkv_format, attn_mask_type, window_size
        self.attention_dropout, self.attention_type = attention_dropout, attention_type
        self.get_rng_state_tracker = get_rng_state_tracker
        self.tp_group = tp_group
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
        key_channels = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self.softmax_scale = 1 / math.sqrt(key_channels) if softmax_scale is None else softmax_scale
        self.softmax_type = softmax_type
        heads = num_attention_heads // tp_size
        if softmax_type == 'learnable':
            self.softmax_offset = nn.Parameter(torch.zeros(heads, dtype=torch.float32))
        elif softmax_type == 'off-by-one':
            self.register_buffer('softmax_offset', torch.zeros(heads, dtype=torch.float32), persistent=False)
        elif softmax_type == 'vanilla':
            self.softmax_offset = None
        else:
            raise ValueError(f'softmax_type {softmax_type}: vanilla, off-by-one or learnable')

    # Megatron leaves this module out of a sharded checkpoint, so that it must have no `_extra_state` key to miss at load.
    get_extra_state, set_extra_state = nn.Module.get_extra_state, nn.Module.set_extra_state

    def set_context_parallel_group(self, cp_group: Any, cp_global_ranks: Any, cp_stream: Any, cp_comm_type: str = 'p2p') -> None:
        """Set or clear (None) the group. Keys and values are gathered whatever cp_comm_type says: the result is the same."""
        if isinstance(cp_group, (list, tuple)):
            raise NotImplementedError('CPU platform: no hierarchical context parallelism (cp_comm_type a2a+p2p); use p2p')
        self.cp_group, self.cp_comm_type = cp_group, cp_comm_type

    def forward(self, query_layer: torch.Tensor, key_layer: torch.Tensor, value_layer: torch.Tensor,
                attention_mask: torch.Tensor | None = None, qkv_format: str | None = None, cu_seqlens_q: torch.Tensor | None = None,
                cu_seqlens_kv: torch.Tensor | None = None, cu_seqlens_q_padded: torch.Tensor | None = None,
                cu_seqlens_kv_padded: torch.Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_kv: int | None = None,
                attn_mask_type: str | None = None, window_size: tuple[int, int] | None = None,
                core_attention_bias_type: str = 'no_bias', core_attention_bias: torch.Tensor | None = None,
                checkpoint_core_attention: bool = False, total_tokens: int | None = None, seq_idx: torch.Tensor | None = None,
                **options: Any) -> torch.Tensor:
        """sbhd: (S, B, h, d) -> (S, B, h*e); bshd: (B, S, ...); thd: (L, h, d) -> (L, h*e). Collective over the CP group.

        attention_mask (True = not seen) counts for the mask types 'arbitrary', 'padding' and 'padding_causal' outside thd, as in
        Transformer Engine. max_seqlen_*, total_tokens and seq_idx are hints for kernels.
        """
        refuse_options('DotProductAttention.forward', options)
        layout = qkv_format or self.qkv_format
        mask_type = attn_mask_type or self.attn_mask_type
        rule = Rule.of(mask_type, self.window_size if window_size is None else window_size)
        q, k, v = (x.unsqueeze(1) if layout == 'thd' else x.transpose(0, 1) if layout == 'bshd' else x
                   for x in (query_layer, key_layer, value_layer))
        dropout = self.attention_dropout if self.training else 0.
        softmax = Softmax(scale=self.softmax_scale, dropout=dropout, sink=self.softmax_offset)
        hidden = attention_mask if layout != 'thd' and mask_type in ('arbitrary', 'padding', 'padding_causal') else None
        fork = self.get_rng_state_tracker().fork() if dropout > 0 and self.get_rng_state_tracker is not None else contextlib.nullcontext()
        with fork:
            if layout == 'thd':
                queries = segments_of(cu_seqlens_q, cu_seqlens_q_padded)
                keys = segments_of(cu_seqlens_kv, cu_seqlens_kv_padded)
            else:
                queries, keys = ([Segment(offset=0, size=x.shape[0] * self._cp_size(), length=x.shape[0] * self._cp_size())]
                                 for x in (q, k))
            if self._cp_size() > 1:
                if hidden is not None or core_attention_bias is not None:
                    raise NotImplementedError('CPU platform: an explicit attention mask or bias with context parallelism; pack instead')
                out = self._over_ranks(q, k, v, queries, rule, softmax)
            else:
                out = self._on_one_rank(q, k, v, queries, keys, rule, softmax, hidden, core_attention_bias, 'bottom_right' in mask_type)
        out = out.flatten(2)
        return out.squeeze(1) if layout == 'thd' else out.transpose(0, 1) if layout == 'bshd' else out

    def _cp_size(self) -> int:
        return 1 if self.cp_group is None else self.cp_group.size()

    def _on_one_rank(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, queries: list[Segment], keys: list[Segment], rule: Rule,
                     softmax: Softmax, hidden: torch.Tensor | None, bias: torch.Tensor | None, bottom_right: bool) -> torch.Tensor:
        """q (L, B, h, d) -> (L, B, h, e), sequence by sequence."""
        parts = []
        for mine, theirs in zip(queries, keys, strict=True):
            rows, columns = (_heads_first(x[s.offset:s.offset + s.length]) for x, s in ((q, mine), (k, theirs)))
            values = _heads_first(v[theirs.offset:theirs.offset + theirs.length])
            start = theirs.length - mine.length if bottom_right else 0
            if mine.length:
                out = attend(rows, columns, values, start=start, rule=rule, softmax=softmax, hidden=hidden, bias=bias)
                parts.append(out.permute(2, 0, 1, 3))
            parts.append(_padding(q, v, mine.size - mine.length))
        parts.append(_padding(q, v, q.shape[0] - (queries[-1].offset + queries[-1].size)))
        return torch.cat(parts)

    def _over_ranks(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: list[Segment], rule: Rule,
                    softmax: Softmax) -> torch.Tensor:
        """The same with context parallelism: of 2*cp equal chunks of each sequence this rank holds chunk r and chunk 2*cp-1-r.

        Keys and values of all ranks are gathered; backward of the gather sums their gradients over the ranks.
        """
        from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region as gather
        cp, rank = self._cp_size(), self.cp_group.rank()
        every_k, every_v = (gather(x.contiguous(), True, group=self.cp_group).unflatten(0, (cp, -1)) for x in (k, v))
        parts = []
        for segment in segments:
            if segment.size % (2 * cp):
                raise ValueError(f'context parallel {cp}: a sequence of {segment.size} tokens is not a multiple of {2 * cp}')
            chunk, offset = segment.size // (2 * cp), segment.offset // cp
            whole_k, whole_v = (_heads_first(_unzigzag(x, offset, chunk)[:segment.length]) for x in (every_k, every_v))
            for half, index in enumerate((rank, 2 * cp - 1 - rank)):
                start = index * chunk
                real = max(0, min(chunk, segment.length - start))
                if real:
                    begin = offset + half * chunk
                    rows = _heads_first(q[begin:begin + real])
                    parts.append(attend(rows, whole_k, whole_v, start=start, rule=rule, softmax=softmax).permute(2, 0, 1, 3))
                parts.append(_padding(q, v, chunk - real))
        parts.append(_padding(q, v, q.shape[0] - (segments[-1].offset + segments[-1].size) // cp))
        return torch.cat(parts)


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """(n, B, h, d) -> (B, h, n, d)."""
    return x.permute(1, 2, 0, 3)


def _padding(q: torch.Tensor, v: torch.Tensor, rows: int) -> torch.Tensor:
    return q.new_zeros(rows, q.shape[1], q.shape[2], v.shape[3])


def _unzigzag(every: torch.Tensor, offset: int, chunk: int) -> torch.Tensor:
    """(cp, L, B, h, d) of all ranks -> one sequence in order, (2*cp*chunk, B, h, d)."""
    cp = every.shape[0]
    first = [every[r, offset:offset + chunk] for r in range(cp)]
    second = [every[r, offset + chunk:offset + 2 * chunk] for r in reversed(range(cp))]
    return torch.cat(first + second)
