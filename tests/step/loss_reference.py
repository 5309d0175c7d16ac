"""One optimizer step twice: through ms-swift's own GRPOTrainer, padded, in one micro-batch; and through ours, flat, cut in any way."""
from __future__ import annotations

import torch
from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace

from swift_megatron_grpo.step.advantage import rlsd_advantages, token_advantages
from swift_megatron_grpo.step.corrections import finish_metrics
from swift_megatron_grpo.step.coupled import couple, needs_step_pass
from swift_megatron_grpo.step.loss import policy_loss
from swift_megatron_grpo.step.loss_config import LossConfig
from swift_megatron_grpo.step.weights import distillation_weights, token_weights
from swift_megatron_grpo.types import LossInputs, Sums, TokenTable

NUM_GENERATIONS = 4
MAX_COMPLETION_LENGTH = 16
UPDATE = 3  # optimizer steps before the generation
# Three groups of four: an empty completion in the first, a truncated one in the second, no variance in the third.
LENGTHS = [5, 1, 14, 0, 3, 7, 2, 16, 4, 4, 1, 9]
TRUNCATED = [7]
ADVANTAGES = [1.2, -0.7, 0.4, -0.9, -1.1, 0.8, 0.9, -0.6, 0.0, 0.0, 0.0, 0.0]
SPLITS = {
    'one micro-batch': [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]],
    'one sequence each': [[s] for s in range(12)],  # the fourth has no token at all
    'groups torn apart': [[11, 0, 5], [7, 3, 2, 9], [1, 4], [10, 6, 8]],
}


@dataclass
class Step:
    """Flat float32 vectors over the tokens of the step, [K], and counts over its sequences, [S]."""
    lengths_S: torch.Tensor
    truncated_S: torch.Tensor
    advantages_S: torch.Tensor
    new_K: torch.Tensor
    old_K: torch.Tensor | None
    ref_K: torch.Tensor
    rollout_K: torch.Tensor | None
    entropies_K: torch.Tensor
    teacher_K: torch.Tensor | None = None
    teacher_kl_coef: float = 0.0
    distills: bool = False  # sdar: the teacher speaks in the loss, not in the advantages

    @property
    def ids_K(self):
        return torch.repeat_interleave(torch.arange(len(self.lengths_S)), self.lengths_S)

    @property
    def groups_S(self):
        return torch.arange(len(self.lengths_S)) // NUM_GENERATIONS


def make_step(lengths=LENGTHS, truncated=TRUNCATED, on_policy=False, seed=0) -> Step:
    """Ratios from about 0.3 to 3, so that every clip is hit on both sides. Advantages are those of ADVANTAGES."""
    draw = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)

    def noise(scale):
        return torch.randn(tokens, generator=draw) * scale

    new = noise(1.0) - 1.5
    truncated_S = torch.zeros(len(lengths), dtype=torch.bool)
    truncated_S[truncated] = True
    # Sequences drift by different amounts, so that sequence-level rules tell them apart.
    drift = torch.repeat_interleave(torch.randn(len(lengths), generator=draw) * 0.4, torch.tensor(lengths))
    old = new - noise(0.4) - drift
    return Step(torch.tensor(lengths), truncated_S, torch.tensor(ADVANTAGES), new, None if on_policy else old, new + noise(0.7),
                (new if on_policy else old) + noise(0.5), torch.rand(tokens, generator=draw))


