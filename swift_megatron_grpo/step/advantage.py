"""Advantages of a generation from its rewards (import tier 1; swift.rl_core is imported inside the functions that use it).

A group is the set of rollouts with one group id, wherever they stand: positions mean nothing here, so the order in which ranks deliver
rewards cannot mix prompts. All functions are pure and take the numbers of the whole generation.

A reward of NaN says that the function does not apply to that rollout (a reward function returned None), as in ms-swift: it adds nothing.
"""
from __future__ import annotations

import torch
from collections.abc import Sequence

from swift_megatron_grpo.errors import RunError, UserError
from .loss_config import LossConfig
from .segments import segment_sum

ESTIMATORS = ('grpo', 'rloo', 'reinforce_plus_plus')
SCALES = ('group', 'batch', 'none', 'gdpo')


def group_advantages(rewards_NF: torch.Tensor,
                     reward_weights_F: torch.Tensor,
                     group_ids_N: torch.Tensor,
                     *,
                     advantage_estimator: str = 'grpo',
                     scale_rewards: str = 'group',
                     kl_in_reward: bool = False,
                     beta: float = 0.0,
                     kl_N: torch.Tensor | None = None,
                     request_ids_N: Sequence[str] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantage and weighted reward of each rollout, both float32 [N], in the order of the arguments.

    The formulas are ms-swift's own (swift.rl_core.advantage): GRPO (arXiv 2402.03300), RLOO (2402.14740), REINFORCE++ (2501.03262),
    GDPO (2601.05242). Groups may differ in size. Without reward functions (F = 0, pure distillation) both are 0.

    Args:
        rewards_NF: one column a reward function; NaN: not applicable.
        group_ids_N: int64, equal for rollouts of one prompt, in any order.
        kl_N: sum over each completion of old - ref log-probabilities; needed where kl_in_reward and beta are set.
        request_ids_N: where one request gave several rollouts (multi-turn), its id for each of them: a request counts once in its group.

    Raises UserError for an unknown estimator or scale and for gdpo with kl_in_reward; RunError for an infinite reward.

    Example: rewards [[1], [0], [3], [1]], groups [0, 0, 7, 7], scale none: advantages [0.5, -0.5, 1, -1], rewards [1, 0, 3, 1].
    """
    from swift.rl_core.advantage import compute_advantages, compute_advantages_dynamic
    subtract_kl = kl_in_reward and beta != 0.0
    _check(rewards_NF, advantage_estimator, scale_rewards, subtract_kl)
    assert not subtract_kl or kl_N is not None, 'kl_in_reward needs kl_N'
    rewards_NF, reward_weights_F = rewards_NF.float(), reward_weights_F.float()
    if rewards_NF.shape[1] == 0 and scale_rewards == 'gdpo':
        zeros_N = rewards_NF.new_zeros(rewards_NF.shape[0])
        return zeros_N, zeros_N.clone()

    order_N = torch.argsort(group_ids_N, stable=True)
    sizes = torch.unique_consecutive(group_ids_N[order_N], return_counts=True)[1]
    repeated = request_ids_N is not None and len(set(request_ids_N)) < len(request_ids_N)
    one_size = bool((sizes == sizes[0]).all()) if sizes.numel() else True
    options = {'advantage_estimator': advantage_estimator, 'scale_rewards': scale_rewards, 'kl_in_reward': kl_in_reward, 'beta': beta}
    if one_size and not repeated:
        sorted_N = compute_advantages(
            rewards_NF[order_N],
            reward_weights_F,
            num_generations=int(sizes[0]) if sizes.numel() else 1,
            kl_values=None if kl_N is None else kl_N[order_N],
            **options)
        advantages_N, rewards_N = (torch.empty_like(values_N).index_copy(0, order_N, values_N) for values_N in sorted_N)
        return advantages_N, rewards_N
    request_ids = list(request_ids_N) if request_ids_N is not None else [str(n) for n in range(rewards_NF.shape[0])]
    if scale_rewards == 'gdpo':
        return _unequal_gdpo(rewards_NF, reward_weights_F, group_ids_N, repeated)
    return compute_advantages_dynamic(
        rewards_NF, reward_weights_F, [str(group) for group in group_ids_N.tolist()], request_ids, kl_values=kl_N, **options)


def _check(rewards_NF: torch.Tensor, advantage_estimator: str, scale_rewards: str, subtract_kl: bool) -> None:
    if advantage_estimator not in ESTIMATORS:
        raise UserError(f'advantage_estimator is {advantage_estimator!r}; it must be one of {", ".join(ESTIMATORS)}.')
    if scale_rewards not in SCALES:
        raise UserError(f'scale_rewards is {scale_rewards!r}; it must be one of {", ".join(SCALES)}.')
    if scale_rewards == 'gdpo' and (subtract_kl or advantage_estimator == 'reinforce_plus_plus'):
        raise UserError(f'scale_rewards gdpo normalizes each reward function by itself: it has no place for the KL in the reward '
                        f'(kl_in_reward {subtract_kl}) nor for the normalization of advantage_estimator reinforce_plus_plus (given: '
                        f'{advantage_estimator}). Use --advantage_estimator grpo and --kl_in_reward false, or scale_rewards group.')
    infinite = torch.isinf(rewards_NF).nonzero()
    if infinite.numel():
        rollout, function = infinite[0].tolist()
        raise RunError(f'Reward function {function} gave rollout {rollout} the reward {rewards_NF[rollout, function].item()}. A reward '
                       'must be finite, or None where the function does not apply.')


def _unequal_gdpo(rewards_NF: torch.Tensor, reward_weights_F: torch.Tensor, group_ids_N: torch.Tensor,
                  repeated: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """GDPO (arXiv 2601.05242) where groups differ in size: each column normalized in its group, weighted, then over the batch."""
    if repeated:
        raise UserError('scale_rewards gdpo cannot be used where one request gives several rollouts (a multi-turn scheduler that splits '
                        'trajectories). Use scale_rewards group, batch or none.')
    group_of_N = torch.unique(group_ids_N, return_inverse=True)[1]
    num_groups = int(group_of_N.max()) + 1
    advantages_N = rewards_NF.new_zeros(rewards_NF.shape[0])
    for rewards_N, weight in zip(rewards_NF.unbind(1), reward_weights_F):
        known_N = ~torch.isnan(rewards_N)
        filled_N = torch.where(known_N, rewards_N, torch.zeros_like(rewards_N))
        count = segment_sum(known_N.float(), group_of_N, num_groups)
        mean = segment_sum(filled_N, group_of_N, num_groups) / count.clamp(min=1.0)
        centered_N = torch.where(known_N, filled_N - mean[group_of_N], torch.zeros_like(filled_N))
        variance = segment_sum(centered_N.square(), group_of_N, num_groups) / (count - 1).clamp(min=1.0)
        advantages_N = advantages_N + weight * centered_N / (variance.sqrt()[group_of_N] + 1e-8)
    spread = advantages_N.std() if advantages_N.numel() > 1 else advantages_N.new_zeros(())
    return (advantages_N - advantages_N.mean()) / (spread + 1e-8), (rewards_NF * reward_weights_F).nansum(dim=1)


def reward_metrics(rewards_N: torch.Tensor, rewards_NF: torch.Tensor, names: Sequence[str], group_ids_N: torch.Tensor,
                   scale_rewards: str) -> dict[str, float]:
    """`reward`, `reward_std`, `frac_reward_zero_std`, and `rewards/NAME/mean` and `/std` of a generation, under ms-swift's names.

    A function that applied to no rollout has no entry. With groups of one size the numbers are those of
    swift.rl_core.advantage.compute_reward_metrics; else the same definitions group by group: `reward` is the mean of the groups' means,
    `reward_std` the mean of their standard deviations (scale batch: of all rewards), and a group of one counts as zero spread.
    Reads values on the host: once a generation, not inside a step.
    """
    from swift.rl_core.advantage import compute_reward_metrics
    order_N = torch.argsort(group_ids_N, stable=True)
    sizes = torch.unique_consecutive(group_ids_N[order_N], return_counts=True)[1].tolist()
    one_size = len(set(sizes)) <= 1
    measured = compute_reward_metrics(
        rewards=rewards_N[order_N],
        rewards_per_func=rewards_NF[order_N],
        reward_func_names=list(names),
        num_generations=sizes[0] if one_size and sizes else 1,
        scale_rewards=scale_rewards)
    overall = (measured.reward_mean, measured.reward_std, measured.frac_reward_zero_std)
    if not one_size:
        groups = rewards_N[order_N].split(sizes)
        spreads = torch.stack([group.std() if group.numel() > 1 else group.new_zeros(()) for group in groups])
        spread = rewards_N.std() if scale_rewards == 'batch' else spreads.mean()
        zero = torch.isclose(spreads, torch.zeros_like(spreads)).float().mean()
        overall = (torch.stack([group.mean() for group in groups]).mean().item(), spread.item(), zero.item())
    metrics = dict(zip(('reward', 'reward_std', 'frac_reward_zero_std'), overall))
    for name, mean in measured.per_func_mean.items():
        metrics[f'rewards/{name}/mean'] = mean
        metrics[f'rewards/{name}/std'] = measured.per_func_std[name]
    return metrics


def sequence_kl(old_logprobs_K: torch.Tensor, ref_logprobs_K: torch.Tensor, sequence_of_token_K: torch.Tensor,
                num_sequences: int) -> torch.Tensor:
    """Sum over each completion of old - ref log-probabilities, float32 [sequences]: the KL that kl_in_reward takes from the reward."""
    return segment_sum(old_logprobs_K - ref_logprobs_K, sequence_of_token_K, num_sequences)


def token_advantages(advantages_S: torch.Tensor,
                     sequence_of_token_K: torch.Tensor,
                     *,
                     teacher_logprobs_K: torch.Tensor | None = None,
                     old_logprobs_K: torch.Tensor | None = None,
                     teacher_kl_coef: float = 0.0) -> torch.Tensor:
    """Advantage of each token, float32 [K]: its sequence's, plus teacher_kl_coef * (teacher - old log-probability) with a teacher.

    The second part is on-policy distillation as a policy gradient: minus the one-sample estimate of KL(student || teacher).
    """
    advantages_K = advantages_S[sequence_of_token_K]
    if teacher_logprobs_K is None or teacher_kl_coef == 0.0:
        return advantages_K
    assert old_logprobs_K is not None, 'a teacher needs old_logprobs_K'
    return advantages_K + teacher_kl_coef * (teacher_logprobs_K - old_logprobs_K)


def rlsd_advantages(config: LossConfig, advantages_S: torch.Tensor, sequence_of_token_K: torch.Tensor, *, teacher_logprobs_K: torch.Tensor,
                    old_logprobs_K: torch.Tensor, update: int) -> torch.Tensor:
    """Advantage of each token, float32 [K], by self-distilled RLVR (RLSD, arXiv 2604.03128).

    A * ((1 - lambda) + lambda * clip(exp(sign(A) * d), 1 - range, 1 + range)) with d = teacher - old log-probability: where the teacher, who has
    seen the answer, agrees with the reward, the token counts for more. The sign never changes.

    Args:
        update: optimizer steps before this generation; lambda follows it (`LossConfig.rlsd_lambda_at`).
    """
    advantages_K = advantages_S[sequence_of_token_K]
    weight_K = torch.exp(torch.sign(advantages_K) * (teacher_logprobs_K - old_logprobs_K))
    weight_K = torch.clamp(weight_K, min=1.0 - config.rlsd_reweight_clip_range, max=1.0 + config.rlsd_reweight_clip_range)
    share = config.rlsd_lambda_at(update)
    scale_K = (1.0 - share) + share * weight_K
    if config.rlsd_negative_only:
        scale_K = torch.where(advantages_K < 0, scale_K, torch.ones_like(scale_K))
    return advantages_K * scale_K


def teacher_kl(teacher_logprobs_K: torch.Tensor, old_logprobs_K: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum over tokens of exp(d) - d - 1 with d = teacher - old, and the number of tokens (0-dim): the metric `teacher_kl`."""
    difference_K = teacher_logprobs_K - old_logprobs_K
    return (torch.exp(difference_K) - difference_K - 1).sum(), torch.ones_like(difference_K).sum()
