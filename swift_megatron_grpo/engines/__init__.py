"""Rollout engines behind one interface; heavy imports happen when an engine is built."""
from __future__ import annotations

import torch
from typing import TYPE_CHECKING, Any

from .base import EngineGroup, RolloutEngine, Sampling
from .server_pool import EngineLost

if TYPE_CHECKING:
    from ..parallel import Topology

__all__ = ['EngineGroup', 'EngineLost', 'RolloutEngine', 'Sampling', 'build_engine', 'check_arguments', 'engine_group', 'shares_devices']


def engine_group(rank: int, world_size: int, ranks_per_engine: int) -> EngineGroup:
    """Engines lie on neighbouring ranks. Pure.

    Example: rank 3 of 4 with 2 ranks an engine: EngineGroup(index=1, count=2, rank=1, size=2).
    """
    return EngineGroup(index=rank // ranks_per_engine, count=world_size // ranks_per_engine, rank=rank % ranks_per_engine,
                       size=ranks_per_engine)


def shares_devices(args: Any) -> bool:
    """Whether the engine lies on the trainer's devices. Pure."""
    return not (args.use_vllm and args.vllm_mode == 'server')


def check_arguments(args: Any) -> None:
    """Raises UserError for what an engine would refuse after the model was loaded. Pure."""
    from .. import cpu
    from ..errors import UserError
    if args.sleep_level not in (0, 1, 2):
        raise UserError(f'--sleep_level {args.sleep_level}: 0 (the engine keeps its memory), 1 (its weights wait in host memory) or 2 (they are '
                        'dropped and sent anew).')
    if args.use_vllm and args.vllm_mode == 'colocate' and args.sleep_level > 0 and cpu.is_active():
        raise UserError(f"--sleep_level {args.sleep_level}: vLLM's CPU build has no sleep mode; use 0 here. On a GPU it is passed through.")
    for name, neutral in (('min_p', 0.0), ('structured_outputs_regex', None)):
        if not args.use_vllm and getattr(args, name) != neutral:
            raise UserError(f'--{name} {getattr(args, name)}: the transformers engine (--use_vllm false) cannot do that. Leave it out, or give '
                            '--use_vllm true --vllm_mode colocate.')
    served = not shares_devices(args)
    if served:
        from .vllm_server import addresses
        addresses(args)
    if args.multi_turn_scheduler is not None and not served:  # a server has its own, unless it has none
        from ..step.turns import check_scheduler
        check_scheduler(args.multi_turn_scheduler)
    if args.use_gym_env and not served and args.multi_turn_scheduler is None:
        raise UserError('--use_gym_env true needs a scheduler that talks to the environment: --multi_turn_scheduler gym_scheduler --gym_env NAME.')
    if args.async_generate and not served:
        raise UserError('--async_generate true needs --vllm_mode server: an engine on these devices cannot sample while they train.')
    if args.async_generate and args.rollout_importance_sampling_mode is None and not args.allow_uncorrected_async:
        raise UserError('--async_generate true trains on rollouts of earlier weights. Give --rollout_importance_sampling_mode (token_truncate, '
                        'token_mask, sequence_truncate or sequence_mask) to correct for that, or --allow_uncorrected_async true to go on '
                        'without.')
    if args.max_staleness < 0:
        raise UserError(f'--max_staleness {args.max_staleness}: 0 (no rollout of earlier weights) or more.')
    if str(args.verify_weight_sync) not in ('off', 'first') and not (str(args.verify_weight_sync).isdigit() and
                                                                    int(args.verify_weight_sync) > 0):
        raise UserError(f'--verify_weight_sync {args.verify_weight_sync}: first, off, or a number N > 0 (after every N-th sync).')
    if float(args.weight_sync_bucket_mb) <= 0:
        raise UserError(f'--weight_sync_bucket_mb {args.weight_sync_bucket_mb}: a size in MiB, above 0.')


def build_engine(args: Any, template: Any, topology: Topology, device: torch.device) -> RolloutEngine:
    """The engine that the arguments ask for. All ranks, collective."""
    rank, world_size = topology.rank, topology.world_size
    per_rank = -(-args.generation_batch_size // world_size)
    if not args.use_vllm:
        from .transformers_engine import TransformersRolloutEngine
        return TransformersRolloutEngine(args, template, engine_group(rank, world_size, 1), max_batch_size=per_rank, device=device)
    if args.vllm_mode == 'server':
        from .vllm_server import VllmServerEngine
        return VllmServerEngine(args, engine_group(rank, world_size, world_size), device)
    from .vllm_colocate import VllmColocateEngine
    size = args.vllm_tensor_parallel_size
    return VllmColocateEngine(args, template, engine_group(rank, world_size, size), max_num_seqs=per_rank * size, device=device)
