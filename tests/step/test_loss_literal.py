"""The losses that ms-swift does not have, on numbers that can be checked by hand; and what all losses promise."""
import math

import pytest
import torch

from swift_megatron_grpo.step.loss import LOSSES, kl_k3, policy_loss
from swift_megatron_grpo.step.loss_config import LEVELS, LossConfig
from swift_megatron_grpo.types import LossInputs
from tests.step.loss_reference import SPLITS, make_step, our_loss


def run(config, ratios, advantages, weights, ids, **more):
    """Loss and gradient for the log-probabilities, with old log-probabilities of -1."""
    new_C = torch.tensor(ratios).log() - 1.0
    new_C.requires_grad_()
    inputs = LossInputs(new_logprobs_C=new_C, old_logprobs_C=torch.full_like(new_C, -1.0), advantages_C=torch.tensor(advantages),
                        weights_C=torch.tensor(weights), sequence_ids_C=torch.tensor(ids), num_sequences=max(ids) + 1, **more)
    loss, sums = policy_loss(config, inputs)
    loss.backward()
    return float(loss), new_C.grad.tolist(), {name: float(total / count) for name, (total, count) in sums.means.items()}


def test_luspo_is_the_sequence_ratio_times_the_length():
    """Sequence ratios 1.1 (two tokens) and 2 (one token, clipped to 1.2): -(2 * 1.1 * 1 + 1 * 1.2 * 1) / 2."""
    config = LossConfig(loss_type='luspo', importance_sampling_level='sequence')
    loss, gradient, _ = run(config, [1.21, 1.0, 2.0], [1.0, 1.0, 1.0], [0.5, 0.5, 0.5], [0, 0, 1])
    assert loss == pytest.approx(-(2 * 1.1 + 1.2) / 2)
    assert gradient == pytest.approx([-0.55, -0.55, 0.0])  # d(2 * r)/d log p_t = 2 * r / 2 for each of the two tokens, halved


def test_gmpo_is_the_geometric_mean_of_ratios_bounded_in_the_direction_that_helps():
    """eps 0.4: log-ratios 1 and -1 with A = 1 become 0.4 and -1; with A = -1 they become 1 and -0.4."""
    config = LossConfig(loss_type='gmpo', epsilon=0.4)
    ratios = [math.e, 1 / math.e]
    loss, gradient, metrics = run(config, ratios, [1.0, 1.0], [0.5, 0.5], [0, 0])
    assert loss == pytest.approx(-math.exp(-0.3))
    assert gradient == pytest.approx([0.0, -math.exp(-0.3) / 2])
    assert metrics['clip_ratio/high_mean'] == 0.5
    assert metrics['clip_ratio/low_mean'] == 0.0
    loss, gradient, metrics = run(config, ratios, [-1.0, -1.0], [0.5, 0.5], [0, 0])
    assert loss == pytest.approx(math.exp(0.3))
    assert gradient == pytest.approx([math.exp(0.3) / 2, 0.0])
    assert metrics['clip_ratio/low_mean'] == 0.5


def test_gmpo_bounds_are_not_symmetric_where_epsilon_high_is_given():
    config = LossConfig(loss_type='gmpo', epsilon=0.2, epsilon_high=0.6)
    assert run(config, [math.e], [1.0], [1.0], [0])[0] == pytest.approx(-math.exp(0.6))
    assert run(config, [1 / math.e], [-1.0], [1.0], [0])[0] == pytest.approx(math.exp(-0.2))


@pytest.mark.parametrize('ratio, advantage, expected, slope', [
    (10.0, -1.0, 3.0, 0.0),  # 10 without the bound
    (2.0, -1.0, 2.0, 2.0),  # below the bound the loss is as ever
    (0.5, -1.0, 0.8, 0.0),
    (10.0, 1.0, -1.2, 0.0),  # a positive advantage is not touched
])
def test_dual_clip_bounds_the_loss_of_negative_advantages(ratio, advantage, expected, slope):
    loss, gradient, metrics = run(LossConfig(dual_clip=3.0), [ratio], [advantage], [1.0], [0])
    assert loss == pytest.approx(expected)
    assert gradient == pytest.approx([slope])
    assert metrics['clip_ratio/dual_mean'] == float(ratio > 3 and advantage < 0)


