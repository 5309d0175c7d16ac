"""Every loss and switch that ms-swift has gives its number and its gradient, however the step is cut into micro-batches."""
import itertools
from dataclasses import replace

import pytest
import torch

from swift_megatron_grpo.step.loss_config import LossConfig
from tests.step.loss_reference import SPLITS, make_step, our_loss, reference_loss

LOSS_TYPES = ['grpo', 'bnpo', 'dr_grpo', 'dapo', 'cispo', 'sapo', 'real', 'fipo']
LEVELS = ['token', 'sequence', 'sequence_token']
EVERYTHING = {'delta': 1.6, 'epsilon_high': 0.35, 'beta': 0.07, 'rollout_importance_sampling_mode': 'token_truncate',
                  'rollout_importance_sampling_threshold': 1.5, 'off_policy_sequence_mask_delta': 0.05, 'top_entropy_quantile': 0.5}
SWITCHES = {
    'plain': {},
    'delta': {'delta': 1.4},
    'epsilon_high': {'epsilon': 0.1, 'epsilon_high': 0.3},
    'beta': {'beta': 0.1},
    'kl in reward': {'beta': 0.1, 'kl_in_reward': True},
    'overlong filter': {'overlong_filter': True},
    'token_truncate': {'rollout_importance_sampling_mode': 'token_truncate', 'rollout_importance_sampling_threshold': 1.2},
    'token_mask': {'rollout_importance_sampling_mode': 'token_mask', 'rollout_importance_sampling_threshold': 1.2},
    'sequence_truncate': {'rollout_importance_sampling_mode': 'sequence_truncate', 'rollout_importance_sampling_threshold': 1.2},
    'sequence_mask': {'rollout_importance_sampling_mode': 'sequence_mask', 'rollout_importance_sampling_threshold': 1.2},
    'off-policy mask': {'off_policy_sequence_mask_delta': 0.05},
    'off-policy mask against the old policy': {'off_policy_sequence_mask_delta': 0.05, 'no_rollout': True},
    'entropy quantile': {'top_entropy_quantile': 0.3},
    'entropy quantile and beta': {'top_entropy_quantile': 0.3, 'beta': 0.1, 'overlong_filter': True},
    'rollout correction and beta': {'beta': 0.1, 'rollout_importance_sampling_mode': 'sequence_mask'},
    'on-policy': {'on_policy': True, 'beta': 0.1},
    'everything': dict(overlong_filter=True, **EVERYTHING),
    'everything, on-policy': dict(overlong_filter=True, on_policy=True, **EVERYTHING),
}


def build(loss_type, level, switches):
    switches = dict(switches)
    step = make_step(on_policy=switches.pop('on_policy', False))
    if switches.pop('no_rollout', False):
        step.rollout_K = None
    overlong_filter = switches.pop('overlong_filter', False)
    return LossConfig(loss_type=loss_type, importance_sampling_level=level, **switches), step, overlong_filter


def assert_close_losses(actual, expected):
    assert abs(float(actual - expected)) <= 1e-6 * max(1.0, abs(float(expected))), (float(actual), float(expected))


def assert_close_gradients(actual, expected):
    assert torch.allclose(actual, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()) * 1e-2), (actual - expected).abs().max()


@pytest.mark.parametrize('switch', SWITCHES)
@pytest.mark.parametrize('loss_type, level', list(itertools.product(LOSS_TYPES, LEVELS)))
def test_loss_and_gradient_equal_ms_swift_however_the_step_is_cut(loss_type, level, switch):
    config, step, overlong_filter = build(loss_type, level, SWITCHES[switch])
    if loss_type == 'real' and config.kl_in_reward:  # ms-swift stops with a TypeError there: it reads the KL that it did not compute
        expected = reference_loss(replace(config, beta=0.0), step, overlong_filter)
    else:
        expected = reference_loss(config, step, overlong_filter)
    expected_loss, expected_gradient, _ = expected
    for micro_batches in SPLITS.values() if switch in ('plain', 'everything') else [SPLITS['groups torn apart']]:
        loss, gradient, _ = our_loss(config, step, overlong_filter, micro_batches)
        assert torch.isfinite(gradient).all()
        assert_close_losses(loss, expected_loss)
        assert_close_gradients(gradient, expected_gradient)