def reference_loss(config: LossConfig, step: Step, overlong_filter: bool, mask: torch.Tensor | None = None):
    """ms-swift's loss, its gradient for the log-probabilities [K], and its metrics, from GRPOTrainer's own methods.

    `mask`, bool [S, T]: where the tokens stand in the padded rows; by default at the left.
    """
    from swift.rl_core.data import GRPOBatch
    from swift.rlhf_trainers.grpo_trainer import GRPOTrainer

    class Trainer:
        pass

    for name in ('_compute_loss_and_metrics', '_compute_fipo_influence', '_compute_sequence_level_ratios', '_get_rollout_is_correction',
                 '_apply_rollout_importance_sampling', '_compute_off_policy_sequence_mask', '_compute_rollout_offpolicy_metrics',
                 '_compute_is_correction_metrics', '_undo_gradient_accumulation_scaling', '_update_metrics'):
        setattr(Trainer, name, getattr(GRPOTrainer, name))
    trainer = Trainer()
    for name in ('loss_type', 'importance_sampling_level', 'beta', 'kl_in_reward', 'tau_pos', 'tau_neg', 'real_tau', 'fipo_clip_range',
                 'fipo_clip_high_only', 'fipo_safety_threshold', 'top_entropy_quantile', 'rollout_importance_sampling_mode',
                 'rollout_importance_sampling_threshold', 'log_rollout_offpolicy_metrics', 'off_policy_sequence_mask_delta'):
        setattr(trainer, name, getattr(config, name))
    trainer.args = SimpleNamespace(delta=config.delta, log_entropy=config.log_entropy, top_entropy_quantile=config.top_entropy_quantile,
                                   gradient_accumulation_steps=1)
    trainer.epsilon_low, trainer.epsilon_high = config.epsilon, config.upper_epsilon
    trainer.fipo_gamma = 2**(-1 / config.fipo_decay_rate)
    trainer.compute_entropy, trainer.overlong_filter = config.needs_entropy, overlong_filter
    trainer.num_generations, trainer.max_completion_length = NUM_GENERATIONS, MAX_COMPLETION_LENGTH
    trainer.model = SimpleNamespace(training=True)
    trainer.accelerator = SimpleNamespace(gather_for_metrics=lambda values: values, num_processes=1)
    trainer.model_accepts_loss_kwargs, trainer.compute_loss_func, trainer.current_gradient_accumulation_steps = False, None, 1
    trainer._has_teacher, trainer.chord_sft_iterator, trainer.sdar_loss_coef = config.has_teacher, None, config.sdar_loss_coef
    trainer.sdar_gate_beta = config.sdar_gate_beta
    trainer.disable_rollout_importance_sampling = False
    trainer._metrics, trainer._logs = {'train': defaultdict(list)}, defaultdict(list)

    if mask is None:
        mask = torch.arange(MAX_COMPLETION_LENGTH)[None] < step.lengths_S[:, None]
    num_sequences, width = mask.shape

    def pad(values_K):
        return None if values_K is None else torch.zeros(num_sequences, width).masked_scatter(mask, values_K)

    logprobs = pad(step.new_K).requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, pad(step.entropies_K))
    batch = GRPOBatch(
        completion_mask=mask,
        truncated_mask=step.truncated_S,
        seq_lengths=step.lengths_S,
        old_per_token_logps=pad(step.old_K),
        ref_per_token_logps=pad(step.ref_K),
        rollout_per_token_logps=pad(step.rollout_K),
        teacher_per_token_logps=pad(step.teacher_K),
        advantages=_ms_swift_advantages(config, step, mask, pad),
        num_items_in_batch=mask.sum())
    loss, metrics = trainer._compute_loss_and_metrics(trainer.model, {}, batch)
    trainer._update_metrics(metrics)
    if loss.requires_grad:
        loss.backward()
    gradient = torch.zeros_like(logprobs) if logprobs.grad is None else logprobs.grad
    assert (gradient[~mask] == 0).all()
    return loss.detach(), gradient[mask], {name: float(values[0]) for name, values in trainer._metrics['train'].items()}


def _ms_swift_advantages(config: LossConfig, step: Step, mask: torch.Tensor, pad):
    from swift.rl_core.advantage import apply_rlsd_reweight, expand_advantage_to_per_token
    if config.advantage_reweight == 'rlsd':
        return apply_rlsd_reweight(step.advantages_S, mask, pad(step.teacher_K), pad(step.old_K), lam=config.rlsd_lambda_at(UPDATE),
                                   clip_range=config.rlsd_reweight_clip_range, negative_only=config.rlsd_negative_only)
    if step.distills:
        return expand_advantage_to_per_token(step.advantages_S, mask)
    return expand_advantage_to_per_token(step.advantages_S, mask, pad(step.teacher_K), pad(step.old_K), step.teacher_kl_coef)


