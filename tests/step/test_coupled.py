"""What couples the sequences of a step: REAL's coefficients, the entropy quantile, covariance choices, shrinking denominators."""
import math
import sys

import pytest
import torch

from swift_megatron_grpo.step import coupled
from swift_megatron_grpo.step.coupled import (covariance_band, covariances, entropy_keep, highest_covariance, needs_step_pass,
                                              real_coefficients)
from swift_megatron_grpo.step.loss_config import LossConfig
from swift_megatron_grpo.step.segments import discounted_suffix_sum, segment_logsumexp, segment_mean
from tests.step.loss_reference import make_step, prepare


def test_segments_by_hand():
    values, ids = torch.tensor([1.0, 3.0, 5.0]), torch.tensor([0, 0, 2])
    assert segment_mean(values, torch.tensor([True, True, False]), ids, 3).tolist() == [2.0, 0.0, 0.0]
    assert discounted_suffix_sum(torch.tensor([1.0, 1.0, 1.0, 8.0]), torch.tensor([0, 0, 0, 1]), 0.5).tolist() == [1.75, 1.5, 1.0, 8.0]
    everything = torch.ones(3, dtype=torch.bool)
    assert segment_logsumexp(values, everything, ids, 3).tolist() == pytest.approx(
        [math.log(1 + math.e + math.exp(3)), 0.0, math.log(1 + math.exp(5))])
    assert segment_logsumexp(values * 100, everything, ids, 3).tolist() == pytest.approx([300.0, 0.0, 500.0])


