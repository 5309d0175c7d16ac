"""Megatron's overlap of communication with the passes changes when gradients and parameters travel, and nothing else."""
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.step.training import Outcome, arguments, train, write_rollouts


@pytest.fixture(scope='module')
def run(ranks: Any, tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    work = tmp_path_factory.mktemp('overlap')

    def run_it(**changes: Any) -> Outcome:
        return ranks.run(train, arguments(work, tiny_model('qwen3'), **changes), world_size=2, deadline=300.)[-1]

    return run_it


def _equal(one: Outcome, other: Outcome) -> None:
    for name in ('loss', 'grad_norm', 'reward'):
        assert one.column(name) == other.column(name), name
    for name, weight in one.weights.items():
        assert torch.equal(weight, other.weights[name]), name


def test_micro_batches_that_only_fill_up_reduce_their_gradients_too(run: Any, tmp_path: Path) -> None:
    """A rank with few long sequences has such micro-batches at its end, where gradients are reduced: each parameter must have one."""
    rollouts = write_rollouts(tmp_path / 'rollouts', generations=2, prompts=4, num_generations=4)
    for path in rollouts.iterdir():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows[1] |= {'response_token_ids': [[5] * 200], 'rollout_logprobs': [[-5.0] * 200]}  # as long as nine others
        path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    changes = {'replay_rollouts': rollouts, 'global_batch_size': 16, 'max_tokens_per_micro_batch': 24, 'max_completion_length': 256}
    _equal(run(**changes, overlap_grad_reduce='true'), run(**changes))


def test_the_engine_gets_the_updated_weights_where_ranks_gather_them_in_the_next_forward(run: Any) -> None:
    changes = {'train_iters': 3, 'max_completion_length': 8, 'lr': 0.02, 'min_lr': 0.02, 'beta': 0.04, 'sync_ref_model': 'true',
               'ref_model_sync_steps': 1}
    _equal(run(**changes, overlap_grad_reduce='true', overlap_param_gather='true'), run(**changes))
