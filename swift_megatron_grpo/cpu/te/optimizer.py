"""AdamW as Transformer Engine's FusedAdam keeps it (import tier 1)."""
from collections.abc import Callable, Iterable
from typing import Any

import torch

from swift_megatron_grpo.cpu.te.base import refuse_options


class FusedAdam(torch.optim.Optimizer):
    """Adam or AdamW with one `step` for a parameter group and fp32 moments.

    Megatron's distributed optimizer writes and reads `step` of the group and the two moments of each parameter; torch's AdamW, which
    counts steps for each parameter, does not survive its reload. Loshchilov and Hutter 2017 (arXiv:1711.05101).
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, bias_correction: bool = True, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, adam_w_mode: bool = True, weight_decay: float = 0., **options: Any) -> None:
        refuse_options('FusedAdam', options)
        super().__init__(params, {'lr': lr, 'bias_correction': bias_correction, 'betas': betas, 'eps': eps, 'weight_decay': weight_decay})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, grad_scaler: Any = None) -> None:
        """One update of every parameter that has a gradient. Local to this rank."""
        if closure is not None or grad_scaler is not None:
            raise NotImplementedError('CPU platform: FusedAdam.step takes neither closure nor grad_scaler')
        for group in self.param_groups:
            if not group['params']:
                continue
            group['step'] = step = int(group.get('step', 0)) + 1
            for parameter in group['params']:
                if parameter.grad is not None:
                    self._update(parameter, group, step)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any], step: int) -> None:
        beta1, beta2 = group['betas']
        rate, decay = group['lr'], group['weight_decay']
        gradient, state = parameter.grad.float(), self.state[parameter]
        if 'exp_avg' not in state:
            state['exp_avg'] = torch.zeros_like(parameter, dtype=torch.float32)
            state['exp_avg_sq'] = torch.zeros_like(parameter, dtype=torch.float32)
        if self.adam_w_mode:
            parameter.mul_(1 - rate * decay)
        elif decay:
            gradient = gradient.add(parameter, alpha=decay)
        state['exp_avg'].lerp_(gradient, 1 - beta1)
        state['exp_avg_sq'].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        correction1, correction2 = (1 - beta1**step, 1 - beta2**step) if group['bias_correction'] else (1., 1.)
        denominator = (state['exp_avg_sq'].sqrt() / correction2**0.5).add_(group['eps'])
        parameter.addcdiv_(state['exp_avg'], denominator, value=-rate / correction1)