def test_suffix_sum_of_a_long_sequence_equals_the_recurrence():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected, carry = [], 0.0
    for value in values.flip(0).tolist():
        carry = value + 0.97 * carry
        expected.append(carry)
    result = discounted_suffix_sum(values, torch.zeros(1000, dtype=torch.int64), 0.97)
    assert torch.allclose(result, torch.tensor(expected[::-1], dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_real_by_hand():
    """One token each, log-ratio 0, tau 0.5: both softmaxes over {0, zero logit} are 1/2, times 1/tau = 2."""
    coefficient_K, value = real_coefficients(0.5, torch.zeros(2), torch.tensor([1.0, -1.0]), torch.ones(2, dtype=torch.bool),
                                             torch.tensor([0, 1]), torch.tensor([7, 7]))
    assert coefficient_K.tolist() == [-1.0, 1.0]
    assert float(value) == pytest.approx(2 * math.log(2))


def test_real_groups_are_by_id_may_differ_in_size_and_be_of_one_kind():
    """Groups 3 (sequences 0, 2, 3) and 9 (sequences 1, 4, all positive); against the definition and autograd."""
    lengths_S, groups_S = torch.tensor([2, 1, 3, 2, 2]), torch.tensor([3, 9, 3, 3, 9])
    ids_K = torch.repeat_interleave(torch.arange(5), lengths_S)
    advantages_S = torch.tensor([1.0, 0.5, -1.0, -0.2, 0.5])
    log_ratio_K = torch.randn(10, generator=torch.Generator().manual_seed(3), dtype=torch.float64).requires_grad_()
    scores = [log_ratio_K[ids_K == s].mean() / 0.4 for s in range(5)]
    loss = (torch.log(1 + torch.exp(-scores[0])) + torch.log(1 + torch.exp(scores[2]) + torch.exp(scores[3]))) / 2
    loss.backward()
    coefficient_K, value = real_coefficients(0.4, log_ratio_K.detach(), advantages_S[ids_K], torch.ones(10, dtype=torch.bool), ids_K,
                                             groups_S)
    assert float(value) == pytest.approx(float(loss), rel=1e-9)
    assert torch.allclose(coefficient_K, log_ratio_K.grad, rtol=1e-6, atol=1e-9)
    assert coefficient_K[ids_K == 1].tolist() == [0.0]


def test_a_filtered_sequence_is_a_negative_of_score_zero_without_gradient():
    """As in ms-swift: positive kept with s = 0, positive filtered: log 2 from each side, gradient on the kept one alone."""
    coefficient_K, value = real_coefficients(0.5, torch.tensor([0.0, 3.0]), torch.tensor([1.0, 1.0]), torch.tensor([True, False]),
                                             torch.tensor([0, 1]), torch.tensor([0, 0]))
    assert coefficient_K.tolist() == [-1.0, 0.0]
    assert float(value) == pytest.approx(2 * math.log(2))


def test_real_gradient_is_bounded_far_from_the_old_policy():
    coefficient_K, value = real_coefficients(0.1, torch.tensor([-300.0, 300.0]), torch.tensor([1.0, -1.0]),
                                             torch.ones(2, dtype=torch.bool), torch.tensor([0, 1]), torch.tensor([0, 0]))
    assert coefficient_K.tolist() == pytest.approx([-10.0, 10.0])
    assert float(value) == pytest.approx(6000.0)


def test_entropy_quantile_by_hand():
    entropies_K = torch.tensor([5.0, 1.0, float('nan'), 4.0, 2.0, 3.0])
    keep_K, threshold = entropy_keep(entropies_K, 0.4)
    assert float(threshold) == pytest.approx(3.4)
    assert keep_K.tolist() == [True, False, False, True, False, False]
    assert entropy_keep(torch.empty(0), 0.4)[0].tolist() == []


@pytest.mark.parametrize('share', [0.0, 0.2, 0.37, 0.8, 0.999])
def test_the_quantile_of_a_step_too_large_for_torch_is_the_same(monkeypatch, share):
    entropies_K = torch.rand(501, generator=torch.Generator().manual_seed(2))
    entropies_K[7] = float('nan')
    keep_K, threshold = entropy_keep(entropies_K, share)
    monkeypatch.setattr(coupled, '_QUANTILE_LIMIT', 100)
    other_K, other = entropy_keep(entropies_K, share)
    assert float(other) == pytest.approx(float(threshold), abs=1e-7)
    assert (keep_K != other_K).sum() <= 1


def test_covariance_by_hand():
    """A = [1, 0, -1], log p = [0, -1, -2], one masked token: products [1, 0, 1]."""
    mask_K = torch.tensor([True, True, True, False])
    result = covariances(torch.tensor([0.0, -1.0, -2.0, -99.0]), torch.tensor([1.0, 0.0, -1.0, 50.0]), mask_K)
    assert result.tolist() == [1.0, 0.0, 1.0, -math.inf]


def test_kl_cov_takes_the_largest_and_of_equals_the_earlier():
    logprobs_K, advantages_K = torch.tensor([0.0, -1.0, -2.0, -9.0]), torch.tensor([1.0, 0.0, -1.0, 50.0])
    mask_K = torch.tensor([True, True, True, False])
    assert highest_covariance(logprobs_K, advantages_K, mask_K, 0.34).tolist() == [True, False, False, False]
    assert highest_covariance(logprobs_K, advantages_K, mask_K, 0.67).tolist() == [True, False, True, False]
    assert highest_covariance(logprobs_K, advantages_K, mask_K, 0.0001).sum() == 1  # at least one
    assert highest_covariance(logprobs_K, advantages_K, torch.zeros(4, dtype=torch.bool), 0.5).sum() == 0


def test_clip_cov_draws_from_its_band_and_the_draw_is_the_update_s():
    config = LossConfig(clip_cov_ratio=0.06, clip_cov_low=1.0, clip_cov_high=5.0)
    step = make_step(seed=4)
    new_K, advantages_K = step.new_K * 3, step.advantages_S[step.ids_K] * 3
    mask_K = torch.ones_like(new_K, dtype=torch.bool)

    def draw(seed, update, old_K=new_K):
        return covariance_band(config, new_K, old_K, advantages_K, mask_K, seed=seed, update=update)

    values_K = covariances(new_K, advantages_K, mask_K)
    band_K = (values_K > 1) & (values_K < 5)
    assert (int(band_K.sum()), len(new_K)) == (11, 66)
    assert int(draw(0, 0).sum()) == 3  # 0.06 of 66, rounded down
    assert not (draw(0, 0) & ~band_K).any()
    assert torch.equal(draw(0, 0), draw(0, 0))
    assert not torch.equal(draw(0, 0), draw(0, 1))
    assert not torch.equal(draw(0, 0), draw(1, 0))
    # Tokens that the ratio clip stops are no candidates: here all positive ones, with a ratio of e.
    stopped_K = advantages_K > 0
    assert not (draw(0, 0, new_K - 1.0) & stopped_K).any()
    assert int(draw(0, 0, new_K - 1.0).sum()) == min(3, int((band_K & ~stopped_K).sum()))


def test_clip_cov_and_the_entropy_quantile_meet_in_one_mask():
    step = make_step()
    _, entropy = prepare(LossConfig(top_entropy_quantile=0.5), step, False)
    _, both = prepare(LossConfig(top_entropy_quantile=0.5, clip_cov_ratio=0.1, clip_cov_low=0.0), step, False)
    assert not (both.keep_K & ~entropy.keep_K).any()
    assert int(entropy.keep_K.sum()) == 33
    assert int(both.keep_K.sum()) < 33
    assert float(both.metrics['clip_cov/selected_ratio']) == pytest.approx(6 / 66)


def test_bnpo_divides_by_what_the_off_policy_mask_leaves():
    step = make_step()
    _, plain = prepare(LossConfig(loss_type='bnpo'), step, True)
    _, masked = prepare(LossConfig(loss_type='bnpo', off_policy_sequence_mask_delta=0.05), step, True)
    assert float(plain.weights_K.max()) == pytest.approx(1 / 50)  # 66 tokens less 16 truncated
    assert torch.equal(masked.weights_K > 0, plain.weights_K > 0)
    assert 1 / float(masked.weights_K.max()) == pytest.approx(DROPPED_LEAVE, rel=1e-6)


DROPPED_LEAVE = 46  # sequences 1 (1 token) and 4 (3 tokens) drifted by more than 0.05 with a negative advantage


@pytest.mark.parametrize('arguments, on_policy, expected', [
    ({'loss_type': 'grpo', 'beta': 0.1}, True, False),
    ({'loss_type': 'grpo', 'beta': 0.1}, False, False),
    ({'loss_type': 'real'}, True, False),
    ({'loss_type': 'real'}, False, True),
    ({'loss_type': 'real', 'off_policy_sequence_mask_delta': 0.1}, True, True),
    ({'loss_type': 'real', 'top_entropy_quantile': 0.2}, True, False),
    ({'loss_type': 'bnpo', 'off_policy_sequence_mask_delta': 0.1}, True, True),
    ({'loss_type': 'grpo', 'off_policy_sequence_mask_delta': 0.1}, False, False),
    ({'loss_type': 'grpo', 'top_entropy_quantile': 0.2}, True, True),
    ({'loss_type': 'dapo', 'kl_cov_ratio': 0.01}, True, True),
    ({'loss_type': 'dapo', 'clip_cov_ratio': 0.01}, True, True),
    ({'loss_type': 'dapo', 'log_entropy': True}, True, False),
])
def test_who_needs_a_pass_over_the_step_first(arguments, on_policy, expected):
    assert needs_step_pass(LossConfig(**arguments), on_policy) is expected


def test_the_mathematics_loads_neither_swift_nor_megatron():
    import subprocess
    names = ', '.join(f'swift_megatron_grpo.step.{name}' for name in ('loss', 'weights', 'corrections', 'coupled', 'advantage', 'segments'))
    code = f'import {names}, sys; print([m for m in ("swift", "megatron", "vllm", "transformers") if m in sys.modules])'
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout.strip() == '[]'
