"""A plan on the page: what counts in a few lines, in the page's language, and the dry run's whole report (import tier 0)."""

from __future__ import annotations

from html import escape

from swift_megatron_grpo.args import report
from swift_megatron_grpo.args.plan import Plan

_GIB = 2**30
STYLE = """<style>
.megatron-plan h3 { margin: 0 0 6px; }
.megatron-plan ul { margin: 2px 0 8px; padding-left: 20px; list-style: disc; }
.megatron-plan li { margin: 1px 0; }
.megatron-plan .megatron-errors, .megatron-plan .megatron-errors * { color: #b91c1c !important; }
.megatron-plan .megatron-ok, .megatron-plan .megatron-ok * { color: #15803d !important; }
.dark .megatron-plan .megatron-errors, .dark .megatron-plan .megatron-errors * { color: #fca5a5 !important; }
.dark .megatron-plan .megatron-ok, .dark .megatron-plan .megatron-ok * { color: #86efac !important; }
.megatron-plan table, .megatron-plan tr { border: none !important; }
.megatron-plan table { border-collapse: collapse; margin: 6px 0 !important; width: auto; }
.megatron-plan th, .megatron-plan td { border: none !important; padding: 2px 20px 2px 0 !important; text-align: left; vertical-align: top; }
.megatron-plan th { font-weight: 600; white-space: nowrap; }
.megatron-plan pre { max-height: 420px; overflow: auto; font-size: 12px; line-height: 1.35; padding: 8px; white-space: pre;
  background: var(--background-fill-secondary); border: 1px solid var(--border-color-primary); }
.megatron-plan summary { cursor: pointer; }
</style>"""

WORDS = {
    'title': {'en': 'Plan', 'zh': '计划'},
    'ok': {'en': 'This run would start.', 'zh': '可以开始。'},
    'errors': {'en': 'This run would not start:', 'zh': '不能开始：'},
    'warnings': {'en': 'Warnings', 'zh': '警告'},
    'processes': {'en': 'Processes', 'zh': '进程'},
    'batch': {'en': 'Completions a step', 'zh': '每个优化器步的 completion'},
    'generation': {'en': 'A generation', 'zh': '每次生成'},
    'run': {'en': 'The run', 'zh': '整个训练'},
    'memory': {'en': 'Memory a device', 'zh': '每张卡的显存'},
    'engine': {'en': 'Rollouts', 'zh': '采样'},
    'report': {'en': 'The whole report of --dry_run true', 'zh': '--dry_run true 的完整报告'},
    'refused': {'en': 'Nothing was started', 'zh': '没有启动任何进程'},
    'look': {
        'en': 'The plan below has changed since it was shown. Look at it, and press Begin again.',
        'zh': '下方的计划在显示之后有变化。请查看后再次点击开始训练。',
    },
    'stopping': {
        'en': 'The run ends after the optimizer step that is under way, with a checkpoint (at once, where it has not begun to train). It has {:.0f} s; '
        'press again to end it at once.',
        'zh': '训练将在当前优化器步之后保存检查点并结束（尚未开始训练则立即结束），限时 {:.0f} 秒；再次点击则立即结束。',
    },
    'still_running': {
        'en': 'The run is still at its step; press again to end it at once.',
        'zh': '训练还在当前步中；再次点击则立即结束。',
    },
    'estimate': {'en': 'estimate', 'zh': '估计'},
    'training': {'en': 'training', 'zh': '训练'},
    'sampling': {'en': 'sampling', 'zh': '采样'},
    'fits': {'en': 'fits a device of {:.0f} GB', 'zh': '可放入 {:.0f} GB 的卡'},
    'too_large': {'en': 'does NOT fit a device of {:.0f} GB', 'zh': '放不进 {:.0f} GB 的卡'},
    'step': {'en': 'optimizer step', 'zh': '优化器步'},
    'steps': {'en': 'optimizer steps', 'zh': '优化器步'},
    'prompts': {'en': 'prompts', 'zh': '个 prompt'},
    'completions': {'en': 'completions', 'zh': '个 completion'},
    'unknown': {'en': 'known when the data is loaded', 'zh': '读取数据后得知'},
    'epochs': {'en': 'epochs', 'zh': '轮'},
}
NOTES = {
    'accumulation': {
        'en': 'Gradient accumulation steps 1 of the hyper settings is left out: the global batch size is given.',
        'zh': '已给出 global batch 大小，超参数中的梯度累计步数 1 不使用。',
    },
}


