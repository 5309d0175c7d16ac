"""The worker's command line, and the `megatron rlhf` command that a plan equals (import tier 0)."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from . import lr as lr_schedule
from .fields import all_fields
from .own import OWN_BY_NAME
from .plan import Schedule
from .translation import Translation
from .values import to_words

# What upstream's Megatron GRPO refuses or reads nowhere (ms-swift 4.6), with what a command without it lacks.
_NOT_UPSTREAM = {
    'reward_model': 'accepts it and reads it nowhere',
    'reward_model_plugin': 'accepts it and reads it nowhere',
    'sync_ref_model': 'refuses it',
    'advantage_reweight': 'has no such argument',
    'sdar_loss_coef': 'has no such argument',
    'chord_sft_dataset': 'has no such argument',
    'async_generate': 'refuses it',
}


def worker_argv(values: Mapping[str, Any]) -> list[str]:
    """Every value as `--name words`, in the table's order. Names the worker does not have, None and empty lists are left out."""
    argv: list[str] = []
    for name, field in all_fields().items():
        value = values.get(name)
        if field.in_worker and value is not None and value != [] and name in values:
            argv += [f'--{name}', *to_words(value)]
    return argv


def megatron_command(t: Translation, schedule: Schedule, environ: Mapping[str, str], world_size: int) -> tuple[str, list[str]]:
    """(the equal `megatron rlhf` command over several lines, notes on what it cannot say or does differently)."""
    values = {name: value for name, value in t.values.items() if value is not None and value != []}
    notes = _replace_own(values, t, schedule)
    lines = []
    for name, field in all_fields().items():
        if name in values and field.worlds in ('both', 'megatron') and (field.megatron_default != values[name] or name in t.given):
            lines.append(' '.join([f'--{name}', *(shlex.quote(word) for word in to_words(values[name]))]))
    lead = ['CUDA_VISIBLE_DEVICES', 'NPROC_PER_NODE', 'NNODES', 'NODE_RANK', 'MASTER_ADDR', 'MASTER_PORT']
    prefix = [f'{key}={shlex.quote(environ[key])}' for key in lead if key in environ]
    if world_size > 1 and not any(key in environ for key in ('NPROC_PER_NODE', 'NNODES')):
        prefix.insert(0, f'NPROC_PER_NODE={world_size}')
    head = ' '.join([*prefix, 'megatron rlhf'])
    return ' \\\n    '.join([head, *lines]), notes


def _replace_own(values: dict[str, Any], t: Translation, schedule: Schedule) -> list[str]:
    """Turn own fields in ``values`` into Megatron's where there is a spelling; say what is lost where there is none."""
    notes: list[str] = []
    kind = values.pop('lr_scheduler_type', None)
    kwargs = values.pop('lr_scheduler_kwargs', None)
    steps, ratio = values.pop('warmup_steps', 0) or 0, values.pop('warmup_ratio', 0) or 0
    if (
        kind is not None
        and isinstance(kwargs if kwargs is not None else {}, dict)
        and not lr_schedule.check(kind, kwargs or {}, values['lr'])
    ):
        flags, differs = lr_schedule.megatron_spelling(
            kind, lr=values['lr'], kwargs=kwargs or {}, warmup_steps=steps, warmup_ratio=ratio, total=schedule.optimizer_steps
        )
        values.update(flags)
        notes += [f'learning rate: {text}.' for text in differs]
    epochs = values.get('num_train_epochs')
    if epochs is not None:
        if schedule.optimizer_steps is not None and (epochs != int(epochs) or t.effective('num_iterations') > 1):
            del values['num_train_epochs']
            values['train_iters'] = schedule.optimizer_steps
        elif epochs == int(epochs):
            values['num_train_epochs'] = int(epochs)
        else:
            notes.append(f'num_train_epochs: Megatron counts whole epochs, not {epochs:g}; give it the number of steps as train_iters.')
    if values.get('save_strategy') == 'no':
        del values['save_strategy']
        notes.append('save_strategy no: megatron rlhf always writes a checkpoint at the end.')
    if values.get('resume_from_checkpoint') and not values.get('mcore_model') and not values.get('mcore_adapter'):
        notes.append('resume_from_checkpoint has no name in megatron rlhf beside mcore_model or mcore_adapter.')
    if values.get('report_to') == ['none']:
        del values['report_to']
        notes.append('report_to none: megatron rlhf always logs to TensorBoard.')
    if values.get('use_vllm') is False:
        notes.append('use_vllm false: megatron rlhf samples with vLLM only.')
    if values.get('num_iterations', 1) > 1:
        notes.append('num_iterations: megatron rlhf takes 1 only.')
    for name, what in _NOT_UPSTREAM.items():
        if values.get(name):
            notes.append(f'{name}: megatron rlhf {what}.')
    silent = ('backend', 'eval_strategy', 'resume_from_checkpoint', 'resume_only_model', 'batch_check')
    for name in list(values):
        own = OWN_BY_NAME.get(name)
        if own is not None and not own.overrides:
            if name not in silent and values[name] != own.default:
                notes.append(f'{name} {" ".join(to_words(values[name]))}: megatron rlhf has no such argument.')
            del values[name]
    loss = values.get('loss_type')
    if loss is not None and (loss in ('luspo', 'gmpo') or ':' in loss):
        notes.append(f'loss_type {loss}: megatron rlhf does not have it.')
    return notes
