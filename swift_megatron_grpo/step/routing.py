"""Router replay R2: experts chosen in the old pass are used again in training (import tier 2).

A mixture of experts may send a token to other experts when the weights have moved a little, or when a kernel rounds otherwise; the importance
ratio then compares two different networks. With `--router_replay_mode R2` the pass that computes old log-probabilities records which experts each
token of each layer went to, and every later pass of the policy on the same micro-batch goes there again; the gate's probabilities are
computed anew and carry their gradient (arXiv 2507.18071 describes the idea as Routing Replay). On-policy runs have no old pass and need none: the
routes are the current weights' own.

The routes of a micro-batch lie on the rank that made them: a rank only sees its own layers and its own part of a sequence.
"""
from __future__ import annotations

import contextlib
import torch
from collections.abc import Iterator
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from typing import Any

from ..errors import RunError
from ..types import MicroBatch


class RouteBook:
    """Records and replays the routes of the policy, micro-batch by micro-batch.

    While `record` is open a forward records; afterwards a forward on a micro-batch with recorded routes replays them, and any other routes
    freely. It is given to the policy's forward only, so a reference or teacher on the same micro-batches is not touched.
    """

    def __init__(self) -> None:
        self.recording = False
        self._routers: dict[int, list[Any]] = {}

    def routers(self, gpt_model: Any) -> list[RouterReplay]:
        """The routers of this model chunk, in the order of its layers."""
        if id(gpt_model) not in self._routers:
            found = [module.router_replay for module in gpt_model.modules() if isinstance(getattr(module, 'router_replay', None), RouterReplay)]
            self._routers[id(gpt_model)] = found
        return self._routers[id(gpt_model)]

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        """While the body runs, forwards of the policy record."""
        self.recording = True
        try:
            yield
        finally:
            self.recording = False

    @contextlib.contextmanager
    def around_forward(self, micro_batch: MicroBatch, gpt_model: Any) -> Iterator[None]:
        """Put around one forward of one model chunk."""
        routers = self.routers(gpt_model)
        if self.recording:
            for router in routers:
                router.set_router_replay_action(RouterReplayAction.RECORD)
            yield
            micro_batch.routes[gpt_model.vp_stage or 0] = [_compact(router.get_recorded_indices()) for router in routers]
            for router in routers:
                router.clear_indices()
                router.clear_router_replay_action()
            return
        routes = micro_batch.routes.get(gpt_model.vp_stage or 0)
        if routes is None:
            yield
            return
        if len(routes) != len(routers) or any(route is None for route in routes):
            raise RunError(f'Router replay: {len(routers)} layers route here, and {sum(route is not None for route in routes)} routes were recorded '
                           'for this micro-batch.')
        for router, route in zip(routers, routes):
            router.set_target_indices(route.to(torch.int64))
            router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        yield
        for router in routers:
            # What is computed again during the backward pass takes its routes from a queue, first in, first out, as micro-batches come back.
            router.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)

    def finish(self, gpt_models: list[Any]) -> None:
        """After one run of the schedule: queues emptied, free routing."""
        for gpt_model in gpt_models:
            for router in self.routers(gpt_model):
                router.clear_indices()
                router.clear_router_replay_action()


def _compact(indices: torch.Tensor | None) -> torch.Tensor | None:
    """Experts are few: a byte or two an entry."""
    return None if indices is None else indices.to(torch.int16)
