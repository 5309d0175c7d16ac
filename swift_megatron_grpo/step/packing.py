"""Sharing sequences over ranks and micro-batches (import tier 0 plus binpacking). Pure: lengths in, indices out.

Every rank calls these with the same numbers and gets the same answer; nothing is communicated.
"""
from __future__ import annotations

import heapq
from collections.abc import Sequence


def balance(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Indices into `lengths` in `parts` bins of nearly equal sum: Karmarkar and Karp's largest differencing method (1982).

    No bin is empty if there are at least `parts` items. Bins and their contents are in ascending order of index, so that the result does
    not depend on ties.

    Example: balance([8, 7, 6, 5, 4], 2) gives sums 16 and 14 (greedy gives 17 and 13 or the like).
    """
    if parts == 1:
        return [list(range(len(lengths)))]
    if len(lengths) <= parts:
        return [[i] for i in range(len(lengths))] + [[] for _ in range(parts - len(lengths))]
    # A state is a tuple of (sum, items), largest sum first; the two states of largest spread are merged, largest with smallest.
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for i, length in enumerate(lengths):
        heap.append((-length, i, [(length, [i])] + [(0, []) for _ in range(parts - 1)]))
    heapq.heapify(heap)
    serial = len(lengths)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(first, reversed(second))]
        merged.sort(key=lambda state: (-state[0], state[1]))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], serial, merged))
        serial += 1
    bins = sorted(sorted(items) for _, items in heap[0][2])
    while not bins[0]:  # many zero lengths can leave a bin without items: take one from the bin with the most
        donor = max(range(len(bins)), key=lambda b: (len(bins[b]), b))
        bins[0] = [bins[donor].pop()]
        bins.sort()
    return bins


def balance_equal_counts(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """As `balance`, but every bin gets the same number of items (len(lengths) must be a multiple of parts): longest first, dealt out and back."""
    assert len(lengths) % parts == 0
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    bins: list[list[int]] = [[] for _ in range(parts)]
    for row in range(0, len(order), parts):
        dealt = order[row:row + parts]
        for target, item in zip(bins, dealt if (row // parts) % 2 == 0 else reversed(dealt)):
            target.append(item)
    return [sorted(items) for items in bins]


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices into `lengths` in as few bins as first-fit decreasing finds, none over `budget` tokens unless one sequence alone is.

    Example: pack([5, 4, 3, 2], 7) == [[0, 3], [1, 2]].
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    bins: list[tuple[int, list[int]]] = []
    for i in order:
        for b, (used, items) in enumerate(bins):
            if used + lengths[i] <= budget:
                bins[b] = (used + lengths[i], [*items, i])
                break
        else:
            bins.append((lengths[i], [i]))
    return sorted(sorted(items) for _, items in bins)


def pack_into(lengths: Sequence[int], budget: int, num_bins: int) -> list[list[int]]:
    """As `pack`, in exactly `num_bins` bins (at least as many as `pack` needs), balanced where that keeps the budget.

    Ranks of a data-parallel group must bring equal numbers of micro-batches. Bins beyond the number of sequences stay empty.
    """
    needed = pack(lengths, budget)
    assert len(needed) <= num_bins
    if len(lengths) >= num_bins:
        balanced = balance(lengths, num_bins)
        if max(sum(lengths[i] for i in items) for items in balanced) <= max(budget, max(lengths)):
            return balanced
    while len(needed) < num_bins:
        largest = max(needed, key=lambda items: (len(items) > 1, sum(lengths[i] for i in items)))
        if len(largest) < 2:
            needed.append([])
            continue
        needed.remove(largest)
        for part in balance([lengths[i] for i in largest], 2):
            needed.append([largest[i] for i in part])
    return needed


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
