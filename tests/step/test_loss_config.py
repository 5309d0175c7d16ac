"""The loss's arguments check themselves, and losses are found by name, by path, or by registration."""
import pytest
import torch

from swift_megatron_grpo.errors import UserError
from swift_megatron_grpo.step.loss import LOSSES, clipped, register_loss, resolve_loss
from swift_megatron_grpo.step.loss_config import LossConfig
from swift_megatron_grpo.step.weights import token_weights


def my_loss(config, terms, sums):
    return -terms.advantages_C * terms.new_logprobs_C


def test_ms_swift_losses_and_ours_are_registered():
    assert set(LOSSES) >= {'grpo', 'bnpo', 'dr_grpo', 'dapo', 'cispo', 'sapo', 'real', 'fipo', 'luspo', 'gmpo'}
    assert resolve_loss('dapo').function is clipped
    assert resolve_loss('dapo').weighting == 'token_mean'


def test_an_unknown_loss_names_the_nearest():
    with pytest.raises(UserError, match='Did you mean grpo'):
        LossConfig(loss_type='gprp')


def test_a_dotted_path_is_a_loss_with_sequence_mean_weights():
    assert resolve_loss(f'{__name__}:my_loss').function is my_loss
    weights = token_weights(f'{__name__}:my_loss', lengths_S=torch.tensor([3, 1]), truncated_S=torch.tensor([False, False]),
                            overlong_filter=False, max_completion_length=8)
    assert weights.tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 2])


@pytest.mark.parametrize('path', ['no_such_package_here:loss', f'{__name__}:nothing', f'{__name__}:pytest.__name__'])
def test_a_path_that_leads_nowhere_is_refused(path):
    with pytest.raises(UserError, match='loss_type'):
        LossConfig(loss_type=path)


def test_a_registered_loss_keeps_its_weights_and_its_name_is_its_own():
    try:
        register_loss('mine', weighting='token_mean')(my_loss)
        register_loss('mine', weighting='token_mean')(my_loss)  # a plugin file that is imported twice
        assert LossConfig(loss_type='mine').loss_type == 'mine'
        assert resolve_loss('mine').weighting == 'token_mean'
        assert resolve_loss(f'{__name__}:my_loss').name == 'mine'
        with pytest.raises(UserError, match='registered already'):
            register_loss('mine')(clipped)
        with pytest.raises(UserError, match='registered already'):
            register_loss('grpo')(my_loss)
    finally:
        LOSSES.pop('mine', None)


@pytest.mark.parametrize('arguments, words', [
    ({'importance_sampling_level': 'sentence'}, 'token, sequence, sequence_token'),
    ({'rollout_importance_sampling_mode': 'truncate'}, 'token_truncate'),
    ({'epsilon': -0.1}, 'epsilon is -0.1'),
    ({'top_entropy_quantile': 1.2}, 'from 0 to 1'),
    ({'real_tau': 0.0}, 'above 0'),
    ({'rollout_importance_sampling_threshold': 0.0}, 'above 0'),
    ({'dual_clip': 1.0}, 'above 1'),
    ({'dual_clip': 3.0, 'delta': 3.0}, 'Give one of them'),
    ({'dual_clip': 3.0, 'loss_type': 'sapo'}, "loss_type is 'sapo'"),
    ({'loss_type': 'luspo'}, 'importance_sampling_level sequence'),
    ({'loss_type': 'gmpo', 'importance_sampling_level': 'sequence'}, 'gmpo'),
    ({'loss_type': 'gmpo', 'delta': 2.0}, 'gmpo'),
    ({'kl_cov_ratio': 0.0}, 'share of tokens'),
    ({'kl_cov_ratio': 0.1, 'clip_cov_ratio': 0.1}, 'Give one of them'),
    ({'kl_cov_ratio': 0.1, 'loss_type': 'cispo'}, "'cispo'"),
    ({'clip_cov_ratio': 0.1, 'importance_sampling_level': 'sequence'}, "'sequence'"),
    ({'kl_cov_ratio': 0.1, 'delta': 2.0}, 'does not clip'),
    ({'clip_cov_low': 5.0}, 'below clip_cov_high'),
    ({'has_teacher': True, 'loss_type': 'real'}, 'teacher'),
    ({'has_teacher': True, 'off_policy_sequence_mask_delta': 0.1}, 'teacher'),
])
def test_contradictions_are_refused_with_what_would_be_right(arguments, words):
    with pytest.raises(UserError, match=words):
        LossConfig(**arguments)


def test_arguments_that_cannot_act_are_named():
    assert LossConfig(loss_type='real', importance_sampling_level='sequence', delta=2.0).without_effect() == [
        'delta', 'importance_sampling_level']
    assert LossConfig(loss_type='cispo', epsilon=0.1, epsilon_high=5.0).without_effect() == ['epsilon']
    assert LossConfig(loss_type='grpo', epsilon=0.1, delta=4.0).without_effect() == []
    assert LossConfig(loss_type='grpo', kl_cov_ratio=0.1, epsilon=0.1).without_effect() == ['epsilon']


def test_derived_values():
    assert LossConfig(epsilon=0.3).upper_epsilon == 0.3
    assert LossConfig(epsilon=0.3, epsilon_high=0.0).upper_epsilon == 0.0
    assert LossConfig(fipo_decay_rate=1.0).fipo_discount == 0.5
    assert not LossConfig(beta=0.1, kl_in_reward=True).needs_kl