def word(name: str, lang: str) -> str:
    return WORDS[name][lang]


def summary(plan: Plan, lang: str) -> list[tuple[str, str]]:
    """(what, value) of the lines that decide: layout, batch, length, engine, memory; those that the plan's errors leave known."""
    rows: list[tuple[str, str]] = []
    layout, batch, schedule = plan.layout, plan.batch_plan, plan.schedule
    if layout is not None:
        sizes = [
            ('TP', layout.tensor_model_parallel_size),
            ('PP', layout.pipeline_model_parallel_size),
            ('VPP', layout.virtual_pipeline_model_parallel_size),
            ('CP', layout.context_parallel_size),
            ('EP', layout.expert_model_parallel_size),
            ('ETP', layout.expert_tensor_parallel_size),
            ('DP', layout.dp_size),
        ]
        shown = [f'{name} {size}' for name, size in sizes if size > 1 or name in ('TP', 'DP')]
        rows.append((word('processes', lang), f'{layout.world_size} = ' + ' x '.join(shown) + (' + SP' if layout.sequence_parallel else '')))
    if batch is not None:
        rows.append(
            (
                word('batch', lang),
                f'{batch.global_batch_size} = {batch.micro_batch_size} x DP {batch.dp_size} x {batch.gradient_accumulation_steps}'
                f' ({batch.num_train_prompts:g} {word("prompts", lang)} x {batch.num_generations})',
            )
        )
        rows.append(
            (
                word('generation', lang),
                f'{batch.generation_batch_size} {word("completions", lang)}, {batch.num_rollout_prompts:g} {word("prompts", lang)},'
                f' {_steps(batch.steps_per_generation * batch.num_iterations, lang)}',
            )
        )
    if schedule is not None:
        if schedule.optimizer_steps is not None:
            text = _steps(schedule.optimizer_steps, lang)
        elif schedule.num_train_epochs is not None:
            text = f'{schedule.num_train_epochs:g} {word("epochs", lang)} ({word("unknown", lang)})'
        else:
            text = word('unknown', lang)
        rows.append((word('run', lang), text))
    if layout is not None:
        vllm = layout.vllm
        rows.append((word('engine', lang), 'transformers' if vllm['engine'] == 'transformers' else f'vLLM, {vllm["mode"]}'))
    if plan.memory is not None:
        memory = plan.memory
        text = f'{word("training", lang)} {memory["train_bytes"] / _GIB:.2f} GiB'
        if memory['rollout_bytes']:
            text += f', {word("sampling", lang)} {memory["rollout_bytes"] / _GIB:.2f} GiB'
        fits = word('fits' if memory['fits'] else 'too_large', lang).format(memory['device_bytes'] / 1e9)
        rows.append((word('memory', lang), f'{text} ({word("estimate", lang)}); {fits}'))
    return rows


def _steps(number: int, lang: str) -> str:
    return f'{number} {word("step" if number == 1 else "steps", lang)}'


def html(plan: Plan, notes: list[str], lang: str) -> str:
    """The plan as the section shows it. All text is escaped."""
    parts = [_errors(plan.errors, lang) if plan.errors else f'<p class="megatron-ok"><b>{word("ok", lang)}</b></p>']
    cells = ''.join(f'<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>' for name, value in summary(plan, lang))
    parts.append(f'<table>{cells}</table>')
    said = [NOTES[note][lang] for note in notes] + plan.warnings
    if said:
        parts.append(f'<b>{word("warnings", lang)}</b>' + _list(said))
    parts.append(f'<details><summary>{word("report", lang)}</summary><pre>{escape(report.render_text(plan))}</pre></details>')
    return _frame(parts, lang)


def refusal(message: str, lang: str) -> str:
    """What stands in the place of a plan where the page's values make no command."""
    return _frame([_errors([message], lang)], lang)


def error_text(errors: list[str], lang: str) -> str:
    """What the page says when Begin is pressed on a plan with errors."""
    return escape(f'{word("refused", lang)}: ' + ' '.join(errors))


def _frame(parts: list[str], lang: str) -> str:
    return f'{STYLE}<div class="megatron-plan"><h3>{word("title", lang)}</h3>{"".join(parts)}</div>'


def _errors(errors: list[str], lang: str) -> str:
    return f'<div class="megatron-errors"><b>{word("errors", lang)}</b>{_list(errors)}</div>'


def _list(texts: list[str]) -> str:
    return '<ul>' + ''.join(f'<li>{escape(text)}</li>' for text in texts) + '</ul>'
