"""The policy loss of one micro-batch: a registry of small pure functions, and the frame around them (import tier 1: torch).

A loss is a function `(config, terms, sums) -> objective_C`: what each token adds, to be minimized, before its weight. The frame does what
all losses share: importance ratios, entropy filter, KL term, rollout correction, off-policy mask, weights, and metrics. Nothing
here communicates, logs, or waits for the device.

A user's own loss: decorate a function with `register_loss('name')` in a file given to `--external_plugins` and name it, or give
`--loss_type package.module:function`.
"""
from __future__ import annotations

import difflib
import importlib
import torch
from collections.abc import Callable
from dataclasses import dataclass

from swift_megatron_grpo.errors import UserError
from swift_megatron_grpo.types import LossInputs, Sums
from . import corrections
from .loss_config import LossConfig
from .segments import discounted_suffix_sum, segment_count, segment_mean, segment_sum

WEIGHTINGS = ('sequence_mean', 'sequence_sum', 'unmasked_token_mean', 'token_mean', 'max_length')  # see weights.py
CLIP_METRICS = ('ratio', 'log_ratio', 'upper', None)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossTerms:
    """What a loss may use, all flat [C] and float32. At masked tokens every log-ratio is 0, so nothing overflows there."""
    new_logprobs_C: torch.Tensor  # carries the gradient; 0 at masked tokens
    log_ratio_C: torch.Tensor  # new - old, token by token; carries the gradient
    ratio_C: torch.Tensor  # importance ratio at the configured level; carries the gradient
    advantages_C: torch.Tensor
    mask_C: torch.Tensor  # bool; False: filtered out before the step (overlong)
    counted_C: torch.Tensor  # bool; mask_C without the sequences that the off-policy rule drops: what metrics are over
    sequence_ids_C: torch.Tensor  # int64
    num_sequences: int
    coefficient_C: torch.Tensor | None  # from coupled.py


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """A registered loss: its function, and which of the shared rules go with it."""
    name: str
    function: Callable[[LossConfig, LossTerms, Sums], torch.Tensor]
    weighting: str = 'sequence_mean'
    clip_metrics: str | None = None  # ratio: outside [1 - eps, 1 + eps_high]; log_ratio: outside [-eps, eps_high]; upper: above eps_high
    couples_groups: bool = False  # gradient from coupled.py, weights included; entropy filter and rollout weights do not touch it


LOSSES: dict[str, Loss] = {}


def register_loss(name: str, *, weighting: str = 'sequence_mean', clip_metrics: str | None = None, couples_groups: bool = False):
    """Decorator: make `function(config, terms, sums) -> objective_C` known as `--loss_type name`.

    `weighting` is a rule of weights.py. Registering another function under a taken name raises UserError; the same function again
    (a plugin file that is imported twice) is fine.
    """
    assert weighting in WEIGHTINGS, weighting
    assert clip_metrics in CLIP_METRICS, clip_metrics

    def register(function):
        known = LOSSES.get(name)
        if known is not None and _address(known.function) != _address(function):
            raise UserError(f'A loss named {name!r} is registered already ({".".join(_address(known.function))}). '
                            'Choose another name.')
        LOSSES[name] = Loss(
            name=name, function=function, weighting=weighting, clip_metrics=clip_metrics, couples_groups=couples_groups)
        return function

    return register


def _address(function: Callable) -> tuple[str, str]:
    return function.__module__, function.__qualname__


