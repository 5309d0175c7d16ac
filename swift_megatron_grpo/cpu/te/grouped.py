"""The experts' linear layers: several weights of one shape, each for its run of tokens (import tier 2)."""
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from swift_megatron_grpo.cpu.te.linear import ParallelLinear


class GroupedLinear(ParallelLinear):
    """num_gemms linear maps; parameters `weight0`, `weight1`, ... and `bias0`, ....

    Communication between tensor-parallel ranks is the token dispatcher's, never this layer's.
    """

    def __init__(self, num_gemms: int, in_features: int, out_features: int, sequence_parallel: bool = False,
                 fuse_wgrad_accumulation: bool = False, tp_group: Any = None, tp_size: int = 1,
                 get_rng_state_tracker: Callable[[], Any] | None = None, rng_tracker_name: str | None = None,
                 init_method: Callable[[torch.Tensor], Any] | None = None, bias: bool = True, return_bias: bool = False,
                 params_dtype: torch.dtype | None = None, parallel_mode: str | None = None, device: Any = 'cpu',
                 ub_name: str | None = None, **options: Any) -> None:
        super().__init__(
            in_features, out_features, names=[f'weight{i}' for i in range(num_gemms)], sequence_parallel=sequence_parallel,
            tp_group=tp_group, tp_size=tp_size, parallel_mode=parallel_mode, bias=bias, return_bias=return_bias,
            params_dtype=params_dtype, device=device, init_method=init_method, get_rng_state_tracker=get_rng_state_tracker,
            rng_tracker_name=rng_tracker_name, ub_name=ub_name, options=options)
        self.num_gemms = num_gemms

    def forward(self, x: torch.Tensor, m_splits: Sequence[int], is_first_microbatch: bool | None = None) -> Any:
        """x: (T, H_in), sorted by expert; m_splits: tokens of each expert (0 is fine), sum T -> (T, H_out). No communication."""
        counts = [int(count) for count in m_splits]
        rows = x.reshape(-1, x.shape[-1])
        if len(counts) != self.num_gemms or sum(counts) != rows.shape[0]:
            raise ValueError(f'm_splits {counts} for {self.num_gemms} experts and {rows.shape[0]} tokens')
        weights = [getattr(self, f'weight{i}') for i in range(self.num_gemms)]
        biases = [getattr(self, f'bias{i}') for i in range(self.num_gemms)]
        y = torch.cat([
            F.linear(part, weight, bias if self.apply_bias else None)
            for part, weight, bias in zip(rows.split(counts), weights, biases)
        ]).reshape(*x.shape[:-1], self.out_features)
        return (y, biases) if self.return_bias else y
