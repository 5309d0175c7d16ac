"""Everything between scored rollouts and an optimizer step: log-probabilities, advantages, weights, loss (import tier 2)."""
from __future__ import annotations

import contextlib
import dataclasses
import torch
import torch.distributed as dist
from collections.abc import Sequence
from typing import Any

from ..metrics import merge, reduce_once, to_logs
from ..parallel import Topology
from ..reference import Reference
from ..teacher import LocalTeacher, ServerTeacher
from ..types import LossInputs, MicroBatch, Sums, TokenTable
from .advantage import group_advantages, reward_metrics, rlsd_advantages, sequence_kl, teacher_kl, token_advantages
from .batch import StepBatch
from .coupled import Coupled, couple, needs_step_pass
from .forward import PolicyForward, collect_logprobs
from .loss import policy_loss
from .loss_config import LossConfig
from .nonfinite import Trace, poison
from .rollout import ScoredRollouts
from .weights import distillation_weights, token_weights


def loss_config(args: Any) -> LossConfig:
    """The loss switches out of the run's arguments; they carry the same names."""
    values = {f.name: getattr(args, f.name) for f in dataclasses.fields(LossConfig) if f.name != 'has_teacher'}
    values['has_teacher'] = args.teacher_model is not None or args.teacher_model_server is not None or args._teacher_use_disable_adapter
    return LossConfig(**values)


