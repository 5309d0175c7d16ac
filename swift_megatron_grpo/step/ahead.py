"""Sampling one generation ahead: the next one is sampled while this one is trained on (`--async_generate true`, server mode; import tier 2).

Generation k + 1 is begun when generation k has been sampled, by the weights that generation k starts its training with. Those weights stay
in the engine until it is sampled: a weight sync, an evaluation, a checkpoint and the end of the run wait for it. A rollout is therefore one
weight version old when its training begins, where a version is what the engine gets: one a generation.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .rollout import Phase, RolloutStage


class Ahead:
    """All methods: all ranks, collective.

    Args:
        args: async_generate, max_staleness, steps_per_generation, num_iterations.
        stage: samples.
        begin: syncs weights and begins the phase of a generation.
    """

    def __init__(self, args: Any, stage: RolloutStage, begin: Callable[[int], Phase]):
        self.stage = stage
        self.begin = begin
        self.enabled = bool(args.async_generate) and args.max_staleness >= 1
        self.updates_per_generation = args.steps_per_generation * args.num_iterations
        self.pending: tuple[int, Phase] | None = None

    def take(self, index: int) -> Phase:
        """The phase of generation `index`: the one that was begun ahead, or begun now."""
        pending, self.pending = self.pending, None
        if pending is None:
            return self.begin(index)
        assert pending[0] == index, f'generation {pending[0]} was begun where {index} is wanted'
        return pending[1]

    def begin_next(self, index: int, *, num_steps_left: int) -> None:
        """After generation `index` was sampled; nothing where no later generation will be trained on."""
        if self.enabled and num_steps_left > self.updates_per_generation:
            self.pending = index + 1, self.begin(index + 1)

    def drain(self) -> None:
        """Waits for what is being sampled; it is kept for its turn."""
        if self.pending is not None:
            self.stage.settle(self.pending[1])

    def abandon(self) -> None:
        """Forgets it: the engine is lost."""
        self.pending = None
