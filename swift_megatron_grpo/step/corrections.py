"""Corrections for rollouts that another policy sampled: importance weights, the off-policy mask, and their metrics (import tier 1).

The engine that samples and the model that trains give the same token slightly different probabilities, and an asynchronous rollout comes
from older weights. rho = exp(old_logprob - rollout_logprob) measures it. All functions are pure, per micro-batch, any rank.

Metrics carry ms-swift's names under `rollout_correction/`. They are sums and counts over the whole step, where ms-swift averages the
averages of micro-batches: a mean over tokens is the mean over all tokens of the step, a mean over sequences that over all sequences with
at least one unmasked token (ms-swift counts empty ones, with perplexity 1), `ess` comes from the step's first and second moment.
"""
from __future__ import annotations

import torch

from swift_megatron_grpo.types import LossInputs, Sums
from .loss_config import LossConfig
from .segments import segment_count, segment_mean

LOG_RATIO_BOUND = 20.0  # exp(20) is 5e8: beyond it a ratio carries no information, and exp must not overflow
_FIRST_MOMENT, _SECOND_MOMENT = 'rollout_correction/_ess_first', 'rollout_correction/_ess_second'


def maximum_over(values: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """Largest of the values that are present, 0-dim; -inf where there is none."""
    lowest = values.new_full((1, ), float('-inf'))
    return torch.cat([torch.where(present, values, lowest), lowest]).max()


def correct(config: LossConfig, inputs: LossInputs, mask_C: torch.Tensor, sums: Sums) -> torch.Tensor | None:
    """Weights to multiply the objective with, [C], or None; adds the metrics that the configuration asks for.

    Without rollout log-probabilities there is nothing to correct with, as in ms-swift: None, and no metrics.
    """
    mode = config.rollout_importance_sampling_mode
    if inputs.rollout_logprobs_C is None or (mode is None and not config.log_rollout_offpolicy_metrics):
        return None
    with torch.no_grad():
        zeros_C = torch.zeros_like(inputs.weights_C)
        old_C = torch.where(mask_C, inputs.old_logprobs_C, zeros_C)
        rollout_C = torch.where(mask_C, inputs.rollout_logprobs_C, zeros_C)
        add_offpolicy_metrics(old_C, rollout_C, mask_C, inputs.sequence_ids_C, inputs.num_sequences, sums)
        if mode is None:
            return None
        log_rho_C = torch.clamp(old_C - rollout_C, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        weights_C, clipped, total = rollout_weights(mode, config.rollout_importance_sampling_threshold, log_rho_C, mask_C,
                                                    inputs.sequence_ids_C, inputs.num_sequences)
        sums.add('rollout_correction/clipped_frac', clipped, total)
        _add_weight_metrics(config.rollout_importance_sampling_threshold, weights_C, mask_C, sums)
    return weights_C


def rollout_weights(mode: str, threshold: float, log_rho_C: torch.Tensor, mask_C: torch.Tensor, ids_C: torch.Tensor,
                    num_sequences: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Importance weights [C] of one of four modes, how many tokens or sequences they cut, and how many there are (0-dim, float32).

    token_truncate: min(rho, threshold). token_mask: rho, or 0 above the threshold. sequence_truncate: every token gets
    min(geometric mean of its sequence, threshold). sequence_mask: rho, or 0 in sequences whose geometric mean is above it.

    Example: rho [1, 4], one sequence, threshold 3: token_truncate [1, 3], token_mask [1, 0], sequence_truncate [2, 2],
    sequence_mask [1, 4].
    """
    rho_C = torch.exp(log_rho_C)
    if mode in ('token_truncate', 'token_mask'):
        above_C = rho_C > threshold
        cut_C = torch.full_like(rho_C, threshold if mode == 'token_truncate' else 0.0)
        return torch.where(above_C, cut_C, rho_C), (above_C & mask_C).sum().float(), mask_C.sum().float()
    assert mode in ('sequence_truncate', 'sequence_mask'), mode
    rho_S = torch.exp(segment_mean(log_rho_C, mask_C, ids_C, num_sequences))
    has_tokens_S = segment_count(mask_C, ids_C, num_sequences) > 0
    clipped = ((rho_S > threshold) & has_tokens_S).sum().float()
    if mode == 'sequence_truncate':
        weights_C = rho_S.clamp(max=threshold)[ids_C]
    else:
        weights_C = rho_C * (rho_S <= threshold)[ids_C]
    return weights_C, clipped, has_tokens_S.sum().float()


def off_policy_keep(config: LossConfig, inputs: LossInputs, new_logprobs_C: torch.Tensor, mask_C: torch.Tensor) -> torch.Tensor:
    """False, [C], for the tokens of sequences that drifted off and whose advantage is negative (DeepSeek-V3.2, arXiv 2512.02556).

    Dropped: mean of (behaviour - new) over the sequence above off_policy_sequence_mask_delta, and mean advantage below 0. The behaviour
    policy is the rollout's where its log-probabilities are known, else the old one. As in ms-swift a dropped sequence keeps its place in
    the denominators, except where tokens are averaged over the unmasked ones (bnpo, real): see coupled.py.
    """
    behaviour_C = inputs.old_logprobs_C if inputs.rollout_logprobs_C is None else inputs.rollout_logprobs_C
    keep_S = keep_sequences(config.off_policy_sequence_mask_delta, new_logprobs_C.detach(), behaviour_C, inputs.advantages_C, mask_C,
                            inputs.sequence_ids_C, inputs.num_sequences)
    return keep_S[inputs.sequence_ids_C]


def keep_sequences(delta: float, new_logprobs_C: torch.Tensor, behaviour_logprobs_C: torch.Tensor, advantages_C: torch.Tensor,
                   mask_C: torch.Tensor, ids_C: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """The rule of `off_policy_keep` on plain tensors; bool [S]. Example: mean drift 0.3, delta 0.2, advantage -1: False."""
    drift_S = segment_mean(behaviour_logprobs_C - new_logprobs_C, mask_C, ids_C, num_sequences)
    advantages_S = segment_mean(advantages_C, mask_C, ids_C, num_sequences)
    return ~((drift_S > delta) & (advantages_S < 0))


def add_offpolicy_metrics(old_C: torch.Tensor, rollout_C: torch.Tensor, mask_C: torch.Tensor, ids_C: torch.Tensor, num_sequences: int,
                          sums: Sums) -> None:
    """How far the training policy is from the one that sampled: KL, perplexities, chi squared. Log-probabilities are 0 at masked tokens.

    kl and k3_kl estimate KL(rollout || old); chi2_token = E[rho^2] - 1 over tokens, chi2_seq the same over the geometric means of
    sequences; ppl_ratio = E[exp(log_ppl_diff)] over sequences.
    """
    tokens, tokens_S = mask_C.sum().float(), segment_count(mask_C, ids_C, num_sequences)
    has_tokens_S = tokens_S > 0
    sequences = has_tokens_S.sum().float()
    log_rho_C = old_C - rollout_C
    bounded_C = torch.clamp(log_rho_C, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    k3_C = torch.clamp(torch.exp(bounded_C) - bounded_C - 1, min=-10, max=10)
    for name, values_C in (('kl', -log_rho_C), ('k3_kl', k3_C), ('chi2_token', torch.exp(2 * bounded_C) - 1)):
        sums.add(f'rollout_correction/{name}', (values_C * mask_C).sum(), tokens)

    old_S = segment_mean(old_C, mask_C, ids_C, num_sequences)
    rollout_S = segment_mean(rollout_C, mask_C, ids_C, num_sequences)
    difference_S = rollout_S - old_S  # log of the perplexity ratio
    rho_S = torch.exp(torch.clamp(segment_mean(log_rho_C, mask_C, ids_C, num_sequences), -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    for name, values_S in (('training_ppl', torch.exp(-old_S)), ('training_log_ppl', -old_S), ('rollout_ppl', torch.exp(-rollout_S)),
                           ('rollout_log_ppl', -rollout_S), ('log_ppl_diff', difference_S), ('log_ppl_abs_diff', difference_S.abs()),
                           ('ppl_ratio', torch.exp(difference_S)), ('chi2_seq', rho_S.square() - 1)):
        sums.add(f'rollout_correction/{name}', (values_S * has_tokens_S).sum(), sequences)
    sums.maximum('rollout_correction/log_ppl_diff_max', maximum_over(difference_S, has_tokens_S))
    sums.maximum('rollout_correction/log_ppl_diff_min', maximum_over(-difference_S, has_tokens_S))


def _add_weight_metrics(threshold: float, weights_C: torch.Tensor, mask_C: torch.Tensor, sums: Sums) -> None:
    """Mean of the weights, and the two moments of the weights bounded to [1/threshold, threshold] that `ess` is made of."""
    tokens = mask_C.sum().float()
    sums.add('rollout_correction/is_weight_mean', (weights_C * mask_C).sum(), tokens)
    bounded_C = weights_C.clamp(min=1.0 / threshold, max=threshold)
    sums.add(_FIRST_MOMENT, (bounded_C * mask_C).sum(), tokens)
    sums.add(_SECOND_MOMENT, (bounded_C.square() * mask_C).sum(), tokens)


def finish_metrics(means: dict[str, float]) -> dict[str, float]:
    """Replace the moments by `rollout_correction/ess` = E[w]^2 / E[w^2], in a new dictionary of the step's reduced means.

    Call it once a step, after the reduction. Means without the moments come back unchanged. 1 says that all weights are equal.
    """
    finished = {name: value for name, value in means.items() if name not in (_FIRST_MOMENT, _SECOND_MOMENT)}
    if _FIRST_MOMENT in means:
        finished['rollout_correction/ess'] = means[_FIRST_MOMENT]**2 / max(means[_SECOND_MOMENT], 1e-10)
    return finished
