"""Router replay: training goes to the experts that were chosen before (import tier 2).

A mixture of experts may send a token to other experts when the weights have moved a little, or when a kernel rounds otherwise; the importance
ratio then compares two different networks. `--router_replay_mode`:

- `R2`: the pass that computes old log-probabilities records which experts each token of each layer went to, and every later pass of the policy
  on the same micro-batch goes there again (Routing Replay, arXiv 2507.18071). On-policy runs have no old pass and need none: the routes are the
  current weights' own.
- `R3`: the routes are those of the engine that sampled (arXiv 2510.11370); vLLM returns them with the rollout, and every pass of the policy
  follows them, the old one too.

The gate's probabilities are computed anew and carry their gradient. Routes of R2 lie on the rank that made them, which sees its own layers and its
own part of a sequence only; those of R3 are cut to the rank's layers and part here.
"""
from __future__ import annotations

import contextlib
import torch
from collections.abc import Iterator
from mcore_bridge import split_cp_inputs
from megatron.core import mpu
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from typing import Any

from ..errors import RunError
from ..parallel import Topology
from ..types import MicroBatch


class RouteBook:
    """Records and replays the routes of the policy, micro-batch by micro-batch.

    Args:
        mode: 'R2' or 'R3'.
        topology: this rank's place.
        cp_partition_mode: how sequences are cut over context-parallel ranks.
        sequence_parallel: whether tensor-parallel ranks hold a part of each sequence.

    While `record` is open a forward records; afterwards a forward on a micro-batch with recorded routes replays them, and any other routes
    freely. It is given to the policy's forward only; a reference or teacher on the same micro-batches routes freely.
    """

    def __init__(self, mode: str, topology: Topology, *, cp_partition_mode: str = 'zigzag', sequence_parallel: bool = False) -> None:
        assert mode in ('R2', 'R3'), mode
        self.mode = mode
        self.topology = topology
        self.cp_partition_mode = cp_partition_mode
        self.sequence_parallel = sequence_parallel and topology.tp_size > 1
        self.recording = False
        self._routers: dict[int, list[tuple[int, RouterReplay]]] = {}

    def routers(self, gpt_model: Any) -> list[tuple[int, RouterReplay]]:
        """(number of the layer in the whole model, from 1; its router) of this model chunk, in the order of its layers."""
        if id(gpt_model) not in self._routers:
            self._routers[id(gpt_model)] = [(module.layer_number, module.router_replay) for module in gpt_model.modules()
                                            if isinstance(getattr(module, 'router_replay', None), RouterReplay)]
        return self._routers[id(gpt_model)]

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        """While the body runs, forwards of the policy record (R2)."""
        self.recording = self.mode == 'R2'
        try:
            yield
        finally:
            self.recording = False

    @contextlib.contextmanager
    def around_forward(self, micro_batch: MicroBatch, gpt_model: Any, cu_seqlens: torch.Tensor | None) -> Iterator[None]:
        """Put around one forward of one model chunk. `cu_seqlens`: of a packed micro-batch, as its inputs are cut by."""
        routers = self.routers(gpt_model)
        if self.recording:
            for _, router in routers:
                router.set_router_replay_action(RouterReplayAction.RECORD)
            yield
            micro_batch.routes[gpt_model.vp_stage or 0] = [_compact(router.get_recorded_indices()) for _, router in routers]
            _clear(routers)
            return
        if self.mode == 'R3':
            routes: list[torch.Tensor | None] | None = self._of_rollouts(micro_batch, routers, cu_seqlens)
        else:
            routes = micro_batch.routes.get(gpt_model.vp_stage or 0)
        if routes is None:
            yield
            return
        if len(routes) != len(routers) or any(route is None for route in routes):
            raise RunError(f'Router replay: {len(routers)} layers route here, and {sum(route is not None for route in routes)} routes were recorded '
                           'for this micro-batch.')
        for (_, router), route in zip(routers, routes):
            router.set_target_indices(route.to(torch.int64))
            router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        yield
        for _, router in routers:
            # What is computed again during the backward pass takes its routes from a queue, first in, first out, as micro-batches come back.
            router.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)

    def _of_rollouts(self, micro_batch: MicroBatch, routers: list[tuple[int, RouterReplay]],
                     cu_seqlens: torch.Tensor | None) -> list[torch.Tensor | None]:
        """The engine's routes of this rank's layers and positions, int16 [positions, top-k] each: positions in the order in which the router
        sees tokens, position by position, row by row."""
        whole = micro_batch.rollout_routes
        assert whole is not None
        last = max((number for number, _ in routers), default=0)
        if last > whole.shape[2]:
            raise RunError(f'Router replay: the engine gave routes of {whole.shape[2]} layers, and layer {last} routes here.')
        topology = self.topology
        if topology.cp_size > 1:
            kwargs = {'cp_partition_mode': self.cp_partition_mode} if self.cp_partition_mode != 'zigzag' else {}
            whole = split_cp_inputs(whole.to(cu_seqlens.device) if cu_seqlens is not None else whole, cu_seqlens, 1, **kwargs)
        by_position = whole.transpose(0, 1)
        if self.sequence_parallel:
            by_position = by_position.chunk(topology.tp_size, dim=0)[mpu.get_tensor_model_parallel_rank()]
        return [by_position[:, :, number - 1].reshape(-1, whole.shape[-1]) for number, _ in routers]

    def finish(self, gpt_models: list[Any]) -> None:
        """After one run of the schedule: queues emptied, free routing."""
        for gpt_model in gpt_models:
            _clear(self.routers(gpt_model))


def _clear(routers: list[tuple[int, RouterReplay]]) -> None:
    for _, router in routers:
        router.clear_indices()
        router.clear_router_replay_action()


def _compact(indices: torch.Tensor | None) -> torch.Tensor | None:
    """Experts are few: two bytes an entry."""
    return None if indices is None else indices.to(torch.int16)
