"""A plan as text for people and as JSON for programs (import tier 0)."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from .plan import BatchPlan, Layout, Plan, Schedule
from .values import to_words

_WIDTH = 100


def render_json(plan: Plan) -> str:
    """One JSON object: arguments, batch_plan, layout, schedule, memory, command, warnings, errors (and command_notes)."""
    part = lambda value: None if value is None else dataclasses.asdict(value)  # noqa: E731
    return json.dumps(
        {
            'ok': plan.ok,
            'arguments': [dataclasses.asdict(row) for row in plan.arguments],
            'batch_plan': part(plan.batch_plan),
            'layout': part(plan.layout),
            'schedule': part(plan.schedule),
            'memory': plan.memory,
            'command': plan.command,
            'command_notes': plan.command_notes,
            'worker_argv': plan.worker_argv,
            'effective': plan.effective,
            'warnings': plan.warnings,
            'errors': plan.errors,
        },
        ensure_ascii=False,
        indent=2,
    )


def render_text(plan: Plan) -> str:
    """The report of `--dry_run true`: arguments, batch plan, layout, schedule, memory, command, then warnings and errors."""
    lines: list[str] = []
    _arguments(lines, plan)
    if plan.batch_plan is not None:
        _batch(lines, plan.batch_plan, plan.warnings)
    if plan.layout is not None:
        _layout(lines, plan.layout)
    if plan.schedule is not None:
        _schedule(lines, plan.schedule)
    if plan.memory is not None:
        from .memory import render

        _title(lines, 'Memory a device (estimate)')
        lines += render(plan.memory)
    if plan.command:
        _title(lines, 'Equal Megatron command')
        lines.append(plan.command)
        lines += [f'  differs: {note}' for note in plan.command_notes]
    if plan.warnings:
        _title(lines, 'Warnings')
        lines += [f'- {text}' for text in plan.warnings]
    if plan.errors:
        _title(lines, f'Errors ({len(plan.errors)}): this command would not start')
        lines += [f'- {text}' for text in plan.errors]
    else:
        lines += ['', 'No errors: this command would start.']
    return '\n'.join(lines).lstrip('\n')


def _title(lines: list[str], text: str) -> None:
    lines += ['', text, '-' * len(text)]


def _show(value: Any) -> str:
    text = ' '.join(to_words(value)) if value is not None else '-'
    return text if len(text) <= 60 else text[:57] + '...'


def _arguments(lines: list[str], plan: Plan) -> None:
    _title(lines, 'Arguments')
    order = ('refused', 'converted', 'renamed', 'no_effect', 'default', 'kept')
    for action in order:
        rows = [row for row in plan.arguments if row.action == action]
        if not rows:
            continue
        if action == 'kept':
            lines.append(f'kept ({len(rows)}):')
            lines += [f'  {row.name} = {_show(row.value)}' for row in rows]
            continue
        lines.append({'no_effect': 'without effect', 'default': 'not given'}.get(action, action) + f' ({len(rows)}):')
        for row in rows:
            source = f'{row.given_as} -> ' if row.given_as and row.given_as.lstrip('-').replace('-', '_') != row.name else ''
            lines.append(f'  {source}{row.name} = {_show(row.value)}' + (f'   ({row.reason})' if row.reason else ''))


def _batch(lines: list[str], b: BatchPlan, warnings: list[str]) -> None:
    _title(lines, 'Batch plan (sizes count completions)')
    model_ranks = b.world_size // b.dp_size
    rows = (
        ('dp_size', b.dp_size, f'world_size {b.world_size} / (TP x PP x CP = {model_ranks})'),
        ('micro_batch_size', b.micro_batch_size, ''),
        ('gradient_accumulation_steps', b.gradient_accumulation_steps, ''),
        (
            'global_batch_size',
            b.global_batch_size,
            f'micro_batch_size {b.micro_batch_size} x dp_size {b.dp_size} x gradient_accumulation_steps {b.gradient_accumulation_steps}',
        ),
        (
            'steps_per_generation',
            b.steps_per_generation,
            f'optimizer steps; {b.swift_steps_per_generation} micro-steps in the unit of swift rlhf',
        ),
        (
            'generation_batch_size',
            b.generation_batch_size,
            f'global_batch_size {b.global_batch_size} x steps_per_generation {b.steps_per_generation}',
        ),
        ('num_generations', b.num_generations, ''),
        (
            'num_rollout_prompts',
            b.num_rollout_prompts,
            f'generation_batch_size {b.generation_batch_size} / num_generations {b.num_generations}',
        ),
        ('num_train_prompts', b.num_train_prompts, f'global_batch_size {b.global_batch_size} / num_generations {b.num_generations}'),
        ('num_prompts_per_dp_group', b.num_prompts_per_dp_group, f'global_batch_size / num_generations / dp_size {b.dp_size}'),
    )
    for name, value, formula in rows:
        lines.append(f'  {name:<28}{value:>8g}' + (f'   = {formula}' if formula else ''))
    lines.append(
        f'  checked by: {b.batch_check}'
        + (
            ' (num_prompts_per_dp_group is a whole multiple of micro_batch_size)'
            if b.batch_check == 'documented'
            else ' (whole groups in a generation)'
        )
    )
    lines += [f'  {note}' for note in b.notes if note not in warnings]
    if b.swift_global_batch_size != b.global_batch_size:
        lines.append(f'  under data parallel alone the script would have global_batch_size {b.swift_global_batch_size}')


def _ranks(groups: list[list[int]]) -> str:
    shown = ' '.join('[' + ' '.join(str(rank) for rank in group) + ']' for group in groups[:8])
    return shown + (f' ... {len(groups)} groups' if len(groups) > 8 else '')


def _layout(lines: list[str], layout: Layout) -> None:
    _title(lines, 'Layout')
    lines.append(
        f'  world {layout.world_size} = TP {layout.tensor_model_parallel_size} x CP {layout.context_parallel_size} x DP '
        f'{layout.dp_size} x PP '
        f'{layout.pipeline_model_parallel_size}; experts: ETP {layout.expert_tensor_parallel_size} x EP '
        f'{layout.expert_model_parallel_size} x DP '
        f'{layout.expert_dp_size} x PP {layout.pipeline_model_parallel_size}'
        + (f'; {layout.virtual_pipeline_model_parallel_size} virtual stages' if layout.virtual_pipeline_model_parallel_size > 1 else '')
        + ('; sequence parallel' if layout.sequence_parallel else '')
    )
    names = (('tp', 'TP'), ('cp', 'CP'), ('dp', 'DP'), ('pp', 'PP'), ('etp', 'ETP'), ('ep', 'EP'), ('expert_dp', 'expert DP'))
    for key, name in names:
        if len(layout.groups[key][0]) > 1 and (key != 'expert_dp' or layout.expert_model_parallel_size > 1):
            lines.append(f'  {name:<10}{_ranks(layout.groups[key])}')
    vllm = layout.vllm
    if vllm['engine'] == 'transformers':
        lines.append('  rollouts  transformers, in every process (--use_vllm true --vllm_mode colocate is faster)')
    elif vllm['mode'] == 'server':
        lines.append('  rollouts  vLLM servers outside these processes')
    else:
        lines.append(f'  vLLM      {_ranks(vllm["groups"])}')


def _schedule(lines: list[str], s: Schedule) -> None:
    _title(lines, 'Schedule')
    unknown = 'not known before the data is loaded'
    if s.prompts is not None:
        lines.append(
            f'  an epoch: {s.prompts} prompts, {s.generations_per_epoch} generations, {s.optimizer_steps_per_epoch} optimizer steps, '
            f'{s.samples_per_epoch} completions'
        )
    else:
        lines.append(f'  an epoch: {unknown}')
    if s.optimizer_steps is not None:
        epochs = f' ({s.num_train_epochs:g} epochs)' if s.num_train_epochs is not None and s.prompts is not None else ''
        lines.append(f'  the run: {s.optimizer_steps} optimizer steps{epochs}, {s.generations} generations, {s.samples} completions')
    else:
        lines.append(f'  the run: {s.num_train_epochs:g} epochs' if s.num_train_epochs is not None else f'  the run: {unknown}')
    rate = s.learning_rate
    text = f'  learning rate: {rate["schedule"]} of {rate["of"]}, peak {rate["peak"]:g}'
    if 'step_0' in rate:
        text += (
            f', warm-up {rate["warmup_steps"]} steps; step 0: {rate["step_0"]:.4g}, step 1: {rate["step_1"]:.4g}, half: '
            f'{rate["step_half"]:.4g}, '
            f'last: {rate["step_last"]:.4g}'
        )
    lines.append(text)
    lines += [f'  {note}' for note in s.notes]
