"""Conversations of several turns, driven from here (import tier 2): ms-swift's schedulers, environments and turn loop.

Where a rollout server has the scheduler, it holds the conversations itself and this module is not used. Here each rank drives the
conversations that it will score, so that a tool or an environment is called once; the ranks of an engine bring their turns together for
sampling.
"""
from __future__ import annotations

import dataclasses
import torch.distributed as dist
from collections.abc import Sequence
from swift.rollout import invoke_async_hook, multi_turns, run_multi_turn
from swift.template import Template
from typing import Any

from ..engines.base import RolloutEngine, Sampling
from ..errors import RunError, UserError

_TURN_STRIDE = 2**13  # seeds of one turn do not meet those of the next; generation_seed leaves room for 16 turns of 8192 rollouts
_NUM_TURNS = 16


class Turns:
    """Args:
        args: multi_turn_scheduler, max_turns, gym_env.
        template: passed to the scheduler.
        engine: samples a turn.

    All ranks, collective (a process group for each engine of several ranks).
    """

    def __init__(self, args: Any, template: Template, engine: RolloutEngine):
        self.engine = engine
        self.name = args.multi_turn_scheduler
        self.max_turns = args.max_turns
        self.scheduler = _scheduler(args, template)
        self.group: dist.ProcessGroup | None = None
        if engine.group.size > 1:
            self.group, _ = dist.new_subgroups(engine.group.size, backend='gloo')

    def run(self, requests: Sequence[Any], part: range, sampling: Sampling) -> list[Any]:
        """All ranks of the engine, together: outputs of this rank's part of the engine's requests.

        A scheduler or an environment that raises on one rank raises RunError on all ranks of the engine.
        """
        try:
            return self._run(list(requests[part.start:part.stop]), sampling)
        except _OtherRankFailed as error:
            raise RunError(str(error)) from None
        except Exception as error:
            text = f'--multi_turn_scheduler {self.name} raised {type(error).__name__}: {error}'
            if self.group is not None:  # the others are in a gather, or about to be
                parts: list[Any] = [None] * self.engine.group.size
                dist.all_gather_object(parts, (None, text), group=self.group)
            raise RunError(text) from error

    def _run(self, own: list[Any], sampling: Sampling) -> list[Any]:
        turn = 0

        def sample(pending: list[Any], _config: Any) -> list[Any]:
            nonlocal turn
            parts = self._parts(list(pending))
            everyone = [request for requests in parts for request in requests]
            seed = sampling.seed + (turn % _NUM_TURNS) * _TURN_STRIDE
            turn += 1
            outputs = self.engine.generate(everyone, dataclasses.replace(sampling, seed=seed)) if everyone else []
            start = sum(len(requests) for requests in parts[:self.engine.group.rank])
            return outputs[start:start + len(pending)]

        invoke_async_hook(self.scheduler.on_trajectory_start(own))
        return run_multi_turn(requests=own, first_turn_outputs=sample(own, None), scheduler=self.scheduler, rollout_fn=sample,
                              request_config=None, max_turns=self.max_turns,
                              gather_fn=lambda values: [value for part in self._parts(list(values)) for value in part])

    def _parts(self, values: list[Any]) -> list[list[Any]]:
        """The lists of the engine's ranks."""
        if self.group is None:
            return [values]
        parts: list[Any] = [None] * self.engine.group.size
        dist.all_gather_object(parts, (values, None), group=self.group)
        failures = [failure for _, failure in parts if failure is not None]
        if failures:
            raise _OtherRankFailed(failures[0])
        return [part for part, _ in parts]


class _OtherRankFailed(Exception):
    """Its text is the error of the rank that failed."""


def check_scheduler(name: str) -> None:
    """UserError for a scheduler that nobody registered. Pure; plug-ins have been imported."""
    if name not in multi_turns:
        import difflib
        near = difflib.get_close_matches(name, list(multi_turns), n=3)
        raise UserError(f'--multi_turn_scheduler: unknown scheduler {name!r}.' + (f' Did you mean {" or ".join(near)}?' if near else '') +
                        f' Known: {", ".join(sorted(multi_turns))}. One of your own is registered as multi_turns[{name!r}] in a file given by '
                        '--external_plugins.')


def _scheduler(args: Any, template: Template) -> Any:
    """As ms-swift makes it; a plug-in registers its own in swift.rollout.multi_turns."""
    check_scheduler(args.multi_turn_scheduler)
    kwargs = {'max_turns': args.max_turns, 'tokenizer': template.tokenizer, 'template': template}
    if args.gym_env is not None:
        kwargs['gym_env'] = args.gym_env
    return multi_turns[args.multi_turn_scheduler](**kwargs)
