"""What couples the sequences of an optimizer step, and therefore needs the whole step's numbers before the training forward (tier 1).

Everything here works on vectors over all K completion tokens of the step in canonical order, which are the same on every rank; so every
rank computes the same result without communication, and a micro-batch then takes its share of it.
"""
from __future__ import annotations

import math
import torch
from dataclasses import dataclass, field

from swift_megatron_grpo.types import TokenTable
from .corrections import keep_sequences
from .loss import resolve_loss
from .loss_config import LossConfig
from .segments import segment_logsumexp, segment_mean, segment_sum

_QUANTILE_LIMIT = 16_000_000  # torch.nanquantile refuses larger inputs


@dataclass(kw_only=True, slots=True)
class Coupled:
    """What `couple` found out; the fields have the names of the TokenTable's and replace them."""
    weights_K: torch.Tensor
    keep_K: torch.Tensor | None = None
    coefficient_K: torch.Tensor | None = None
    coupled_loss: torch.Tensor | None = None
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)  # of the whole step, 0-dim; not to be reduced


def needs_step_pass(config: LossConfig, on_policy: bool) -> bool:
    """Whether a forward-only pass over the whole step at the current weights must come before the training forward.

    It gives log-probabilities, and entropies where config.needs_entropy. `on_policy`: the current weights are the old policy, so every
    log-ratio is 0; REAL needs no pass then.
    """
    loss = resolve_loss(config.loss_type)
    if config.top_entropy_quantile < 1.0 and not loss.couples_groups:
        return True
    if config.kl_cov_ratio is not None or config.clip_cov_ratio is not None:
        return True
    if config.off_policy_sequence_mask_delta is not None and (loss.couples_groups or loss.weighting == 'unmasked_token_mean'):
        return True
    return loss.couples_groups and not on_policy


def couple(config: LossConfig, table: TokenTable, *, logprobs_K: torch.Tensor | None = None, entropies_K: torch.Tensor | None = None,
           seed: int = 0, update: int = 0) -> Coupled:
    """Work out the step's keep mask, coefficients and denominators. Pure; every rank calls it with the same vectors.

    Args:
        table: weights_K as token_weights made them; old_logprobs_K, rollout_logprobs_K whole (summed over the ranks).
        logprobs_K: of the current weights, no gradient; None only where needs_step_pass says that none is needed.
        entropies_K: of the current weights; needed for top_entropy_quantile < 1.
        seed, update: of the run and of this optimizer step; they decide the random choice of Clip-Cov.
    """
    loss = resolve_loss(config.loss_type)
    result = Coupled(weights_K=table.weights_K)
    mask_K, ids_K, num_sequences = table.weights_K > 0, table.sequence_of_token_K, table.lengths_S.numel()
    old_K = logprobs_K if table.old_logprobs_K is None else table.old_logprobs_K

    if config.off_policy_sequence_mask_delta is not None and (loss.couples_groups or loss.weighting == 'unmasked_token_mean'):
        behaviour_K = old_K if table.rollout_logprobs_K is None else table.rollout_logprobs_K
        keep_S = keep_sequences(config.off_policy_sequence_mask_delta, logprobs_K, behaviour_K, table.advantages_K, mask_K, ids_K,
                                num_sequences)
        # Weights of dropped sequences stay above 0: the loss drops them itself, and the metrics before that rule count them.
        result.weights_K = mask_K / (mask_K & keep_S[ids_K]).sum().clamp(min=1).float()
        mask_K = mask_K & keep_S[ids_K]

    if config.top_entropy_quantile < 1.0 and not loss.couples_groups:
        result.keep_K, result.metrics['entropy/threshold'] = entropy_keep(entropies_K, config.top_entropy_quantile)

    if config.kl_cov_ratio is not None:
        chosen_K = highest_covariance(logprobs_K, table.advantages_K, mask_K, config.kl_cov_ratio)
        result.coefficient_K = chosen_K.float() * config.kl_cov_coef
        result.metrics['kl_cov/selected_ratio'] = chosen_K.sum() / mask_K.sum().clamp(min=1)
    elif config.clip_cov_ratio is not None:
        chosen_K = covariance_band(config, logprobs_K, old_K, table.advantages_K, mask_K, seed=seed, update=update)
        result.keep_K = ~chosen_K if result.keep_K is None else result.keep_K & ~chosen_K
        result.metrics['clip_cov/selected_ratio'] = chosen_K.sum() / mask_K.sum().clamp(min=1)

    if loss.couples_groups:
        log_ratio_K = torch.zeros_like(table.advantages_K) if logprobs_K is None else logprobs_K - old_K
        result.coefficient_K, result.coupled_loss = real_coefficients(config.real_tau, log_ratio_K, table.advantages_K, mask_K, ids_K,
                                                                      table.groups_S)
    return result


def entropy_keep(entropies_K: torch.Tensor, top_entropy_quantile: float) -> tuple[torch.Tensor, torch.Tensor]:
    """True, [K], for tokens whose entropy reaches the (1 - top_entropy_quantile) quantile over the step; and that threshold.

    NaN entropies are left out and not kept. Truncated sequences count, as in ms-swift. The quantile interpolates linearly.
    arXiv 2506.01939. Example: entropies [1, 2, 3, 4, 5], quantile 0.4: threshold 3.4, the last two are kept.
    """
    threshold = _quantile(entropies_K.float(), 1 - top_entropy_quantile)
    return entropies_K >= threshold, threshold


