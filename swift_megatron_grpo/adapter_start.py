"""A fresh adapter is the same in every layout (import tier 2).

mcore-bridge draws the factors A on each rank: by pipeline stage, by order of creation, and for a factor that tensor parallelism cuts, by shard, whose
bound follows from the shard's width (with TP 8 its standard deviation is 2.8 times what one process draws). Here a factor is drawn whole from a
generator that its name in the whole model seeds, and each rank takes its part. Distribution as in PEFT and in Hu et al. 2021: A uniform in
+-1/sqrt(in_features), which is kaiming_uniform with a = sqrt(5); B stays 0.
"""
from __future__ import annotations

import hashlib
import re
import torch
from collections.abc import Iterator, Sequence
from mcore_bridge import LoraParallelLinear
from megatron.core import mpu
from peft.tuners.lora import LoraLayer
from torch import nn

from .parallel_names import WholeModel

_EXPERT = re.compile(r'(?<=\.weight)\d+$')  # of grouped matrices; mcore-bridge loads no others


def draw_adapters(models: Sequence[nn.Module], seed: int) -> None:
    """Every rank, before the optimizer copies the weights; no collective. models: this rank's chunks."""
    for model in models:
        factors = dict(_factors(model))
        for name, weight in WholeModel(model).named_parameters():
            if weight in factors:
                layer = factors[weight]
                with torch.no_grad():
                    weight.copy_(_part(_whole(_name_in_whole_model(name, layer), weight.shape[0], _width(layer, weight), seed), layer, weight))


def _factors(model: nn.Module) -> Iterator[tuple[nn.Parameter, LoraLayer]]:
    """Each matrix A, of shape (rank, in_features of this rank), with its layer."""
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            for factor in layer.lora_A.values():
                for weight in factor.parameters():
                    if weight.dim() == 2:
                        yield weight, layer


def _name_in_whole_model(name: str, layer: LoraLayer) -> str:
    """Experts are numbered from 0 on each rank of an expert-parallel group."""
    if not getattr(layer, 'is_expert', False):
        return name
    first = mpu.get_expert_model_parallel_rank() * (layer.config.num_moe_experts // mpu.get_expert_model_parallel_world_size())
    return _EXPERT.sub(lambda match: str(int(match[0]) + first), name)


def _is_cut(layer: LoraLayer) -> bool:
    """Whether tensor parallelism cuts A, along in_features. (Adapters on experts have no expert tensor parallelism in mcore-bridge.)"""
    return isinstance(layer, LoraParallelLinear) and layer.is_parallel_a and not layer.is_expert and layer.tp_size > 1


def _width(layer: LoraLayer, weight: torch.Tensor) -> int:
    return weight.shape[1] * (layer.tp_size if _is_cut(layer) else 1)


def _whole(name: str, rank: int, in_features: int, seed: int) -> torch.Tensor:
    digest = hashlib.sha256(f'{seed}/{name}'.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], 'little') >> 1)
    bound = in_features**-0.5
    return torch.empty(rank, in_features).uniform_(-bound, bound, generator=generator)


def _part(whole: torch.Tensor, layer: LoraLayer, weight: torch.Tensor) -> torch.Tensor:
    start = mpu.get_tensor_model_parallel_rank() * weight.shape[1] if _is_cut(layer) else 0
    return whole[:, start:start + weight.shape[1]]