class Learner:
    """Turns a generation's optimizer steps into gradients.

    Args:
        args: the run's arguments.
        forward: the policy's forward.
        reference: None at beta 0.
        teacher: says for each generation whether it teaches.
        topology: this rank's place.
        device: the rank's device.
        reward_names, reward_weights: of the F columns.
    """

    def __init__(self, args: Any, forward: PolicyForward, reference: Reference | None,
                 teacher: LocalTeacher | ServerTeacher, topology: Topology, device: torch.device, reward_names: Sequence[str],
                 reward_weights: torch.Tensor):
        self.args = args
        self.config = loss_config(args)
        self.forward = forward
        self.reference = reference
        self.teacher = teacher
        self.topology = topology
        self.device = device
        self.reward_names = list(reward_names)
        self.reward_weights = reward_weights
        self.last_advantages_N = torch.zeros(0)
        self.trace: Trace | None = None  # of the last optimizer step

    # -- once a generation -----------------------------------------------------------------------------------------------------------------

    def needs_old_pass(self, has_teacher: bool) -> bool:
        """On-policy, one optimizer step a generation: the old log-probabilities are the training forward's own, detached."""
        args = self.args
        return args.steps_per_generation * args.num_iterations > 1 or (args.kl_in_reward and args.beta != 0.0) or has_teacher

    def add_logprobs(self, steps: Sequence[StepBatch], scored: ScoredRollouts) -> None:
        """old_logprobs_K, ref_logprobs_K and teacher_logprobs_K where they are needed. All ranks, collective: one forward-only run of the
        schedule for each."""
        has_teacher = self.teacher.teaches(scored)
        if self.needs_old_pass(has_teacher):
            with self.forward.routes.record() if self.forward.routes is not None else contextlib.nullcontext():
                old = collect_logprobs(self.forward, steps, self.device)
            if self.forward.routes is not None and self.forward.routes.mode == 'R2':
                for step in steps:
                    step.share_routes()
            for step, (logprobs_K, _) in zip(steps, old):
                step.table.old_logprobs_K = logprobs_K
        if self.reference is not None:
            for step, logprobs_K in zip(steps, self.reference.logprobs(steps)):
                step.table.ref_logprobs_K = logprobs_K
        if has_teacher:
            for step, logprobs_K in zip(steps, self.teacher.logprobs(steps, scored)):
                step.table.teacher_logprobs_K = logprobs_K

    def add_advantages(self, steps: Sequence[StepBatch], scored: ScoredRollouts, *, update: int) -> dict[str, float]:
        """advantages_K and weights_K of every step; returns the reward metrics under ms-swift's names.

        All ranks; collectives over the data-parallel group only with kl_in_reward and with a teacher. Groups are those of the prompt, by id.

        Args:
            update: optimizer steps before the generation.
        """
        args = self.args
        kl_N = self._kl_of_rollouts(steps, len(scored.rollouts)) if args.kl_in_reward and args.beta != 0.0 else None
        groups_N = torch.tensor([rollout.prompt_index for rollout in scored.rollouts])
        advantages_N, rewards_N = group_advantages(
            scored.rewards_NF,
            self.reward_weights,
            groups_N,
            advantage_estimator=args.advantage_estimator,
            scale_rewards=args.scale_rewards,
            kl_in_reward=args.kl_in_reward,
            beta=args.beta,
            kl_N=kl_N)
        distance = Sums()
        for step in steps:
            table = step.table
            advantages_S = advantages_N.to(self.device, torch.float32)[table.rollout_indices_S]
            table.advantages_K = self._token_advantages(advantages_S, table, distance, update)
            table.weights_K = token_weights(
                self.config.loss_type,
                lengths_S=table.lengths_S,
                truncated_S=table.truncated_S,
                overlong_filter=args.overlong_filter,
                max_completion_length=args.max_completion_length)
            if self.config.sdar_loss_coef > 0 and table.teacher_logprobs_K is not None:
                table.distillation_weights_K = distillation_weights(table.lengths_S, table.truncated_S, overlong_filter=args.overlong_filter)
        self.last_advantages_N = advantages_N
        metrics = reward_metrics(rewards_N, scored.rewards_NF, self.reward_names, groups_N, args.scale_rewards)
        if kl_N is not None:
            metrics['kl'] = float(kl_N.mean())
        metrics.update(to_logs(distance))
        if any(step.table.teacher_logprobs_K is not None for step in steps):
            if self.config.advantage_reweight == 'rlsd':
                metrics['rlsd_lambda'] = self.config.rlsd_lambda_at(update)
            if self.config.sdar_loss_coef > 0:
                metrics['sdar/coef'] = self.config.sdar_loss_coef
        return metrics

    def reward_metrics(self, scored: ScoredRollouts) -> dict[str, float]:
        """Reward metrics of rollouts that are not trained on (evaluation). Pure."""
        groups_N = torch.tensor([rollout.prompt_index for rollout in scored.rollouts])
        rewards_N = (scored.rewards_NF * self.reward_weights).nansum(dim=1)
        return reward_metrics(rewards_N, scored.rewards_NF, self.reward_names, groups_N, self.args.scale_rewards)

    def _token_advantages(self, advantages_S: torch.Tensor, table: TokenTable, kl: Sums, update: int) -> torch.Tensor:
        """advantages_K of one step, whole on every rank; adds the step's distance from the teacher to `kl`."""
        if table.teacher_logprobs_K is None:
            return token_advantages(advantages_S, table.sequence_of_token_K)
        teacher_K, old_K = self._whole(table.teacher_logprobs_K), self._whole(table.old_logprobs_K)
        kl.add('teacher_kl', *teacher_kl(teacher_K, old_K))
        if self.config.advantage_reweight == 'rlsd':
            return rlsd_advantages(self.config, advantages_S, table.sequence_of_token_K, teacher_logprobs_K=teacher_K, old_logprobs_K=old_K,
                                   update=update)
        if self.config.sdar_loss_coef > 0:  # the teacher speaks in the loss
            return token_advantages(advantages_S, table.sequence_of_token_K)
        return token_advantages(advantages_S, table.sequence_of_token_K, teacher_logprobs_K=teacher_K, old_logprobs_K=old_K,
                                teacher_kl_coef=self.args.teacher_kl_coef)

    def _whole(self, values_K: torch.Tensor) -> torch.Tensor:
        """Sum over the data-parallel group of vectors that hold own tokens only. All ranks of the group, collective."""
        if self.topology.dp_size == 1:
            return values_K
        whole_K = values_K.clone()
        dist.all_reduce(whole_K, group=self.topology.dp_group)
        return whole_K

    def _kl_of_rollouts(self, steps: Sequence[StepBatch], num_rollouts: int) -> torch.Tensor:
        """Sum over the completion of old - reference log-probability, by rollout, [N]."""
        kl_N = torch.zeros(num_rollouts, device=self.device)
        for step in steps:
            table = step.table
            kl_S = sequence_kl(table.old_logprobs_K, table.ref_logprobs_K, table.sequence_of_token_K, table.lengths_S.numel())
            kl_N[table.rollout_indices_S] = kl_S
        if self.topology.dp_size > 1:
            dist.all_reduce(kl_N, group=self.topology.dp_group)
        return kl_N.cpu()

    # -- once an optimizer step ------------------------------------------------------------------------------------------------------------

    def gradients(self, step: StepBatch, *, update: int, on_policy: bool, experts: StepBatch | None = None, expert_share: float = 0.0) -> Sums:
        """Forward and backward of one optimizer step. All ranks, collective.

        Args:
            step: its micro-batches and table.
            update: number of the optimizer step in the run; seeds what is drawn at random.
            on_policy: the weights are those that `old` stands for: no importance ratio differs from 1.
            experts: expert answers of this step (step/expert.py), or None.
            expert_share: of their loss in the whole, mu.

        Returns:
            Metrics of the whole step on the last pipeline stage (empty elsewhere), reduced by one collective.
        """
        coupled = self._couple(step, update, needs_step_pass(self.config, on_policy))
        parts: list[Sums] = []
        self.trace = Trace(step.table)

        of_experts = {id(micro_batch) for micro_batch in experts.micro_batches} if experts is not None else set()

        def consume(micro_batch: MicroBatch, logprobs_C: torch.Tensor, entropies_C: torch.Tensor) -> torch.Tensor:
            if id(micro_batch) in of_experts:
                loss, sums = self._expert_loss(micro_batch, experts.table, logprobs_C)
                loss = loss * expert_share
            else:
                inputs = self._inputs(micro_batch, step.table, coupled, logprobs_C, entropies_C)
                self.trace.add(micro_batch, inputs)
                loss, sums = policy_loss(self.config, inputs)
                loss = loss * (1.0 - expert_share) if of_experts else loss
            one = loss.new_ones(()) if not parts and self.topology.dp_rank == 0 else loss.new_zeros(())
            sums.add('loss', loss.detach(), one)  # losses add up over micro-batches and ranks; one count in the whole step
            parts.append(sums)
            return poison(loss)

        micro_batches = step.micro_batches if experts is None else [*step.micro_batches, *experts.micro_batches]
        self.forward.run(micro_batches, consume, forward_only=False)
        if not self.topology.is_last_stage:
            return Sums()
        reduced = reduce_once(merge(parts), self.topology.dp_group)
        for name, value in coupled.metrics.items():
            reduced.add(name, value.double(), torch.ones_like(value, dtype=torch.float64))
        return reduced

    def _expert_loss(self, micro_batch: MicroBatch, table: TokenTable, logprobs_C: torch.Tensor) -> tuple[torch.Tensor, Sums]:
        """This micro-batch's part of the mean over the expert tokens of -phi log p, 0-dim."""
        index_C = micro_batch.token_index_C.to(logprobs_C.device)
        loss_C = -logprobs_C
        if self.args.chord_enable_phi_function:
            probabilities_C = torch.exp(logprobs_C.detach())
            loss_C = loss_C * probabilities_C * (1.0 - probabilities_C)
        sums = Sums()
        sums.add('chord/sft_loss', loss_C.detach().sum(), torch.ones_like(loss_C).sum())
        return (loss_C * table.weights_K[index_C]).sum(), sums

    def _couple(self, step: StepBatch, update: int, needs_pass: bool) -> Coupled:
        """What couples the sequences of the step (entropy quantile, REAL, covariances), from numbers of the whole step at the current
        weights. Without such a loss there is neither a pass nor communication."""
        if not needs_pass:
            return couple(self.config, step.table)
        (logprobs_K, entropies_K), = collect_logprobs(self.forward, [step], self.device)
        vectors = [logprobs_K, entropies_K]
        if step.table.old_logprobs_K is not None:
            vectors.append(step.table.old_logprobs_K)
        whole = torch.stack(vectors)
        if self.topology.dp_size > 1:
            dist.all_reduce(whole, group=self.topology.dp_group)
        table = dataclasses.replace(step.table, old_logprobs_K=whole[2] if len(vectors) > 2 else None)
        return couple(self.config, table, logprobs_K=whole[0], entropies_K=whole[1], seed=self.args.seed, update=update)

    @staticmethod
    def _inputs(micro_batch: MicroBatch, table: TokenTable, coupled: Coupled, logprobs_C: torch.Tensor,
                entropies_C: torch.Tensor) -> LossInputs:
        index_C = micro_batch.token_index_C.to(logprobs_C.device)

        def rows(values_K: torch.Tensor | None) -> torch.Tensor | None:
            return None if values_K is None else values_K[index_C]

        old_C = rows(table.old_logprobs_K)
        return LossInputs(
            new_logprobs_C=logprobs_C,
            old_logprobs_C=logprobs_C.detach() if old_C is None else old_C,
            advantages_C=table.advantages_K[index_C],
            weights_C=coupled.weights_K[index_C],
            sequence_ids_C=micro_batch.sequence_ids_C.to(logprobs_C.device),
            num_sequences=micro_batch.num_sequences,
            ref_logprobs_C=rows(table.ref_logprobs_K),
            rollout_logprobs_C=rows(table.rollout_logprobs_K),
            entropies_C=entropies_C,
            keep_C=rows(coupled.keep_K),
            coefficient_C=rows(coupled.coefficient_K),
            coupled_loss=coupled.coupled_loss,
            teacher_logprobs_C=rows(table.teacher_logprobs_K),
            distillation_weights_C=rows(table.distillation_weights_K),
        )
