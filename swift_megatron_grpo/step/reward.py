"""Rewards of rollouts, through ms-swift's reward functions (import tier 2: swift).

Functions come from `--reward_funcs` (ms-swift's names, or names that an external plug-in registered in `swift.rewards.orms`), from
`--reward_model` with `--reward_model_plugin`, and from the environment (`--use_gym_env`). They are called as ms-swift calls them, each on
all rollouts of this rank; asynchronous ones run together. What they return is checked before it is used: one value a rollout, a finite
number or None ("not applicable").

A function may compare the rollouts that it sees, so that a call for fewer of them is another reward. `--reward_batch group` allows it:
functions are then called once a group, when the group is complete, beside the generation (`GroupScores`).
"""
from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import difflib
import inspect
import math
import threading
import time
import torch
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from swift.dataset import RowPreprocessor
from swift.rl_core.data import GRPOSample
from swift.rlhf_trainers.utils import resolve_reward_funcs
from typing import Any

from ..errors import RunError, UserError


Column = list[float | None]  # of one function, one value a rollout


@dataclass(kw_only=True, slots=True)
class Scores:
    """rewards: [n, F], one row a rollout of this rank, None where a function does not apply. seconds: by function name."""
    rewards: list[list[float | None]]
    seconds: dict[str, float] = field(default_factory=dict)


class Stopwatch:
    """Which functions are running, and for how long: the seconds during which at least one call of a name ran. Thread-safe."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._calls: dict[str, tuple[int, float]] = {}  # name -> (calls that run now, when the first of them began)
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def call(self, name: str) -> Iterator[None]:
        with self._lock:
            count, since = self._calls.get(name, (0, time.perf_counter()))
            self._calls[name] = (count + 1, since)
        try:
            yield
        finally:
            with self._lock:
                count, since = self._calls.pop(name)
                if count > 1:
                    self._calls[name] = (count - 1, since)
                else:
                    self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - since

    def running(self) -> str:
        """For the watchdog, e.g. 'reward function accuracy'."""
        with self._lock:
            names = list(self._calls)
        return f'reward function{"s" if len(names) > 1 else ""} {", ".join(names)}' if names else ''


@dataclass(kw_only=True, slots=True)
class _Call:
    """One set of rollouts and what functions get of it."""
    samples: Sequence[GRPOSample]
    completions: list[Any]
    rows: list[dict[str, Any]]
    kwargs: dict[str, Any]
    watch: Stopwatch


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
        self._beside: _Beside | None = None

    def _weights(self, configured: Sequence[float] | None) -> torch.Tensor:
        if configured is None:
            return torch.ones(len(self.names), dtype=torch.float32)
        if len(configured) != len(self.names):
            raise UserError(f'--reward_weights has {len(configured)} values, but there are {len(self.names)} reward functions '
                            f'({", ".join(self.names)}). Give one weight for each.')
        return torch.tensor(list(configured), dtype=torch.float32)

    def score(self, samples: Sequence[GRPOSample], watch: Stopwatch | None = None) -> Scores:
        """Scores of this rank's rollouts. No communication; raises RunError that names the function and the rollout."""
        if not samples:
            return Scores(rewards=[])
        watch = watch or Stopwatch()
        call = self.call_for(samples, watch)
        columns = {**self.synchronous(call), **self.by_models(call)}
        if self.are_async:

            async def together() -> list[Any]:
                return await asyncio.gather(*(self.asynchronous(i, call) for i in self.are_async))

            columns.update(zip(self.are_async, asyncio.run(together())))
        return self.table(samples, columns, watch)

    def by_group(self, prompts: Sequence[GRPOSample], num_rollouts: int, watch: Stopwatch, device: torch.device) -> GroupScores:
        """For this rank's rollouts of one generation, as the groups of its prompts become complete."""
        if self._beside is None:
            self._beside = _Beside(device)
        return GroupScores(self, prompts, num_rollouts, watch, self._beside)

    @property
    def are_async(self) -> list[int]:
        return [i for i, function in enumerate(self.functions) if _is_async(function)]

    def call_for(self, samples: Sequence[GRPOSample], watch: Stopwatch, columns: Iterable[str] = ()) -> _Call:
        """What ms-swift passes to a function: the answers, and every column as a list, None where a row lacks it.

        columns: that other calls of the same generation have, and this one therefore has too.
        """
        rows = [sample.to_reward_row() for sample in samples]
        kwargs = {**{name: [None] * len(rows) for name in columns}, **RowPreprocessor.rows_to_batched(rows)}
        return _Call(samples=samples, completions=[sample.messages[-1]['content'] for sample in samples], rows=rows,
                     kwargs={'trainer_state': self.trainer_state, **kwargs}, watch=watch)

    def synchronous(self, call: _Call) -> dict[int, Column]:
        """Columns of the functions that are not asynchronous, called one after the other."""
        return {i: self._called(i, call, lambda function=function: function(call.completions, **call.kwargs))
                for i, function in enumerate(self.functions) if not _is_async(function)}

    def by_models(self, call: _Call) -> dict[int, Column]:
        """Columns of the reward models."""
        return {i: self._called(i, call, lambda model=model: model(inputs=call.rows, **call.kwargs))
                for i, model in enumerate(self.models, start=len(self.functions))}

    async def asynchronous(self, i: int, call: _Call) -> Column:
        """Column of the i-th function, which is asynchronous."""
        with call.watch.call(self.names[i]):
            try:
                values = await self.functions[i](call.completions, **call.kwargs)
            except Exception as error:
                raise self._failure(i, call, error) from error
        return self._checked(i, call.samples, values)

    def table(self, samples: Sequence[GRPOSample], columns: dict[int, Column], watch: Stopwatch) -> Scores:
        """Columns of functions and models, and the environment's."""
        if self.use_gym_env:
            last = len(self.names) - 1
            columns[last] = self._checked(last, samples, [sample.rollout_infos['total_reward'] for sample in samples])
        return Scores(rewards=[[columns[f][i] for f in range(len(self.names))] for i in range(len(samples))], seconds=dict(watch.seconds))

    def _called(self, i: int, call: _Call, function: Callable[[], Any]) -> Column:
        with call.watch.call(self.names[i]):
            try:
                values = function()
            except RunError:
                raise
            except Exception as error:
                raise self._failure(i, call, error) from error
        return self._checked(i, call.samples, values)

    def _failure(self, i: int, call: _Call, error: Exception) -> RunError:
        columns = ''
        if isinstance(error, TypeError) and 'missing' in str(error):  # an argument of the function is a column of the data
            columns = f'. It is called with completions and {", ".join(sorted(call.kwargs))}.'
        return RunError(f'reward function {self.names[i]} raised {type(error).__name__}: {error} {_where(error)}'
                        f'(rollouts of data set rows {self._rows(call.samples)}){columns}')

    def _checked(self, i: int, samples: Sequence[GRPOSample], values: Any) -> Column:
        name = self.names[i]
        if isinstance(values, torch.Tensor):
            values = values.tolist()
        if not isinstance(values, (list, tuple)) or len(values) != len(samples):
            got = f'{len(values)} values' if isinstance(values, (list, tuple)) else f'a {type(values).__name__}'
            raise RunError(f'reward function {name} returned {got} for {len(samples)} rollouts; it must return a list with one number (or None '
                           'for "not applicable") a rollout.')
        checked: Column = []
        for sample, value in zip(samples, values):
            try:
                number = None if value is None else float(value)
            except (TypeError, ValueError):
                raise RunError(f'reward function {name} returned {value!r:.60} ({type(value).__name__}) for a rollout of {self._row(sample)}; it must be a '
                               'number, or None for "not applicable".') from None
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


