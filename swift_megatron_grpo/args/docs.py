"""docs/arguments.md and docs/arguments_zh.md from the table (import tier 0): ``python -m swift_megatron_grpo.args.docs``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .fields import Field, all_fields
from .own import OWN_FIELDS
from .table import megatron, model_data, rlhf, training
from .table.zh import SENTENCES

_GROUPS = (
    ('Training, optimizer, logging, checkpoints, evaluation', training),
    ('Model, template, data, tuner', model_data),
    ('Rollouts, rewards, losses, reward and teacher models', rlhf),
    ("Megatron's own names", megatron),
)
_ACTIONS = {'kept': 'kept', 'renamed': 'renamed', 'converted': 'converted', 'no_effect': 'no effect', 'refused': 'refused'}
_INTRO = (
    'Every argument of `swift rlhf` (ms-swift 4.6) and of `megatron rlhf` may be given to `swift rlhf --rlhf_type grpo '
    '--backend megatron`. '
    'This page says what becomes of each; it is written by `python -m swift_megatron_grpo.args.docs`.',
    'Where nothing is given, `swift rlhf` is followed: its defaults are in the third column, those of `megatron rlhf` in the '
    'fourth, and a dash '
    'says that the argument is unknown there.',
    'kept: as it is. renamed, converted: the fifth column names where it goes. no effect: it is said once in the report, and '
    'changes nothing. '
    'refused: any value but the default ends the command before a model is loaded, with the reason in the last column.',
    '`--dry_run true` prints the same for one command, and the plan with it.',
)


def render(language: str = 'en') -> str:
    """The page in English (en) or Chinese (zh)."""

    def say(text: str) -> str:
        return text if language == 'en' else SENTENCES.get(text, text)

    lines = [f'# {say("Arguments")}', '']
    for paragraph in _INTRO:
        lines += [say(paragraph), '']
    lines += [f'## {say("Arguments of this package")}', '']
    lines += [f'| {say("argument")} | {say("type")} | {say("default")} | {say("meaning")} |', '|---|---|---|---|']
    for own in OWN_FIELDS:
        kind = ', '.join(own.choices) if own.choices else own.type
        lines.append(f'| `{own.name}` | {_cell(kind)} | {_default(own.default)} | {_cell(say(own.help))} |')
    lines += ['', f'## {say("Batch sizes")}', '', say(_BATCH), '']
    table = all_fields()
    own_names = {own.name for own in OWN_FIELDS}
    for title, module in _GROUPS:
        lines += ['', f'## {say(title)}', '']
        heads = ('argument', 'type', 'swift rlhf', 'megatron rlhf', 'what becomes of it', 'why, and what else')
        lines += ['| ' + ' | '.join(say(head) for head in heads) + ' |', '|---|---|---|---|---|---|']
        for line in module.ROWS.strip().splitlines():
            field = table[line.split(' | ', 1)[0]]
            lines.append(_row(field, say, field.name in own_names))
    return '\n'.join(lines) + '\n'


_BATCH = (
    'All sizes count completions. dp_size = world_size / (TP x PP x CP); global_batch_size = micro_batch_size x dp_size x '
    'gradient_accumulation_steps; generation_batch_size = global_batch_size x steps_per_generation; num_rollout_prompts = '
    'generation_batch_size / num_generations; num_train_prompts = global_batch_size / num_generations; num_prompts_per_dp_group = '
    'global_batch_size / num_generations / dp_size. Beside gradient_accumulation_steps or per_device_train_batch_size, '
    'steps_per_generation '
    'counts micro-steps as in swift rlhf; beside micro_batch_size or global_batch_size it counts optimizer steps. '
    'sequence_parallel_size multiplies gradient_accumulation_steps, as in swift rlhf.'
)


def _row(field: Field, say: Callable[[str], str], own: bool) -> str:
    action = say(_ACTIONS[field.action]) + (f': `{field.target}`' if field.target else '')
    swift = _default(field.swift_default) if field.worlds != 'megatron' else '-'
    known = field.worlds in ('both', 'megatron')
    kind = ', '.join(field.choices) if field.choices else field.type
    reason = say(field.reason) if field.reason else ''
    if own and not reason:
        reason = say('see above')
    return (
        f'| `{field.name}` | {_cell(kind)} | {swift} | {_default(field.megatron_default) if known else "-"} | {action} | {_cell(reason)} |'
    )


def _cell(text: str) -> str:
    return text.replace('|', '\\|')


def _default(value: Any) -> str:
    if value is None:
        return 'None'
    return f'`{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}`'


def main(argv: Sequence[str] | None = None) -> int:
    """Write both pages into a folder, by default docs/ of the current folder."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    folder = Path(arguments[0] if arguments else 'docs')
    folder.mkdir(parents=True, exist_ok=True)
    for name, language in (('arguments.md', 'en'), ('arguments_zh.md', 'zh')):
        (folder / name).write_text(render(language), encoding='utf-8')
        print(folder / name)
    return 0


if __name__ == '__main__':
    sys.exit(main())