@pytest.mark.parametrize('extra', [
    {'fipo_clip_high_only': False},
    {'fipo_clip_range': None},
    {'fipo_clip_range': 0.0, 'fipo_safety_threshold': None},
    {'fipo_clip_range': None, 'fipo_decay_rate': 3.0, 'fipo_safety_threshold': 1.1},
    {'fipo_clip_range': 0.5, 'delta': 1.3},
])
def test_fipo_settings_equal_ms_swift(extra):
    config, step, overlong_filter = build('fipo', 'token', extra)
    expected_loss, expected_gradient, _ = reference_loss(config, step, overlong_filter)
    loss, gradient, _ = our_loss(config, step, overlong_filter, SPLITS['groups torn apart'])
    assert_close_losses(loss, expected_loss)
    assert_close_gradients(gradient, expected_gradient)


@pytest.mark.parametrize('loss_type, extra', [('sapo', {'tau_pos': 2.0, 'tau_neg': 0.5}), ('real', {'real_tau': 0.2}),
                                              ('cispo', {'epsilon_high': 2.0})])
def test_temperatures_and_bounds_equal_ms_swift(loss_type, extra):
    config, step, overlong_filter = build(loss_type, 'token', extra)
    expected_loss, expected_gradient, _ = reference_loss(config, step, overlong_filter)
    loss, gradient, _ = our_loss(config, step, overlong_filter, SPLITS['groups torn apart'])
    assert_close_losses(loss, expected_loss)
    assert_close_gradients(gradient, expected_gradient)


@pytest.mark.parametrize('loss_type', ['grpo', 'cispo', 'fipo', 'sapo', 'bnpo'])
@pytest.mark.parametrize('mode', [None, 'token_truncate', 'token_mask', 'sequence_truncate', 'sequence_mask'])
def test_metrics_carry_the_names_and_numbers_of_ms_swift(loss_type, mode):
    # No empty sequence: where there are some, ms-swift counts perplexity 1 for them.
    step = make_step(lengths=[5, 1, 14, 2, 3, 7, 2, 16, 4, 4, 1, 9])
    config = LossConfig(loss_type=loss_type, beta=0.1, log_entropy=True, top_entropy_quantile=0.4, log_rollout_offpolicy_metrics=True,
                        rollout_importance_sampling_mode=mode, rollout_importance_sampling_threshold=1.3)
    _, _, expected = reference_loss(config, step, overlong_filter=False)
    _, _, split = our_loss(config, step, False, SPLITS['groups torn apart'])
    layout_dependent = {'clip_ratio/low_min', 'clip_ratio/high_max'}
    assert set(split) == set(expected)
    assert {'kl', 'entropy/mean', 'entropy/threshold', 'rollout_correction/chi2_seq'} <= set(expected)
    for name in set(expected) - layout_dependent:
        assert split[name] == pytest.approx(expected[name], rel=2e-5, abs=1e-6), name


