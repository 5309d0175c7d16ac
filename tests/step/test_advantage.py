"""Advantages: groups by id and never by position, None as not applicable, unequal groups, metrics under ms-swift's names."""
import itertools
import math

import pytest
import torch

from swift_megatron_grpo.errors import RunError, UserError
from swift_megatron_grpo.step.advantage import group_advantages, reward_metrics, sequence_kl, teacher_kl, token_advantages

NAN = float('nan')


def advantages(rewards, groups, **options):
    rewards_NF = torch.tensor(rewards, dtype=torch.float32)
    if rewards_NF.dim() == 1:
        rewards_NF = rewards_NF[:, None]
    return group_advantages(rewards_NF, torch.ones(rewards_NF.shape[1]), torch.tensor(groups), **options)


def test_by_hand_without_scale():
    advantages_N, rewards_N = advantages([1.0, 0.0, 3.0, 1.0], [0, 0, 7, 7], scale_rewards='none')
    assert advantages_N.tolist() == [0.5, -0.5, 1.0, -1.0]
    assert rewards_N.tolist() == [1.0, 0.0, 3.0, 1.0]


def test_by_hand_with_each_scale():
    """Rewards 0, 2 | 1, 1: standard deviations sqrt(2) and 0 of the groups, sqrt(2/3) of the batch; 1e-4 is added to each."""
    options = ([0.0, 2.0, 1.0, 1.0], [0, 0, 1, 1])
    assert advantages(*options, scale_rewards='group')[0].tolist() == pytest.approx(
        [-1 / (math.sqrt(2) + 1e-4), 1 / (math.sqrt(2) + 1e-4), 0, 0])
    assert advantages(*options, scale_rewards='batch')[0].tolist() == pytest.approx(
        [-1 / (math.sqrt(2 / 3) + 1e-4), 1 / (math.sqrt(2 / 3) + 1e-4), 0, 0])
    assert advantages(*options, scale_rewards='none', advantage_estimator='rloo')[0].tolist() == pytest.approx([-2, 2, 0, 0])


def test_reward_equal_to_the_prompt_gives_zero_however_ranks_deliver_it():
    """16 rollouts of 2 prompts, the reward is the prompt's index, delivered by ranks whose groups are not neighbours."""
    groups = [0, 1, 0, 1, 0, 1, 0, 1, 0, 0, 1, 1, 0, 1, 1, 0]
    advantages_N, _ = advantages([float(group) for group in groups], groups)
    assert advantages_N.tolist() == [0.0] * 16


@pytest.mark.parametrize('estimator, scale', [
    pair for pair in itertools.product(['grpo', 'rloo', 'reinforce_plus_plus'], ['group', 'batch', 'none', 'gdpo'])
    if pair != ('reinforce_plus_plus', 'gdpo')])
def test_any_order_gives_what_ms_swift_gives_for_sorted_groups(estimator, scale):
    from swift.rl_core.advantage import compute_advantages
    draw = torch.Generator().manual_seed(5)
    rewards_NF, weights_F = torch.rand(12, 2, generator=draw), torch.tensor([1.0, 0.3])
    rewards_NF[3, 0] = NAN
    kl_N = torch.rand(12, generator=draw)
    kl_in_reward = scale != 'gdpo'
    options = {'advantage_estimator': estimator, 'scale_rewards': scale, 'kl_in_reward': kl_in_reward, 'beta': 0.2}
    expected, expected_rewards = compute_advantages(rewards_NF, weights_F, 4, kl_values=kl_N, **options)
    shuffle = torch.randperm(12, generator=draw)
    groups_N = torch.arange(12) // 4
    result, rewards_N = group_advantages(rewards_NF[shuffle], weights_F, groups_N[shuffle], kl_N=kl_N[shuffle], **options)
    assert torch.allclose(result, expected[shuffle], rtol=1e-6, atol=1e-6)
    assert torch.allclose(rewards_N, expected_rewards[shuffle])


