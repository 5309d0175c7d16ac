"""Which prompts a generation is made of, where not simply the next ones of the data set (import tier 2: ms-swift's template).

- `--truncation_strategy delete`: a prompt that cannot be encoded (longer than max_length, a broken image) is replaced by another one.
- `--dynamic_sample true` (DAPO, arXiv 2503.14476): a group whose rewards are all equal teaches nothing; its place is given to a group of
  another prompt.

Replacements come from `PromptSource.replacements`: rows that this generation has not used, in an order of their own.
"""
from __future__ import annotations

import copy
import dataclasses
import torch
from collections.abc import Iterator, Sequence
from swift.template import Template
from swift.utils import get_logger, remove_response
from typing import Any, Protocol

from ..errors import UserError
from ..parallel import Topology, agree
from ..teacher import refuse_own_prompts
from .prompts import Prompt, media_names
from .rollout import RolloutStage, ScoredRollouts, generation_seed

logger = get_logger()

# A prompt that cannot be encoded is an exception; where this many times the prompts of a generation fail, the settings are wrong.
_MAX_REPLACED_GENERATIONS = 10


class Source(Protocol):
    """What a prompt source of step/prompts.py offers."""

    def take(self, generation: int) -> list[Prompt]:
        ...

    def replacements(self, generation: int, used: set[int]) -> Iterator[Prompt]:
        ...