def _quantile(values_K: torch.Tensor, q: float) -> torch.Tensor:
    if 0 < values_K.numel() <= _QUANTILE_LIMIT:
        return torch.nanquantile(values_K, q)
    if values_K.numel() == 0:
        return values_K.new_tensor(float('nan'))
    ordered = values_K[~torch.isnan(values_K)].sort().values
    if ordered.numel() == 0:
        return values_K.new_tensor(float('nan'))
    position = q * (ordered.numel() - 1)
    low, high = ordered[math.floor(position)], ordered[math.ceil(position)]
    return torch.lerp(low, high, position - math.floor(position))


def covariances(logprobs_K: torch.Tensor, advantages_K: torch.Tensor, mask_K: torch.Tensor) -> torch.Tensor:
    """(A - mean A) * (log p - mean log p) with means over the unmasked tokens of the step, [K] (arXiv 2505.22617); -inf where masked."""
    count = mask_K.sum().clamp(min=1)
    mean_advantage = torch.where(mask_K, advantages_K, torch.zeros_like(advantages_K)).sum() / count
    mean_logprob = torch.where(mask_K, logprobs_K, torch.zeros_like(logprobs_K)).sum() / count
    product_K = (advantages_K - mean_advantage) * (logprobs_K - mean_logprob)
    return torch.where(mask_K, product_K, torch.full_like(product_K, float('-inf')))


def highest_covariance(logprobs_K: torch.Tensor, advantages_K: torch.Tensor, mask_K: torch.Tensor, ratio: float) -> torch.Tensor:
    """True, [K], for the `ratio` of unmasked tokens with the largest covariance, at least one (KL-Cov). Of equals the earlier wins."""
    count = int(mask_K.sum())
    chosen_K = torch.zeros_like(mask_K)
    if count:
        order = covariances(logprobs_K, advantages_K, mask_K).sort(descending=True, stable=True).indices
        chosen_K[order[:max(int(count * ratio), 1)]] = True
    return chosen_K


def covariance_band(config: LossConfig, logprobs_K: torch.Tensor, old_logprobs_K: torch.Tensor, advantages_K: torch.Tensor,
                    mask_K: torch.Tensor, *, seed: int, update: int) -> torch.Tensor:
    """True, [K], for the tokens whose gradient Clip-Cov cuts: drawn from those with a covariance between clip_cov_low and clip_cov_high.

    As many as clip_cov_ratio of the unmasked tokens, at least one, at most all in the band; tokens that the ratio clip stops anyway
    are no candidates. The draw depends on the seed, the update and the canonical order alone, so all ranks draw the same.
    """
    ratio_K = torch.exp(torch.where(mask_K, logprobs_K - old_logprobs_K, torch.zeros_like(logprobs_K)))
    clipped_K = torch.clamp(ratio_K, 1 - config.epsilon, 1 + config.upper_epsilon)
    stopped_K = -clipped_K * advantages_K > -ratio_K * advantages_K
    covariances_K = covariances(logprobs_K, advantages_K, mask_K).masked_fill(stopped_K, float('-inf'))
    candidates = torch.nonzero((covariances_K > config.clip_cov_low) & (covariances_K < config.clip_cov_high)).flatten()
    chosen_K = torch.zeros_like(mask_K)
    wanted = min(max(int(mask_K.sum() * config.clip_cov_ratio), 1), candidates.numel())
    generator = torch.Generator().manual_seed((seed * 1_000_003 + update) % 2**63)
    drawn = torch.randperm(candidates.numel(), generator=generator)[:wanted].to(candidates.device)
    chosen_K[candidates[drawn]] = True
    return chosen_K


def real_coefficients(tau: float, log_ratio_K: torch.Tensor, advantages_K: torch.Tensor, mask_K: torch.Tensor, ids_K: torch.Tensor,
                      groups_S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient of REAL's loss for every token's log-probability, float32 [K], and the loss's value (REAL, arXiv 2602.05630).

    score s = mean log-ratio of a sequence; positive: advantage above 0. Loss = mean over the groups of
    log(1 + sum over negatives of exp(s / tau)) + log(1 + sum over positives of exp(-s / tau)); groups with one kind only give 0.
    A sequence without unmasked tokens has score 0 and counts as negative, as in ms-swift. Groups are by id and may differ in size.
    d loss / d log p_t = d loss / d s * 1 / length, and d loss / d s is at most 1 / (tau * groups) in size.

    Example: one group, advantages [1, -1], one token each, log-ratio 0, tau 0.5: coefficients [-1, 1], value 2 log 2.
    """
    num_sequences = groups_S.numel()
    group_ids, group_of_S = torch.unique(groups_S, return_inverse=True)
    num_groups = group_ids.numel()
    scores_S = segment_mean(log_ratio_K, mask_K, ids_K, num_sequences)
    positive_S = segment_mean(advantages_K, mask_K, ids_K, num_sequences) > 0
    num_positive = segment_sum(positive_S.float(), group_of_S, num_groups)
    num_negative = segment_sum((~positive_S).float(), group_of_S, num_groups)
    valid = (num_positive > 0) & (num_negative > 0)

    logits_S = torch.where(positive_S, -scores_S, scores_S) / tau
    positive_loss = segment_logsumexp(logits_S, positive_S, group_of_S, num_groups)
    negative_loss = segment_logsumexp(logits_S, ~positive_S, group_of_S, num_groups)
    value = torch.where(valid, positive_loss + negative_loss, torch.zeros_like(positive_loss)).sum() / max(num_groups, 1)

    own_loss_S = torch.where(positive_S, positive_loss[group_of_S], negative_loss[group_of_S])
    sign_S = torch.where(positive_S, -1.0, 1.0)
    gradient_S = sign_S * torch.exp(logits_S - own_loss_S) * valid[group_of_S] / (tau * max(num_groups, 1))
    lengths_S = segment_sum(mask_K.float(), ids_K, num_sequences).clamp(min=1.0)
    return (gradient_S / lengths_S)[ids_K] * mask_K, value