@pytest.mark.parametrize('estimator, scale', list(itertools.product(['grpo', 'rloo', 'reinforce_plus_plus'], ['group', 'batch', 'none'])))
def test_unequal_groups_give_each_group_its_own_baseline(estimator, scale):
    """Each group by itself through ms-swift's fixed-size formula, for the scales that do not look beyond the group."""
    groups = [5, 2, 5, 2, 5, 9]
    rewards = [1.0, 0.0, 3.0, 1.0, 5.0, 4.0]
    result = advantages(rewards, groups, advantage_estimator=estimator, scale_rewards=scale)[0]
    factor = {5: 1.5, 2: 2.0, 9: 1.0} if estimator == 'rloo' else {5: 1.0, 2: 1.0, 9: 1.0}
    centered = [factor[group] * (reward - {5: 3.0, 2: 0.5, 9: 4.0}[group]) for group, reward in zip(groups, rewards)]
    source = centered if estimator == 'reinforce_plus_plus' else rewards
    spread = {'none': [1.0] * 6, 'batch': [float(torch.tensor(source).std()) + 1e-4] * 6,
              'group': [{5: 2.0, 2: math.sqrt(0.5), 9: 0.0}[group] + 1e-4 for group in groups]}[scale]
    assert result.tolist() == pytest.approx([c / s for c, s in zip(centered, spread)], rel=1e-5)


def test_unequal_gdpo_equals_equal_gdpo_where_the_groups_are_equal():
    from swift_megatron_grpo.step.advantage import _unequal_gdpo
    draw = torch.Generator().manual_seed(8)
    rewards_NF, weights_F, groups_N = torch.rand(8, 2, generator=draw), torch.tensor([1.0, 0.5]), torch.tensor([0, 1, 0, 1, 1, 0, 0, 1])
    rewards_NF[2, 1] = NAN
    expected, _ = group_advantages(rewards_NF, weights_F, groups_N, scale_rewards='gdpo')
    result, rewards_N = _unequal_gdpo(rewards_NF, weights_F, groups_N, False)
    assert torch.allclose(result, expected, rtol=1e-5, atol=1e-6)
    assert float(rewards_N[2]) == pytest.approx(float(rewards_NF[2, 0]))


def test_unequal_gdpo_by_hand():
    """Columns [0, 2 | 3, 3, 3] and one group of spread sqrt(2): -1, 1, 0, 0, 0 over sqrt(2), then by the batch's spread 0.5."""
    result = advantages([0.0, 2.0, 3.0, 3.0, 3.0], [0, 0, 1, 1, 1], scale_rewards='gdpo')[0]
    assert result.tolist() == pytest.approx([-math.sqrt(2), math.sqrt(2), 0, 0, 0], rel=1e-5)


def test_none_is_not_applicable_and_adds_nothing():
    result, rewards_N = advantages([[1.0, NAN], [0.0, 2.0], [NAN, NAN], [1.0, 1.0]], [0, 0, 0, 0], scale_rewards='none')
    assert rewards_N.tolist() == [1.0, 2.0, 0.0, 2.0]
    assert result.tolist() == [-0.25, 0.75, -1.25, 0.75]


def test_the_kl_is_taken_from_the_reward_before_the_baseline():
    kl_N = sequence_kl(torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-2.0, -2.5, -3.0]), torch.tensor([0, 0, 1]), 3)
    assert kl_N.tolist() == [1.5, 0.0, 0.0]
    result, rewards_N = advantages([1.0, 1.0, 1.0], [0, 0, 0], scale_rewards='none', kl_in_reward=True, beta=0.2, kl_N=kl_N)
    assert rewards_N.tolist() == pytest.approx([0.7, 1.0, 1.0])
    assert result.tolist() == pytest.approx([-0.2, 0.1, 0.1])


