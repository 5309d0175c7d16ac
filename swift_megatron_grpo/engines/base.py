"""One interface for everything that samples (import tier 1).

An engine lives on a set of ranks. `generate` is called on all of them with the same requests and returns the same outputs on each.
Weights arrive by `load_weights`, by their Hugging Face names; an engine never reads the policy's memory.
"""
from __future__ import annotations

import abc
import torch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True, slots=True, frozen=True)
class EngineGroup:
    """Where the engines of this run lie: engine `index` of `count`, this rank being `rank` of `size` ranks in it."""
    index: int
    count: int
    rank: int
    size: int


@dataclass(kw_only=True, slots=True, frozen=True)
class Sampling:
    """How to sample, in ms-swift's names. Request i of a call uses seed `seed + i`, so that answers do not depend on which engine samples."""
    temperature: float
    max_tokens: int
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_words: tuple[str, ...] = ()
    structured_outputs_regex: str | None = None
    seed: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether the sampled distribution is the model's own at this temperature, which is what the log-probabilities of the trainer describe."""
        return (self.top_p >= 1.0 and self.top_k <= 0 and self.min_p <= 0.0 and self.repetition_penalty == 1.0
                and self.structured_outputs_regex is None)


class RolloutEngine(abc.ABC):
    """What the trainer needs of an engine. All methods: all ranks of the engine, together."""

    group: EngineGroup

    @abc.abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> int:
        """Takes (Hugging Face name, tensor) pairs; returns how many. Afterwards no answer sampled before is served from a cache."""

    @abc.abstractmethod
    def generate(self, requests: Sequence[Any], sampling: Sampling) -> list[Any]:
        """ms-swift `RolloutOutput`s, one a request, in order. Raises RunError if no complete set of weights was loaded."""

    @abc.abstractmethod
    def checksums(self) -> dict[str, float] | None:
        """Name -> sum of absolute values in float64 of the weights that the engine holds; None where its names cannot be mapped."""

    def sleep(self, level: int) -> None:
        """Gives memory back (level 1 keeps the weights in host memory, level 2 drops them). Engines without sleep ignore level 0 only."""
        if level:
            raise NotImplementedError(f'{type(self).__name__} cannot sleep')

    def wake(self, tags: Sequence[str]) -> None:  # noqa: B027 (an engine that never sleeps has nothing to do)
        """Takes memory for 'weights' or 'kv_cache' again."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the engine. Called before the process group is destroyed, once; later calls do nothing."""
