"""Where the sampled distribution is not what the trainer's log-probabilities describe, a metric says so."""
from pathlib import Path
from typing import Any

import pytest

from swift_megatron_grpo.engines.base import Sampling
from tests.step.training import arguments, train


@pytest.mark.parametrize('changes, plain', [
    ({}, True),
    ({'temperature': 0.3}, True),
    ({'stop_words': ('x', )}, True),
    ({'top_p': 0.9}, False),
    ({'top_k': 5}, False),
    ({'min_p': 0.1}, False),
    ({'repetition_penalty': 1.1}, False),
    ({'structured_outputs_regex': 'a+'}, False),
])
def test_what_changes_the_distribution(changes: dict[str, Any], plain: bool) -> None:
    assert Sampling(**{'temperature': 1.0, 'max_tokens': 4, **changes}).is_plain is plain


def test_the_metric(ranks: Any, tiny_model: Any, tmp_path: Path) -> None:
    name = 'rollout/sampled_from_another_distribution'
    outcome = ranks.run(train, arguments(tmp_path, tiny_model('qwen3'), train_iters=1, top_k=5, max_completion_length=8), world_size=1)[-1]
    assert outcome.column(name) == [1.0]
    outcome = ranks.run(train, arguments(tmp_path, tiny_model('qwen3'), train_iters=1, max_completion_length=8), world_size=1)[-1]
    assert name not in outcome.logs[0]
