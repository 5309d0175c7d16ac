"""Which parameters a tensor-parallel rank owns alone, said where the gradient norm looks for it (import tier 2).

Megatron's gradient norm counts a parameter on every tensor-parallel rank when `parameter.tensor_model_parallel` is true, and on the group's
first rank only when it is not. Two sources of that attribute are wrong:

- megatron-core sets it on embedding and output weights while it initialises them, and so never with `perform_initialization=False`, the
  default of mcore-bridge and ms-swift: all shards but the first are left out, the norm is too small, clipping too weak.
- Transformer Engine sets it on every linear weight, also on those that each rank holds whole (the latent projections of multi-head latent
  attention, the whole factor of a LoRA pair): they are counted once a rank, the norm is too large.

A third attribute, `allreduce`, says over which replicas a gradient is summed. megatron-core derives it from expert parallelism alone, so
that with tensor parallel 2 and both expert sizes 1 (ms-swift's defaults) each rank of a pair keeps the gradient of its own half of the
tokens: expert gradients are wrong (by 0.85 relative in a four-expert model) and the two copies of an expert drift apart.
"""
from collections.abc import Iterable, Iterator

import torch
from torch import nn


def _column(module: nn.Module) -> Iterator[tuple[str, int | None]]:
    yield 'weight', 0
    yield 'bias', 0


def _row(module: nn.Module) -> Iterator[tuple[str, int | None]]:
    yield 'weight', 1
    yield 'bias', None


def _engine_layout(module: nn.Module) -> Iterator[tuple[str, int | None]]:
    """(parameter name, split dimension or None) of a Transformer Engine linear layer under one of Megatron's wrappers."""
    from megatron.core.extensions import transformer_engine as wrappers
    column = isinstance(module, (wrappers.TEColumnParallelLinear, wrappers.TELayerNormColumnParallelLinear))
    row = isinstance(module, wrappers.TERowParallelLinear)
    if column or row:
        yield from (_row if row else _column)(module)
    elif isinstance(module, wrappers.TELinear):
        yield 'weight', None
        yield 'bias', None


def _expert_layout(module: nn.Module) -> Iterator[tuple[str, int | None]]:
    """Experts: no two ranks of the dense tensor-parallel group share what they hold, since the optimizer shards it over its replicas.

    Megatron asks for the rank in the dense group, also for experts; a parameter that does not claim its rank is left out on all but one.
    """
    from megatron.core.extensions import transformer_engine as wrappers
    row = isinstance(module, (wrappers.TERowParallelGroupedLinear, wrappers.TERowParallelLinear))
    for name, _ in module.named_parameters(recurse=False):
        yield name, 1 if row else 0


def _layout(module: nn.Module) -> Iterable[tuple[str, int | None]]:
    from megatron.core.extensions import transformer_engine as wrappers
    from megatron.core.tensor_parallel import layers
    if _is_expert(module):
        return _expert_layout(module)
    if isinstance(module, layers.VocabParallelEmbedding):
        return [('weight', 0)]
    if isinstance(module, layers.ColumnParallelLinear):
        return _column(module)
    if isinstance(module, layers.RowParallelLinear):
        return _row(module)
    if isinstance(module, (wrappers.TELinear, wrappers.TELayerNormColumnParallelLinear)):
        return _engine_layout(module)
    if isinstance(module, wrappers.TEDotProductAttention):
        return [('softmax_offset', 0)]  # attention sinks (gpt-oss), one a head; nobody marks them
    return ()


def _is_expert(module: nn.Module) -> bool:
    """A grouped layer of experts, or the layer of one expert: the latter is known by its group, which is the experts' own."""
    from megatron.core import mpu
    from megatron.core.extensions import transformer_engine as wrappers
    if isinstance(module, wrappers.TEGroupedLinear):
        return True
    if not isinstance(module, (wrappers.TEColumnParallelLinear, wrappers.TERowParallelLinear)):
        return False
    return module._tp_group is mpu.get_expert_tensor_parallel_group() and module._tp_group is not mpu.get_tensor_model_parallel_group()


def _set(parameter: torch.Tensor, dim: int | None) -> bool:
    """Set the three attributes; whether any of them was missing or different."""
    wanted = {'tensor_model_parallel': dim is not None, 'partition_dim': -1 if dim is None else dim}
    changed = False
    for name, value in wanted.items():
        if not hasattr(parameter, name) or getattr(parameter, name) != value:
            setattr(parameter, name, value)
            changed = True
    if not hasattr(parameter, 'partition_stride'):
        parameter.partition_stride = 1
    return changed


def _set_replicas(parameter: torch.Tensor) -> bool:
    """Have the gradient of an expert's parameter summed over the replicas of experts, where these are not the replicas of the rest."""
    from megatron.core import mpu
    own = mpu.get_expert_data_parallel_world_size()
    if own == mpu.get_data_parallel_world_size(with_context_parallel=True) or not getattr(parameter, 'allreduce', True):
        return False
    if hasattr(parameter, 'main_grad'):
        raise RuntimeError('mark_tensor_parallel must come before DistributedDataParallel, which sorts parameters by their replicas')
    parameter.allreduce = False
    return True


def mark_tensor_parallel(models: Iterable[nn.Module]) -> list[str]:
    """Say of each linear and embedding parameter, and of attention sinks, whether this rank owns its shard alone; returns the names that were wrong.

    Every rank calls it, without communication, on the model chunks that mcore_bridge built: after adapters are added, before Megatron's
    DistributedDataParallel (which sorts parameters by their replicas) and before the optimizer (which copies the attributes to its own
    shards). Calling it again changes nothing. Parameters of other modules (norms, routers, state-space layers, which Megatron marks itself)
    stay as they are.
    """
    corrected = []
    for index, model in enumerate(models):
        for path, module in model.named_modules():
            expert = _is_expert(module)
            for name, dim in _layout(module):
                parameter = module._parameters.get(name)
                if parameter is None:
                    continue
                wrong = _set(parameter, dim)
                if expert:
                    wrong = _set_replicas(parameter) or wrong
                if wrong:
                    corrected.append(f'{index}:{path}.{name}')
    return corrected
