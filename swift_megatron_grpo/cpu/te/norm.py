"""RMSNorm and LayerNorm (import tier 1)."""
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from swift_megatron_grpo.cpu.te.base import EngineModule, parameter_device, refuse_options


def normalize(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, eps: float, kind: str,
              zero_centered: bool) -> torch.Tensor:
    """Normalise the last dimension; statistics in fp32, result in the dtype of x. `kind` is 'RMSNorm' or 'LayerNorm'.

    x: (..., H); weight, bias: (H,). With `zero_centered` the stored weight is the scale less one.
    RMSNorm: Zhang and Sennrich 2019 (arXiv:1910.07467). Pure.
    """
    scale = weight + 1 if zero_centered else weight
    if kind == 'RMSNorm':
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
        return (x32 * scale.float()).to(x.dtype)
    if kind == 'LayerNorm':
        return F.layer_norm(x, x.shape[-1:], scale, bias, eps)
    raise ValueError(f'normalization {kind}: RMSNorm or LayerNorm')


def norm_parameters(size: int, *, kind: str, zero_centered: bool, dtype: torch.dtype | None, device: Any,
                    sequence_parallel: bool) -> tuple[nn.Parameter, nn.Parameter | None]:
    """(weight, bias or None) at the identity, marked for the gradient sum that sequence parallelism needs."""
    device = parameter_device(device)
    start = torch.zeros if zero_centered else torch.ones
    weight = nn.Parameter(start(size, dtype=dtype, device=device))
    bias = nn.Parameter(torch.zeros(size, dtype=dtype, device=device)) if kind == 'LayerNorm' else None
    for parameter in (weight, bias):
        if parameter is not None:
            parameter.sequence_parallel = sequence_parallel
    return weight, bias


class _Norm(EngineModule):
    kind = ''

    def __init__(self, normalized_shape: int | None = None, eps: float = 1e-5, sequence_parallel: bool = False,
                 params_dtype: torch.dtype | None = None, zero_centered_gamma: bool = False, device: Any = 'cpu',
                 hidden_size: int | None = None, dtype: torch.dtype | None = None, **options: Any) -> None:
        super().__init__()
        refuse_options(self.kind, options)
        size = hidden_size if normalized_shape is None else normalized_shape
        if isinstance(size, (tuple, list)):
            if len(size) != 1:
                raise NotImplementedError(f'CPU platform: {self.kind} over {len(size)} dimensions')
            size = size[0]
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.weight, self.bias = norm_parameters(
            size, kind=self.kind, zero_centered=zero_centered_gamma, dtype=params_dtype or dtype, device=device,
            sequence_parallel=sequence_parallel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return normalize(x, self.weight, self.bias, eps=self.eps, kind=self.kind, zero_centered=self.zero_centered_gamma)


class RMSNorm(_Norm):
    kind = 'RMSNorm'


class LayerNorm(_Norm):
    kind = 'LayerNorm'
