"""Metrics of an optimizer step: sums and counts, reduced once (import tier 1)."""
from __future__ import annotations

import math
import torch
import torch.distributed as dist
from collections.abc import Iterable
from typing import Any

from .step.corrections import finish_metrics
from .types import Sums


def merge(parts: Iterable[Sums]) -> Sums:
    """Adds up what the micro-batches of one rank brought. No communication, no host sync."""
    merged = Sums()
    for part in parts:
        for name, (total, count) in part.means.items():
            merged.add(name, total, count)
        for name, value in part.maxima.items():
            merged.maximum(name, value)
    return merged


def reduce_once(sums: Sums, group: dist.ProcessGroup) -> Sums:
    """Over the ranks of the group, by one all-gather of one vector. All ranks of the group, collective.

    Every rank must bring the same names: all micro-batches of a step go through one loss.
    """
    names, maxima = sorted(sums.means), sorted(sums.maxima)
    if not names and not maxima:
        return sums
    device = next(iter(sums.means.values()))[0].device if names else next(iter(sums.maxima.values())).device
    values = [value for name in names for value in sums.means[name]] + [sums.maxima[name] for name in maxima]
    mine = torch.stack([value.to(device=device, dtype=torch.float64).reshape(()) for value in values])
    size = dist.get_world_size(group)
    if size > 1:
        gathered = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(gathered, mine, group=group)
        stacked = torch.stack(gathered)
    else:
        stacked = mine[None]
    whole = stacked.sum(0)
    peaks = stacked.max(0).values
    reduced = Sums()
    for i, name in enumerate(names):
        reduced.means[name] = (whole[2 * i], whole[2 * i + 1])
    for i, name in enumerate(maxima, start=2 * len(names)):
        reduced.maxima[name] = peaks[i]
    return reduced


def to_logs(sums: Sums) -> dict[str, float]:
    """Plain numbers, at logging time: one transfer. A `...min` comes back with its own sign; what no token or sequence counted is left out."""
    names, maxima = sorted(sums.means), sorted(sums.maxima)
    values = [value for name in names for value in sums.means[name]] + [sums.maxima[name] for name in maxima]
    if not values:
        return {}
    flat = torch.stack([torch.as_tensor(value, dtype=torch.float64) for value in values]).tolist()
    logs: dict[str, float] = {}
    for i, name in enumerate(names):
        total, count = flat[2 * i], flat[2 * i + 1]
        if count:
            logs[name] = total / count
    for name, value in zip(maxima, flat[2 * len(names):]):
        if math.isfinite(value):
            logs[name] = -value if name.endswith('min') else value
    return finish_metrics(logs)


def curve_names(logs: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a log entry under the names that transformers' TensorBoard callback gives them. Pure.

    Example: {'reward': 1.0, 'eval_reward': 0.5, 'memory': '1GiB'} gives {'train/reward': 1.0, 'eval/reward': 0.5}.
    """
    numbers = {name: value for name, value in logs.items() if value is not None and not isinstance(value, str)}
    return {f'eval/{name[5:]}' if name.startswith('eval_') else f'train/{name}': value for name, value in numbers.items()}


class Window:
    """What is logged at once: the sums of the steps since the last log, and plain values of the generations in it."""

    def __init__(self) -> None:
        self.sums = Sums()
        self.values: dict[str, list[float]] = {}

    def add(self, sums: Sums) -> None:
        self.sums = merge([self.sums, sums])

    def add_values(self, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.values.setdefault(name, []).append(value)

    def flush(self) -> dict[str, float]:
        """Means over the window; it is empty afterwards."""
        logs = to_logs(self.sums)
        logs.update({name: sum(values) / len(values) for name, values in self.values.items()})
        self.sums, self.values = Sums(), {}
        return logs
