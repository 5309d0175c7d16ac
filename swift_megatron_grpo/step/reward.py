"""Rewards of rollouts, through ms-swift's reward functions (import tier 2: swift).

Functions come from `--reward_funcs` (ms-swift's names, or names that an external plug-in registered in `swift.rewards.orms`), from
`--reward_model` with `--reward_model_plugin`, and from the environment (`--use_gym_env`). They are called as ms-swift calls them, each on
the rollouts of this rank; asynchronous ones run together. What they return is checked before it is used: one value a rollout, a finite
number or None ("not applicable").
"""
from __future__ import annotations

import asyncio
import difflib
import inspect
import math
import time
import torch
from collections.abc import Sequence
from dataclasses import dataclass, field
from swift.dataset import RowPreprocessor
from swift.rl_core.data import GRPOSample
from swift.rlhf_trainers.utils import resolve_reward_funcs
from typing import Any

from ..errors import RunError, UserError


@dataclass(kw_only=True, slots=True)
class Scores:
    """rewards: [n, F], one row a rollout of this rank, None where a function does not apply. seconds: by function name."""
    rewards: list[list[float | None]]
    seconds: dict[str, float] = field(default_factory=dict)


class Rewarder:
    """All reward functions of a run.

    Args:
        args: reward_funcs, reward_weights, use_gym_env, ...
        models: (callable plug-in, name) of each reward model, called after the functions; see reward_models.py.
        trainer_state: passed to every function under that name, as ms-swift does.
    """

    def __init__(self, args: Any, trainer_state: Any, models: Sequence[tuple[Any, str]] = ()):
        self.functions, self.names = resolve_reward_funcs(refuse_unknown_rewards(args), args=args)
        self.models = [model for model, _ in models]
        self.names += [name for _, name in models]
        self.use_gym_env = bool(args.use_gym_env)
        if self.use_gym_env:
            self.names.append('gym_reward')
        self.trainer_state = trainer_state
        self.weights = self._weights(args.reward_weights)
        self.running = ''  # read by the watchdog

    def _weights(self, configured: Sequence[float] | None) -> torch.Tensor:
        if configured is None:
            return torch.ones(len(self.names), dtype=torch.float32)
        if len(configured) != len(self.names):
            raise UserError(f'--reward_weights has {len(configured)} values, but there are {len(self.names)} reward functions '
                            f'({", ".join(self.names)}). Give one weight for each.')
        return torch.tensor(list(configured), dtype=torch.float32)

    def score(self, samples: Sequence[GRPOSample]) -> Scores:
        """Scores of this rank's rollouts. No communication; raises RunError that names the function and the rollout."""
        if not samples:
            return Scores(rewards=[])
        completions = [sample.messages[-1]['content'] for sample in samples]
        rows = [sample.to_reward_row() for sample in samples]
        kwargs: dict[str, Any] = {'trainer_state': self.trainer_state, **RowPreprocessor.rows_to_batched(rows)}
        columns: list[list[float | None]] = [[] for _ in self.names]
        seconds: dict[str, float] = {}
        asynchronous = [i for i, function in enumerate(self.functions) if _is_async(function)]
        for i, function in enumerate(self.functions):
            if i not in asynchronous:
                columns[i] = self._call(i, samples, seconds, lambda function=function: function(completions, **kwargs))
        for i, model in enumerate(self.models, start=len(self.functions)):
            columns[i] = self._call(i, samples, seconds, lambda model=model: model(inputs=rows, **kwargs))
        if asynchronous:
            for i, column in zip(asynchronous, asyncio.run(self._together(asynchronous, completions, kwargs, seconds))):
                columns[i] = self._checked(i, samples, column)
        if self.use_gym_env:
            columns[-1] = self._checked(len(self.names) - 1, samples, [sample.rollout_infos['total_reward'] for sample in samples])
        self.running = ''
        return Scores(rewards=[[column[i] for column in columns] for i in range(len(samples))], seconds=seconds)

    def _call(self, i: int, samples: Sequence[GRPOSample], seconds: dict[str, float], function: Any) -> list[float | None]:
        self.running = f'reward function {self.names[i]}'
        start = time.perf_counter()
        try:
            values = function()
        except RunError:
            raise
        except Exception as error:
            raise RunError(f'reward function {self.names[i]} raised {type(error).__name__}: {error} {_where(error)}'
                           f'(rollouts of data set rows {self._rows(samples)})') from error
        seconds[self.names[i]] = time.perf_counter() - start
        return self._checked(i, samples, values)

    async def _together(self, indices: Sequence[int], completions: list[Any], kwargs: dict[str, Any],
                        seconds: dict[str, float]) -> list[Any]:

        async def timed(i: int) -> Any:
            start = time.perf_counter()
            try:
                values = await self.functions[i](completions, **kwargs)
            except Exception as error:
                raise RunError(f'reward function {self.names[i]} raised {type(error).__name__}: {error} {_where(error)}') from error
            seconds[self.names[i]] = time.perf_counter() - start
            return values

        self.running = 'reward functions ' + ', '.join(self.names[i] for i in indices)
        return await asyncio.gather(*(timed(i) for i in indices))

    def _checked(self, i: int, samples: Sequence[GRPOSample], values: Any) -> list[float | None]:
        name = self.names[i]
        if isinstance(values, torch.Tensor):
            values = values.tolist()
        if not isinstance(values, (list, tuple)) or len(values) != len(samples):
            got = f'{len(values)} values' if isinstance(values, (list, tuple)) else f'a {type(values).__name__}'
            raise RunError(f'reward function {name} returned {got} for {len(samples)} rollouts; it must return a list with one number (or None '
                           'for "not applicable") a rollout.')
        checked: list[float | None] = []
        for sample, value in zip(samples, values):
            number = None if value is None else float(value)
            if number is not None and not math.isfinite(number):
                raise RunError(f'reward function {name} returned {number} for a rollout of {self._row(sample)}. Return None where the function '
                               'does not apply.')
            checked.append(number)
        return checked

    @staticmethod
    def _row(sample: GRPOSample) -> str:
        return f'prompt {sample.prompt_id}'

    def _rows(self, samples: Sequence[GRPOSample]) -> str:
        names = sorted({sample.prompt_id for sample in samples})
        return ', '.join(names[:4]) + (', ...' if len(names) > 4 else '')


def refuse_unknown_rewards(args: Any) -> list[Any]:
    """The configured reward functions; raises UserError for a name that nobody registered. Pure."""
    from swift.rewards import orms
    configured = [args.reward_funcs] if isinstance(args.reward_funcs, str) else list(args.reward_funcs)
    unknown = [name for name in configured if isinstance(name, str) and name not in orms]
    if unknown:
        near = difflib.get_close_matches(unknown[0], list(orms), n=3)
        raise UserError(f'--reward_funcs: unknown reward function {unknown[0]!r}.' + (f' Did you mean {" or ".join(near)}?' if near else '') +
                        f' Known: {", ".join(sorted(orms))}. A function of your own is registered as orms[{unknown[0]!r}] in a file given '
                        'by --external_plugins.')
    return configured


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _where(error: BaseException) -> str:
    """File and line in which the error was raised."""
    import traceback
    frames = traceback.extract_tb(error.__traceback__)
    return f'at {frames[-1].filename}:{frames[-1].lineno} ' if frames else ''
