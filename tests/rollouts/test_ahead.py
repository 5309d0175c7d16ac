"""One generation ahead: when it is begun, when it is waited for, and what is never begun (a stage double that writes down what happens)."""
from typing import Any

import pytest


def story(max_staleness: int, events: list[str], *, async_generate: bool = True, train_iters: int = 6) -> list[str]:
    """Two optimizer steps a generation. `events` are what happens after each generation was sampled."""
    from types import SimpleNamespace

    from swift_megatron_grpo.step.ahead import Ahead
    told: list[str] = []

    class Stage:

        def settle(self, phase: dict[str, Any]) -> None:
            if not phase['settled']:
                phase['settled'] = True
                told.append(f'wait for {phase["index"]}')

    def begin(index: int) -> dict[str, Any]:
        told.append(f'begin {index}')
        return {'index': index, 'settled': False}

    args = SimpleNamespace(async_generate=async_generate, max_staleness=max_staleness, steps_per_generation=2, num_iterations=1)
    stage = Stage()
    ahead = Ahead(args, stage, begin)
    iteration = index = 0
    while iteration < train_iters:
        phase = ahead.take(index)
        assert phase['index'] == index
        stage.settle(phase)
        ahead.begin_next(index, num_steps_left=train_iters - iteration)
        told.append(f'train {index}')
        if index < len(events) and events[index]:
            told.append(events[index])
            ahead.drain()
        iteration += 2
        index += 1
    assert ahead.pending is None
    return told


@pytest.mark.parametrize('changes', [{'max_staleness': 0}, {'max_staleness': 1, 'async_generate': False}])
def test_without_an_age_allowed_generation_and_training_take_turns(ranks: Any, changes: dict[str, Any]) -> None:
    assert ranks.run(story, events=[], **changes, world_size=1)[0] == [
        'begin 0', 'wait for 0', 'train 0', 'begin 1', 'wait for 1', 'train 1', 'begin 2', 'wait for 2', 'train 2']


def test_the_next_generation_is_begun_before_this_one_is_trained_and_none_after_the_last(ranks: Any) -> None:
    assert ranks.run(story, 1, [], world_size=1)[0] == [
        'begin 0', 'wait for 0', 'begin 1', 'train 0', 'wait for 1', 'begin 2', 'train 1', 'wait for 2', 'train 2']


def test_an_evaluation_or_a_checkpoint_waits_for_what_is_being_sampled(ranks: Any) -> None:
    assert ranks.run(story, 1, ['evaluate'], world_size=1)[0] == [
        'begin 0', 'wait for 0', 'begin 1', 'train 0', 'evaluate', 'wait for 1', 'begin 2', 'train 1', 'wait for 2', 'train 2']
