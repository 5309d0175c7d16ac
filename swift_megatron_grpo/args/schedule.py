"""How many prompts, generations and optimizer steps a run has (import tier 0; reads local data files, nothing else).

A generation takes num_rollout_prompts prompts; an epoch is the whole number of generations that the data holds, the rest is left out, as in
`swift rlhf`; a generation feeds steps_per_generation x num_iterations optimizer steps; max_steps wins over epochs, and epochs x steps an
epoch is rounded up.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
from collections.abc import Sequence
from typing import Any

from . import lr as lr_schedule
from .plan import BatchPlan, Schedule

_EXACT_BYTES = 2**24
_EMPTY_LINE = re.compile(rb'(?<=\n)\n')
_LIMIT_BYTES = 2**30  # a larger file is not counted line by line: the dry run answers in under two seconds


def dataset_path(spec: str) -> tuple[str, int | None]:
    """'path#N' or 'path' to (path, N): the sampling suffix of ms-swift, which is read only where the whole text is no existing path."""
    spec = re.sub(r'^(hf|ms|HF|MS)::', '', spec)
    if os.path.exists(spec) or '#' not in spec:
        return spec, None
    path, _, number = spec.rpartition('#')
    return (path, int(number)) if number.isdigit() else (spec, None)


def looks_local(path: str) -> bool:
    """Whether a dataset name can only mean a file: it ends as one, or begins as a path."""
    return path.endswith(('.jsonl', '.json', '.csv', '.txt', '.parquet')) or path.startswith(('/', './', '../', '~'))


def count_rows(path: str) -> int | None:
    """Rows of a local .jsonl, .json or .csv file; None for anything else, and for files over 1 GiB."""
    path = os.path.expanduser(path)
    if not os.path.isfile(path) or os.path.getsize(path) > _LIMIT_BYTES:
        return None
    if path.endswith('.jsonl'):
        return _count_lines(path)
    if path.endswith('.json'):
        with open(path, encoding='utf-8') as text:
            try:
                content = json.load(text)
            except json.JSONDecodeError:
                return None
        return len(content) if isinstance(content, list) else None
    if path.endswith('.csv'):
        with open(path, encoding='utf-8', newline='') as text:
            return max(0, sum(1 for row in csv.reader(text) if row) - 1)
    return None


def _count_lines(path: str) -> int:
    """Lines with something on them. Large files are read in blocks: there, only lines of nothing but a newline are left out."""
    with open(path, 'rb') as file:
        if os.path.getsize(path) <= _EXACT_BYTES:
            return sum(1 for line in file if line.strip())
        lines, last = 0, b'\n'
        while block := file.read(2**22):
            lines += block.count(b'\n') - len(_EMPTY_LINE.findall(last + block))
            last = block[-1:]
        return lines + (last != b'\n')


def count_prompts(specs: Sequence[str], held_out_ratio: float = 0.0) -> tuple[int | None, int, list[str]]:
    """(rows of the training data or None, rows held out for evaluation, notes that say why).

    Each dataset is sampled (#N) and split by itself; at least one row of each is held out (swift.dataset.DatasetLoader).
    """
    total, held_out = 0, 0
    for spec in specs:
        path, sample = dataset_path(spec)
        rows = count_rows(path)
        if rows is None and sample is None:
            return None, 0, [f'{spec}: the number of rows is not known before it is loaded; write {spec}#N to take N of them.']
        size = sample if sample is not None else rows or 0
        if held_out_ratio > 0:
            part = max(1, int(min(size, rows if rows is not None else size) * held_out_ratio))
            held_out += part
            size -= part
        total += size
    return total, held_out, []


def resolve_schedule(
    values: dict[str, Any], batch: BatchPlan, *, train_iters: int | None, epochs: float | None
) -> tuple[Schedule, list[str]]:
    """(schedule, errors). ``values`` holds dataset, val_dataset, split_dataset_ratio, streaming, interleave_prob, lr, lr_scheduler_*."""
    errors: list[str] = []
    ratio = 0.0 if values['val_dataset'] else values['split_dataset_ratio']
    prompts, held_out, notes = count_prompts(values['dataset'], ratio)
    if values['streaming']:
        prompts = None
        notes = ['Streaming data has no length.']
        if train_iters is None:
            errors.append('--streaming true needs --max_steps: the data has no length to count epochs by.')
    elif values['interleave_prob'] and prompts is not None:
        prompts = None
        notes = ['interleave_prob decides how much of each dataset is used.']
    if prompts is not None and held_out:
        notes.append(f'{held_out} of {prompts + held_out} rows are held out for evaluation (split_dataset_ratio {ratio:g}).')
    per_generation = batch.num_rollout_prompts if isinstance(batch.num_rollout_prompts, int) else math.ceil(batch.num_rollout_prompts)
    steps_per_generation = batch.steps_per_generation * batch.num_iterations
    generations_per_epoch = steps_per_epoch = None
    if prompts is not None:
        generations_per_epoch = prompts // per_generation
        steps_per_epoch = generations_per_epoch * steps_per_generation
        if generations_per_epoch == 0 and values['dataset']:
            smaller = f', or a generation_batch_size of at most {prompts * batch.num_generations}' if prompts else ''
            errors.append(
                f'The data has {prompts} prompts, and one generation takes {per_generation} (generation_batch_size '
                f'{batch.generation_batch_size} / num_generations {batch.num_generations}): there would be no step at all. Give more data '
                f'(--dataset FILE#{per_generation} repeats rows){smaller}.'
            )
    total = train_iters
    if total is None and steps_per_epoch and epochs is not None:
        total = math.ceil(epochs * steps_per_epoch)
    if total is not None and steps_per_epoch:
        epochs = total / steps_per_epoch if train_iters is not None else epochs
    generations = None if total is None else math.ceil(total / steps_per_generation)
    if prompts is not None and generations_per_epoch and prompts % per_generation:
        notes.append(
            f'{prompts % per_generation} prompts an epoch do not fill a generation of {per_generation} and are left out (another choice '
            'each epoch), as in swift rlhf.'
        )
    schedule = Schedule(
        prompts=prompts,
        prompts_per_epoch=None if generations_per_epoch is None else generations_per_epoch * per_generation,
        generations_per_epoch=generations_per_epoch,
        optimizer_steps_per_epoch=steps_per_epoch,
        samples_per_epoch=None if generations_per_epoch is None else generations_per_epoch * batch.generation_batch_size,
        num_train_epochs=epochs,
        optimizer_steps=total,
        generations=generations,
        samples=None if generations is None else generations * batch.generation_batch_size,
        learning_rate={},
        notes=notes,
    )
    schedule.learning_rate = learning_rates(values, total)
    return schedule, errors


def learning_rates(values: dict[str, Any], total: int | None) -> dict[str, Any]:
    """The learning rate at steps 0, 1, half and last where the length of the run is known; the schedule's parts in any case."""
    kind = values.get('lr_scheduler_type')
    if kind is None:
        return {'peak': values['lr'], 'schedule': values['lr_decay_style'], 'of': 'megatron'}
    result = {'peak': values['lr'], 'schedule': kind, 'of': 'transformers'}
    kwargs = values.get('lr_scheduler_kwargs') or {}
    if total is None or not isinstance(kwargs, dict) or lr_schedule.check(kind, kwargs, values['lr']):
        return result
    warmup = lr_schedule.num_warmup_steps(values.get('warmup_steps') or 0, values.get('warmup_ratio') or 0, total)
    result['warmup_steps'] = 0 if kind == 'constant' else warmup
    for name, step in (('step_0', 0), ('step_1', 1), ('step_half', total // 2), ('step_last', total - 1)):
        result[name] = values['lr'] * lr_schedule.factor(kind, step, warmup=warmup, total=total, lr=values['lr'], kwargs=kwargs)
    return result