def test_kl_cov_does_not_clip_and_penalizes_the_chosen_tokens():
    """Ratios 2 and 1/2, coefficient 1 on the second: -2 A and -A / 2 + log 2; |log r| falls towards r = 1, so its slope is -1."""
    loss, gradient, metrics = run(LossConfig(loss_type='dapo', kl_cov_ratio=0.5), [2.0, 0.5], [1.0, 1.0], [0.5, 0.5], [0, 0],
                                  coefficient_C=torch.tensor([0.0, 1.0]))
    assert loss == pytest.approx((-2.0 - 0.5 + math.log(2)) / 2)
    assert gradient == pytest.approx([-1.0, (-0.5 - 1.0) / 2])
    assert not [name for name in metrics if name.startswith('clip_ratio')]


def test_a_token_that_is_not_kept_gives_its_kl_and_nothing_else():
    loss, gradient, _ = run(LossConfig(beta=0.5), [1.0, 1.0], [1.0, 1.0], [0.5, 0.5], [0, 0], keep_C=torch.tensor([True, False]),
                            ref_logprobs_C=torch.tensor([-1.0, 0.0]))
    assert loss == pytest.approx(0.5 * -1.0 + 0.5 * 0.5 * (math.e - 2))
    assert gradient == pytest.approx([-0.5, 0.25 * (1 - math.e)])


def test_the_least_and_the_most_clipped_sequence_are_logged():
    """Ratios 0.5 with a negative and 2 with a positive advantage are clipped: 1/2 and 1/1 of two sequences; 1/2 and 0/1."""
    new_C = torch.tensor([0.5, 1.0, 0.5]).log()
    inputs = LossInputs(new_logprobs_C=new_C, old_logprobs_C=torch.zeros(3), advantages_C=torch.tensor([-1.0, -1.0, -1.0]),
                        weights_C=torch.ones(3), sequence_ids_C=torch.tensor([0, 0, 2]), num_sequences=3)
    maxima = policy_loss(LossConfig(), inputs)[1].maxima
    assert -float(maxima['clip_ratio/low_min']) == 0.5  # the sequence without tokens does not count
    assert float(maxima['clip_ratio/high_max']) == 0.0
    inputs.new_logprobs_C, inputs.advantages_C = torch.tensor([2.0, 1.0, 1.0]).log(), torch.ones(3)
    maxima = policy_loss(LossConfig(), inputs)[1].maxima
    assert -float(maxima['clip_ratio/low_min']) == 0.0
    assert float(maxima['clip_ratio/high_max']) == 0.5


def test_real_takes_its_value_from_the_step_and_does_not_look_at_the_entropy_filter():
    loss, gradient, _ = run(LossConfig(loss_type='real'), [1.0, 2.0], [1.0, -1.0], [0.5, 0.5], [0, 1], keep_C=torch.tensor([False, False]),
                            coefficient_C=torch.tensor([-1.0, 1.0]), coupled_loss=torch.tensor(1.5))
    assert loss == pytest.approx(1.5)
    assert gradient == [-1.0, 1.0]


def test_k3_at_its_bounds():
    new_C = torch.tensor([0.0, 0.0, 0.0], requires_grad=True)
    kl_C = kl_k3(new_C, torch.tensor([0.0, 1.0, 30.0]))
    assert kl_C.tolist() == pytest.approx([0.0, math.e - 2, 10.0])
    kl_C.sum().backward()
    assert new_C.grad.tolist() == pytest.approx([0.0, 1 - math.e, 0.0])