def _our_advantages(config: LossConfig, step: Step):
    if config.advantage_reweight == 'rlsd':
        return rlsd_advantages(config, step.advantages_S, step.ids_K, teacher_logprobs_K=step.teacher_K, old_logprobs_K=step.old_K, update=UPDATE)
    if step.distills:
        return token_advantages(step.advantages_S, step.ids_K)
    return token_advantages(step.advantages_S, step.ids_K, teacher_logprobs_K=step.teacher_K, old_logprobs_K=step.old_K,
                            teacher_kl_coef=step.teacher_kl_coef)


def prepare(config: LossConfig, step: Step, overlong_filter: bool):
    """The step's TokenTable, and what couples its sequences."""
    weights_K = token_weights(
        config.loss_type,
        lengths_S=step.lengths_S,
        truncated_S=step.truncated_S,
        overlong_filter=overlong_filter,
        max_completion_length=MAX_COMPLETION_LENGTH)
    table = TokenTable(
        rollout_indices_S=torch.arange(len(step.lengths_S)),
        lengths_S=step.lengths_S,
        truncated_S=step.truncated_S,
        groups_S=step.groups_S,
        sequence_of_token_K=step.ids_K,
        advantages_K=_our_advantages(config, step),
        weights_K=weights_K,
        rollout_logprobs_K=step.rollout_K,
        old_logprobs_K=step.old_K,
        ref_logprobs_K=step.ref_K)
    passed = needs_step_pass(config, on_policy=step.old_K is None)
    coupled = couple(
        config, table, logprobs_K=step.new_K if passed else None, entropies_K=step.entropies_K if passed and config.needs_entropy else None)
    return table, coupled


def our_loss(config: LossConfig, step: Step, overlong_filter: bool, micro_batches):
    """The sum of our micro-batches' losses, its gradient for the log-probabilities [K], and the metrics of the step."""
    table, coupled = prepare(config, step, overlong_filter)
    new_K = step.new_K.clone().requires_grad_()
    total, sums = torch.zeros(()), Sums()
    distillation_K = distillation_weights(step.lengths_S, step.truncated_S, overlong_filter=overlong_filter) if step.distills else None
    for rows in micro_batches:
        index_C = torch.cat([torch.nonzero(step.ids_K == row).flatten() for row in rows])
        ids_C = torch.repeat_interleave(torch.arange(len(rows)), step.lengths_S[rows])

        def take(values_K, index_C=index_C):
            return None if values_K is None else values_K[index_C]

        new_C = new_K[index_C]
        loss, micro_sums = policy_loss(
            config,
            LossInputs(
                new_logprobs_C=new_C,
                old_logprobs_C=new_C.detach() if step.old_K is None else step.old_K[index_C],
                advantages_C=table.advantages_K[index_C],
                weights_C=coupled.weights_K[index_C],
                sequence_ids_C=ids_C,
                num_sequences=len(rows),
                ref_logprobs_C=take(table.ref_logprobs_K),
                rollout_logprobs_C=take(table.rollout_logprobs_K),
                entropies_C=take(step.entropies_K),
                keep_C=take(coupled.keep_K),
                coefficient_C=take(coupled.coefficient_K),
                coupled_loss=coupled.coupled_loss,
                teacher_logprobs_C=take(step.teacher_K),
                distillation_weights_C=take(distillation_K)))
        loss.backward()
        total = total + loss.detach()
        for name, (value, count) in micro_sums.means.items():
            assert value.dim() == 0 and count.dim() == 0 and not value.requires_grad, name
            sums.add(name, value, count)
        for name, value in micro_sums.maxima.items():
            assert value.dim() == 0, name
            sums.maximum(name, value)
    metrics = finish_metrics({name: float(value / count.clamp(min=1.0)) for name, (value, count) in sums.means.items()})
    metrics.update({name: float(-value if name.endswith('min') else value) for name, value in sums.maxima.items()})
    metrics.update({name: float(value) for name, value in coupled.metrics.items()})
    return total, new_K.grad, metrics
