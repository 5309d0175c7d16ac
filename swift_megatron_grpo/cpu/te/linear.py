"""Linear layers with tensor and sequence parallelism (import tier 2: Megatron's collectives, when called)."""
import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from swift_megatron_grpo.cpu.te.base import EngineModule, parameter_device, refuse_options
from swift_megatron_grpo.cpu.te.norm import norm_parameters, normalize


def _mappings() -> Any:
    from megatron.core.tensor_parallel import mappings
    return mappings


class ParallelLinear(EngineModule):
    """Weights of one or several linear maps of one shape, and the collectives around them.

    parallel_mode 'column' splits the output over the group, 'row' the input; None leaves the weight whole. With sequence parallel a
    column layer gathers its input (S/tp, B, H) along the first dimension and a row layer scatters its sum back. The option
    fuse_wgrad_accumulation asks for the gradient to be added straight into main_grad; Megatron's own hook does that here, with the
    same sum, since `grad_added_to_main_grad` stays false.
    """

    def __init__(self, in_features: int, out_features: int, *, names: list[str], sequence_parallel: bool, tp_group: Any, tp_size: int,
                 parallel_mode: str | None, bias: bool, return_bias: bool, params_dtype: torch.dtype | None, device: Any,
                 init_method: Callable[[torch.Tensor], Any] | None, get_rng_state_tracker: Callable[[], Any] | None,
                 rng_tracker_name: str | None, ub_name: str | None, options: dict[str, Any]) -> None:
        super().__init__()
        refuse_options(type(self).__name__, options)
        if parallel_mode not in (None, 'column', 'row'):
            raise ValueError(f'parallel_mode {parallel_mode}: column, row or None')
        self.tp_group, self.tp_size, self.parallel_mode = tp_group, tp_size, parallel_mode
        self.in_features = in_features // tp_size if parallel_mode == 'row' else in_features
        self.out_features = out_features // tp_size if parallel_mode == 'column' else out_features
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        self.use_bias, self.return_bias = bias, return_bias
        self.apply_bias = bias and not return_bias
        self.ub_name = ub_name
        self.fuse_wgrad_accumulation = False
        self._dtype, self._device = params_dtype, parameter_device(device)
        for name in names:
            self._add_weight(name, init_method, get_rng_state_tracker, rng_tracker_name)
            self._add_bias(name.replace('weight', 'bias'))

    def _mark(self, parameter: nn.Parameter, dim: int) -> None:
        from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
        set_tensor_model_parallel_attributes(parameter, True, dim, 1)

    def _add_weight(self, name: str, init_method: Callable[[torch.Tensor], Any] | None, tracker: Callable[[], Any] | None,
                    stream: str | None) -> None:
        weight = nn.Parameter(torch.empty(self.out_features, self.in_features, dtype=self._dtype, device=self._device))
        if init_method is not None and self._device.type != 'meta':
            fork = contextlib.nullcontext()
            if tracker is not None:
                fork = tracker().fork(stream) if stream else tracker().fork()
            with fork, torch.no_grad():
                init_method(weight)
        self.register_parameter(name, weight)
        # As Transformer Engine: also where parallel_mode is None (see swift_megatron_grpo.parallel_attributes for what that means).
        self._mark(weight, 1 if self.parallel_mode == 'row' else 0)

    def _add_bias(self, name: str) -> None:
        if not self.use_bias:
            # Transformer Engine holds an empty tensor here, and Megatron asks for its size.
            setattr(self, name, torch.tensor([], dtype=self._dtype))
            return
        bias = nn.Parameter(torch.zeros(self.out_features, dtype=self._dtype, device=self._device))
        self.register_parameter(name, bias)
        if self.parallel_mode == 'row':
            bias.sequence_parallel = self.sequence_parallel
        elif self.parallel_mode == 'column':
            self._mark(bias, 0)

    def _multiply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """x: (S, B, H_in) of this rank -> (S', B, H_out) of this rank. Collective over the tensor-parallel group."""
        added = bias if self.apply_bias else None
        if self.tp_size == 1 or self.parallel_mode is None:
            return F.linear(x, weight, added)
        mappings = _mappings()
        if self.parallel_mode == 'column':
            if self.sequence_parallel:
                x = mappings.gather_from_sequence_parallel_region(x, True, group=self.tp_group)
            else:
                x = mappings.copy_to_tensor_model_parallel_region(x, group=self.tp_group)
            return F.linear(x, weight, added)
        y = F.linear(x, weight)
        if self.sequence_parallel:
            y = mappings.reduce_scatter_to_sequence_parallel_region(y, group=self.tp_group)
        else:
            y = mappings.reduce_from_tensor_model_parallel_region(y, group=self.tp_group)
        return y if added is None else y + added