@pytest.mark.parametrize('loss_type', ['grpo', 'cispo', 'fipo', 'bnpo'])
def test_kl_and_clip_metrics_leave_out_what_ms_swift_leaves_out(loss_type):
    config, step, overlong_filter = build(loss_type, 'token', SWITCHES['everything'])
    _, _, expected = reference_loss(config, step, overlong_filter)
    _, _, metrics = our_loss(config, step, overlong_filter, SPLITS['groups torn apart'])
    names = [name for name in expected if name.startswith(('kl', 'cispo', 'fipo', 'clip_ratio')) and not name.endswith(('min', 'max'))]
    assert len(names) == {'grpo': 4, 'bnpo': 4, 'cispo': 2, 'fipo': 7}[loss_type]
    for name in names:
        assert metrics[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name


def test_metrics_do_not_depend_on_the_split():
    config, step, overlong_filter = build('fipo', 'token', {**SWITCHES['everything'], 'log_entropy': True})
    numbers = [our_loss(config, step, overlong_filter, split)[2] for split in SPLITS.values()]
    assert len(numbers[0]) == 29
    for other in numbers[1:]:
        assert other == pytest.approx(numbers[0], rel=1e-5, abs=1e-6)


def test_the_first_ratio_is_one_and_a_shift_by_one_token_is_caught():
    """Known probabilities at temperature 0.7, three prompt tokens, four completion tokens: the old pass gives the training pass's bits."""
    logits = torch.tensor([[0.2, 1.0, -0.5], [1.5, 0.1, 0.3], [-0.2, 0.4, 2.0], [0.9, -1.0, 0.0], [0.3, 0.3, 0.1], [2.0, 0.0, 1.0],
                           [0.5, 0.6, 0.7]])  # row t predicts token t + 1
    tokens = torch.tensor([0, 2, 1, 2, 0, 1, 0])
    logprobs = torch.log_softmax(logits / 0.7, -1)[torch.arange(6), tokens[1:]]
    new_C, shifted_C = logprobs[2:], logprobs[1:5]
    assert new_C.exp() == pytest.approx([0.8735, 0.7448, 0.3634, 0.7710], abs=1e-4)
    from swift_megatron_grpo.step.loss import make_terms
    from swift_megatron_grpo.types import LossInputs

    def ratios(old_C):
        inputs = LossInputs(new_logprobs_C=new_C, old_logprobs_C=old_C, advantages_C=torch.ones(4), weights_C=torch.full((4, ), 0.25),
                            sequence_ids_C=torch.zeros(4, dtype=torch.int64), num_sequences=1)
        return make_terms(LossConfig(), inputs).ratio_C

    assert ratios(new_C.clone()).tolist() == [1.0, 1.0, 1.0, 1.0]
    assert (ratios(shifted_C) - 1).abs().max() > 0.2


@pytest.mark.parametrize('loss_type', LOSS_TYPES)
def test_everything_filtered_gives_zero_and_not_nan(loss_type):
    step = make_step(truncated=list(range(12)))
    config = LossConfig(loss_type=loss_type, beta=0.1, rollout_importance_sampling_mode='sequence_mask',
                        off_policy_sequence_mask_delta=0.0, top_entropy_quantile=0.5, log_entropy=True)
    loss, gradient, metrics = our_loss(config, step, True, SPLITS['one sequence each'])
    assert float(loss) == 0.0
    assert torch.equal(gradient, torch.zeros_like(gradient))
    assert metrics['kl'] == 0.0
    assert metrics['entropy/mean'] == pytest.approx(float(reference_loss(config, step, True)[2]['entropy/mean']), rel=1e-5)


@pytest.mark.parametrize('loss_type', LOSS_TYPES)
def test_a_group_of_truncated_and_one_of_empty_completions_equals_ms_swift(loss_type):
    step = make_step(lengths=[5, 1, 14, 2, 0, 0, 0, 0, 4, 4, 1, 9], truncated=[0, 1, 2, 3])
    config = LossConfig(loss_type=loss_type, beta=0.1)
    expected_loss, expected_gradient, _ = reference_loss(config, step, True)
    loss, gradient, _ = our_loss(config, step, True, SPLITS['groups torn apart'])
    assert_close_losses(loss, expected_loss)
    assert_close_gradients(gradient, expected_gradient)
    assert torch.equal(gradient[:22], torch.zeros(22))


@pytest.mark.parametrize('loss_type', [name for name in LOSS_TYPES if name != 'fipo'])
@pytest.mark.parametrize('level', LEVELS)
def test_environment_tokens_between_two_turns_carry_no_loss(loss_type, level):
    """Three tokens of environment after the second token of each answer. fipo counts distances without them and is left out."""
    config, step, overlong_filter = build(loss_type, level, SWITCHES['everything'])
    columns = torch.arange(20)[None]
    mask = (columns < step.lengths_S[:, None] + 3 * (step.lengths_S[:, None] > 2)) & ~((columns >= 2) & (columns < 5))
    assert torch.equal(mask.sum(1), step.lengths_S)
    expected_loss, expected_gradient, _ = reference_loss(config, step, overlong_filter, mask)
    loss, gradient, _ = our_loss(config, step, overlong_filter, SPLITS['groups torn apart'])
    assert_close_losses(loss, expected_loss)
    assert_close_gradients(gradient, expected_gradient)


@pytest.mark.parametrize('loss_type', [name for name in LOSS_TYPES if name not in ('real', 'fipo')])
@pytest.mark.parametrize('level', LEVELS)
def test_a_teacher_s_advantages_token_by_token_equal_ms_swift(loss_type, level):
    switches = {**EVERYTHING, 'off_policy_sequence_mask_delta': None}
    config, step, overlong_filter = build(loss_type, level, {**switches, 'has_teacher': True, 'overlong_filter': True})
    step.teacher_K, step.teacher_kl_coef = step.ref_K.flip(0), 0.6
    expected_loss, expected_gradient, _ = reference_loss(config, step, overlong_filter)
    loss, gradient, _ = our_loss(config, step, overlong_filter, SPLITS['groups torn apart'])
    assert_close_losses(loss, expected_loss)
    assert_close_gradients(gradient, expected_gradient)


@pytest.mark.parametrize('loss_type', [name for name in LOSS_TYPES if name not in ('real', 'fipo')])
@pytest.mark.parametrize('extra', [{}, {'rlsd_negative_only': True, 'rlsd_lambda': 1.0}, {'rlsd_lambda_warmup_steps': 4},
                                   {'rlsd_lambda_warmup_steps': 1, 'rlsd_lambda_decay_steps': 8, 'rlsd_reweight_clip_range': 0.5}])
def test_self_distilled_advantages_equal_ms_swift(loss_type, extra):
    switches = {**EVERYTHING, 'off_policy_sequence_mask_delta': None, 'advantage_reweight': 'rlsd', **extra}
    config, step, overlong_filter = build(loss_type, 'token', switches)
    step.teacher_K = step.ref_K.flip(0)
    expected_loss, expected_gradient, _ = reference_loss(config, step, overlong_filter)
    loss, gradient, _ = our_loss(config, step, overlong_filter, SPLITS['groups torn apart'])
    assert_close_losses(loss, expected_loss)
    assert_close_gradients(gradient, expected_gradient)


@pytest.mark.parametrize('loss_type', LOSS_TYPES)
@pytest.mark.parametrize('overlong_filter', [False, True])
def test_gated_distillation_equals_ms_swift_however_the_step_is_cut(loss_type, overlong_filter):
    config, step, overlong_filter = build(loss_type, 'token', {'beta': 0.1, 'sdar_loss_coef': 0.3, 'sdar_gate_beta': 2.0,
                                                               'overlong_filter': overlong_filter})
    step.teacher_K, step.distills = step.ref_K.flip(0), True
    expected_loss, expected_gradient, expected = reference_loss(config, step, overlong_filter)
    for split in SPLITS.values():
        loss, gradient, metrics = our_loss(config, step, overlong_filter, split)
        assert_close_losses(loss, expected_loss)
        assert_close_gradients(gradient, expected_gradient)
    for name in ('sdar/gate_mean', 'sdar/gate_active_ratio', 'sdar/teacher_gap_mean', 'sdar/loss'):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-5), name


def test_overflow_at_a_masked_token_does_not_reach_the_gradient():
    step = make_step()
    step.new_K[step.ids_K == 7] = 1e4  # the truncated sequence: its ratio would be infinite
    config, _, _ = build('grpo', 'token', {'beta': 0.1})
    loss, gradient, _ = our_loss(config, step, True, SPLITS['one micro-batch'])
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()
    assert gradient[step.ids_K == 7].abs().max() == 0