def resolve_loss(name: str) -> Loss:
    """The loss of that name, or the function at 'package.module:function' (sequence_mean weights unless it is registered with others).

    Raises UserError for an unknown name, with the nearest ones, and for a path that does not lead to a function.
    """
    if name in LOSSES:
        return LOSSES[name]
    module_name, colon, attribute = name.partition(':')
    if not colon:
        near = difflib.get_close_matches(name, LOSSES, n=3)
        raise UserError(f'Unknown loss_type {name!r}.' + (f' Did you mean {" or ".join(near)}?' if near else '') +
                        f' Known: {", ".join(LOSSES)}; or module:function, or a name that a file of --external_plugins registers.')
    try:
        function = importlib.import_module(module_name)
        for part in attribute.split('.'):
            function = getattr(function, part)
    except (ImportError, AttributeError) as error:
        raise UserError(f'loss_type {name!r} leads nowhere: {error}. It must be importable as package.module:function.') from error
    if not callable(function):
        raise UserError(f'loss_type {name!r} is a {type(function).__name__}, not a function (config, terms, sums) -> objective.')
    for loss in LOSSES.values():
        if loss.function is function:
            return loss
    return Loss(name=name, function=function)


@register_loss('grpo', weighting='sequence_mean', clip_metrics='ratio')
@register_loss('bnpo', weighting='unmasked_token_mean', clip_metrics='ratio')
@register_loss('dr_grpo', weighting='max_length', clip_metrics='ratio')
@register_loss('dapo', weighting='token_mean', clip_metrics='ratio')
@register_loss('luspo', weighting='sequence_sum', clip_metrics='ratio')
def clipped(config: LossConfig, terms: LossTerms, sums: Sums) -> torch.Tensor:
    """-min(r A, clip(r, 1 - eps, 1 + eps_high) A).

    GRPO (arXiv 2402.03300), BNPO (2506.02864), Dr. GRPO (2503.20783), DAPO (2503.14476), GSPO (2507.18071, by importance_sampling_level
    sequence) and LUSPO (2602.05261) share it and differ in the tokens' weights and in r. `delta` bounds r in the first branch.
    `dual_clip` c keeps the gain of a negative advantage at or above c A (arXiv 1912.09729).
    """
    ratio_C, advantages_C = terms.ratio_C, terms.advantages_C
    clipped_C = torch.clamp(ratio_C, 1 - config.epsilon, 1 + config.upper_epsilon)
    if config.delta is not None:
        ratio_C = torch.clamp(ratio_C, max=config.delta)
    gain_C = torch.min(ratio_C * advantages_C, clipped_C * advantages_C)
    if config.dual_clip is not None:
        gain_C = torch.where(advantages_C < 0, torch.max(gain_C, config.dual_clip * advantages_C), gain_C)
        bounded_C = (terms.ratio_C > config.dual_clip) & (advantages_C < 0) & terms.counted_C
        sums.add('clip_ratio/dual_mean', bounded_C.sum().float(), terms.counted_C.sum().float())
    return -gain_C


def kl_cov(config: LossConfig, terms: LossTerms, sums: Sums) -> torch.Tensor:
    """-r A, plus kl_cov_coef |log r| on the tokens whose log-probability and advantage vary together most (KL-Cov, arXiv 2505.22617).

    Takes the place of `clipped` where kl_cov_ratio is set. The tokens are chosen over the whole step in coupled.py; `coefficient_C`
    is kl_cov_coef on them and 0 elsewhere.
    """
    return -terms.ratio_C * terms.advantages_C + terms.coefficient_C * terms.log_ratio_C.abs()


@register_loss('cispo', weighting='token_mean', clip_metrics='upper')
def cispo(config: LossConfig, terms: LossTerms, sums: Sums) -> torch.Tensor:
    """-sg[min(r, epsilon_high)] A log p: the clipped ratio is a weight, so every token keeps its gradient (arXiv 2506.13585)."""
    bounded_C = torch.clamp(terms.ratio_C, max=config.upper_epsilon).detach()
    return -bounded_C * terms.advantages_C * terms.new_logprobs_C


@register_loss('sapo', weighting='sequence_mean')
def sapo(config: LossConfig, terms: LossTerms, sums: Sums) -> torch.Tensor:
    """-(4 / tau) sigmoid(tau (r - 1)) A with tau_pos for positive advantages and tau_neg for the others (arXiv 2511.20347)."""
    gate_pos_C = torch.sigmoid(config.tau_pos * (terms.ratio_C - 1)) * (4.0 / config.tau_pos)
    gate_neg_C = torch.sigmoid(config.tau_neg * (terms.ratio_C - 1)) * (4.0 / config.tau_neg)
    return -torch.where(terms.advantages_C > 0, gate_pos_C, gate_neg_C) * terms.advantages_C


