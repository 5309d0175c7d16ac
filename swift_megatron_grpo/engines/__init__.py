"""Rollout engines behind one interface; heavy imports happen when an engine is built."""
from __future__ import annotations

import torch
from typing import TYPE_CHECKING, Any

from .base import EngineGroup, RolloutEngine, Sampling

if TYPE_CHECKING:
    from ..parallel import Topology

__all__ = ['EngineGroup', 'RolloutEngine', 'Sampling', 'build_engine', 'engine_group']


def engine_group(rank: int, world_size: int, ranks_per_engine: int) -> EngineGroup:
    """Engines lie on neighbouring ranks. Pure.

    Example: rank 3 of 4 with 2 ranks an engine: EngineGroup(index=1, count=2, rank=1, size=2).
    """
    return EngineGroup(index=rank // ranks_per_engine, count=world_size // ranks_per_engine, rank=rank % ranks_per_engine,
                       size=ranks_per_engine)


def build_engine(args: Any, template: Any, topology: Topology, device: torch.device) -> RolloutEngine:
    """The engine that the arguments ask for. All ranks, collective."""
    rank, world_size = topology.rank, topology.world_size
    per_rank = -(-args.generation_batch_size // world_size)
    if not args.use_vllm:
        from .transformers_engine import TransformersRolloutEngine
        return TransformersRolloutEngine(args, template, engine_group(rank, world_size, 1), max_batch_size=per_rank, device=device)
    from .vllm_colocate import VllmColocateEngine
    size = args.vllm_tensor_parallel_size
    return VllmColocateEngine(args, template, engine_group(rank, world_size, size), max_num_seqs=per_rank * size, device=device)
