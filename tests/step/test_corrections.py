"""Rollout corrections: each mode on four numbers, the off-policy mask, and metrics as sums."""
import math

import pytest
import torch

from swift_megatron_grpo.step.corrections import add_offpolicy_metrics, finish_metrics, keep_sequences, maximum_over, rollout_weights
from swift_megatron_grpo.step.loss import policy_loss
from swift_megatron_grpo.step.loss_config import LossConfig
from swift_megatron_grpo.types import LossInputs, Sums

LOG_RHO = torch.tensor([1.0, 4.0, 1.0, 2.0]).log()  # two sequences of two tokens, geometric means 2 and sqrt(2)
IDS = torch.tensor([0, 0, 1, 1])
ALL = torch.ones(4, dtype=torch.bool)


@pytest.mark.parametrize('mode, threshold, expected, cut, of', [
    ('token_truncate', 3.0, [1, 3, 1, 2], 1, 4),
    ('token_mask', 3.0, [1, 0, 1, 2], 1, 4),
    ('token_mask', 0.5, [0, 0, 0, 0], 4, 4),
    ('sequence_truncate', 1.5, [1.5, 1.5, math.sqrt(2), math.sqrt(2)], 1, 2),
    ('sequence_truncate', 3.0, [2, 2, math.sqrt(2), math.sqrt(2)], 0, 2),
    ('sequence_mask', 1.5, [0, 0, 1, 2], 1, 2),
    ('sequence_mask', 1.0, [0, 0, 0, 0], 2, 2),
])
def test_each_mode_on_four_ratios(mode, threshold, expected, cut, of):
    weights_C, clipped, total = rollout_weights(mode, threshold, LOG_RHO, ALL, IDS, 2)
    assert weights_C.tolist() == pytest.approx(expected)
    assert (float(clipped), float(total)) == (cut, of)


def test_a_masked_token_does_not_count_in_the_geometric_mean():
    weights_C, _, total = rollout_weights('sequence_truncate', 9.0, LOG_RHO, torch.tensor([True, False, False, False]), IDS, 3)
    assert weights_C.tolist() == pytest.approx([1, 1, 1, 1])
    assert float(total) == 1


@pytest.mark.parametrize('delta, advantages, expected', [
    (0.2, [-1.0, -1.0], [False, True]),  # drifts 0.3 and 0.1
    (0.05, [-1.0, -1.0], [False, False]),
    (0.2, [1.0, -1.0], [True, True]),
    (0.2, [0.0, -1.0], [True, True]),
])
def test_a_sequence_is_dropped_for_drift_and_a_negative_advantage_together(delta, advantages, expected):
    new_C, behaviour_C = torch.tensor([-1.0, -1.0, -1.0, -1.0]), torch.tensor([-0.9, -0.5, -1.0, -0.8])
    keep_S = keep_sequences(delta, new_C, behaviour_C, torch.tensor(advantages)[IDS], ALL, IDS, 2)
    assert keep_S.tolist() == expected


def test_a_dropped_sequence_keeps_its_place_in_the_mean():
    """Two sequences of one token, weights 1/2: the second drifts by 1 and has a negative advantage."""

    def loss(delta):
        inputs = LossInputs(
            new_logprobs_C=torch.tensor([-1.0, -2.0], requires_grad=True), old_logprobs_C=torch.tensor([-1.0, -1.0]),
            advantages_C=torch.tensor([1.0, -1.0]), weights_C=torch.tensor([0.5, 0.5]), sequence_ids_C=torch.tensor([0, 1]),
            num_sequences=2)
        return float(policy_loss(LossConfig(off_policy_sequence_mask_delta=delta), inputs)[0])

    assert loss(None) == pytest.approx(-0.5 + 0.5 * 0.8)  # ratio exp(-1) is clipped to 0.8
    assert loss(0.5) == pytest.approx(-0.5)


