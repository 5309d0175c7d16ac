"""What is on the device, and when (import tier 1; megatron and swift only where something is moved).

A colocated engine and the trainer share a device. This module is the one place that decides which of them holds memory, as a table of
stages. Going to a stage gives away everything that the stage does not need before anything is taken: two copies are never there together
unless the table says so.
"""
from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, Protocol


class Part(enum.Enum):
    """What takes memory."""
    POLICY = 'policy weights'
    GRADIENTS = 'gradients'
    REFERENCE = 'reference weights'
    OPTIMIZER = 'optimizer state'
    ENGINE_WEIGHTS = 'engine weights'
    ENGINE_CACHE = 'engine key-value cache'


class Stage(enum.Enum):
    """What the device is used for."""
    TRAINING = 'training'
    BUILDING = 'building the engine'
    EXPORTING = 'exporting weights into host memory'
    STREAMING = 'streaming weights to the engine'
    LOADING = 'loading weights from host memory'
    GENERATING = 'generating'


_TRAINER = frozenset({Part.POLICY, Part.GRADIENTS, Part.REFERENCE, Part.OPTIMIZER})
_ENGINE = frozenset({Part.ENGINE_WEIGHTS, Part.ENGINE_CACHE})

NEEDS: dict[Stage, frozenset[Part]] = {
    Stage.TRAINING: _TRAINER,
    Stage.BUILDING: _ENGINE,
    Stage.EXPORTING: frozenset({Part.POLICY}),
    Stage.STREAMING: frozenset({Part.POLICY, Part.ENGINE_WEIGHTS}),
    Stage.LOADING: frozenset({Part.ENGINE_WEIGHTS}),
    Stage.GENERATING: _ENGINE,
}


class Movers(Protocol):
    """Gives away and takes parts of the trainer. Both are called with parts that are there, or not there."""

    def release(self, parts: frozenset[Part]) -> None:
        ...

    def take(self, parts: frozenset[Part]) -> None:
        ...


class Residency:
    """The state machine. All methods: all ranks.

    Args:
        movers: moves the trainer's parts.
        sleep_level: 0 the engine keeps its memory; 1 it keeps its weights in host memory; 2 it drops them.
        offload_model: policy, gradients and reference leave the device when they are not needed.
        offload_optimizer: so does the optimizer's state.
        offload_bridge: weights reach the engine by way of host memory. Together with offload_model and a sleeping engine this means that
            the policy and the engine's copy of it are never on the device at once; it takes host memory for one copy of the model a rank.

    Example, sleep_level 1, offload_model and offload_bridge: training -> exporting (the engine sleeps) -> loading (the policy is away)
    -> generating -> training. Without flags every part stays where it is and no call moves anything.
    """

    def __init__(self, movers: Movers, *, sleep_level: int, offload_model: bool, offload_optimizer: bool, offload_bridge: bool):
        self.movers = movers
        self.engine: Any = None
        self.sleep_level = sleep_level
        movable: set[Part] = set()
        if offload_model:
            movable |= {Part.POLICY, Part.GRADIENTS, Part.REFERENCE}
        if offload_optimizer:
            movable.add(Part.OPTIMIZER)
        if sleep_level > 0:
            movable |= _ENGINE
        self.movable = frozenset(movable)
        self.stages_in_host_memory = offload_model and offload_bridge and sleep_level > 0
        self.stage = Stage.TRAINING
        self.present = _TRAINER

    def attach(self, engine: Any) -> None:
        """The engine was built, in stage BUILDING, and is awake."""
        assert self.stage is Stage.BUILDING and self.engine is None
        self.engine = engine
        self.present |= _ENGINE

    def to(self, stage: Stage) -> None:
        """Moves what the flags allow to move: first away, then in."""
        if 0 < len(self.present & _ENGINE) < len(_ENGINE) and not _ENGINE & NEEDS[stage] and self.movable >= _ENGINE:
            # vLLM falls asleep as a whole: weights that were loaded and never used (a run that is resumed inside a generation) would stay.
            self.to(Stage.GENERATING)
        needed = NEEDS[stage] | (self.present - self.movable)
        if self.engine is None:
            needed -= _ENGINE
        if (self.present & _ENGINE) - needed:
            # vLLM gives its weights and its cache away together.
            self.engine.sleep(self.sleep_level)
            self.present -= _ENGINE
        leaving = (self.present & _TRAINER) - needed
        if leaving:
            self.movers.release(leaving)
            self.present -= leaving
        coming = (needed & _TRAINER) - self.present
        if coming:
            self.movers.take(coming)
            self.present |= coming
        waking = (needed & _ENGINE) - self.present
        if waking:
            self.engine.wake([tag for part, tag in ((Part.ENGINE_WEIGHTS, 'weights'), (Part.ENGINE_CACHE, 'kv_cache')) if part in waking])
            self.present |= waking
        self.stage = stage


class MegatronMovers:
    """Moves Megatron's buffers with ms-swift's functions. `trainer` is read when something is moved: the reference comes later than the policy."""

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def release(self, parts: Iterable[Part]) -> None:
        from swift.megatron.trainers.utils import offload_megatron_model_to_cpu, offload_megatron_optimizer
        parts = frozenset(parts)
        if Part.OPTIMIZER in parts:
            offload_megatron_optimizer(self.trainer.optimizer)
        if Part.REFERENCE in parts and self._reference:
            offload_megatron_model_to_cpu(self._reference)
        if Part.POLICY in parts:
            offload_megatron_model_to_cpu(self.trainer.wrapped_models)  # gradients too
        elif Part.GRADIENTS in parts:
            self._free_gradients()

    def take(self, parts: Iterable[Part]) -> None:
        from swift.megatron.trainers.utils import load_megatron_model_to_gpu, load_megatron_optimizer
        parts = frozenset(parts)
        if parts & {Part.POLICY, Part.GRADIENTS}:
            load_megatron_model_to_gpu(self.trainer.wrapped_models, load_grad=Part.GRADIENTS in parts)
        if Part.REFERENCE in parts and self._reference:
            load_megatron_model_to_gpu(self._reference)
        if Part.OPTIMIZER in parts:
            load_megatron_optimizer(self.trainer.optimizer)

    @property
    def _reference(self) -> list[Any]:
        return self.trainer.reference.models if self.trainer.reference is not None else []

    def _free_gradients(self) -> None:
        """As offload_megatron_model_to_cpu does it; load_megatron_model_to_gpu makes them again, as zeros."""
        for model in self.trainer.wrapped_models:
            for buffer in [*model.buffers, *model.expert_parallel_buffers]:
                if buffer.grad_data.storage().size() > 0:
                    buffer.grad_data_size = buffer.grad_data.storage().size()
                    buffer.grad_data.storage().resize_(0)
