"""Expert answers beside the rollouts: CHORD, on- and off-policy in one step (arXiv 2508.11408; import tier 2).

The loss of an optimizer step is (1 - mu) * policy loss + mu * mean over the expert tokens of -phi log p, with phi = 1, or p (1 - p) with
`--chord_enable_phi_function`; log p at temperature 1. mu follows ms-swift's schedule over optimizer steps.

ms-swift takes the mean of the expert tokens by micro-batch and device, and the mean of those means; here it is over the whole step, so that it does not
depend on the layout. They agree where a step is one micro-batch.
"""
from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Sequence
from swift.rlhf_trainers.utils import mu_schedule_function
from typing import Any

from ..types import Rollout
from .batch import BatchBuilder, StepBatch
from .weights import token_weights


class Experts:
    """Which expert rows an optimizer step gets, as micro-batches.

    Args:
        args: chord_*, seed, and the sizes of a step.
        dataset: rows with the expert's answer as the last message.
        batches: encodes and packs.
        dp_size: data-parallel size.
    """

    def __init__(self, args: Any, dataset: Sequence[dict[str, Any]], batches: BatchBuilder, dp_size: int):
        self.args = args
        self.dataset = dataset
        self.batches = batches
        accumulation = args.global_batch_size // (args.micro_batch_size * dp_size)
        self.num_rows = args.chord_sft_per_device_train_batch_size * dp_size * accumulation
        self._order: tuple[int, list[int]] = (-1, [])

    def share(self, update: int) -> float:
        """mu after `update` optimizer steps."""
        args = self.args
        return float(mu_schedule_function(update, args.chord_mu_warmup_steps, args.chord_mu_decay_steps, args.chord_mu_peak, args.chord_mu_valley))

    def rows(self, update: int) -> list[int]:
        """The rows of one optimizer step. Pure in `update`: a resumed run gets what the undisturbed run would have got."""
        size = len(self.dataset)
        return [self._epoch(position // size)[position % size] for position in range(update * self.num_rows, (update + 1) * self.num_rows)]

    def _epoch(self, epoch: int) -> list[int]:
        if self._order[0] != epoch:
            order = list(range(len(self.dataset)))
            random.Random(f'{self.args.seed}/chord/{epoch}').shuffle(order)
            self._order = (epoch, order)
        return self._order[1]

    def batch(self, update: int) -> StepBatch:
        """All ranks, collective. Every micro-batch has the temperature 1; weights_K adds up to 1."""
        rows = {index: (row, copy.deepcopy(dict(self.dataset[row]))) for index, row in enumerate(self.rows(update))}
        # Balanced by characters: which rank encodes a row is known before its tokens are.
        rollouts = [Rollout(index=index, prompt_index=index, dataset_index=row, response_token_ids=[],
                            num_prompt_tokens=sum(len(str(message['content'])) for message in columns['messages']))
                    for index, (row, columns) in rows.items()]
        step, = self.batches.build(rollouts, {index: columns for index, (_, columns) in rows.items()}, 1, encode=self.batches.encode_expert)
        step.table.weights_K = token_weights('dapo', lengths_S=step.table.lengths_S, truncated_S=step.table.truncated_S, overlong_filter=False,
                                             max_completion_length=1)
        step.micro_batches = [dataclasses.replace(micro_batch, temperature=1.0) for micro_batch in step.micro_batches]
        return step
