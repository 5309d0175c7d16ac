"""The attention stand-in against a reference written out in full, and what it costs in memory."""
import math

import pytest
import torch
import torch.nn.functional as F

from swift_megatron_grpo.cpu.te import attention
from swift_megatron_grpo.cpu.te.attention import DotProductAttention, Rule, segments_of


def full(q, k, v, allowed, scale, sink=None):
    """(n, h, d), (m, g, d), (m, g, e), booleans (n, m) -> (n, h, e): softmax over all keys, everything else at minus infinity."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum('nhd,mhd->hnm', q, k) * scale
    scores = scores.masked_fill(~allowed, -math.inf)
    if sink is not None:
        scores = torch.cat([scores, sink[:, None, None].expand(-1, q.shape[0], 1)], -1)
    share = scores.softmax(-1)[..., :k.shape[0]]
    return torch.einsum('hnm,mhe->nhe', share, v)


def causal(n, window=None):
    query, key = torch.arange(n)[:, None], torch.arange(n)[None]
    mask = key <= query
    return mask if window is None else mask & (key >= query - window)


def tensors(length, heads=4, groups=2, dk=8, dv=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, n, d, generator=generator, requires_grad=True) for n, d in ((heads, dk), (groups, dk), (groups, dv))]


def build(heads=4, groups=2, dk=8, dv=None, **options):
    return DotProductAttention(heads, dk if dv is None else (dk, dv), num_gqa_groups=groups, **options)


def packed(module, q, k, v, lengths, padded=None, **options):
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    cu_padded = None if padded is None else torch.tensor([0, *padded]).cumsum(0).int()
    return module(q, k, v, qkv_format='thd', attn_mask_type=options.pop('attn_mask_type', 'padding_causal'), cu_seqlens_q=cu,
                  cu_seqlens_kv=cu, cu_seqlens_q_padded=cu_padded, cu_seqlens_kv_padded=cu_padded, **options)


@pytest.mark.parametrize('window', [None, 3])
@pytest.mark.parametrize('dv', [8, 5], ids=['equal', 'other-value-width'])
def test_packed_sequences_see_only_themselves_and_gradients_agree(window, dv, monkeypatch):
    monkeypatch.setattr(attention, 'QUERY_BLOCK', 4)
    lengths = [5, 1, 9]
    q, k, v = tensors(15, dv=dv)
    module = build(dv=dv, window_size=None if window is None else (window, 0))
    out = packed(module, q, k, v, lengths)
    weights = torch.randn(15, 4 * dv, generator=torch.Generator().manual_seed(9))
    gradients = torch.autograd.grad((out * weights).sum(), (q, k, v))
    parts, start = [], 0
    for n in lengths:
        rows = slice(start, start + n)
        parts.append(full(q[rows], k[rows], v[rows], causal(n, window), 8**-0.5))
        start += n
    expected = torch.cat(parts).flatten(1)
    wanted = torch.autograd.grad((expected * weights).sum(), (q, k, v))
    assert torch.allclose(out, expected, atol=1e-6)
    for mine, theirs in zip(gradients, wanted, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)


def test_one_packed_sequence_equals_the_same_row_unpacked():
    q, k, v = tensors(7)
    module = build()
    row = module(q[:, None], k[:, None], v[:, None], qkv_format='sbhd', attn_mask_type='causal')
    assert torch.equal(packed(module, q, k, v, [7]), row[:, 0])
    other = module(q[None], k[None], v[None], qkv_format='bshd', attn_mask_type='causal')
    assert torch.equal(other[0], row[:, 0])


def test_padding_inside_and_behind_the_buffer_gives_zeros_and_no_gradient():
    q, k, v = tensors(12)
    out = packed(build(), q, k, v, [3, 2], padded=[4, 4])
    assert torch.equal(out[[3, 6, 7, 8, 9, 10, 11]], torch.zeros(7, 32))
    assert torch.allclose(out[:3], full(q[:3], k[:3], v[:3], causal(3), 8**-0.5).flatten(1), atol=1e-6)
    assert torch.allclose(out[4:6], full(q[4:6], k[4:6], v[4:6], causal(2), 8**-0.5).flatten(1), atol=1e-6)
    gradient, = torch.autograd.grad(out.square().sum(), k)
    assert gradient[[3, 6, 7, 8, 9, 10, 11]].abs().max().item() == 0
    # Without a causal rule the padded keys of the first sequence must still be invisible to its real rows.
    two_way = packed(build(), q, k, v, [3, 2], padded=[4, 4], attn_mask_type='padding')
    everything = torch.ones(3, 3, dtype=torch.bool)
    assert torch.allclose(two_way[:3], full(q[:3], k[:3], v[:3], everything, 8**-0.5).flatten(1), atol=1e-6)


def test_softmax_scale_is_used_as_given():
    q, k, v = tensors(4)
    out = packed(build(softmax_scale=0.5), q, k, v, [4])
    assert torch.allclose(out, full(q, k, v, causal(4), 0.5).flatten(1), atol=1e-6)


@pytest.mark.parametrize('kind', ['learnable', 'off-by-one'])
def test_a_sink_takes_its_share_of_the_softmax(kind):
    q, k, v = tensors(6)
    module = build(softmax_type=kind)
    sink = torch.tensor([0.3, -1., 2., 0.]) if kind == 'learnable' else torch.zeros(4)
    if kind == 'learnable':
        module.softmax_offset.data.copy_(sink)
    assert sorted(module.state_dict()) == (['softmax_offset'] if kind == 'learnable' else [])
    out = packed(module, q, k, v, [6])
    assert torch.allclose(out, full(q, k, v, causal(6), 8**-0.5, sink).flatten(1), atol=1e-6)
    assert not torch.allclose(out, full(q, k, v, causal(6), 8**-0.5).flatten(1), atol=1e-2)


def test_an_arbitrary_mask_hides_what_is_true_and_a_row_without_keys_is_zero():
    q, k, v = (x[:, None] for x in tensors(4))
    hidden = torch.zeros(1, 1, 4, 4, dtype=torch.bool)
    hidden[..., 0, 1] = True
    hidden[..., 2, :] = True
    out = build()(q, k, v, attention_mask=hidden, attn_mask_type='arbitrary')
    expected = full(q[:, 0], k[:, 0], v[:, 0], ~hidden[0, 0] | (torch.arange(4) == 2)[:, None], 8**-0.5).flatten(1)
    expected[2] = 0
    assert torch.allclose(out[:, 0], expected, atol=1e-6)
    assert torch.isfinite(torch.autograd.grad(out.sum(), q)[0]).all()
    # A causal mask type does not look at the mask, as Transformer Engine does not.
    assert torch.equal(build()(q, k, v, attention_mask=hidden, attn_mask_type='causal'), build()(q, k, v, attn_mask_type='causal'))


def test_bottom_right_alignment_puts_the_last_query_at_the_last_key():
    q, k, v = tensors(6)
    out = build()(q[4:, None], k[:, None], v[:, None], attn_mask_type='causal_bottom_right')
    assert torch.allclose(out[:, 0], full(q, k, v, causal(6), 8**-0.5)[4:].flatten(1), atol=1e-6)


def test_a_bias_is_added_to_the_scaled_scores():
    q, k, v = tensors(5)
    bias = torch.randn(1, 4, 5, 5, generator=torch.Generator().manual_seed(1))
    out = build()(q[:, None], k[:, None], v[:, None], attn_mask_type='no_mask', core_attention_bias_type='post_scale_bias',
                  core_attention_bias=bias)
    k2, v2 = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    share = (torch.einsum('nhd,mhd->hnm', q, k2) * 8**-0.5 + bias[0]).softmax(-1)
    assert torch.allclose(out[:, 0], torch.einsum('hnm,mhd->nhd', share, v2).flatten(1), atol=1e-6)


def test_dropout_draws_from_the_tracker_and_only_in_training():
    from swift_megatron_grpo.cpu.te.rng import CudaRNGStatesTracker
    tracker = CudaRNGStatesTracker()
    tracker.add('model-parallel-rng', 5)
    q, k, v = tensors(64)
    module = build(attention_dropout=0.5, get_rng_state_tracker=lambda: tracker)
    outside = torch.get_rng_state()
    first, second = (packed(module, q, k, v, [64]) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), outside)
    assert not torch.equal(first, second)
    tracker.reset()
    tracker.add('model-parallel-rng', 5)
    assert torch.equal(packed(module, q, k, v, [64]), first)
    module.eval()
    assert torch.allclose(packed(module, q, k, v, [64]), full(q, k, v, causal(64), 8**-0.5).flatten(1), atol=1e-6)


def test_memory_grows_with_the_longest_sequence_and_never_with_all_packed_tokens(monkeypatch):
    """40 sequences of 50 tokens: a mask over all of them would have 4,000,000 entries."""
    masks, scores = [], []
    original = F.scaled_dot_product_attention

    def watched(q, k, v, attn_mask=None, **options):
        masks.append(0 if attn_mask is None else attn_mask.numel())
        scores.append(q.shape[2] * k.shape[2])
        return original(q, k, v, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, 'scaled_dot_product_attention', watched)
    q, k, v = tensors(2000)
    packed(build(), q, k, v, [50] * 40)
    assert (len(scores), max(scores), sum(scores), max(masks)) == (40, 2500, 100_000, 0)
    # A window of 7 back over 2,000 tokens, in blocks of 512 rows: a mask holds 512 rows by the 519 keys that they reach.
    masks.clear(), scores.clear()
    packed(build(window_size=(7, 0)), q, k, v, [2000])
    assert max(masks) == 512 * 519 and len(masks) == 4


@pytest.mark.parametrize('rule, first, last, keys, expected', [
    (Rule.of('causal', None), 4, 7, 20, (0, 8)),
    (Rule.of('padding_causal', (3, 0)), 4, 7, 20, (1, 8)),
    (Rule.of('no_mask', (2, 2)), 4, 7, 20, (2, 10)),
    (Rule.of('no_mask', None), 4, 7, 20, (0, 20)),
    (Rule.of('causal', (-1, -1)), 18, 25, 20, (0, 20)),
])
def test_the_keys_that_a_block_reaches(rule, first, last, keys, expected):
    assert rule.reach(first, last, keys) == expected


def test_segments_carry_the_padded_place_and_the_real_length():
    found = segments_of(torch.tensor([0, 3, 5]), torch.tensor([0, 4, 8]))
    assert [(s.offset, s.size, s.length) for s in found] == [(0, 4, 3), (4, 4, 2)]


@pytest.mark.parametrize('options, message', [({'return_max_logit': True}, 'return_max_logit'),
                                              ({'softmax_type': 'odd'}, 'softmax_type odd')])
def test_what_has_no_stand_in_is_refused_by_name(options, message):
    with pytest.raises((NotImplementedError, ValueError), match=message):
        build(**options)


def test_an_unknown_call_option_is_not_passed_over():
    q, k, v = (x[:, None] for x in tensors(4))
    with pytest.raises(NotImplementedError, match='alibi_slopes'):
        build()(q, k, v, alibi_slopes=torch.ones(4))