@pytest.mark.parametrize('arguments', [
    {'loss_type': 'luspo', 'importance_sampling_level': 'sequence', 'beta': 0.1},
    {'loss_type': 'gmpo', 'epsilon': 0.4, 'beta': 0.1, 'off_policy_sequence_mask_delta': 0.05},
    {'loss_type': 'grpo', 'dual_clip': 1.5, 'rollout_importance_sampling_mode': 'token_mask'},
    {'loss_type': 'dapo', 'kl_cov_ratio': 0.2, 'kl_cov_coef': 0.7, 'top_entropy_quantile': 0.6},
    {'loss_type': 'dapo', 'clip_cov_ratio': 0.3, 'clip_cov_low': 0.0, 'top_entropy_quantile': 0.6},
    {'loss_type': 'bnpo', 'clip_cov_ratio': 0.3, 'clip_cov_low': 0.0, 'off_policy_sequence_mask_delta': 0.05},
])
def test_our_own_losses_do_not_depend_on_the_split(arguments):
    config, step = LossConfig(**arguments), make_step()
    plain = our_loss(LossConfig(loss_type=config.loss_type, importance_sampling_level=config.importance_sampling_level), step, True,
                     SPLITS['one micro-batch'])
    results = [our_loss(config, step, True, split) for split in SPLITS.values()]
    for loss, gradient, metrics in results[1:]:
        assert float(loss) == pytest.approx(float(results[0][0]), abs=1e-6)
        assert torch.allclose(gradient, results[0][1], rtol=1e-5, atol=1e-8)
        assert metrics == pytest.approx(results[0][2], rel=1e-5, abs=1e-6)
    assert (results[0][1] - plain[1]).abs().max() > 1e-3  # the switches do something


@pytest.mark.parametrize('loss_type', sorted(LOSSES))
def test_a_micro_batch_without_tokens_gives_zero_tied_to_the_graph(loss_type):
    """It fills up a pipeline; every rank must still run its backward."""
    empty = torch.empty(0)
    parameter = torch.ones(3, requires_grad=True)
    config = LossConfig(loss_type=loss_type, importance_sampling_level='sequence' if loss_type == 'luspo' else 'token', beta=0.1,
                        log_entropy=True, rollout_importance_sampling_mode='sequence_mask', off_policy_sequence_mask_delta=0.1)
    loss, sums = policy_loss(
        config,
        LossInputs(new_logprobs_C=parameter[:0] * 2, old_logprobs_C=empty, advantages_C=empty, weights_C=empty,
                   sequence_ids_C=empty.long(), num_sequences=0, ref_logprobs_C=empty, rollout_logprobs_C=empty, entropies_C=empty,
                   coefficient_C=empty, coupled_loss=torch.tensor(3.0)))
    loss.backward()
    assert float(loss) == 0.0
    assert parameter.grad.tolist() == [0.0, 0.0, 0.0]
    assert all(float(total) == 0.0 and float(count) == 0.0 for total, count in sums.means.values())
    assert all(float(value) == -math.inf for value in sums.maxima.values())


@pytest.mark.parametrize('loss_type, level', [
    (loss_type, level) for loss_type in sorted(LOSSES) for level in LEVELS
    if (loss_type, level) != ('luspo', 'token') and (loss_type != 'gmpo' or level == 'token')])
def test_no_value_is_read_on_the_host(loss_type, level):
    """A meta tensor has no values: whoever waits for the device to read one stops with an error here."""
    config = LossConfig(loss_type=loss_type, importance_sampling_level=level, beta=0.1, log_entropy=True, epsilon_high=0.3,
                        log_rollout_offpolicy_metrics=True, rollout_importance_sampling_mode='sequence_truncate',
                        off_policy_sequence_mask_delta=0.1)

    def floats():
        return torch.empty(7, device='meta')

    new_C = floats().requires_grad_()
    loss, sums = policy_loss(
        config,
        LossInputs(new_logprobs_C=new_C, old_logprobs_C=floats(), advantages_C=floats(), weights_C=floats(),
                   sequence_ids_C=torch.empty(7, dtype=torch.int64, device='meta'), num_sequences=3, ref_logprobs_C=floats(),
                   rollout_logprobs_C=floats(), entropies_C=floats(), keep_C=torch.empty(7, dtype=torch.bool, device='meta'),
                   coefficient_C=floats(), coupled_loss=torch.empty((), device='meta')))
    loss.backward()
    assert loss.shape == () and loss.device.type == 'meta'
    assert new_C.grad.shape == (7, )
    assert len(sums.means) >= 17
