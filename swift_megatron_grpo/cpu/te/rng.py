"""Random states by name, and activation recomputation that draws the same numbers again (import tier 1)."""
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint


class CudaRNGStatesTracker:
    """Named random states of the one generator that a CPU process has; Megatron's TECudaRNGStatesTracker derives from it."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """Enter `name` with `seed`. Raises ValueError when either is taken."""
        if seed in self.seeds_ or name in self.states_:
            raise ValueError(f'random state {name!r} or seed {seed} is already there')
        self.seeds_.add(seed)
        self.states_[name] = torch.Generator().manual_seed(seed).get_state()

    @contextlib.contextmanager
    def fork(self, name: str = 'model-parallel-rng') -> Iterator[None]:
        """Draw from the state `name` inside the block; outside goes on as if nothing had been drawn."""
        if name not in self.states_:
            raise KeyError(f'random state {name!r} is not there')
        outside = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outside)


@contextlib.contextmanager
def _states_as_then(tracker: Any, then: dict[str, torch.Tensor]) -> Iterator[None]:
    now = tracker.get_states()
    tracker.set_states(dict(then))
    try:
        yield
    finally:
        tracker.set_states(now)


def checkpoint(function: Callable[..., Any], *args: Any, distribute_saved_activations: bool = False,
               get_rng_state_tracker: Callable[[], Any] | None = None, tp_group: Any = None, use_reentrant: bool = False,
               **kwargs: Any) -> Any:
    """Forget activations, compute them again in backward with the random states of the first time.

    `distribute_saved_activations` asks for the saved input to be cut over the tensor-parallel group: only memory, so it is refused and not
    ignored. All ranks of the group call it in the same order, as they call `function`.
    """
    if distribute_saved_activations:
        raise NotImplementedError('CPU platform: recomputation keeps its input whole; set distribute_saved_activations false')
    if get_rng_state_tracker is None:
        return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)
    tracker = get_rng_state_tracker()
    then = tracker.get_states()
    return torch_checkpoint(
        function, *args, use_reentrant=False, context_fn=lambda: (contextlib.nullcontext(), _states_as_then(tracker, then)), **kwargs)
