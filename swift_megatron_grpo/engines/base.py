"""One interface for everything that samples (import tier 1).

An engine lives on a set of ranks. `generate` is called on all of them with the same requests and returns the same outputs on each.
Weights arrive by `load_weights`, by their Hugging Face names; an engine never reads the policy's memory.
"""
from __future__ import annotations

import abc
import torch
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .checksums import Checksum

Bucket = list[tuple[str, torch.Tensor]]  # (Hugging Face name, weight)


@dataclass(kw_only=True, slots=True, frozen=True)
class EngineGroup:
    """Where the engines of this run lie: engine `index` of `count`, this rank being `rank` of `size` ranks in it."""
    index: int
    count: int
    rank: int
    size: int


@dataclass(kw_only=True, slots=True, frozen=True)
class Sampling:
    """How to sample, in ms-swift's names. Request i of a call uses seed `seed + i`, so that answers do not depend on which engine samples.

    limits: what each request of the call may sample where that differs from max_tokens (conversations of several turns with a common
    bound); empty else.
    """
    temperature: float
    max_tokens: int
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_words: tuple[str, ...] = ()
    structured_outputs_regex: str | None = None
    seed: int = 0
    limits: tuple[int, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether the sampled distribution is the model's own at this temperature, which is what the log-probabilities of the trainer describe."""
        return (self.top_p >= 1.0 and self.top_k <= 0 and self.min_p <= 0.0 and self.repetition_penalty == 1.0
                and self.structured_outputs_regex is None)

    def request_config(self, *, seed: int | None) -> Any:
        """As ms-swift's `RequestConfig` (imported here). `seed` is the first request's: ms-swift adds a request's position; None: the engine draws."""
        from swift.infer_engine import RequestConfig
        return RequestConfig(
            n=1,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            stop=list(self.stop_words),
            structured_outputs_regex=self.structured_outputs_regex,
            seed=seed,
            logprobs=True,
            return_details=True)


class RolloutEngine(abc.ABC):
    """What the trainer needs of an engine. All methods: all ranks of the engine, together.

    group: where it lies. version: of the weights it holds, -1 when they are not a complete set; `generate` then refuses.
    keeps_deadlines: whether `generate` ends by itself at --rollout_timeout, and says why.
    runs_turns: whether it holds multi-turn conversations by itself.
    takes_adapters: whether `load_adapter` works. needs_base: whether it must get the base weights (again) before an adapter.
    """

    group: EngineGroup
    version: int = -1
    keeps_deadlines: bool = False
    runs_turns: bool = False
    takes_adapters: bool = False
    needs_base: bool = True

    def begin_sync(self) -> None:
        """Called before each weight sync, e.g. to find servers that came back."""

    @abc.abstractmethod
    def load_weights(self, buckets: Iterable[Bucket], version: int) -> int:
        """Takes all weights, in buckets; returns how many tensors. Afterwards no answer sampled before is served from a cache.

        version -1: an adapter is still to come, the set is not complete. Reading the iterable is collective over all ranks of the run.
        """

    def load_adapter(self, tensors: dict[str, torch.Tensor], config: dict[str, Any], version: int) -> int:
        """Takes a LoRA adapter (PEFT names and configuration) in the place of the one before; returns how many tensors."""
        raise NotImplementedError(f'{type(self).__name__} takes no adapters')

    @abc.abstractmethod
    def generate(self, requests: Sequence[Any], sampling: Sampling) -> list[Any]:
        """ms-swift `RolloutOutput`s, one a request, in order. Raises RunError if no complete set of weights was loaded."""

    def start(self, requests: Sequence[Any], sampling: Sampling) -> Any:
        """Begins to sample and returns at once, where an engine can; `finish` takes what is returned. Weights must not change until then.

        Here: everything is done by `finish`.
        """
        return requests, sampling

    def finish(self, pending: Any) -> list[Any]:
        """The outputs of what `start` began."""
        return self.generate(*pending)

    def arrivals(self, pending: Any) -> Iterator[tuple[int, list[Any]]]:
        """The same in pieces, as they are sampled: number of the first request, outputs. In any order, each output once.

        Here: everything at once.
        """
        yield 0, self.finish(pending)

    @abc.abstractmethod
    def checksums(self) -> dict[str, Checksum] | None:
        """By the engine's own names, summed over the engine's ranks; None where its weights cannot be read."""

    def holder_of(self, name: str) -> str:
        """The engine's name of what holds the weight `name` (a Hugging Face name)."""
        return name

    def sleep(self, level: int) -> None:
        """Gives memory back (level 1 keeps the weights in host memory, level 2 drops them). Engines without sleep ignore level 0 only."""
        if level:
            raise NotImplementedError(f'{type(self).__name__} cannot sleep')

    def wake(self, tags: Sequence[str]) -> None:
        """Takes memory for 'weights' or 'kv_cache' again."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the engine. Called before the process group is destroyed, once; later calls do nothing."""


def buckets(weights: Iterable[tuple[str, torch.Tensor]], max_bytes: int) -> Iterator[Bucket]:
    """Consecutive weights in lists of at most `max_bytes`; a larger weight has a list of its own. Pure.

    Example: sizes 4, 4, 4, 9 with max_bytes 8 give [4, 4], [4], [9].
    """
    bucket: Bucket = []
    size = 0
    for name, tensor in weights:
        num_bytes = tensor.numel() * tensor.element_size()
        if bucket and size + num_bytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += num_bytes
    if bucket:
        yield bucket