def test_off_policy_metrics_of_two_sequences_and_an_empty_one():
    old_C, rollout_C = torch.tensor([-1.0, -1.0, -2.0]), torch.tensor([-1.0, -1.5, -1.0])
    sums = Sums()
    add_offpolicy_metrics(old_C, rollout_C, ALL[:3], torch.tensor([0, 0, 1]), 3, sums)
    means = {name.split('/')[1]: float(total / count) for name, (total, count) in sums.means.items()}
    assert means['kl'] == pytest.approx((0 - 0.5 + 1) / 3)
    assert means['k3_kl'] == pytest.approx((0 + math.exp(0.5) - 0.5 - 1 + math.exp(-1) + 1 - 1) / 3)
    assert means['training_ppl'] == pytest.approx((math.e + math.e**2) / 2)
    assert means['rollout_log_ppl'] == pytest.approx((1.25 + 1.0) / 2)
    assert means['log_ppl_diff'] == pytest.approx((-0.25 + 1.0) / 2)
    assert means['log_ppl_abs_diff'] == pytest.approx((0.25 + 1.0) / 2)
    assert means['ppl_ratio'] == pytest.approx((math.exp(-0.25) + math.exp(1.0)) / 2)
    assert means['chi2_token'] == pytest.approx((1 + math.exp(1) + math.exp(-2)) / 3 - 1)
    assert means['chi2_seq'] == pytest.approx((math.exp(0.5) + math.exp(-2)) / 2 - 1)
    assert float(sums.maxima['rollout_correction/log_ppl_diff_max']) == pytest.approx(1.0)
    assert -float(sums.maxima['rollout_correction/log_ppl_diff_min']) == pytest.approx(-0.25)


def test_effective_sample_size_of_the_step_from_two_micro_batches():
    """Weights 1 | 1, 2 with threshold 4: E[w] = 4/3, E[w^2] = 2, ess = 16/18."""
    config = LossConfig(rollout_importance_sampling_mode='token_truncate', rollout_importance_sampling_threshold=4.0)
    sums = Sums()
    for ratios in ([1.0], [1.0, 2.0]):
        log_rho_C = torch.tensor(ratios).log()
        zeros_C = torch.zeros_like(log_rho_C)
        inputs = LossInputs(
            new_logprobs_C=log_rho_C, old_logprobs_C=log_rho_C, advantages_C=zeros_C, weights_C=zeros_C + 1,
            sequence_ids_C=zeros_C.long(), num_sequences=1, rollout_logprobs_C=zeros_C)
        for name, (total, count) in policy_loss(config, inputs)[1].means.items():
            sums.add(name, total, count)
    metrics = finish_metrics({name: float(total / count) for name, (total, count) in sums.means.items()})
    assert metrics['rollout_correction/ess'] == pytest.approx(16 / 18)
    assert metrics['rollout_correction/is_weight_mean'] == pytest.approx(4 / 3)
    assert not [name for name in metrics if '_ess' in name]


def test_without_rollout_logprobs_there_is_no_correction_and_no_metric():
    config = LossConfig(rollout_importance_sampling_mode='token_truncate', log_rollout_offpolicy_metrics=True)
    inputs = LossInputs(new_logprobs_C=torch.tensor([-1.0]), old_logprobs_C=torch.tensor([-1.0]), advantages_C=torch.tensor([2.0]),
                        weights_C=torch.tensor([1.0]), sequence_ids_C=torch.tensor([0]), num_sequences=1)
    loss, sums = policy_loss(config, inputs)
    assert float(loss) == -2.0
    assert not [name for name in sums.means if name.startswith('rollout_correction')]


def test_the_largest_of_nothing_is_minus_infinity():
    assert float(maximum_over(torch.tensor([3.0]), torch.tensor([False]))) == -math.inf
    assert float(maximum_over(torch.empty(0), torch.empty(0, dtype=torch.bool))) == -math.inf
