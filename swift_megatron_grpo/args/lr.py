"""Learning-rate schedules by the names of transformers, and their nearest spelling for Megatron (import tier 0; pure).

The trainer itself calls transformers for these schedules. What stands here is for the report (the rate at steps 0, 1, half and last)
and for the equal `megatron rlhf` command; a test compares both with the real schedulers. Formulas: transformers.optimization, and
megatron.core.optimizer_param_scheduler.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

SCHEDULES = (
    'linear',
    'cosine',
    'cosine_with_restarts',
    'polynomial',
    'constant',
    'constant_with_warmup',
    'inverse_sqrt',
    'cosine_with_min_lr',
    'cosine_warmup_with_min_lr',
    'warmup_stable_decay',
)
NEEDS_METRIC = ('reduce_lr_on_plateau', 'greedy')
KWARGS = {
    'linear': (),
    'constant': (),
    'constant_with_warmup': (),
    'cosine': ('num_cycles',),
    'cosine_with_restarts': ('num_cycles',),
    'polynomial': ('lr_end', 'power'),
    'inverse_sqrt': ('timescale',),
    'cosine_with_min_lr': ('num_cycles', 'min_lr', 'min_lr_rate'),
    'cosine_warmup_with_min_lr': ('num_cycles', 'min_lr', 'min_lr_rate', 'warmup_lr_rate'),
    'warmup_stable_decay': ('num_decay_steps', 'num_stable_steps', 'warmup_type', 'decay_type', 'min_lr_ratio', 'num_cycles'),
}


def check(kind: str, kwargs: Mapping[str, Any], lr: float) -> list[str]:
    """Errors in a schedule's name and arguments."""
    import difflib

    if kind in NEEDS_METRIC:
        return [
            f'--lr_scheduler_type {kind} follows an evaluation metric, and this trainer takes the rate from the step alone. '
            f'The nearest are cosine, '
            'constant_with_warmup and warmup_stable_decay.'
        ]
    if kind not in SCHEDULES:
        close = difflib.get_close_matches(kind, SCHEDULES, n=1, cutoff=0.4)
        return [
            f'--lr_scheduler_type is {kind!r}; it takes one of {", ".join(SCHEDULES)}.' + (f' Did you mean {close[0]}?' if close else '')
        ]
    errors = []
    for name in kwargs:
        if name not in KWARGS[kind]:
            allowed = ', '.join(KWARGS[kind]) or 'none'
            errors.append(f'--lr_scheduler_kwargs has {name!r}; {kind} takes {allowed}.')
    if 'min_lr' in KWARGS[kind] and ('min_lr' in kwargs) == ('min_lr_rate' in kwargs):
        errors.append(
            f'--lr_scheduler_type {kind} needs one of min_lr and min_lr_rate: --lr_scheduler_kwargs \'{{"min_lr": {lr / 10:g}}}\'.'
        )
    if kind == 'warmup_stable_decay' and 'num_decay_steps' not in kwargs:
        errors.append('--lr_scheduler_type warmup_stable_decay needs num_decay_steps: --lr_scheduler_kwargs \'{"num_decay_steps": 100}\'.')
    return errors


def num_warmup_steps(warmup_steps: float, warmup_ratio: float, total: int) -> int:
    """Warm-up in optimizer steps. A ratio, or a number of steps below 1, is a share of ``total``, rounded up (transformers)."""
    share = warmup_ratio or warmup_steps
    return int(share) if share >= 1 else math.ceil(total * share)


def factor(kind: str, step: int, *, warmup: int, total: int, lr: float, kwargs: Mapping[str, Any]) -> float:
    """The share of the peak rate at optimizer step ``step`` (0 is the first), as transformers computes it."""
    if kind == 'constant':
        return 1.0
    if kind == 'warmup_stable_decay':
        return _warmup_stable_decay(step, warmup, total, kwargs)
    rate = 0.0
    if 'min_lr' in KWARGS[kind]:
        rate = kwargs['min_lr'] / lr if 'min_lr' in kwargs else kwargs['min_lr_rate']
    cycles = kwargs.get('num_cycles', 1 if kind == 'cosine_with_restarts' else 0.5)
    if kind == 'cosine_warmup_with_min_lr':
        start = kwargs.get('warmup_lr_rate')
        if step < warmup:
            return (step + 1.0) / max(1.0, warmup) if start is None else start + (1.0 - start) * step / max(1, warmup - 1)
        progress = (step - warmup + 1.0) / max(1.0, total - warmup)
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * cycles * 2.0 * progress)) * (1 - rate) + rate)
    if step < warmup:
        return step / max(1, warmup)
    if kind == 'constant_with_warmup':
        return 1.0
    if kind == 'inverse_sqrt':
        timescale = kwargs.get('timescale') or warmup or 10_000
        return 1.0 / math.sqrt((step + timescale - warmup) / timescale)
    progress = (step - warmup) / max(1, total - warmup)
    if kind == 'linear':
        return max(0.0, 1.0 - progress)
    if kind == 'polynomial':
        end = kwargs.get('lr_end', 1e-7)
        if step > total:
            return end / lr
        return ((lr - end) * (1.0 - progress) ** kwargs.get('power', 1.0) + end) / lr
    if kind == 'cosine_with_restarts':
        return 0.0 if progress >= 1.0 else max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((cycles * progress) % 1.0))))
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * cycles * 2.0 * progress)) * (1 - rate) + rate)


