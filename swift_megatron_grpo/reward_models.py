"""`--reward_model`: models that score rollouts, beside the reward functions (import tier 2).

A reward model is a transformers model, loaded as `swift rlhf` loads it: a classifier with one output by default, or anything that a plug-in
of `swift.rewards.rm_plugins` makes of it (`--reward_model_plugin default | genrm | a name that an external plug-in registered`). Every rank
holds a frozen copy and scores its own rollouts.
"""
from __future__ import annotations

import difflib
import torch
from collections.abc import Sequence
from swift.model import get_model_info_meta
from swift.pipelines.train.rlhf import SwiftRLHF
from swift.pipelines.utils import prepare_adapter
from swift.utils import HfConfigFactory, safe_snapshot_download
from typing import Any

from .errors import UserError


def load_reward_models(args: Any, device: torch.device) -> list[tuple[Any, str]]:
    """(plug-in, name) of each reward model, in order. Any rank; no communication.

    The name, under which rewards are logged, is the last part of the model's path; a second model of one name gets `_2`. With
    `--replay_rollouts` rewards are read from disk: the plug-in is None and nothing is loaded.

    Raises UserError for lists of different lengths and for unknown plug-ins, before the first model is loaded.
    """
    paths = _as_list(args.reward_model)
    if not paths:
        return []
    plugins = _per_model('reward_model_plugin', args.reward_model_plugin, paths, 'default')
    types = _per_model('reward_model_type', args.reward_model_type, paths, None)
    templates = _per_model('reward_template', args.reward_template, paths, None)
    revisions = _per_model('reward_model_revision', args.reward_model_revision, paths, None)
    classes = [_plugin_class(name) for name in plugins]
    names = _unique([path.rstrip('/').rsplit('/', 1)[-1] for path in paths])
    if args.replay_rollouts is not None:
        return [(None, name) for name in names]
    loaded = []
    for plugin_class, name, path, model_type, template_type, revision in zip(classes, names, paths, types, templates, revisions):
        model, template = _load(args, path, model_type, template_type, revision, device)
        loaded.append((plugin_class(model=model, template=template), name))
    return loaded


def _load(args: Any, path: str, model_type: str | None, template_type: str | None, revision: str | None,
          device: torch.device) -> tuple[Any, Any]:
    """A frozen model in evaluation mode, and the template that encodes conversations for it."""
    if model_type is None:
        model_type = get_model_info_meta(path, use_hf=args.use_hf, hub_token=args.hub_token)[0].model_type
    folder = safe_snapshot_download(path, revision=revision, download_model=False, use_hf=args.use_hf, hub_token=args.hub_token)
    task_type, num_labels = SwiftRLHF._get_model_task_type(folder)
    model, processor = args.get_model_processor(model=path, model_type=model_type, revision=revision, task_type=task_type,
                                                num_labels=num_labels, device_map={'': str(device)})
    model = prepare_adapter(args, model, args.reward_adapters)
    model.requires_grad_(False).eval()
    HfConfigFactory.set_config_attr(model.config, 'use_cache', False)
    template = args.get_template(processor, template_type=template_type or processor.model_meta.template)
    # The trainer's batches are packed for Megatron; a transformers model takes padded rows. Lengths were limited when sampling.
    template.padding_free = False
    template.sequence_parallel_size = 1
    template.use_megatron = False
    template.max_length = None
    template.set_mode('train')
    if template.use_model:
        template.model = model
    return model, template


def _as_list(value: str | Sequence[str] | None) -> list[str]:
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(value)


def _per_model(name: str, value: str | Sequence[str] | None, paths: Sequence[str], default: str | None) -> list[Any]:
    values = _as_list(value) or [default] * len(paths)
    if len(values) != len(paths):
        raise UserError(f'--{name} has {len(values)} values ({", ".join(map(str, values))}), but there are {len(paths)} reward models '
                        f'({", ".join(paths)}). Give one for each, or leave it out.')
    return values


def _plugin_class(name: str) -> Any:
    from swift.rewards import rm_plugins
    if name not in rm_plugins:
        near = difflib.get_close_matches(name, rm_plugins, n=2)
        raise UserError(f'--reward_model_plugin: unknown plug-in {name!r}.' + (f' Did you mean {" or ".join(near)}?' if near else '') +
                        f' Known: {", ".join(sorted(rm_plugins))}. One of your own is registered as swift.rewards.rm_plugins[{name!r}] in a '
                        'file given by --external_plugins.')
    return rm_plugins[name]


def _unique(names: Sequence[str]) -> list[str]:
    """Example: ['rm', 'rm'] -> ['rm', 'rm_2']."""
    seen: dict[str, int] = {}
    unique = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        unique.append(name if seen[name] == 1 else f'{name}_{seen[name]}')
    return unique
