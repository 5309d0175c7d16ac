"""Learning rates of `swift rlhf` on Megatron's optimizer (import tier 2).

transformers' own `get_scheduler` gives the factor for every step, so each of its schedules is exact; the result is written to the parameter
groups of Megatron's optimizer, scaled by each group's own maximum (vit_lr, aligner_lr, muon_lr). The weight decay of each group comes from
Megatron's scheduler: nobody else keeps it off norms and biases (`wd_mult` 0).
"""
from __future__ import annotations

import math
import torch
from transformers import get_scheduler
from typing import Any


class TransformersSchedule:
    """Stands in for Megatron's OptimizerParamScheduler: `step(increment)`, `state_dict`, `load_state_dict`.

    Args:
        megatron: Megatron's scheduler of the same optimizer; says the weight decay.
        max_lr: learning rate of groups without one of their own.
        name, kwargs: transformers' lr_scheduler_type and lr_scheduler_kwargs.
        warmup_steps: optimizer steps; below 1 a share of num_steps. warmup_ratio: the same as a share, used if warmup_steps is 0.
        num_steps: optimizer steps of the run.
        samples_per_step: what one step adds to `increment` (global_batch_size).
    """

    def __init__(self, megatron: Any, *, max_lr: float, name: str, kwargs: dict[str, Any] | None, warmup_steps: float, warmup_ratio: float,
                 num_steps: int, samples_per_step: int):
        self.megatron = megatron
        self.max_lr = max_lr
        self.samples_per_step = samples_per_step
        self.num_steps_done = 0
        self._warmup = warmup_iterations(warmup_steps, warmup_ratio, num_steps)
        probe = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
        self._probe = get_scheduler(name, probe, num_warmup_steps=self._warmup, num_training_steps=num_steps,
                                    scheduler_specific_kwargs=self._specific(name, kwargs or {}, max_lr))
        self._factor = self._probe.lr_lambdas[0]
        self._write()

    @staticmethod
    def _specific(name: str, kwargs: dict[str, Any], max_lr: float) -> dict[str, Any]:
        kwargs = dict(kwargs)
        if 'min_lr' in kwargs and 'min_lr_rate' not in kwargs:  # the probe's learning rate is 1
            kwargs['min_lr_rate'] = kwargs.pop('min_lr') / max_lr
        return kwargs

    def factor(self, step: int) -> float:
        """Share of the maximum learning rate that step `step` (0 = the first) trains with."""
        return float(self._factor(step))

    def _write(self) -> None:
        factor = self.factor(self.num_steps_done)
        self.megatron.num_steps = self.num_steps_done * self.samples_per_step
        for group in self.megatron.optimizer.param_groups:
            group['lr'] = group.get('max_lr', self.max_lr) * factor
            group['weight_decay'] = self.megatron.get_wd(group) * group.get('wd_mult', 1.0)

    def step(self, increment: int) -> None:
        self.num_steps_done += math.ceil(increment / self.samples_per_step)
        self._write()

    def state_dict(self) -> dict[str, Any]:
        return {'num_steps_done': self.num_steps_done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_steps_done = int(state['num_steps_done'])
        self._write()


def warmup_iterations(warmup_steps: float, warmup_ratio: float, num_steps: int) -> int:
    """As transformers' TrainingArguments.get_warmup_steps: warmup_steps wins; a value below 1 is a share; shares round up.

    Example: warmup_iterations(0, 0.1, 25) == 3.
    """
    if warmup_steps >= 1:
        return int(warmup_steps)
    share = warmup_steps or warmup_ratio
    return math.ceil(num_steps * share)