def _warmup_stable_decay(step: int, warmup: int, total: int, kwargs: Mapping[str, Any]) -> float:
    decay, low = kwargs['num_decay_steps'], kwargs.get('min_lr_ratio', 0.0)
    stable = kwargs['num_stable_steps'] if kwargs.get('num_stable_steps') is not None else total - warmup - decay
    if step < warmup:
        progress = step / max(1, warmup)
        shape = {'linear': progress, 'cosine': 0.5 * (1.0 - math.cos(math.pi * progress)), '1-sqrt': 1.0 - math.sqrt(1.0 - progress)}
        return max(0.0, shape[kwargs.get('warmup_type', 'linear')] * (1.0 - low) + low)
    if step < warmup + stable:
        return 1.0
    if step < warmup + stable + decay:
        progress = (step - warmup - stable) / max(1, decay)
        cycles = kwargs.get('num_cycles', 0.5)
        shape = {
            'linear': 1.0 - progress,
            'cosine': 0.5 * (1.0 + math.cos(math.pi * cycles * 2.0 * progress)),
            '1-sqrt': 1.0 - math.sqrt(progress),
        }
        return max(0.0, shape[kwargs.get('decay_type', 'cosine')] * (1.0 - low) + low)
    return low


def megatron_spelling(
    kind: str, *, lr: float, kwargs: Mapping[str, Any], warmup_steps: float, warmup_ratio: float, total: int | None
) -> tuple[dict[str, Any], list[str]]:
    """Megatron's arguments for a schedule of transformers, and how they differ (an empty list: equal to 1e-9 at every step)."""
    flags: dict[str, Any] = {}
    notes: list[str] = []
    share = warmup_ratio or warmup_steps
    warmup = int(share) if share >= 1 else None if total is None else math.ceil(total * share)
    if kind != 'constant' and share:
        if warmup is not None:
            flags['lr_warmup_iters'] = warmup
        else:
            flags['lr_warmup_fraction'] = share
            notes.append(
                'the number of steps is not known here, and Megatron does not round the warm-up up: it may end up to one step earlier'
            )
    if warmup is not None and total is not None and warmup >= total and flags:
        notes.append(f'Megatron refuses a warm-up ({warmup} steps) as long as the run ({total})')
    styles = {
        'constant': 'constant',
        'constant_with_warmup': 'constant',
        'linear': 'linear',
        'cosine': 'cosine',
        'cosine_with_restarts': 'cosine',
        'polynomial': 'linear',
        'inverse_sqrt': 'inverse-square-root',
        'cosine_with_min_lr': 'cosine',
        'cosine_warmup_with_min_lr': 'cosine',
        'warmup_stable_decay': 'WSD',
    }
    flags['lr_decay_style'] = styles[kind]
    if 'min_lr' in kwargs or 'min_lr_rate' in kwargs:
        flags['min_lr'] = kwargs.get('min_lr', kwargs.get('min_lr_rate', 0.0) * lr)
    if 'num_cycles' in kwargs and kwargs['num_cycles'] != (1 if kind == 'cosine_with_restarts' else 0.5):
        notes.append(f'Megatron has no num_cycles; it goes down once where the script has {kwargs["num_cycles"]}')
    if kind == 'cosine_warmup_with_min_lr':
        notes.append('Megatron starts the warm-up at 0 and decays one step later')
    if kind == 'polynomial':
        flags['min_lr'] = kwargs.get('lr_end', 1e-7)
        if kwargs.get('power', 1.0) != 1.0:
            notes.append(f'Megatron has no polynomial decay of power {kwargs["power"]}; linear is the nearest')
    if kind == 'inverse_sqrt' and ((not warmup and warmup is not None) or kwargs.get('timescale') not in (None, warmup)):
        notes.append(
            "Megatron's inverse-square-root takes the warm-up as its time scale; transformers takes "
            f'{kwargs.get("timescale") or 10_000} steps'
        )
    if kind == 'warmup_stable_decay':
        notes += _wsd_spelling(flags, lr, kwargs, warmup, total)
    return flags, notes


def _wsd_spelling(flags: dict[str, Any], lr: float, kwargs: Mapping[str, Any], warmup: int | None, total: int | None) -> list[str]:
    notes = []
    flags['lr_wsd_decay_iters'] = kwargs['num_decay_steps']
    flags['lr_wsd_decay_style'] = {'linear': 'linear', 'cosine': 'cosine', '1-sqrt': 'minus_sqrt'}[kwargs.get('decay_type', 'cosine')]
    if kwargs.get('min_lr_ratio'):
        flags['min_lr'] = kwargs['min_lr_ratio'] * lr
        if warmup:
            flags['lr_warmup_init'] = kwargs['min_lr_ratio'] * lr
    if kwargs.get('warmup_type', 'linear') != 'linear':
        notes.append(f'Megatron warms up linearly, not {kwargs["warmup_type"]}')
    stable = kwargs.get('num_stable_steps')
    if stable is not None:
        if total is None or warmup is None:
            notes.append('Megatron decays over the last steps of the run, wherever they are')
        elif warmup + stable + kwargs['num_decay_steps'] <= total:
            flags['lr_decay_iters'] = warmup + stable + kwargs['num_decay_steps']
        else:
            notes.append('the run ends before the decay does, and Megatron decays over the last steps of the run')
    elif total is not None and warmup is not None and warmup + kwargs['num_decay_steps'] > total:
        notes.append('warm-up and decay overlap, and the two worlds cut them differently')
    return notes