@register_loss('fipo', weighting='token_mean', clip_metrics='ratio')
def fipo(config: LossConfig, terms: LossTerms, sums: Sums) -> torch.Tensor:
    """The clipped loss times exp(discounted sum of the log-ratios from here to the end), clipped, no gradient (arXiv 2603.19835).

    The distance to a future token counts tokens that carry loss; ms-swift counts environment tokens between two turns too.
    """
    with torch.no_grad():
        delta_C = terms.log_ratio_C
        if config.delta is not None:  # tokens far off the old policy do not speak for their past
            delta_C = torch.where(terms.ratio_C > config.delta, torch.zeros_like(delta_C), delta_C)
        future_kl_C = discounted_suffix_sum(delta_C, terms.sequence_ids_C, config.fipo_discount)
        influence_C = torch.exp(future_kl_C)
        if config.fipo_clip_range:
            lowest = 1.0 if config.fipo_clip_high_only else 1.0 - config.fipo_clip_range
            influence_C = torch.clamp(influence_C, min=lowest, max=1.0 + config.fipo_clip_range)
        safe_C = torch.ones_like(terms.mask_C)
        if config.fipo_safety_threshold is not None:
            safe_C = ~((terms.advantages_C < 0) & (terms.ratio_C > config.fipo_safety_threshold))
            influence_C = torch.where(safe_C, influence_C, torch.clamp(influence_C, min=0.8, max=1.0))
        for name, values_C in (('future_kl_mean', future_kl_C), ('influence_weight_mean', influence_C), ('safety_keep_ratio', safe_C)):
            sums.add(f'fipo/{name}', (values_C * terms.counted_C).sum(), terms.counted_C.sum().float())
    return clipped(config, terms, sums) * influence_C


@register_loss('gmpo', weighting='sequence_mean', clip_metrics='log_ratio')
def gmpo(config: LossConfig, terms: LossTerms, sums: Sums) -> torch.Tensor:
    """-A exp(mean over the sequence of the clipped log-ratio): geometric instead of arithmetic mean (GMPO, arXiv 2507.20673).

    Each token's log-ratio is bounded in the direction in which it helps only: at most epsilon_high for a positive advantage, at least
    -epsilon for a negative one. epsilon bounds the logarithm here (the paper: 0.4 for both). Every token of a sequence gets the
    sequence's value; A is its mean advantage.
    """
    log_ratio_C, ids_C = terms.log_ratio_C, terms.sequence_ids_C
    positive_C = torch.clamp(log_ratio_C, max=config.upper_epsilon)
    negative_C = torch.clamp(log_ratio_C, min=-config.epsilon)
    bounded_C = torch.where(terms.advantages_C > 0, positive_C, negative_C)
    ratio_S = torch.exp(segment_mean(bounded_C, terms.mask_C, ids_C, terms.num_sequences))
    advantages_S = segment_mean(terms.advantages_C, terms.mask_C, ids_C, terms.num_sequences)
    return -(advantages_S * ratio_S)[ids_C]


@register_loss('real', weighting='unmasked_token_mean', couples_groups=True)
def real(config: LossConfig, terms: LossTerms, sums: Sums) -> torch.Tensor:
    """Rewards as labels (REAL, arXiv 2602.05630): a logistic loss over each group's scores, score = mean log-ratio of a sequence.

    A group may lie in several micro-batches, so its gradient for each token is worked out from the whole step in coupled.py; it
    comes in as `coefficient_C`, and this objective has exactly that gradient and the value 0.
    """
    return terms.coefficient_C * (terms.new_logprobs_C - terms.new_logprobs_C.detach())