class Linear(ParallelLinear):

    def __init__(self, in_features: int, out_features: int, sequence_parallel: bool = False, fuse_wgrad_accumulation: bool = False,
                 tp_group: Any = None, tp_size: int = 1, get_rng_state_tracker: Callable[[], Any] | None = None,
                 init_method: Callable[[torch.Tensor], Any] | None = None, bias: bool = True, return_bias: bool = False,
                 params_dtype: torch.dtype | None = None, parallel_mode: str | None = None, device: Any = 'cpu',
                 rng_tracker_name: str | None = None, ub_name: str | None = None, **options: Any) -> None:
        super().__init__(
            in_features, out_features, names=['weight'], sequence_parallel=sequence_parallel, tp_group=tp_group, tp_size=tp_size,
            parallel_mode=parallel_mode, bias=bias, return_bias=return_bias, params_dtype=params_dtype, device=device,
            init_method=init_method, get_rng_state_tracker=get_rng_state_tracker, rng_tracker_name=rng_tracker_name, ub_name=ub_name,
            options=options)

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        y = self._multiply(x, self.weight, self.bias)
        return (y, self.bias) if self.return_bias else y


class LayerNormLinear(ParallelLinear):
    """A norm and a column-parallel linear layer in one module; parameters `layer_norm_weight`, `layer_norm_bias`, `weight`, `bias`."""

    def __init__(self, in_features: int, out_features: int, eps: float = 1e-5, sequence_parallel: bool = False,
                 fuse_wgrad_accumulation: bool = False, tp_group: Any = None, tp_size: int = 1,
                 get_rng_state_tracker: Callable[[], Any] | None = None, init_method: Callable[[torch.Tensor], Any] | None = None,
                 bias: bool = True, normalization: str = 'LayerNorm', return_bias: bool = False, params_dtype: torch.dtype | None = None,
                 parallel_mode: str | None = None, return_layernorm_output: bool = False,
                 return_layernorm_output_gathered: bool = False, zero_centered_gamma: bool = False, device: Any = 'cpu',
                 rng_tracker_name: str | None = None, ub_name: str | None = None, **options: Any) -> None:
        super().__init__(
            in_features, out_features, names=['weight'], sequence_parallel=sequence_parallel, tp_group=tp_group, tp_size=tp_size,
            parallel_mode=parallel_mode, bias=bias, return_bias=return_bias, params_dtype=params_dtype, device=device,
            init_method=init_method, get_rng_state_tracker=get_rng_state_tracker, rng_tracker_name=rng_tracker_name, ub_name=ub_name,
            options=options)
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        self.layer_norm_weight, self.layer_norm_bias = norm_parameters(
            in_features, kind=normalization, zero_centered=zero_centered_gamma, dtype=params_dtype, device=device,
            sequence_parallel=self.sequence_parallel)

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        normed = normalize(x, self.layer_norm_weight, self.layer_norm_bias, eps=self.eps, kind=self.normalization,
                           zero_centered=self.zero_centered_gamma)
        y = self._multiply(normed, self.weight, self.bias)
        out = [y]
        if self.return_bias:
            out.append(self.bias)
        if self.return_layernorm_output:
            if self.return_layernorm_output_gathered and self.sequence_parallel:
                normed = _mappings().gather_from_sequence_parallel_region(normed, True, group=self.tp_group)
            out.append(normed)
        return tuple(out) if len(out) > 1 else y
