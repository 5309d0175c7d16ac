"""Replacing prompts: dynamic sampling keeps what it finds and ends, prompts that cannot be encoded are replaced, ranks agree."""
from types import SimpleNamespace
from typing import Any

import pytest

from swift_megatron_grpo.errors import UserError


class _Rollouts:
    """In place of the rollout stage: the two answers to prompt i differ in reward where `i in good`."""

    def __init__(self, good: set[int]) -> None:
        self.good = good
        self.calls: list[tuple[list[int], int]] = []

    def run(self, prompts: Any, *, num_generations: int, seed: int, version: int) -> Any:
        import torch

        from swift_megatron_grpo.step.rollout import ScoredRollouts
        from swift_megatron_grpo.types import Rollout
        self.calls.append(([prompt.dataset_index for prompt in prompts], seed))
        rollouts = [Rollout(index=i, prompt_index=i // num_generations, dataset_index=prompts[i // num_generations].dataset_index,
                            response_token_ids=[[seed % 1000, i]]) for i in range(len(prompts) * num_generations)]
        rewards = [[1.0 if r.dataset_index in self.good and r.index % num_generations == 0 else 0.5] for r in rollouts]
        return ScoredRollouts(prompts=prompts, rollouts=rollouts, rewards_NF=torch.tensor(rewards), seconds={'generate': 2.0},
                              samples_P=[prompt.dataset_index for prompt in prompts])


class _Template:
    """Encodes prompts of up to `limit` characters."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def encode(self, row: dict[str, Any]) -> None:
        assert [message['role'] for message in row['messages']] == ['user'], 'the answer in the row is not part of the prompt'
        if len(row['messages'][0]['content']) > self.limit:
            raise ValueError(f'{len(row["messages"][0]["content"])} > {self.limit}')


def collect(rows: list[str], good: set[int], *, prompts: int = 2, limit: int = 1000, shuffle: bool = False, **changes: Any) -> Any:
    """On every rank of a case: generation 0. (rows trained on, (index, prompt_index, first token), rewards, metrics, seconds, calls, warnings)"""
    import logging

    import torch
    import torch.distributed as dist
    from swift_megatron_grpo.step import resample
    from swift_megatron_grpo.step.prompts import PromptSource
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    args = SimpleNamespace(**{'dynamic_sample': True, 'max_resample_times': 2, 'truncation_strategy': 'left', 'num_generations': 2, 'seed': 1,
                              'loss_type': 'grpo', 'off_policy_sequence_mask_delta': None, 'sdar_loss_coef': 0.0,
                              **changes})
    data = [{'messages': [{'role': 'user', 'content': row}, {'role': 'assistant', 'content': 'x' * 500}]} for row in rows]
    rollouts = _Rollouts(good)
    topology = SimpleNamespace(rank=dist.get_rank(), world_size=dist.get_world_size())
    sampler = resample.Sampler(args, _Template(limit), rollouts, torch.ones(1), topology)  # type: ignore[arg-type]
    resample.logger.addHandler(handler)
    try:
        scored = sampler.collect(PromptSource(data, prompts, shuffle=shuffle, seed=5), 0, version=0)
    finally:
        resample.logger.removeHandler(handler)
    assert [prompt.dataset_index for prompt in scored.prompts] == scored.samples_P == [r.dataset_index for r in scored.rollouts[::2]]
    return SimpleNamespace(rows=scored.samples_P, rollouts=[(r.index, r.prompt_index) for r in scored.rollouts],
                           rewards=scored.rewards_NF[:, 0].tolist(), metrics=scored.metrics, seconds=scored.seconds, calls=rollouts.calls,
                           warnings=warnings)


def _collect(ranks: Any, *args: Any, world_size: int = 1, **kwargs: Any) -> Any:
    results = ranks.run(collect, *args, world_size=world_size, **kwargs)
    assert all(result.rows == results[0].rows and result.calls == results[0].calls for result in results)
    return results[0]


def test_five_prompts_of_which_four_are_constant_end_after_two_retries_and_the_found_group_is_kept(ranks: Any) -> None:
    got = _collect(ranks, ['a'] * 5, {1})
    assert got.rows == [0, 1] and got.rewards == [0.5, 0.5, 1.0, 0.5]
    first, second, third = (rows for rows, _ in got.calls)
    assert first == [0, 1] and sorted(second + third[:1]) == [2, 3, 4], 'every other row comes once before any comes again'
    assert len({seed for _, seed in got.calls}) == 3
    assert got.metrics == {'dynamic_sample/num_rounds': 3.0, 'dynamic_sample/num_sampled_groups': 6.0, 'dynamic_sample/frac_equal_groups': 0.5}
    assert got.seconds == {'generate': 6.0}
    warning, = got.warnings
    assert '1 of the 2 groups' in warning and 'after 2 rounds' in warning and '--max_resample_times' in warning


def test_found_groups_take_the_places_of_constant_ones_and_are_renumbered(ranks: Any) -> None:
    got = _collect(ranks, ['a'] * 12, {1, 2, 5, 7, 8}, prompts=4, max_resample_times=5, world_size=2)
    assert got.rows[1:3] == [1, 2] and set(got.rows[::3]) <= {5, 7, 8} and len(set(got.rows)) == 4
    assert got.rollouts == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (5, 2), (6, 3), (7, 3)]
    assert got.rewards == [1.0, 0.5] * 4 and got.warnings == []
    assert got.metrics['dynamic_sample/frac_equal_groups'] == 0.0


def test_nothing_is_resampled_where_every_group_differs_or_no_retry_is_allowed(ranks: Any) -> None:
    assert len(_collect(ranks, ['a'] * 8, set(range(8))).calls) == 1
    none = _collect(ranks, ['a'] * 8, set(), max_resample_times=0)
    assert len(none.calls) == 1 and 'after 0 rounds' in none.warnings[0]


def test_a_prompt_that_cannot_be_encoded_is_replaced_by_one_that_was_not_used(ranks: Any) -> None:
    rows = ['a', 'long' * 10, 'b', 'c']
    got = _collect(ranks, rows, set(), prompts=3, limit=10, dynamic_sample=False, truncation_strategy='delete', world_size=2)
    assert got.rows == [0, 3, 2] and got.metrics == {'truncation/replaced_prompts': 1.0}
    assert 'row 1: ValueError: 40 > 10' in got.warnings[0]
    kept = _collect(ranks, rows, set(), prompts=3, limit=10, dynamic_sample=False)
    assert kept.rows == [0, 1, 2] and kept.metrics == {}, 'left: the template shortens it'


def test_too_few_prompts_that_can_be_encoded_are_refused_by_name_of_the_row(ranks: Any) -> None:
    with pytest.raises(UserError, match='needs 3 prompts.*2 cannot.*row [12].*--max_length'):
        _collect(ranks, ['a', 'long' * 10, 'long' * 9, 'c'], set(), prompts=3, limit=10, dynamic_sample=False, truncation_strategy='delete')
