"""Rollouts on disk: `--save_rollouts DIR` writes each generation, `--replay_rollouts DIR` trains on them without an engine (import tier 2).

One JSON-lines file a generation, `generation-000000.jsonl`, complete or absent. Its first line describes the generation:

    {"format": 1, "generation": 0, "num_generations": 8, "reward_names": ["Accuracy"], "num_rollouts": 64, "seed": 42}

and every further line is one rollout, in canonical order:

    {"index": 0, "prompt_index": 0, "dataset_index": 17, "messages": [...], "response_token_ids": [[19, 2]], "response_loss_mask": [],
     "rollout_logprobs": [[-0.1, -0.02]], "finish_reason": "stop", "num_prompt_tokens": 18, "rollout_infos": {}, "policy_version": 0,
     "rewards": [1.0], "columns": {"images": [...], "tools": ...}, "media": {}}

`messages` is the whole conversation; `columns` are the columns of the row that encoding needs. Rewards are null where a function did not
apply. With router replay R3 a rollout also has `routed_experts`, the experts of each token and layer, [tokens][layers][top-k].
Floats are written so that they read back exactly. A checkpoint inside a generation holds the same format.
"""
from __future__ import annotations

import json
import math
import os
import torch
from swift.rl_core.data import GRPOSample
from typing import Any

from ..errors import UserError
from ..types import Rollout
from .prompts import Prompt
from .rollout import ScoredRollouts

FORMAT = 1
_COLUMNS = ('images', 'videos', 'audios', 'tools', 'objects', 'teacher_prompt', 'teacher_images')
_FIELDS = ('index', 'prompt_index', 'dataset_index', 'response_token_ids', 'response_loss_mask', 'rollout_logprobs', 'finish_reason', 'messages',
           'num_prompt_tokens', 'rollout_infos', 'media', 'policy_version')


def generation_path(folder: str, generation: int) -> str:
    return os.path.join(folder, f'generation-{generation:06d}.jsonl')


def write_generation(path: str, generation: int, scored: ScoredRollouts, reward_names: list[str], seed: int, **extra: Any) -> None:
    """One rank writes; beside and renamed, so that no half file is ever read."""
    num_generations = len(scored.rollouts) // len(scored.prompts)
    head = {'format': FORMAT, 'generation': generation, 'num_generations': num_generations, 'reward_names': reward_names,
            'num_rollouts': len(scored.rollouts), 'seed': seed, **extra}
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path + '.part', 'w', encoding='utf-8') as file:
        file.write(json.dumps(head) + '\n')
        for rollout, rewards in zip(scored.rollouts, scored.rewards_NF.tolist()):
            sample = scored.samples_P[rollout.prompt_index]
            row = {name: getattr(rollout, name) for name in _FIELDS}
            if rollout.routed_experts is not None:
                row['routed_experts'] = torch.as_tensor(rollout.routed_experts).tolist()
            row['rewards'] = [None if math.isnan(value) else value for value in rewards]
            row['columns'] = {name: getattr(sample, name) for name in _COLUMNS if getattr(sample, name)}
            if 'chat_template_kwargs' in sample.extra:
                row['columns']['chat_template_kwargs'] = sample.extra['chat_template_kwargs']
            file.write(json.dumps(row, ensure_ascii=False, default=_plain) + '\n')
    os.replace(path + '.part', path)


def _plain(value: Any) -> Any:
    """What JSON does not know: tensors and arrays become lists, image bytes are refused by name."""
    if hasattr(value, 'tolist'):
        return value.tolist()
    raise UserError(f'--save_rollouts cannot write a {type(value).__name__} from a data set row; give images as paths or base64 text.')


def read_generation(path: str, reward_names: list[str] | None = None) -> tuple[ScoredRollouts, dict[str, Any]]:
    """Every rank reads the same file. Returns the rollouts and the head line.

    Raises UserError for a missing, foreign or cut-off file, or one with other reward functions.
    """
    if not os.path.exists(path):
        raise UserError(f'--replay_rollouts: {path} does not exist. The run needs more generations than were saved; lower --max_steps.')
    with open(path, encoding='utf-8') as file:
        lines = file.read().splitlines()
    head = json.loads(lines[0]) if lines else {}
    if head.get('format') != FORMAT or head.get('num_rollouts') != len(lines) - 1:
        raise UserError(f'{path} is not a complete file of rollouts (format {FORMAT}).')
    if reward_names is not None and head['reward_names'] != reward_names:
        raise UserError(f'{path} holds rewards of {head["reward_names"]}, but this run has {reward_names}: give the same --reward_funcs.')
    rollouts, rewards, samples, prompts = [], [], {}, {}
    for line in lines[1:]:
        row = json.loads(line)
        rollout = Rollout(**{name: row[name] for name in _FIELDS}, routed_experts=row.get('routed_experts'))
        rollouts.append(rollout)
        rewards.append([math.nan if value is None else value for value in row['rewards']])
        if rollout.prompt_index not in samples:
            columns = dict(row['columns'])
            extra = {'chat_template_kwargs': columns.pop('chat_template_kwargs')} if 'chat_template_kwargs' in columns else {}
            samples[rollout.prompt_index] = GRPOSample(messages=rollout.messages[:-1], prompt_id=str(rollout.dataset_index), extra=extra, **columns)
            prompts[rollout.prompt_index] = Prompt(dataset_index=rollout.dataset_index, row={})
    order = sorted(samples)
    scored = ScoredRollouts(
        prompts=[prompts[i] for i in order],
        rollouts=rollouts,
        rewards_NF=torch.tensor(rewards, dtype=torch.float32).reshape(len(rollouts), len(head['reward_names'])),
        samples_P=[samples[i] for i in order])
    return scored, head