def policy_loss(config: LossConfig, inputs: LossInputs) -> tuple[torch.Tensor, Sums]:
    """Loss of one micro-batch, a 0-dim tensor to be added up over the step's micro-batches and ranks, and its metrics.

    Pure: no communication, no synchronization, any rank. The order of the rules is that of ms-swift's trainer: objective, entropy filter,
    plus beta * KL, times the rollout correction, minus the off-policy sequences, times the weights. A micro-batch without tokens
    gives 0, still tied to the graph.
    """
    loss = resolve_loss(config.loss_type)
    sums = Sums()
    terms = make_terms(config, inputs)
    mask_C = terms.mask_C
    function = kl_cov if config.kl_cov_ratio is not None else loss.function
    objective_C = function(config, terms, sums)
    coupled_C = torch.zeros_like(objective_C)
    if loss.couples_groups:
        objective_C, coupled_C = coupled_C, objective_C
        if inputs.coupled_loss is not None:
            objective_C = objective_C + inputs.coupled_loss  # the weights of a coupled loss add up to 1 over the step
    elif inputs.keep_C is not None:
        objective_C = objective_C * inputs.keep_C
    kl_C = None
    if config.needs_kl:
        kl_C = kl_k3(terms.new_logprobs_C, torch.where(mask_C, inputs.ref_logprobs_C, torch.zeros_like(inputs.ref_logprobs_C)))
        objective_C = objective_C + config.beta * kl_C
    rollout_weights_C = corrections.correct(config, inputs, mask_C, sums)
    if rollout_weights_C is not None and not loss.couples_groups:
        objective_C = objective_C * rollout_weights_C
    total = torch.where(terms.counted_C, objective_C * inputs.weights_C + coupled_C, torch.zeros_like(objective_C)).sum()
    if config.sdar_loss_coef > 0 and inputs.teacher_logprobs_C is not None:
        total = total + config.sdar_loss_coef * distillation(config, terms, inputs, sums)
    with torch.no_grad():
        if kl_C is not None:
            sums.add('kl', (kl_C * terms.counted_C).sum(), terms.counted_C.sum().float())
        _add_clip_metrics(config, loss, terms, sums)
        if config.log_entropy:
            _add_entropy_metrics(inputs, sums)
    return total, sums


def distillation(config: LossConfig, terms: LossTerms, inputs: LossInputs, sums: Sums) -> torch.Tensor:
    """Token mean of sigmoid(beta d) d with d = teacher - new log-probability, the gate without gradient (SDAR, arXiv 2605.15155). 0-dim.

    A token of which the teacher is surer than the policy is pulled up; where it is less sure the gate closes.
    """
    gap_C = torch.where(terms.mask_C, inputs.teacher_logprobs_C - terms.new_logprobs_C, torch.zeros_like(terms.new_logprobs_C))
    gate_C = torch.sigmoid(config.sdar_gate_beta * gap_C.detach())
    loss = (gate_C * gap_C * inputs.distillation_weights_C).sum()
    with torch.no_grad():
        count = terms.mask_C.sum().float()
        for name, values_C in (('gate_mean', gate_C), ('gate_active_ratio', (gate_C > 0.5).float()), ('teacher_gap_mean', gap_C),
                               ('loss', gate_C * gap_C)):
            sums.add(f'sdar/{name}', (values_C * terms.mask_C).sum(), count)
    return loss


def make_terms(config: LossConfig, inputs: LossInputs) -> LossTerms:
    """Ratios at the configured level: token; sequence, exp of the mean log-ratio; sequence_token, that value with the token's gradient."""
    mask_C = inputs.weights_C > 0
    zeros_C = torch.zeros_like(inputs.new_logprobs_C)
    new_C = torch.where(mask_C, inputs.new_logprobs_C, zeros_C)
    log_ratio_C = torch.where(mask_C, inputs.new_logprobs_C - inputs.old_logprobs_C, zeros_C)
    if config.importance_sampling_level == 'token':
        log_weights_C = log_ratio_C
    else:
        log_weights_C = segment_mean(log_ratio_C, mask_C, inputs.sequence_ids_C, inputs.num_sequences)[inputs.sequence_ids_C]
        if config.importance_sampling_level == 'sequence_token':
            log_weights_C = new_C - new_C.detach() + log_weights_C.detach()
    counted_C = mask_C
    if config.off_policy_sequence_mask_delta is not None:
        counted_C = mask_C & corrections.off_policy_keep(config, inputs, new_C, mask_C)
    return LossTerms(
        new_logprobs_C=new_C,
        log_ratio_C=log_ratio_C,
        ratio_C=torch.exp(log_weights_C),
        advantages_C=inputs.advantages_C,
        mask_C=mask_C,
        counted_C=counted_C,
        sequence_ids_C=inputs.sequence_ids_C,
        num_sequences=inputs.num_sequences,
        coefficient_C=inputs.coefficient_C)


