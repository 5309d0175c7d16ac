"""Puts the stand-in under the name `transformer_engine` (import tier 2)."""
import contextlib
import enum
import importlib.machinery
import itertools
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from swift_megatron_grpo.cpu.patches import PLATFORM
from swift_megatron_grpo.cpu.te import attention, base, grouped, linear, norm, optimizer, rng
from swift_megatron_grpo.passport import Passport

VERSION = '2.8.0'  # what decides in megatron-core which arguments are passed; the interfaces here are those of that release
ROOT = 'transformer_engine'


class SplitAlongDim(torch.autograd.Function):
    """torch.split with contiguous parts, whose backward is one concatenation. Called as `.apply(x, dim, sizes, squeeze)`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, sizes: int | list[int], squeeze: bool = False) -> tuple[torch.Tensor, ...]:
        ctx.dim, ctx.squeeze = dim, squeeze
        parts = torch.split(x, sizes, dim)
        return tuple((part.squeeze(dim) if squeeze else part).contiguous() for part in parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        if ctx.squeeze:
            grads = tuple(grad.unsqueeze(ctx.dim) for grad in grads)
        return torch.cat(grads, ctx.dim), None, None, None


def thd_get_partitioned_indices(cu_seqlens: torch.Tensor, total_tokens: int, cp_size: int, rank: int) -> torch.Tensor:
    """Positions in the packed buffer that context-parallel rank `rank` holds, int32, (total_tokens / cp_size,).

    Of 2*cp_size equal chunks of each sequence it holds chunk rank and chunk 2*cp_size-1-rank. cu_seqlens counts padding. Example: one
    sequence of 8 tokens, cp_size 2, rank 0 -> 0, 1, 6, 7.
    """
    bounds = cu_seqlens.tolist()
    if bounds[-1] != total_tokens:
        raise ValueError(f'cu_seqlens ends at {bounds[-1]}, the buffer has {total_tokens} tokens')
    parts = []
    for start, end in itertools.pairwise(bounds):
        chunk = (end - start) // (2 * cp_size)
        for index in (rank, 2 * cp_size - 1 - rank):
            parts.append(torch.arange(start + index * chunk, start + (index + 1) * chunk, dtype=torch.int32))
    return torch.cat(parts)


def apply_rotary_pos_emb(*args: Any, **kwargs: Any) -> None:
    """The fused kernel, which has no stand-in: Megatron's own rotary code gives the same numbers."""
    raise NotImplementedError('CPU platform: no fused rotary embedding; set apply_rope_fusion false')


@contextlib.contextmanager
def quantized(enabled: bool = False, **kwargs: Any) -> Iterator[None]:
    """fp8_autocast and fp8_model_init: fine when off, refused when on."""
    if enabled:
        raise NotImplementedError('CPU platform: no FP8; leave fp8_format out')
    yield


class FP8GlobalStateManager:
    """Says that nothing is quantized."""
    FP8_ENABLED = False

    @staticmethod
    def is_fp8_enabled() -> bool:
        return False

    is_fp8_calibration = with_fp8_parameters = is_first_fp8_module = in_fp8_graph_capture = is_fp8_enabled

    @staticmethod
    def get_fp8_recipe() -> None:
        return None

    @staticmethod
    def reset() -> None:
        return None


def _unavailable(name: str) -> type:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f'CPU platform: transformer_engine.{name} has no stand-in')

    return type(name, (), {'__init__': __init__})


def _module(name: str, **members: Any) -> None:
    module = types.ModuleType(name)
    module.__path__ = []  # a package without files: what is not listed here raises ModuleNotFoundError, which Megatron expects
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__dict__.update(members)
    sys.modules[name] = module
    parent, _, leaf = name.rpartition('.')
    if parent:
        setattr(sys.modules[parent], leaf, module)


@PLATFORM.patch(Passport(
    name='transformer-engine',
    target='sys:modules',
    breaks='ModuleNotFoundError: mcore_bridge imports transformer_engine unconditionally, and builds on its layers',
    reference='mcore_bridge/model/register.py; megatron/core/extensions/transformer_engine.py',
    versions='megatron-core 0.16.1; mcore-bridge 1.6.5',
    remove_when="mcore-bridge builds on megatron-core's local layer specification",
))
def transformer_engine() -> None:
    recipes = ('Recipe', 'DelayedScaling', 'Float8CurrentScaling', 'Float8BlockScaling', 'MXFP8BlockScaling', 'NVFP4BlockScaling',
               'CustomRecipe')
    fusible = ('Sequential', 'BasicLinear', 'Bias', 'SwiGLU', 'ReLU', 'ReGLU', 'GELU', 'GEGLU', 'SiLU', 'ReduceScatter', 'AllReduce',
               'RMSNorm', 'LayerNorm', 'FusibleOperation')
    pytorch = f'{ROOT}.pytorch'
    layers = {'Linear': linear.Linear, 'LayerNormLinear': linear.LayerNormLinear, 'GroupedLinear': grouped.GroupedLinear}
    contexts = {'fp8_autocast': quantized, 'fp8_model_init': quantized}
    _module(ROOT, __version__=VERSION)
    _module(f'{ROOT}.common')
    _module(f'{ROOT}.common.recipe', Format=enum.Enum('Format', 'E4M3 HYBRID E5M2'), **{name: _unavailable(name) for name in recipes})
    _module(pytorch, LayerNorm=norm.LayerNorm, RMSNorm=norm.RMSNorm, DotProductAttention=attention.DotProductAttention,
            LayerNormMLP=_unavailable('LayerNormMLP'), checkpoint=rng.checkpoint, **layers, **contexts)
    _module(f'{pytorch}.fp8', FP8GlobalStateManager=FP8GlobalStateManager, **contexts)
    _module(f'{pytorch}.distributed', CudaRNGStatesTracker=rng.CudaRNGStatesTracker, checkpoint=rng.checkpoint,
            activation_recompute_forward=lambda activation_recompute=False, recompute_phase=False: contextlib.nullcontext(),
            is_fp8_activation_recompute_enabled=lambda: False, get_all_rng_states=dict)
    _module(f'{pytorch}.attention', _SplitAlongDim=SplitAlongDim, apply_rotary_pos_emb=apply_rotary_pos_emb,
            DotProductAttention=attention.DotProductAttention)
    _module(f'{pytorch}.attention.rope', apply_rotary_pos_emb=apply_rotary_pos_emb)
    _module(f'{pytorch}.utils', SplitAlongDim=SplitAlongDim)
    _module(f'{pytorch}.tensor', QuantizedTensor=_unavailable('QuantizedTensor'))
    _module(f'{pytorch}.float8_tensor', Float8Tensor=_unavailable('Float8Tensor'))
    _module(f'{pytorch}.optimizers', FusedAdam=optimizer.FusedAdam, FusedSGD=torch.optim.SGD)
    _module(f'{pytorch}.module', **layers)
    _module(f'{pytorch}.module.base', TransformerEngineBaseModule=base.EngineModule)
    _module(f'{pytorch}.ops', **{name: _unavailable(name) for name in fusible})
    # The compiled half of Transformer Engine, of which Megatron calls one function on this way.
    _module(f'{ROOT}_torch', thd_get_partitioned_indices=thd_get_partitioned_indices)
    # Kernels that Megatron imports by name and calls only when moe_router_fusion is on, which is refused.
    _module(f'{pytorch}.router', fused_compute_score_for_moe_aux_loss=None, fused_moe_aux_loss=None, fused_topk_with_score_function=None)


def apply() -> None:
    """Apply the patch of this module, once."""
    PLATFORM.apply('transformer-engine')
