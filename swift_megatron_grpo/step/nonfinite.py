"""An update with a loss or a gradient that is not finite: found before it touches a weight, and traced to its prompts (import tier 2).

`--nonfinite_update skip` leaves weights, optimizer state and learning rate as they are, counts the update (`skipped_updates` in the log) and
goes on; the schedule does not advance, as with Megatron's own skipped steps, while the optimizer step counts in max_steps. `stop` ends the run.
"""
from __future__ import annotations

import dataclasses
import math
import torch
from collections.abc import Sequence
from typing import Any

from ..errors import RunError
from ..parallel import Topology, gather_objects
from ..types import LossInputs, MicroBatch, Rollout, TokenTable

_MAX_NAMED = 8


class FiniteGate:
    """Stands between the gradients and the update.

    Megatron's optimizers take no step where `prepare_grads` says that something overflowed; this gate makes it say so for a gradient norm that is
    not finite, in every precision. The norm is the same number on all ranks, so all of them decide alike without asking each other.

    Args:
        optimizer: Megatron's; two of its methods are wrapped on the instance.
    """

    def __init__(self, optimizer: Any):
        self._prepare_grads, self._get_grad_norm = optimizer.prepare_grads, optimizer.get_grad_norm
        self._norm: float | None = None
        self.norm_of_refused: float | None = None
        optimizer.prepare_grads, optimizer.get_grad_norm = self._prepare, self._known_norm

    def _prepare(self) -> bool:
        self._norm, self.norm_of_refused = None, None
        if self._prepare_grads():
            return True
        self._norm = float(self._get_grad_norm())
        if math.isfinite(self._norm):
            return False
        self.norm_of_refused = self._norm
        return True

    def _known_norm(self) -> float:
        """The optimizer asks for the norm once more, to clip."""
        if self._norm is not None:
            norm, self._norm = self._norm, None
            return norm
        return self._get_grad_norm()


class RouterBiases:
    """The biases that keep experts evenly used, as they were before an optimizer step.

    Megatron moves them while it finishes the gradients, before anyone has looked at the norm; an update that is left out takes that back. They are
    the same on all ranks that hold a layer, before and after. Built before the gradients, on every rank; no communication.
    """

    def __init__(self, models: Sequence[torch.nn.Module]):
        self._before = [(buffer, buffer.clone()) for model in models for name, buffer in model.named_buffers() if name.endswith('.expert_bias')]

    def restore(self) -> None:
        for buffer, before in self._before:
            buffer.copy_(before)


def leave_it_to_the_gate(wrapped_models: Sequence[Any]) -> None:
    """ms-swift has Megatron's data-parallel wrapper end the run of the one rank that sees a NaN in its share of a gradient, which names no prompt
    and leaves the other ranks waiting. The gate sees the same NaN, on all ranks, and does what --nonfinite_update says."""
    for model in wrapped_models:
        model.ddp_config.check_for_nan_in_grad = False


def poison(loss: torch.Tensor) -> torch.Tensor:
    """The same value and gradient; a NaN gradient where the value is not finite, which every rank then sees in the norm. Pure."""
    return loss * torch.where(torch.isfinite(loss.detach()), 1.0, float('nan'))


class Trace:
    """Remembers which rollouts of an optimizer step had values that are not finite. Keeps references only, looks at them when asked."""

    def __init__(self, table: TokenTable):
        self.table = table
        self._seen: list[tuple[MicroBatch, LossInputs]] = []

    def add(self, micro_batch: MicroBatch, inputs: LossInputs) -> None:
        self._seen.append((micro_batch, dataclasses.replace(inputs, new_logprobs_C=inputs.new_logprobs_C.detach())))

    def bad_rollouts(self) -> dict[int, str]:
        """Rollout index -> what is not finite in it, of this rank's share."""
        bad: dict[int, str] = {}
        for micro_batch, inputs in self._seen:
            values = {'log-probability': inputs.new_logprobs_C, 'old log-probability': inputs.old_logprobs_C,
                      'reference log-probability': inputs.ref_logprobs_C, 'rollout log-probability': inputs.rollout_logprobs_C,
                      'advantage': inputs.advantages_C}
            for name, values_C in values.items():
                if values_C is None:
                    continue
                tokens = micro_batch.token_index_C.to(values_C.device)[~torch.isfinite(values_C)]
                for sequence in self.table.sequence_of_token_K[tokens].unique().tolist():
                    bad.setdefault(int(self.table.rollout_indices_S[sequence]), name)
        return bad


def report(trace: Trace | None, rollouts: Sequence[Rollout], *, norm: float, step: int, policy: str, topology: Topology) -> str:
    """What happened, for the log. All ranks, collective.

    Args:
        trace: None where the loss was not computed (other pipeline stages).
        rollouts: of the generation, for their data set rows.
        norm: the gradient norm.
        step: number of the optimizer step, from 1.
        policy: 'skip' or 'stop'.

    Raises RunError with the same text where policy is 'stop'.
    """
    parts = gather_objects(trace.bad_rollouts() if trace is not None and topology.is_last_stage else {})
    bad = {index: what for part in parts for index, what in sorted(part.items())}
    if bad:
        named = [f'{what} of rollout {index} (prompt {rollouts[index].dataset_index})' for index, what in sorted(bad.items())[:_MAX_NAMED]]
        cause = 'Not finite: ' + ', '.join(named) + (f' and {len(bad) - _MAX_NAMED} more' if len(bad) > _MAX_NAMED else '') + '.'
    else:
        prompts = sorted({rollout.dataset_index for rollout in rollouts})
        cause = ('All log-probabilities and advantages are finite: the loss or the backward pass overflowed. The generation has prompts '
                 + ', '.join(map(str, prompts[:_MAX_NAMED])) + (', ...' if len(prompts) > _MAX_NAMED else '') + '.')
    text = f'Optimizer step {step}: the gradient norm is {norm}. {cause}'
    if policy == 'stop':
        raise RunError(text + ' The run stops (--nonfinite_update stop); skip would leave this update out.')
    return text + ' The update is left out: weights, optimizer state and learning rate stay as they are (--nonfinite_update skip).'