def kl_k3(new_logprobs_C: torch.Tensor, ref_logprobs_C: torch.Tensor) -> torch.Tensor:
    """exp(d) - d - 1 with d = ref - new: the k3 estimate of KL(new || ref) of each token, [C].

    d is bounded to +-20 and the result to 10, as in ms-swift; a token beyond a bound gives no gradient.
    """
    difference_C = torch.clamp(ref_logprobs_C - new_logprobs_C, min=-20, max=20)
    return torch.clamp(torch.exp(difference_C) - difference_C - 1, min=-10, max=10)


def _add_clip_metrics(config: LossConfig, loss: Loss, terms: LossTerms, sums: Sums) -> None:
    """Shares of tokens beyond the clip range, by token. The minimum and maximum are over sequences.

    ms-swift takes them over micro-batches, which depends on the layout; they agree where a micro-batch is one sequence.
    """
    if loss.clip_metrics is None or config.kl_cov_ratio is not None:  # KL-Cov clips nothing
        return
    mask_C, count = terms.counted_C, terms.counted_C.sum().float()
    positive_C, negative_C = terms.advantages_C > 0, terms.advantages_C < 0
    if loss.clip_metrics == 'upper':
        sums.add('cispo_clip_ratio', ((terms.ratio_C > config.upper_epsilon) & positive_C & mask_C).sum().float(), count)
        return
    if loss.clip_metrics == 'log_ratio':
        low_C, high_C = terms.log_ratio_C < -config.epsilon, terms.log_ratio_C > config.upper_epsilon
    else:
        low_C, high_C = terms.ratio_C < 1 - config.epsilon, terms.ratio_C > 1 + config.upper_epsilon
    low_C, high_C = (low_C & negative_C & mask_C).float(), (high_C & positive_C & mask_C).float()
    sums.add('clip_ratio/low_mean', low_C.sum(), count)
    sums.add('clip_ratio/high_mean', high_C.sum(), count)
    sums.add('clip_ratio/region_mean', low_C.sum() + high_C.sum(), count)
    tokens_S = segment_count(mask_C, terms.sequence_ids_C, terms.num_sequences)
    for name, values_C, sign in (('clip_ratio/low_min', low_C, -1.0), ('clip_ratio/high_max', high_C, 1.0)):
        share_S = segment_sum(values_C, terms.sequence_ids_C, terms.num_sequences) / tokens_S.clamp(min=1.0)
        sums.maximum(name, corrections.maximum_over(sign * share_S, tokens_S > 0))


def _add_entropy_metrics(inputs: LossInputs, sums: Sums) -> None:
    """Mean, maximum and minimum over completions of the mean entropy of their tokens; truncated ones count, empty ones do not."""
    everything_C = torch.ones_like(inputs.weights_C, dtype=torch.bool)
    has_tokens_S = segment_count(everything_C, inputs.sequence_ids_C, inputs.num_sequences) > 0
    entropies_S = segment_mean(inputs.entropies_C, everything_C, inputs.sequence_ids_C, inputs.num_sequences)
    sums.add('entropy/mean', entropies_S.sum(), has_tokens_S.sum().float())
    sums.maximum('entropy/max', corrections.maximum_over(entropies_S, has_tokens_S))
    sums.maximum('entropy/min', corrections.maximum_over(-entropies_S, has_tokens_S))
