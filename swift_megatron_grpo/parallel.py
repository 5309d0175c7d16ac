"""Who this rank is, who owns which rollout, and how ranks agree (import tier 2: megatron).

Megatron orders ranks tp-cp-ep-dp-pp: with pipeline parallelism the ranks that hold one data-parallel index are not neighbours in the
world. Nothing in this package may therefore derive a group from a position in a gathered list; rollouts carry their ids instead.
"""
from __future__ import annotations

import torch
import torch.distributed as dist
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from megatron.core import mpu
from typing import Any, TypeVar

from .errors import RunError, UserError

T = TypeVar('T')

# Of the groups made here. A phase that lasts too long is ended, by name, at its own deadline (deadlines.py); torch would give a group 10 or 30 minutes.
GROUP_TIMEOUT = timedelta(days=30)


@dataclass(kw_only=True, slots=True)
class Topology:
    """This rank's place. `model_group` (gloo) holds the TP x PP x CP ranks that share its data-parallel index."""
    rank: int
    world_size: int
    dp_rank: int
    dp_size: int
    tp_size: int
    pp_size: int
    cp_size: int
    dp_group: dist.ProcessGroup
    cp_group: dist.ProcessGroup
    tp_group: dist.ProcessGroup
    model_group: dist.ProcessGroup
    model_ranks: list[int]
    is_last_stage: bool

    @property
    def is_logging_rank(self) -> bool:
        """ms-swift logs on the last rank; it is in the last pipeline stage, where the loss is."""
        return self.rank == self.world_size - 1

    @property
    def model_rank(self) -> int:
        return self.model_ranks.index(self.rank)


def build_topology() -> Topology:
    """All ranks, collective: creates one process group for each data-parallel index, and one of all ranks."""
    tp, pp, cp = (mpu.get_tensor_model_parallel_world_size(), mpu.get_pipeline_model_parallel_world_size(),
                  mpu.get_context_parallel_world_size())
    dp = mpu.get_data_parallel_world_size()
    generator = mpu.RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order='tp-cp-ep-dp-pp', rank_offset=0)
    rank = dist.get_rank()
    model_group, model_ranks = None, [rank]
    for ranks in generator.get_ranks('tp-cp-ep-pp'):
        ranks = sorted(ranks)
        # Only objects go through it (token ids, pictures): with NCCL they would all lie on the device at once.
        group = dist.new_group(ranks, timeout=GROUP_TIMEOUT, backend='gloo', group_desc='SWIFT_MEGATRON_GRPO_MODEL')
        if rank in ranks:
            model_group, model_ranks = group, ranks
    assert model_group is not None
    global _host_world
    _host_world = (dist.group.WORLD, dist.new_group(timeout=GROUP_TIMEOUT, backend='gloo', group_desc='SWIFT_MEGATRON_GRPO_WORLD'))
    return Topology(
        rank=rank,
        world_size=dist.get_world_size(),
        dp_rank=mpu.get_data_parallel_rank(),
        dp_size=dp,
        tp_size=tp,
        pp_size=pp,
        cp_size=cp,
        dp_group=mpu.get_data_parallel_group(),
        cp_group=mpu.get_context_parallel_group(),
        tp_group=mpu.get_tensor_model_parallel_group(),
        model_group=model_group,
        model_ranks=model_ranks,
        is_last_stage=mpu.is_pipeline_last_stage(ignore_virtual=True),
    )


# (the world it was made for, a gloo group of all its ranks): objects are host memory, and with NCCL all of them would lie on the device at once.
_host_world: tuple[Any, dist.ProcessGroup] | None = None


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """All ranks of the group, collective: every rank's value, in group order. None: all ranks, through host memory once `build_topology` was called."""
    if group is None and _host_world is not None and _host_world[0] is dist.group.WORLD:
        group = _host_world[1]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def agree(phase: str, produce: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Run `produce` on every rank and return all results, or raise one error everywhere.

    All ranks of the group, collective. An exception on one rank must not leave the others waiting in the next collective: it travels
    with the results, and every rank raises the same RunError (or UserError), which names the phase and the rank.
    """
    result: Any = None
    failure: tuple[str, str, bool] | None = None
    try:
        result = produce()
    except (UserError, RunError) as error:
        failure = (type(error).__name__, str(error), True)
    except Exception as error:  # a user's reward function or plug-in may raise anything
        import traceback
        where = traceback.extract_tb(error.__traceback__)[-1]
        failure = (type(error).__name__, f'{type(error).__name__}: {error} ({where.filename}:{where.lineno})', False)
    outcomes = gather_objects((result, failure), group)
    failures = [(position, outcome[1]) for position, outcome in enumerate(outcomes) if outcome[1] is not None]
    if failures:
        position, (kind, message, is_ours) = failures[0]
        more = f' ({len(failures)} ranks failed)' if len(failures) > 1 else ''
        text = f'{phase} failed on rank {position}{more}: {message}'
        raise (UserError if is_ours and kind == 'UserError' else RunError)(text)
    return [outcome[0] for outcome in outcomes]


def contiguous_share(total: int, parts: int, part: int) -> range:
    """The part-th of `parts` contiguous shares of range(total); sizes differ by at most one. Pure.

    Example: contiguous_share(10, 4, 1) == range(2, 5).
    """
    return range(part * total // parts, (part + 1) * total // parts)


def share_of_groups(num_prompts: int, num_generations: int, parts: int, part: int) -> range:
    """The rollouts [a, b) that engine `part` of `parts` samples: whole groups where there are enough of them, so that the engine's prefix
    cache sees a prompt once; single rollouts otherwise. Pure."""
    if num_prompts >= parts:
        share = contiguous_share(num_prompts, parts, part)
        return range(share.start * num_generations, share.stop * num_generations)
    return contiguous_share(num_prompts * num_generations, parts, part)


class _SumOverContextParallel(torch.autograd.Function):
    """Forward: sum over the context-parallel group. Backward: identity.

    Each rank holds the values of its own positions and zeros elsewhere. The loss is computed from the whole vector, identically on every
    rank; a rank's gradient is then that of its own positions, and Megatron's reduction over the data x context group adds them up.
    """

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        whole = local.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def sum_over_context_parallel(local: torch.Tensor, topology: Topology) -> torch.Tensor:
    """All ranks of the context-parallel group, collective; no communication at CP 1."""
    if topology.cp_size == 1:
        return local
    return _SumOverContextParallel.apply(local, topology.cp_group)


def max_over(values: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """Elementwise maximum over the group, one all-reduce. All ranks of the group, collective."""
    tensor = torch.tensor(list(values), dtype=torch.int64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return tensor.tolist()