def test_a_request_with_several_rollouts_counts_once():
    result, _ = advantages([1.0, 1.0, 0.0], [0, 0, 0], scale_rewards='none', request_ids_N=['a', 'a', 'b'])
    assert result.tolist() == [0.5, 0.5, -0.5]


@pytest.mark.parametrize('scale', ['group', 'batch', 'none', 'gdpo'])
def test_without_reward_functions_advantages_are_zero(scale):
    result, rewards_N = group_advantages(torch.zeros(4, 0), torch.zeros(0), torch.tensor([0, 1, 0, 1]), scale_rewards=scale)
    assert result.tolist() == rewards_N.tolist() == [0.0] * 4


def test_what_cannot_be_is_refused():
    with pytest.raises(UserError, match='reinforce_plus_plus'):
        advantages([1.0, 0.0], [0, 0], advantage_estimator='ppo')
    with pytest.raises(UserError, match='gdpo'):
        advantages([1.0, 0.0], [0, 0], scale_rewards='std')
    with pytest.raises(UserError, match='kl_in_reward'):
        advantages([1.0, 0.0], [0, 0], scale_rewards='gdpo', kl_in_reward=True, beta=0.1, kl_N=torch.zeros(2))
    with pytest.raises(UserError, match='multi-turn'):
        advantages([1.0, 1.0, 0.0], [0, 0, 0], scale_rewards='gdpo', request_ids_N=['a', 'a', 'b'])
    with pytest.raises(RunError, match='function 1 gave rollout 2 the reward inf'):
        advantages([[1.0, 0.0], [1.0, 0.0], [1.0, math.inf]], [0, 0, 0])


def test_metrics_by_hand_in_any_order():
    rewards_NF = torch.tensor([[1.0, NAN], [2.0, NAN], [3.0, NAN], [2.0, NAN]])
    metrics = reward_metrics(rewards_NF[:, 0], rewards_NF, ['accuracy', 'format'], torch.tensor([0, 4, 0, 4]), 'group')
    assert metrics == pytest.approx({'reward': 2.0, 'reward_std': math.sqrt(2) / 2, 'frac_reward_zero_std': 0.5,
                                     'rewards/accuracy/mean': 2.0, 'rewards/accuracy/std': math.sqrt(2 / 3)})
    assert reward_metrics(rewards_NF[:, 0], rewards_NF, ['a', 'b'], torch.tensor([0, 4, 0, 4]),
                          'batch')['reward_std'] == pytest.approx(math.sqrt(2 / 3))


def test_metrics_of_unequal_groups():
    """Groups [1, 3, 5], [4], [2, 2]: means 3, 4, 2; spreads 2, 0, 0."""
    rewards_N, groups_N = torch.tensor([1.0, 4.0, 3.0, 2.0, 5.0, 2.0]), torch.tensor([0, 1, 0, 2, 0, 2])
    metrics = reward_metrics(rewards_N, rewards_N[:, None], ['f'], groups_N, 'group')
    assert metrics['reward'] == pytest.approx(3.0)
    assert metrics['reward_std'] == pytest.approx(2 / 3)
    assert metrics['frac_reward_zero_std'] == pytest.approx(2 / 3)
    assert metrics['rewards/f/mean'] == pytest.approx(17 / 6)


def test_a_teacher_adds_its_log_ratio_to_each_token():
    ids_K, old_K, teacher_K = torch.tensor([0, 0, 1]), torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, -1.0, -3.0])
    advantages_S = torch.tensor([1.0, -1.0])
    assert token_advantages(advantages_S, ids_K).tolist() == [1.0, 1.0, -1.0]
    assert token_advantages(advantages_S, ids_K, teacher_logprobs_K=teacher_K, old_logprobs_K=old_K,
                            teacher_kl_coef=0.5).tolist() == [0.75, 1.5, -1.0]
    total, count = teacher_kl(teacher_K, old_K)
    assert float(total / count) == pytest.approx((math.exp(-0.5) + 0.5 - 1 + math.e - 2) / 3)
