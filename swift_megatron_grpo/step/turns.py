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
from ..parallel import GROUP_TIMEOUT

_TURN_STRIDE = 2**13  # seeds of one turn do not meet those of the next; generation_seed leaves room for 16 turns of 8192 rollouts
_NUM_TURNS = 16


class Turns:
    """Args:
        args: multi_turn_scheduler, max_turns, gym_env, completion_length_limit_scope.
        template: passed to the scheduler.
        engine: samples a turn.

    All ranks, collective (a process group for each engine of several ranks).
    """

    def __init__(self, args: Any, template: Template, engine: RolloutEngine):
        self.engine = engine
        self.name = args.multi_turn_scheduler
        self.max_turns = args.max_turns
        # as in ms-swift, a server counts each round by itself
        self.bounds_the_whole = args.completion_length_limit_scope == 'total' and args.vllm_mode != 'server'
        self.scheduler = _scheduler(args, template)
        self.budget = args.max_completion_length
        self.sampled: dict[str, int] = {}  # tokens of each conversation so far, without those of its environment
        if self.bounds_the_whole:
            self._end_when_spent()
        self.group: dist.ProcessGroup | None = None
        if engine.group.size > 1:
            self.group, _ = dist.new_subgroups(engine.group.size, timeout=GROUP_TIMEOUT, backend='gloo')

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
        self.sampled = {request.uuid: 0 for request in own}

        def sample(pending: list[Any], _config: Any) -> list[Any]:
            nonlocal turn
            left = [self.budget - self.sampled[request.uuid] for request in pending]
            parts = self._parts(list(zip(pending, left, strict=True)))
            everyone = [pair for pairs in parts for pair in pairs]
            seed = sampling.seed + (turn % _NUM_TURNS) * _TURN_STRIDE
            limits = tuple(limit for _, limit in everyone) if self.bounds_the_whole and turn else ()
            turn += 1
            whole = dataclasses.replace(sampling, seed=seed, limits=limits)
            outputs = self.engine.generate([request for request, _ in everyone], whole) if everyone else []
            start = sum(len(pairs) for pairs in parts[:self.engine.group.rank])
            answers = outputs[start:start + len(pending)]
            for request, output in zip(pending, answers, strict=True):
                self.sampled[request.uuid] += len(output.response.choices[0].token_ids)
            return answers

        invoke_async_hook(self.scheduler.on_trajectory_start(own))
        return run_multi_turn(requests=own, first_turn_outputs=sample(own, None), scheduler=self.scheduler, rollout_fn=sample,
                              request_config=None, max_turns=self.max_turns,
                              gather_fn=lambda values: [value for part in self._parts(list(values)) for value in part])

    def _end_when_spent(self) -> None:
        """completion_length_limit_scope total: a conversation ends with the turn that uses its last token, whatever its scheduler says."""
        inner = self.scheduler.on_turn_end

        async def on_turn_end(request: Any, choice: Any, turn: int) -> dict[str, Any]:
            result: dict[str, Any] = await inner(request, choice, turn) or {}
            return {**result, 'done': True} if self.sampled[request.uuid] >= self.budget else result

        self.scheduler.on_turn_end = on_turn_end

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
