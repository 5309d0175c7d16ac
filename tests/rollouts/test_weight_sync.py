"""Buckets and checksums of weight sync, by hand; the engines themselves are in test_colocate.py and test_server_mode.py."""
from typing import Any

import pytest
import torch

from swift_megatron_grpo.engines.base import buckets
from swift_megatron_grpo.engines.checksums import Checksum, differences, expected
from swift_megatron_grpo.engines.vllm_names import holder_of


def weights(*sizes: int) -> list[tuple[str, torch.Tensor]]:
    return [(f'w{i}', torch.full((size, ), float(i))) for i, size in enumerate(sizes)]


@pytest.mark.parametrize('max_bytes, counts', [
    (1, [1, 1, 1, 1, 1]),  # one tensor each
    (12 * 4, [3, 1, 1]),  # 4 + 4 + 4 elements; 9 has no room beside another; a tensor larger than a bucket has one of its own
    (10**9, [5]),
])
def test_as_many_buckets_as_planned_and_the_same_weights(max_bytes: int, counts: list[int]) -> None:
    sent = weights(4, 4, 4, 9, 20)
    lists = list(buckets(iter(sent), max_bytes))
    assert [len(bucket) for bucket in lists] == counts
    assert [name for bucket in lists for name, _ in bucket] == ['w0', 'w1', 'w2', 'w3', 'w4']
    assert all(torch.equal(tensor, dict(sent)[name]) for bucket in lists for name, tensor in bucket)


def checksum(*values: float) -> Checksum:
    return Checksum.of(torch.tensor(values))


def test_a_checksum_by_hand() -> None:
    assert checksum(1.0, -2.0, 3.0) == Checksum(numel=3, absolute=6.0, signed=2.0)


def test_what_ranks_should_hold_together() -> None:
    q, k, v = checksum(1.0, 2.0, 3.0, 4.0), checksum(5.0, -5.0), checksum(7.0, 7.0)
    fused = {'q_proj': q, 'k_proj': k, 'v_proj': v}
    assert expected(fused, 8, 2) == Checksum(numel=8, absolute=34.0, signed=24.0)  # split over two ranks
    assert expected(fused, 16, 2) == Checksum(numel=16, absolute=68.0, signed=48.0)  # repeated on both
    assert expected(fused, 12, 2) == Checksum(numel=12, absolute=58.0, signed=38.0)  # key-value heads on both: 10 + 2 x (10 + 14)
    assert expected(fused, 11, 2) is None
    assert expected({'model.embed_tokens.weight': q}, 6, 1) == q  # a vocabulary filled up with zeros
    assert expected({'norm': q}, 6, 1) is None
    assert expected({'model.layers.0.mlp.experts.down_proj_bias': q}, 8, 2) == Checksum(numel=8, absolute=10.0, signed=10.0)  # zeros on the second


def test_a_weight_that_did_not_arrive_is_named() -> None:
    sent = {'a.q_proj': checksum(1.0, 2.0), 'a.k_proj': checksum(3.0), 'a.v_proj': checksum(4.0), 'norm': checksum(1.0), 'extra': checksum(9.0)}
    held = {'a.qkv_proj': checksum(1.0, 2.0, 3.0, 4.5), 'norm': checksum(1.0)}
    wrong, uncovered = differences(sent, held, 1, lambda name: 'a.qkv_proj' if name.startswith('a.') else name)
    assert wrong == [('a.qkv_proj', 'sum of absolute values 10.5 instead of 10, sum 10.5 instead of 10')]
    assert uncovered == ['extra']


def test_a_changed_sign_is_found() -> None:
    wrong, _ = differences({'w': checksum(1.0, 2.0)}, {'w': checksum(-1.0, 2.0)}, 1, str)
    assert [name for name, _ in wrong] == ['w']


class Model:
    packed_modules_mapping = {'qkv_proj': ['q_proj', 'k_proj', 'v_proj']}

    class hf_to_vllm_mapper:

        @staticmethod
        def apply_list(names: list[str]) -> list[str]:
            return [name.replace('.down_proj_bias', '.w2_bias') for name in names]


@pytest.mark.parametrize('name, holder', [
    ('m.0.attn.k_proj.weight', 'm.0.attn.qkv_proj.weight'),
    ('m.1.attn.v_proj.weight', 'm.1.attn.qkv_proj.base_layer.weight'),
    ('m.0.mlp.up_proj.weight', 'm.0.mlp.gate_up_proj.weight'),
    ('m.0.mlp.experts.3.up_proj.weight', 'm.0.mlp.experts.routed.w13_weight'),
    ('m.0.mlp.experts.3.down_proj.weight', 'm.0.mlp.experts.routed.w2_weight'),
    ('m.0.mlp.experts.down_proj_bias', 'm.0.mlp.experts.routed.w2_bias'),  # all experts in one
    ('m.0.norm.weight', 'm.0.norm.weight'),
    ('unknown.weight', 'unknown.weight'),
])
def test_who_holds_a_weight(name: str, holder: str) -> None:
    parameters = ['m.0.attn.qkv_proj.weight', 'm.1.attn.qkv_proj.base_layer.weight', 'm.0.mlp.gate_up_proj.weight',
                  'm.0.mlp.experts.routed.w13_weight', 'm.0.mlp.experts.routed.w2_weight', 'm.0.mlp.experts.routed.w2_bias', 'm.0.norm.weight']
    assert holder_of(name, Model(), parameters) == holder


def test_a_checksum_of_a_large_weight_needs_little_memory_and_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    from swift_megatron_grpo.engines import checksums
    largest = 0

    class Watch(TorchDispatchMode):

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
                largest = max(largest, result.numel())
            return result

    weight = torch.randn(40, 7, generator=torch.Generator().manual_seed(0)).bfloat16()
    monkeypatch.setattr(checksums, '_CHUNK', 16)
    for tensor in (weight, weight.t()):
        with Watch():
            found = Checksum.of(tensor)
        assert found.numel == 280 and found.equals(Checksum(numel=280, absolute=float(weight.double().abs().sum()),
                                                            signed=float(weight.double().sum())))
    assert 0 < largest <= 16
