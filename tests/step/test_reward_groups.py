"""Rewards group by group, beside the generation: the same values, one call a group, and a clock that counts overlapping calls once."""
import time
from types import SimpleNamespace
from typing import Any

import pytest


def samples(*texts: str) -> list[Any]:
    from swift.rl_core.data import GRPOSample
    made = []
    for number, text in enumerate(texts):
        made.append(GRPOSample.from_row({'messages': [{'role': 'user', 'content': 'p'}, {'role': 'assistant', 'content': text}], 'number': number}))
        made[-1].prompt_id = str(number // 2)
    return made


class Recorder:
    """A synchronous function and an asynchronous one that write down what they were called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[str], list[int]]] = []

    def functions(self) -> list[Any]:

        def length(completions: list[str], number: list[int], trainer_state: Any, **kwargs: Any) -> list[float | None]:
            self.calls.append(('length', completions, number))
            return [None if text == 'none' else float(len(text)) for text in completions]

        async def judge(completions: list[str], number: list[int], **kwargs: Any) -> list[float]:
            import asyncio
            self.calls.append(('judge', completions, number))
            await asyncio.sleep(0.3)
            return [10.0 * value for value in number]

        return [length, judge]


def rewarder(functions: list[Any]) -> Any:
    from swift_megatron_grpo.step.reward import Rewarder
    return Rewarder(SimpleNamespace(reward_funcs=functions, reward_weights=None, use_gym_env=None), None)


def both_ways() -> dict[str, Any]:
    import torch

    from swift_megatron_grpo.step.reward import Stopwatch
    everything = samples('a', 'bb', 'none', 'dddd', 'eeeee', 'ffffff')
    whole, grouped = Recorder(), Recorder()
    plain = rewarder(whole.functions()).score(everything)
    watch = Stopwatch()
    start = time.perf_counter()
    scores = rewarder(grouped.functions()).by_group(everything, 6, watch, torch.device('cpu'))
    for first in (4, 0, 2):  # as they become complete
        scores.add(range(first, first + 2), lambda first=first: everything[first:first + 2])
    result = scores.result()
    return {'plain': plain.rewards, 'by group': result.rewards, 'whole calls': whole.calls,
            'group calls': sorted(grouped.calls, key=lambda call: (call[0], call[2])),
            'took': time.perf_counter() - start, 'seconds': result.seconds, 'names': sorted(plain.seconds)}


@pytest.fixture(scope='module')
def out(ranks: Any) -> dict[str, Any]:
    return ranks.run(both_ways, world_size=1)[0]


def test_by_group_every_value_is_the_same_and_a_call_sees_one_group(out: dict[str, Any]) -> None:
    assert out['plain'] == [[1.0, 0.0], [2.0, 10.0], [None, 20.0], [4.0, 30.0], [5.0, 40.0], [6.0, 50.0]]
    assert out['by group'] == out['plain']
    texts = ['a', 'bb', 'none', 'dddd', 'eeeee', 'ffffff']
    assert out['whole calls'] == [('length', texts, [0, 1, 2, 3, 4, 5]), ('judge', texts, [0, 1, 2, 3, 4, 5])]
    assert out['group calls'] == [(name, texts[i:i + 2], [i, i + 1]) for name in ('judge', 'length') for i in (0, 2, 4)]


def test_asynchronous_functions_of_several_groups_run_together_and_their_time_counts_once(out: dict[str, Any]) -> None:
    assert out['names'] == ['judge', 'length'] == sorted(out['seconds'])
    assert 0.3 <= out['seconds']['judge'] <= out['took'] < 0.9  # three calls of 0.3 s


def failing() -> list[str]:
    import torch

    from swift_megatron_grpo.step.reward import Stopwatch

    def breaks(completions: list[str], **kwargs: Any) -> list[float]:
        if completions[0] == 'c':
            raise KeyError('no such column')
        return [1.0] * len(completions)

    async def short(completions: list[str], **kwargs: Any) -> list[float]:
        return [1.0] if completions[0] == 'c' else [1.0] * len(completions)

    def wordy(completions: list[str], **kwargs: Any) -> list[Any]:
        return ['good' if completion == 'c' else 1.0 for completion in completions]

    def demanding(completions: list[str], gold_answer: list[str], **kwargs: Any) -> list[float]:
        return [1.0] * len(completions)

    errors = []
    for function in (breaks, short, wordy, demanding):
        everything = samples('a', 'b', 'c', 'd')
        scores = rewarder([function]).by_group(everything, 4, Stopwatch(), torch.device('cpu'))
        for first in (0, 2):
            scores.add(range(first, first + 2), lambda first=first: everything[first:first + 2])
        try:
            scores.result()
        except Exception as error:
            errors.append(f'{type(error).__name__}: {error}')
    return errors


def test_an_error_names_the_function_and_the_group(ranks: Any) -> None:
    raised, short, wordy, demanding = ranks.run(failing, world_size=1)[0]
    assert raised.startswith("RunError: reward function breaks raised KeyError: 'no such column'") and raised.endswith('(rollouts of data set rows 1)')
    assert short.startswith('RunError: reward function short returned 1 values for 2 rollouts')
    assert wordy == ('RunError: reward function wordy returned \'good\' (str) for a rollout of prompt 1; it must be a number, or None for "not '
                     'applicable".')
    assert "missing 1 required positional argument: 'gold_answer'" in demanding
    assert '(rollouts of data set rows 0). It is called with completions and finish_reason, ' in demanding


def with_a_column_that_one_prompt_has() -> list[Any]:
    import torch

    from swift_megatron_grpo.step.reward import Stopwatch
    everything = samples('a', 'b', 'c', 'd')
    for sample in everything[:2]:
        sample.extra['solution'] = 'x'
    seen = []

    def function(completions: list[str], solution: list[str | None], **kwargs: Any) -> list[float]:
        seen.append(solution)
        return [1.0] * len(completions)

    rewarder([function]).score(everything)
    scores = rewarder([function]).by_group(everything, 4, Stopwatch(), torch.device('cpu'))
    for first in (0, 2):
        scores.add(range(first, first + 2), lambda first=first: everything[first:first + 2])
    scores.result()
    return seen


def test_a_column_that_other_prompts_have_is_there_as_in_a_call_for_all(ranks: Any) -> None:
    assert ranks.run(with_a_column_that_one_prompt_has, world_size=1)[0] == [['x', 'x', None, None], ['x', 'x'], [None, None]]


def shares() -> list[tuple[range, range]]:
    """3 prompts of 4 rollouts over an engine of 2 ranks, then over 4 engines of one rank."""
    from swift_megatron_grpo.engines import EngineGroup
    from swift_megatron_grpo.step.rollout import RolloutStage
    out = []
    for count, size in ((1, 2), (4, 1)):
        for position in range(count * size):
            stage = RolloutStage.__new__(RolloutStage)
            stage.scores_groups = True
            stage.engine = SimpleNamespace(group=EngineGroup(index=position // size, count=count, rank=position % size, size=size))
            out.append(stage._shares(3, 4))
    return out


def test_a_rank_scores_whole_groups(ranks: Any) -> None:
    assert ranks.run(shares, world_size=1)[0] == [
        (range(0, 12), range(0, 4)), (range(0, 12), range(4, 12)),
        (range(0, 0), range(0, 0)), (range(0, 4), range(0, 4)), (range(4, 8), range(0, 4)), (range(8, 12), range(0, 4))]


def clock() -> dict[str, float]:
    import threading

    from swift_megatron_grpo.step.reward import Stopwatch
    watch = Stopwatch()

    def call(seconds: float) -> None:
        with watch.call('f'):
            time.sleep(seconds)

    threads = [threading.Thread(target=call, args=(seconds, )) for seconds in (0.2, 0.4)]
    for thread in threads:
        thread.start()
    said = watch.running()
    for thread in threads:
        thread.join()
    call(0.1)
    return {'said': said, 'then': watch.running(), **watch.seconds}


def test_a_stopwatch_counts_overlapping_calls_once_and_knows_what_runs(ranks: Any) -> None:
    out = ranks.run(clock, world_size=1)[0]
    assert out['said'] == 'reward function f' and out['then'] == ''
    assert 0.5 <= out['f'] < 0.7
