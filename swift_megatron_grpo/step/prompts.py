"""Which prompts a generation gets (import tier 0: standard library only; the data set is any sequence of rows).

The order is a pure function of (seed, generation number): every rank computes it without talking to the others, and a resumed run gets
exactly the prompts that the undisturbed run would have got.
"""
from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UserError

# Keeps the stream of replacement prompts apart from the training order of every epoch.
_REPLACEMENT_STREAM = 0x5EED


@dataclass(kw_only=True, slots=True)
class Prompt:
    """One row of the data set. `dataset_index` identifies it."""
    dataset_index: int
    row: dict[str, Any]


def media_names(columns: Mapping[str, Any]) -> str:
    """' (images a.png, b.png)' of a row with media, for messages; '' without. Pure. Bytes and decoded images have no name."""
    parts = []
    for kind in ('images', 'videos', 'audios'):
        names = [item.get('path') if isinstance(item, Mapping) else item for item in columns.get(kind) or ()]
        shown = [name[:200] if isinstance(name, str) else 'one without a path' for name in names]
        if shown:
            parts.append(f'{kind} {", ".join(shown[:4])}' + (', ...' if len(shown) > 4 else ''))
    return f' ({"; ".join(parts)})' if parts else ''


class PromptSource:
    """Prompts from a data set of known length.

    An epoch is `len(dataset) // prompts_per_generation` generations, as in `swift rlhf`: rows that do not fill a generation wait for the
    next epoch's order.

    Example: 5 rows, 4 prompts a generation: one generation an epoch; 2 epochs are 2 generations.
    """

    def __init__(self, dataset: Sequence[dict[str, Any]], prompts_per_generation: int, *, shuffle: bool, seed: int):
        if len(dataset) < prompts_per_generation:
            raise UserError(
                f'The data set has {len(dataset)} prompts, but one generation needs {prompts_per_generation} '
                '(generation_batch_size / num_generations). Use more data, or a smaller generation: '
                'lower global_batch_size (per_device_train_batch_size, gradient_accumulation_steps) or steps_per_generation, '
                'or raise num_generations.')
        self.dataset = dataset
        self.prompts_per_generation = prompts_per_generation
        self.shuffle = shuffle
        self.seed = seed
        self._order: tuple[int, list[int]] = (-1, [])

    @property
    def generations_per_epoch(self) -> int:
        return len(self.dataset) // self.prompts_per_generation

    def epoch_of(self, generation: int) -> float | None:
        return generation / self.generations_per_epoch

    def take(self, generation: int) -> list[Prompt]:
        """The prompts of one generation. Pure in `generation`."""
        epoch, place = divmod(generation, self.generations_per_epoch)
        order = self._epoch_order(epoch)
        start = place * self.prompts_per_generation
        return [self._prompt(index) for index in order[start:start + self.prompts_per_generation]]

    def replacements(self, generation: int, used: Iterable[int]) -> Iterator[Prompt]:
        """Endless other prompts for a generation: first every row that is not in `used`, each once, in an order of its own.

        For dynamic sampling and for rows that cannot be encoded. Ends only if every row of the data set is in `used`; then rows repeat.
        """
        rng = random.Random(f'{self.seed}/{_REPLACEMENT_STREAM}/{generation}')
        used = set(used)
        while True:
            fresh = [index for index in range(len(self.dataset)) if index not in used] or list(range(len(self.dataset)))
            rng.shuffle(fresh)
            for index in fresh:
                yield self._prompt(index)
            used = set()

    def _epoch_order(self, epoch: int) -> list[int]:
        if self._order[0] != epoch:
            order = list(range(len(self.dataset)))
            if self.shuffle:
                random.Random(f'{self.seed}/{epoch}').shuffle(order)
            self._order = (epoch, order)
        return self._order[1]

    def _prompt(self, index: int) -> Prompt:
        row = self.dataset[index]
        if row.get('messages') is None:
            raise UserError(f'Data set row {index} has no messages (it has {", ".join(name for name, value in row.items() if value) or "nothing"}). Each row '
                            'needs `messages` with a user turn, or `query`; take the row out, or name its columns with --columns.')
        return Prompt(dataset_index=index, row=row)


class StreamingPromptSource:
    """Prompts from an iterable data set, in its own order.

    A generation takes the next rows, and more of them where some are replaced: where it begins depends on what the earlier ones took. A resumed run
    is told (`go_on`) and reads past what was used.
    """

    def __init__(self, dataset: Iterable[dict[str, Any]], prompts_per_generation: int):
        self.dataset = dataset
        self.prompts_per_generation = prompts_per_generation
        self._iterator = self._cycle()
        self._position = 0
        self._next_generation = 0
        self._starts: dict[int, int] = {}

    def epoch_of(self, generation: int) -> float | None:
        return None

    def start_of(self, generation: int) -> int:
        """Rows that are read before those of `generation`: it is the next one, or was taken already."""
        return self._starts.get(generation, self._position)

    def go_on(self, generation: int, start: int) -> None:
        """Makes `generation` the next one, at row `start`. Once, on a new source."""
        for _ in range(start):
            self._one()
        self._next_generation = generation

    def _cycle(self) -> Iterator[dict[str, Any]]:
        while True:
            empty = True
            for row in self.dataset:
                empty = False
                yield row
            if empty:
                raise UserError('The streaming data set is empty.')

    def take(self, generation: int) -> list[Prompt]:
        assert self._next_generation == generation, 'a stream is read in order'
        self._starts[generation] = self._position
        self._next_generation += 1
        return [self._one() for _ in range(self.prompts_per_generation)]

    def replacements(self, generation: int, used: Iterable[int]) -> Iterator[Prompt]:
        while True:
            yield self._one()

    def _one(self) -> Prompt:
        self._position += 1
        return Prompt(dataset_index=self._position - 1, row=next(self._iterator))