class Sampler:
    """Takes the prompts of a generation, has them sampled and scored, and replaces what cannot be trained on.

    Args:
        args: dynamic_sample, max_resample_times, truncation_strategy, num_generations, seed.
        template: the trainer's template; encodes prompts to see whether it can.
        rollouts: samples and scores.
        reward_weights: of the F reward functions.
        topology: this rank's place.
    """

    def __init__(self, args: Any, template: Template, rollouts: RolloutStage, reward_weights: torch.Tensor, topology: Topology):
        self.args = args
        self.template = template
        self.rollouts = rollouts
        self.reward_weights = reward_weights
        self.topology = topology
        self._open: dict[int, tuple[Iterator[Prompt], int]] = {}  # generations whose first round is being sampled

    def collect(self, source: Source, generation: int, version: int) -> ScoredRollouts:
        """The scored rollouts of one generation: P prompts, G rollouts each. All ranks, collective; the same on every rank.

        Args:
            source: of prompts; the result is a function of its order and of what the engine samples.
            generation: number of the generation in the run.
            version: of the weights that the engine holds.

        Raises:
            UserError where truncation_strategy delete leaves too few prompts; RunError from sampling.
        """
        return self.complete(self._sample(self.prompts(source, generation), generation, 0, version), generation, version)

    def prompts(self, source: Source, generation: int) -> list[Prompt]:
        """The prompts that the first sampling round of a generation takes. All ranks, collective."""
        prompts = source.take(generation)
        refuse_own_prompts(self.args, ((prompt.dataset_index, prompt.row) for prompt in prompts))
        others = source.replacements(generation, {prompt.dataset_index for prompt in prompts})
        prompts, num_replaced = self._encodable(prompts, others)
        self._open[generation] = (others, num_replaced)
        return prompts

    def complete(self, scored: ScoredRollouts, generation: int, version: int) -> ScoredRollouts:
        """The first round of a generation with what it lacks. All ranks, collective; further rounds are sampled at once."""
        others, num_replaced = self._open.pop(generation)
        if self.args.dynamic_sample:
            scored = self._resample(scored, others, generation, version)
        if self.args.truncation_strategy == 'delete':
            scored.metrics['truncation/replaced_prompts'] = float(num_replaced)
        return scored

    def _sample(self, prompts: list[Prompt], generation: int, attempt: int, version: int) -> ScoredRollouts:
        return self.rollouts.run(prompts, num_generations=self.args.num_generations, version=version,
                                 seed=generation_seed(self.args.seed, generation, attempt))

    # -- dynamic_sample --------------------------------------------------------------------------------------------------------------------

    def _resample(self, scored: ScoredRollouts, others: Iterator[Prompt], generation: int, version: int) -> ScoredRollouts:
        """Gives the places of groups without a difference in reward to others, up to max_resample_times further rounds of P prompts.

        Groups that are found stay, whatever comes after. Places that are still not filled keep the group they had, and one warning says so:
        those groups have advantage 0 and leave the gradient as it is.
        """
        num_prompts = len(scored.prompts)
        chosen = {place: (scored, place) for place in range(num_prompts)}  # place -> (round it is from, group in that round)
        empty = [place for place, differs in enumerate(self._differs(scored)) if not differs]
        rounds = [scored]
        while empty and len(rounds) <= self.args.max_resample_times:
            try:
                prompts, _ = self._encodable([next(others) for _ in range(num_prompts)], others)
            except UserError as error:  # the data has no more prompts to offer; what was found so far is trained on
                logger.warning(f'dynamic_sample: {error}')
                break
            more = self._sample(prompts, generation, len(rounds), version)
            rounds.append(more)
            for group, differs in enumerate(self._differs(more)):
                if differs and empty:
                    chosen[empty.pop(0)] = (more, group)
        if empty:
            logger.warning(
                f'dynamic_sample: after {len(rounds) - 1} rounds of resampling {len(empty)} of the {num_prompts} groups of generation '
                f'{generation} still have equal rewards. The groups that were found are kept; the others add no gradient. A larger '
                '--max_resample_times tries longer.')
        result = join_groups([chosen[place] for place in range(num_prompts)], self.args.num_generations)
        for part in rounds:
            for name, seconds in part.seconds.items():
                result.seconds[name] = result.seconds.get(name, 0.0) + seconds
        result.metrics['dynamic_sample/num_rounds'] = float(len(rounds))
        result.metrics['dynamic_sample/num_sampled_groups'] = float(num_prompts * len(rounds))
        result.metrics['dynamic_sample/frac_equal_groups'] = len(empty) / num_prompts
        return result

    def _differs(self, scored: ScoredRollouts) -> list[bool]:
        """For each group whether its weighted rewards are not all the same."""
        rewards_N = (scored.rewards_NF * self.reward_weights).nansum(dim=1)
        rewards_PG = rewards_N.view(len(scored.prompts), -1)
        return (rewards_PG.max(dim=1).values > rewards_PG.min(dim=1).values).tolist()

    # -- truncation_strategy delete ----------------------------------------------------------------------------------------------------------

    def _encodable(self, prompts: list[Prompt], others: Iterator[Prompt]) -> tuple[list[Prompt], int]:
        """The prompts, those that cannot be encoded replaced in place, and how many were. Each is encoded once, ranks take turns."""
        if self.args.truncation_strategy != 'delete':
            return prompts, 0
        kept = list(prompts)
        pending = list(range(len(prompts)))
        failed: dict[int, str] = {}
        num_failed = 0
        while True:
            failures = self._failures([kept[place] for place in pending])
            pending = [pending[position] for position in failures]
            if not pending:
                break
            num_failed += len(pending)
            failed.update({kept[place].dataset_index: reason for place, reason in zip(pending, failures.values())})
            if num_failed > _MAX_REPLACED_GENERATIONS * len(prompts):
                raise UserError(f'--truncation_strategy delete: {len(failed)} prompts in a row cannot be encoded. '
                                f'{self._reason(failed)} Raise --max_length, or use --truncation_strategy left.')
            for place in pending:
                kept[place] = self._next_unseen(others, failed, {prompt.dataset_index for prompt in kept}, len(prompts))
        if failed:
            logger.warning(f'truncation_strategy delete: {len(failed)} prompts that cannot be encoded were replaced. {self._reason(failed)}')
        return kept, len(failed)

    def _next_unseen(self, others: Iterator[Prompt], failed: dict[int, str], taken: set[int], needed: int) -> Prompt:
        """The next replacement; a row is never silently read again."""
        prompt = next(others)
        if prompt.dataset_index in failed or prompt.dataset_index in taken:
            raise UserError(f'--truncation_strategy delete: a generation needs {needed} prompts, and the data set has no more that can be '
                            f'encoded ({len(failed)} cannot). {self._reason(failed)} Raise --max_length, use --truncation_strategy left, or '
                            'make the generation smaller.')
        return prompt

    def _failures(self, prompts: Sequence[Prompt]) -> dict[int, str]:
        """Position -> reason, for the prompts that cannot be encoded. All ranks, collective."""
        rank, size = self.topology.rank, self.topology.world_size

        def encode_mine() -> dict[int, str]:
            mine = {position: self._why_not(prompts[position]) for position in range(rank, len(prompts), size)}
            return {position: reason for position, reason in mine.items() if reason is not None}

        parts = agree('Encoding of prompts', encode_mine)
        return dict(sorted((position, reason) for part in parts for position, reason in part.items()))

    def _why_not(self, prompt: Prompt) -> str | None:
        row = copy.deepcopy(prompt.row)
        remove_response(row['messages'])
        try:
            self.template.encode(row)
        except Exception as error:  # whatever stands in the way of encoding, as in ms-swift
            return f'{type(error).__name__}: {error}{media_names(row)}'
        return None

    @staticmethod
    def _reason(failed: dict[int, str]) -> str:
        row, reason = next(iter(failed.items()))
        return f'Data set row {row}: {reason}.'


def join_groups(groups: Sequence[tuple[ScoredRollouts, int]], num_generations: int) -> ScoredRollouts:
    """A generation made of groups of several sampling rounds, renumbered; without seconds and metrics. Pure.

    Args:
        groups: (round, group in it), in their new order.
    """
    rollouts, rewards, prompts, samples = [], [], [], []
    for place, (scored, group) in enumerate(groups):
        part = slice(group * num_generations, (group + 1) * num_generations)
        for number, rollout in enumerate(scored.rollouts[part]):
            rollouts.append(dataclasses.replace(rollout, index=place * num_generations + number, prompt_index=place))
        rewards.append(scored.rewards_NF[part])
        prompts.append(scored.prompts[group])
        samples.append(scored.samples_P[group])
    return ScoredRollouts(prompts=prompts, rollouts=rollouts, rewards_NF=torch.cat(rewards), samples_P=samples)
