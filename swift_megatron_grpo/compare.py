"""Two runs that should have made the same optimizer steps, number by number (import tier 0: standard library only).

Record a run with --save_rollouts, replay it with --replay_rollouts in another layout, and compare what both logged: docs/proofs.md.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import UserError

LOG = 'logging.jsonl'
# what tells of the machine, and of the sampling that a replayed run does not do
_OF_THE_MACHINE = ('profiling/', 'memory', 'train_speed', 'elapsed_time', 'remaining_time')


@dataclass(frozen=True, slots=True)
class Difference:
    """Of one metric of one optimizer step. error: |a - b| / max(|a|, |b|), for anything but the gradient norm / max(|a|, |b|, 1)."""

    step: int
    metric: str
    a: float
    b: float
    error: float


def read_steps(run: str) -> dict[int, dict[str, float]]:
    """Optimizer step -> its numbers, from a run's folder, from a folder that holds one run, or from the file itself. Raises UserError."""
    path = _log_of(run)
    try:
        text = path.read_text(encoding='utf-8-sig')
    except (OSError, ValueError) as error:
        raise UserError(f'{path} cannot be read: {error}. Give the {LOG} of a run.') from None
    steps: dict[int, dict[str, float]] = {}
    for number, line in enumerate(text.split('\n'), start=1):  # not splitlines: JSON may hold other separators
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise UserError(f'{path}, line {number}: not JSON. The run that wrote it may have been ended while it wrote.') from None
        if isinstance(row, dict) and 'grad_norm' in row and 'iteration' in row:
            try:
                step = int(str(row['iteration']).partition('/')[0])
                steps[step] = {
                    name: float(value)
                    for name, value in row.items()
                    if isinstance(value, (int, float)) and name != 'iteration' and not name.startswith(_OF_THE_MACHINE)
                }
            except (ValueError, OverflowError) as error:
                raise UserError(f'{path}, line {number}: not a line of the log of a run ({error}).') from None
    if not steps:
        raise UserError(f'{path} holds no optimizer step.')
    return steps


def differences(a: Mapping[int, Mapping[str, float]], b: Mapping[int, Mapping[str, float]]) -> list[Difference]:
    """Of all steps and metrics that both runs have, the largest first. Two values that are not finite in the same way do not differ. Pure."""
    found = []
    for step in sorted(a.keys() & b.keys()):
        for metric in sorted(a[step].keys() & b[step].keys()):
            x, y = a[step][metric], b[step][metric]
            scale = max(abs(x), abs(y), 0.0 if metric == 'grad_norm' else 1.0)
            same = x == y or (math.isnan(x) and math.isnan(y))
            error = 0.0 if same else abs(x - y) / scale if math.isfinite(x) and math.isfinite(y) else math.inf
            found.append(Difference(step, metric, x, y, error))
    return sorted(found, key=lambda difference: -difference.error)


def report(runs: Sequence[str], tolerance: float) -> tuple[str, bool]:
    """(the text, whether all numbers agree within `tolerance`). Raises UserError where there is nothing to compare."""
    a, b = (read_steps(run) for run in runs)
    found = differences(a, b)
    if not found:
        raise UserError(f'{runs[0]} has the optimizer steps {_span(a)}, and {runs[1]} has {_span(b)}: none in common.')
    lines = []
    alone = sorted(a.keys() ^ b.keys())
    if alone:
        lines.append(f'steps of one run alone, left out: {", ".join(map(str, alone))}')
    for run, steps in zip(runs, (a, b)):
        skipped = [step for step in sorted(steps) if 'grad_norm' not in steps[step]]
        if skipped:
            lines.append(f'{run} made no update in step {", ".join(map(str, skipped))}: no gradient norm was logged')
    one_sided = sorted({metric for step in a.keys() & b.keys() for metric in a[step].keys() ^ b[step].keys()})
    if one_sided:
        lines.append(f'metrics of one run alone, left out: {", ".join(one_sided)}')
    worst: dict[str, Difference] = {}
    for difference in found:
        worst.setdefault(difference.metric, difference)
    width = max(map(len, worst))
    lines.append(f'{"metric":<{width}}  {"difference":>10}  step  values there')
    for difference in worst.values():
        lines.append(f'{difference.metric:<{width}}  {difference.error:>10.1e}  {difference.step:>4}  {difference.a:.9g}  {difference.b:.9g}')
    agree = found[0].error <= tolerance
    count = len(a.keys() & b.keys())
    lines.append(f'{count} optimizer step{"s" if count != 1 else ""}: ' + (f'all {len(worst)} metrics agree within {tolerance:g}.' if agree else
                 f'{sum(d.error > tolerance for d in worst.values())} of {len(worst)} metrics differ by more than {tolerance:g}.'))
    return '\n'.join(lines), agree


def _log_of(run: str) -> Path:
    path = Path(os.path.expanduser(run))
    if path.is_file():
        return path
    if (path / LOG).is_file():
        return path / LOG
    below = sorted(path.glob(f'*/{LOG}'))
    if len(below) == 1:
        return below[0]
    if below:
        raise UserError(f'{run} holds {len(below)} runs; name one of them: {", ".join(str(log.parent) for log in below)}.')
    raise UserError(f'{run} holds no {LOG}. Give the output folder of a run (--output_dir), or that file.')


def _span(steps: Mapping[int, Mapping[str, float]]) -> str:
    return f'{min(steps)} to {max(steps)}' if len(steps) > 1 else str(min(steps))
