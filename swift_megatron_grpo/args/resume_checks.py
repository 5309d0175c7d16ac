"""Whether a folder is a checkpoint that a run can go on from, in the layout that it has now (import tier 0).

Megatron writes a checkpoint so that any layout reads its weights. The moments of the distributed optimizer follow the layout, unless it was told to
write them in one that all can read (--dist_ckpt_optim_fully_reshardable); those of experts are a list of their own where EP > 1.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from .model_checks import adapts_experts
from .translation import Translation

STATE_FILE = 'trainer_state.json'
CHECKPOINT_FORMAT = 2  # 1 (0.1.0): lora_B of gated layers lies there in the order of the tensor-parallel ranks that wrote it
_RESHARDABLE = ('dist_ckpt_optim_fully_reshardable', 'dist_ckpt_save_pre_mcore_014')
_SIZES = {'tensor_model_parallel_size': 'TP', 'expert_model_parallel_size': 'EP', 'expert_tensor_parallel_size': 'ETP'}
_WEIGHTS_ALONE = 'take the weights alone: --resume_only_model true'


def can_be_resumed(t: Translation, folder: str) -> None:
    """Adds an error for each reason why `folder` cannot be gone on from."""
    if not os.path.isfile(os.path.join(folder, 'latest_checkpointed_iteration.txt')):
        if os.path.isfile(os.path.join(folder, STATE_FILE)):
            start = '--model' if t.effective('tuner_type') == 'full' else '--adapters'
            t.errors.append(
                f'--resume_from_checkpoint {folder} was written by the transformers trainer; its optimizer state has no Megatron form. Start '
                f'from its weights instead: {start} {folder}.'
            )
        else:
            t.errors.append(
                f'--resume_from_checkpoint {folder} is not a complete checkpoint of Megatron training (it has no '
                'latest_checkpointed_iteration.txt). Give a folder checkpoint-N that a run with save_only_model false wrote.'
            )
        return
    saved = _read(os.path.join(folder, 'args.json'))
    if saved.get('tuner_type') not in (None, t.effective('tuner_type')):
        t.errors.append(
            f'--resume_from_checkpoint {folder} is of --tuner_type {saved["tuner_type"]}, and this run has --tuner_type {t.effective("tuner_type")}.'
        )
    problem = unreadable_adapter(folder)
    if problem:
        t.errors.append(f'--resume_from_checkpoint {problem}')
    if t.effective('resume_only_model'):
        return
    if saved.get('no_save_optim'):
        t.errors.append(
            f'--resume_from_checkpoint {folder} was saved without optimizer state (save_only_model true), so the run cannot go on where it '
            'stopped. To start anew from its weights: --resume_only_model true.'
        )
    _layout(t, folder, saved)


def unreadable_adapter(folder: str) -> str | None:
    """Why the adapter in Megatron's part of a checkpoint cannot be read any more; None where it can."""
    saved, state = _read(os.path.join(folder, 'args.json')), _read(os.path.join(folder, STATE_FILE))
    tp = saved.get('tensor_model_parallel_size')
    if not state or state.get('format', 1) >= 2 or saved.get('tuner_type') in (None, 'full') or tp in (None, 1):
        return None
    return (
        f'{folder} holds an adapter that version 0.1.0 wrote with TP {tp}, with rows in the order of its ranks, which is not read any more. Its weights '
        f'are in adapter_model.safetensors too: start from them with --adapters {folder}.'
    )


def _layout(t: Translation, folder: str, saved: Mapping[str, Any]) -> None:
    names = ('tensor_model_parallel_size', 'pipeline_model_parallel_size')
    before, now = [saved.get(name) for name in names], [t.effective(name) for name in names]
    follows = t.effective('use_distributed_optimizer') and not any(saved.get(name) for name in _RESHARDABLE)
    if None not in before and before != now and follows:
        t.errors.append(
            f'--resume_from_checkpoint {folder} was written with TP {before[0]} and PP {before[1]}, and this run has TP {now[0]} and PP {now[1]}: the '
            f'moments of the distributed optimizer lie there as that layout has them. Keep the layout, or {_WEIGHTS_ALONE}. A run with '
            '--dist_ckpt_optim_fully_reshardable true writes checkpoints that go on in any layout.'
        )


def experts_can_be_resumed(t: Translation, folder: str) -> None:
    """Adds an error where a model with experts would read their moments from a place that they are not written to. Call it for such a model alone."""
    saved = _read(os.path.join(folder, 'args.json'))
    trains_them = t.effective('tuner_type') == 'full' or adapts_experts(t.effective('target_modules') or ['all-linear'])
    before, now = _keeps_experts_apart(saved), _keeps_experts_apart({name: t.effective(name) for name in _SIZES})
    if before is None or before == now or not trains_them or t.effective('resume_only_model'):
        return
    shown = ', '.join(f'{short} {saved[name]}' for name, short in _SIZES.items())
    t.errors.append(
        f'--resume_from_checkpoint {folder} was written with {shown}: the moments of experts lie there {"apart from" if before else "with"} the others, and '
        f'this run keeps them {"apart" if now else "with them"} (apart where EP > 1, or where EP x ETP is not TP). Choose sizes of the same kind, or '
        f'{_WEIGHTS_ALONE}.'
    )


def _keeps_experts_apart(sizes: Mapping[str, Any]) -> bool | None:
    """Whether the optimizer has a list of its own for experts (Megatron: EP > 1; parallel_attributes.py: replicas that are not those of the rest). None: that
    cannot be told."""
    tp, ep, etp = (sizes.get(name) for name in _SIZES)
    return None if tp is None or ep is None or etp is None else bool(ep > 1 or ep * etp != tp)


def _read(path: str) -> dict[str, Any]:
    """A JSON object; an empty one where there is none."""
    try:
        with open(path, encoding='utf-8') as file:
            content = json.load(file)
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