class _Beside:
    """Where functions run beside a generation: one after the other in a thread, asynchronous ones together in another."""

    def __init__(self, device: torch.device):
        self.thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='rewards', initializer=_use, initargs=(device, ))
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, args=(device, ), daemon=True, name='asynchronous rewards').start()

    def _run(self, device: torch.device) -> None:
        _use(device)
        self.loop.run_forever()


def _use(device: torch.device) -> None:
    """The current device is a thread's own."""
    if device.type == 'cuda':
        torch.cuda.set_device(device)


class GroupScores:
    """Rewards of this rank's rollouts of one generation, group by group (`--reward_batch group`). No communication.

    Functions run in threads (see _Beside), one group after the other. A reward model works on the trainer's device: it is called once, for all
    rollouts, in `result`.
    """

    def __init__(self, rewarder: Rewarder, prompts: Sequence[GRPOSample], num_rollouts: int, watch: Stopwatch, beside: _Beside):
        self.rewarder = rewarder
        self.columns = {name for prompt in prompts for name in prompt.to_reward_row()}
        self.num_rollouts = num_rollouts
        self.watch = watch
        self.beside = beside
        self.parts: list[tuple[range, concurrent.futures.Future[tuple[Sequence[GRPOSample], dict[int, Any]]]]] = []

    def add(self, part: range, samples: Callable[[], Sequence[GRPOSample]]) -> None:
        """A group is complete: `part` of the rollouts. `samples` is called in the thread. Returns at once."""
        self.parts.append((part, self.beside.thread.submit(self._score, samples)))

    def _score(self, make: Callable[[], Sequence[GRPOSample]]) -> tuple[Sequence[GRPOSample], dict[int, Any]]:
        """The group's samples; columns of functions, those of asynchronous ones as futures."""
        rewarder = self.rewarder
        call = rewarder.call_for(make(), self.watch, self.columns)
        coming: dict[int, Any] = {i: asyncio.run_coroutine_threadsafe(rewarder.asynchronous(i, call), self.beside.loop)
                                  for i in rewarder.are_async}
        return call.samples, {**coming, **rewarder.synchronous(call)}

    def result(self) -> Scores:
        """Waits. Raises the RunError of the first group that failed."""
        rewarder = self.rewarder
        samples: list[Any] = [None] * self.num_rollouts
        columns: dict[int, Column] = {i: [None] * self.num_rollouts for i in range(len(rewarder.functions))}
        for part, future in self.parts:
            samples[part.start:part.stop], scored = future.result()
            for i, column in scored.items():
                columns[i][part.start:part.stop] = column.result() if i in rewarder.are_async else column
        if rewarder.models and samples:
            columns.update(rewarder.by_models(rewarder.call_for(samples, self.watch)))
        return rewarder.table(samples, columns, self.watch)


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
