"""One command to one plan (import tier 0: standard library only)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import UserError
from . import argv as argv_module
from . import checks, model_files
from .belongs import alone
from .batch_plan import counts_micro_steps, resolve_batch
from .command import megatron_command, worker_argv
from .convert import full_recompute
from .fields import all_fields
from .known_models import known_config
from .layout import resolve_layout
from .memory_plan import estimate_for
from .pending import unfinished
from .plan import Argument, BatchPlan, Plan
from .schedule import resolve_schedule
from .translation import BATCH_NAMES, Translation


def resolve(argv: Sequence[str], environ: Mapping[str, str], *, elsewhere: bool = False) -> Plan:
    """Everything that can be known of `swift rlhf ARGV` with this backend before torch is imported.

    ``argv`` is what follows `swift rlhf`; a .yaml, .yml or .json first argument is read. ``environ`` is the environment that the command
    would run in. ``elsewhere`` says that the command will run on another machine: local files that are missing here are warnings then.
    Reads local files (configuration, data, plugin sources, config.json); executes nothing, imports nothing heavy, writes
    nothing. Never raises for a user's mistake: the messages are in ``Plan.errors``. A command without `--backend` and without
    `--rlhf_type megatron_grpo` gives a plan with is_megatron false and nothing else.
    """
    try:
        words, environment, warnings = argv_module.expand_config(argv, environ)
    except UserError as error:
        # a file that cannot be read cannot say whose it is; only an open request makes the error ours
        return Plan(is_megatron=argv_module.looks_ours(argv), errors=[str(error)] if argv_module.looks_ours(argv) else [])
    if not argv_module.looks_ours(words):
        return Plan(is_megatron=False)
    given, more_warnings, errors = argv_module.read(words)
    t = Translation(given, elsewhere=elsewhere)
    t.warnings += warnings + more_warnings
    t.errors += errors
    plan = Plan(is_megatron=True, environment=environment)
    dry_run = t.asked('dry_run')
    plan.dry_run = '' if dry_run in (None, 'false') else dry_run
    world_size = _world_size(t, environment)
    t.run()
    if t.values.get('rlhf_type') is None and 'rlhf_type' not in t.given:
        t.errors.append('--rlhf_type grpo is needed beside --backend megatron (swift rlhf takes dpo where nothing is said).')
    batch = _batch(t, world_size)
    _defaults(t)
    config = _model_config(t, environment)
    checks.check_all(t, config)
    t.errors += unfinished(t)
    t.warnings += alone(t)
    plan.batch_plan = batch
    _fill(plan, t, batch, world_size, config)
    plan.arguments = t.rows
    plan.worker_argv = worker_argv(t.values)
    plan.effective = {name: t.effective(name) for name, field in all_fields().items() if field.in_worker}
    plan.warnings = list(dict.fromkeys(t.warnings))
    plan.errors = list(dict.fromkeys(t.errors))
    return plan


def is_dry_run(t: Translation) -> bool:
    """Whether the plan is for reading only; what concerns the estimate alone is said then."""
    return t.asked('dry_run') not in (None, 'false')


def _world_size(t: Translation, environ: Mapping[str, str]) -> int:
    asked = t.asked('world_size')
    try:
        size, source = argv_module.world_size_of(environ)
    except UserError as error:
        if asked is not None and is_dry_run(t):
            return max(1, asked)
        t.errors.append(f'{error} For a dry run, give --world_size N.' if is_dry_run(t) else str(error))
        return 1
    if asked is not None:
        if asked < 1:
            t.errors.append(f'--world_size is {asked}; it is 1 or more.')
        elif not is_dry_run(t) and asked != size:
            t.errors.append(
                f'--world_size {asked} is for a dry run; this command starts {size} process{"es" if size > 1 else ""}. Set '
                'NPROC_PER_NODE (and NNODES), or add --dry_run true.'
            )
        elif source and asked != size:
            t.warnings.append(f'--world_size {asked} is planned with; {source} says {size}.')
        return max(1, asked)
    if not source:
        _one_process(t, environ)
    return size


def _one_process(t: Translation, environ: Mapping[str, str]) -> None:
    """No variable says how many processes there are: one is started, which a script with one visible device means."""
    devices = [entry for entry in environ.get('CUDA_VISIBLE_DEVICES', '').split(',') if entry.strip()]
    if len(devices) > 1:
        t.warnings.append(
            f'CUDA_VISIBLE_DEVICES names {len(devices)} devices, and NPROC_PER_NODE is not set: one process is started, on the first device '
            f'(swift rlhf would spread the layers of the model over them). Set NPROC_PER_NODE={len(devices)} to use them.'
        )
    elif not devices and is_dry_run(t):
        t.warnings.append('NPROC_PER_NODE is not set: one process is planned. Set it, or give --world_size N to a dry run.')


def _batch(t: Translation, world_size: int) -> BatchPlan | None:
    names = (*BATCH_NAMES, 'num_generations', 'num_iterations', 'batch_check')
    given = {name: t.asked(name) for name in names if t.asked(name) is not None}
    micro, per_device = given.get('micro_batch_size'), given.get('per_device_train_batch_size')
    if micro is not None and per_device is not None and micro != per_device:
        t.errors.append(
            f'--per_device_train_batch_size is {per_device}, and --micro_batch_size is {micro}. They are one setting here: '
            f'leave one of them out, or make '
            'them equal.'
        )
    sizes = [t.effective(f'{name}_parallel_size') for name in ('tensor_model', 'pipeline_model', 'context')]
    ulysses = t.asked('sequence_parallel_size') or 1
    result = resolve_batch(given, world_size=world_size, tp=sizes[0], pp=sizes[1], cp=sizes[2], ulysses=ulysses)
    t.errors += result.errors
    t.warnings += result.warnings
    plan = result.plan
    if plan is None:
        return None
    for name, value in (
        ('micro_batch_size', plan.micro_batch_size),
        ('global_batch_size', plan.global_batch_size),
        ('steps_per_generation', plan.steps_per_generation),
    ):
        t.values[name], t.source[name] = value, name
    if 'generation_batch_size' in given:
        t.values['generation_batch_size'], t.source['generation_batch_size'] = plan.generation_batch_size, 'generation_batch_size'
    _batch_rows(t, plan, given)
    return plan


def _batch_rows(t: Translation, plan: BatchPlan, given: Mapping[str, Any]) -> None:
    formula = (
        f'global_batch_size = micro_batch_size {plan.micro_batch_size} x dp_size {plan.dp_size} x gradient_accumulation_steps '
        f'{plan.gradient_accumulation_steps}'
    )
    micro_steps, beside = counts_micro_steps(given)
    unit = f'counts micro-steps beside {beside}' if micro_steps else f'counts optimizer steps beside {beside}'
    shown = {
        'per_device_train_batch_size': (
            'converted',
            'micro_batch_size',
            plan.micro_batch_size,
            'completions in one micro-batch of one data-parallel rank',
        ),
        'micro_batch_size': ('kept', 'micro_batch_size', plan.micro_batch_size, ''),
        'gradient_accumulation_steps': ('converted', 'global_batch_size', plan.global_batch_size, formula),
        'global_batch_size': ('kept', 'global_batch_size', plan.global_batch_size, ''),
        'steps_per_generation': ('converted' if micro_steps else 'kept', 'steps_per_generation', plan.steps_per_generation, unit),
        'generation_batch_size': ('kept', 'generation_batch_size', plan.generation_batch_size, ''),
        'keep_global_batch': ('kept', 'keep_global_batch', given.get('keep_global_batch'), 'used before the workers start'),
    }
    for name in BATCH_NAMES:
        if name in t.given:
            action, target, value, reason = shown[name]
            t.row(t.given[name], action, name=target, value=value, reason=reason)
    sources = {
        'micro_batch_size': ('per_device_train_batch_size',),
        'global_batch_size': ('gradient_accumulation_steps',),
        'steps_per_generation': (),
    }
    for name, others in sources.items():
        if name not in t.given and not any(other in t.given for other in others):
            reason = formula if name == 'global_batch_size' else 'as in swift rlhf'
            t.rows.append(Argument(name=name, value=t.values[name], given_as='', action='default', reason=reason))


def _defaults(t: Translation) -> None:
    """Where `swift rlhf` and Megatron take different values when nothing is said, `swift rlhf` is followed."""
    t.default('tuner_type', 'lora', "as in swift rlhf; Megatron's own default is full")
    full = t.effective('tuner_type') == 'full'
    t.default('lr', 1e-5 if full else 1e-4, f'as in swift rlhf for tuner_type {t.effective("tuner_type")}')
    if 'train_iters' in t.values:
        if 'num_train_epochs' in t.values:
            t.values.pop('num_train_epochs')
            t.warnings.append(
                f'max_steps {t.values["train_iters"]} wins over num_train_epochs {t.asked("num_train_epochs"):g}, as in swift rlhf.'
            )
    else:
        t.default('num_train_epochs', 3.0, 'as in swift rlhf')
    if not any(name in t.given for name in checks.MEGATRON_SCHEDULE) or any(name in t.given for name in checks.HF_SCHEDULE):
        t.default('lr_scheduler_type', 'cosine', 'as in swift rlhf')
    t.default('beta', 0.04, 'as in swift rlhf')
    t.default('loss_type', 'grpo', 'as in swift rlhf')
    t.default('padding_free', True, 'rollouts are packed; the gradient does not depend on it')
    if t.effective('vllm_mode') is not None:
        t.default('use_vllm', True, 'vllm_mode is given')
    t.default('use_vllm', False, "as in swift rlhf; Megatron's own default is true")
    if t.effective('tuner_type') == 'lora':
        t.default('merge_lora', False, "swift rlhf writes the adapter alone; Megatron's own default writes a merged model beside it")
    if isinstance(t.effective('model'), str) and os.path.isdir(os.path.expanduser(t.effective('model'))):
        t.default('check_model', False, 'the model is a local folder: no hub is asked whether it is the latest')
    t.default('dataloader_num_workers', 1, "as in swift rlhf; Megatron's own default is 4")
    if 'recompute_granularity' not in t.values:
        full_recompute(t)
        t.rows.append(
            Argument(
                name='recompute_granularity',
                value='full',
                given_as='',
                action='default',
                reason='gradient_checkpointing is true in swift rlhf: each layer is recomputed (uniform, 1)',
            )
        )
    elif t.values['recompute_granularity'] == 'full':
        t.default('recompute_method', 'uniform', 'full recomputation needs a method')
        t.default('recompute_num_layers', 1, 'full recomputation needs a number of layers')
    t.default('output_dir', f'output/{_model_name(t)}', 'as in swift rlhf')
    if t.effective('multi_turn_scheduler') is not None:
        t.default('loss_scale', 'default', 'as in swift rlhf with multi_turn_scheduler')
    _engine_defaults(t)
    _evaluation_defaults(t)
    loggers = t.effective('report_to') or []
    if 'swanlab' in loggers:
        t.default('swanlab_project', 'ms-swift', 'as in swift rlhf')
    if 'wandb' in loggers:
        t.default('wandb_project', 'ms-swift', 'as in swift rlhf')
    if 'soft_overlong' in (t.effective('reward_funcs') or []):
        t.default('soft_max_length', t.effective('max_completion_length'), 'as in swift rlhf: max_completion_length')
    if t.effective('loss_type') == 'real' and t.effective('scale_rewards') not in (None, 'none'):
        t.warnings.append('--loss_type real normalises no rewards: scale_rewards none is used, as in swift rlhf.')
        t.values['scale_rewards'] = 'none'
    if t.effective('resume_from_checkpoint'):
        _resume(t, full)


def _engine_defaults(t: Translation) -> None:
    plain = t.effective('async_generate') or not t.effective('use_vllm') or t.effective('vllm_mode') == 'server'
    if plain and t.effective('sleep_level'):
        t.values['sleep_level'] = 0
        t.warnings.append('sleep_level is 0 with a server, with async_generate and without vLLM, as in swift rlhf.')
    if not t.effective('use_vllm') and t.effective('vllm_tensor_parallel_size') != 1:
        t.values['vllm_tensor_parallel_size'] = 1


def _evaluation_defaults(t: Translation) -> None:
    has_data = bool(t.effective('val_dataset')) or t.effective('split_dataset_ratio') > 0
    strategy = t.effective('eval_strategy') or ('steps' if t.effective('save_strategy') is None else t.effective('save_strategy'))
    if not has_data:
        if t.asked('eval_strategy') not in (None, 'no'):
            t.warnings.append(
                f'--eval_strategy {t.asked("eval_strategy")}: there is no validation data (--val_dataset or '
                f'--split_dataset_ratio), so nothing is '
                'evaluated, as in swift rlhf.'
            )
        elif t.asked('eval_steps') is not None or t.asked('eval_on_start'):
            name = 'eval_steps' if t.asked('eval_steps') is not None else 'eval_on_start'
            t.warnings.append(f'--{name} is given, and there is no validation data (--val_dataset or --split_dataset_ratio): nothing is evaluated.')
        strategy = 'no'
    t.values['eval_strategy'], t.source['eval_strategy'] = strategy, 'eval_strategy'
    if strategy == 'no':
        t.default('eval_iters', 0, 'no evaluation')
        if t.effective('split_dataset_ratio') > 0:
            t.values['split_dataset_ratio'] = 0.0
            t.warnings.append('split_dataset_ratio is 0 where nothing is evaluated, as in swift rlhf: all rows are trained on.')
    elif strategy == 'steps':
        t.default('eval_steps', t.effective('save_steps'), 'save_steps, as in swift rlhf')
    if t.effective('val_dataset') and t.effective('split_dataset_ratio') > 0:
        t.values['split_dataset_ratio'] = 0.0
        t.warnings.append('split_dataset_ratio is 0 where val_dataset is given, as in swift rlhf.')


def _resume(t: Translation, full: bool) -> None:
    only_model = t.effective('resume_only_model')
    t.default('mcore_model' if full else 'mcore_adapter', t.effective('resume_from_checkpoint'), 'resume_from_checkpoint')
    t.default(
        'finetune', bool(only_model), 'resume_only_model' if only_model else 'a resumed run keeps iteration, optimizer and data position'
    )
    if only_model:
        t.default('no_load_optim', True, 'resume_only_model')
        t.default('no_load_rng', True, 'resume_only_model')


def _model_name(t: Translation) -> str:
    name = (t.effective('model') or t.effective('mcore_model') or 'model').rstrip('/')
    return os.path.basename(os.path.abspath(os.path.expanduser(name)) if name in ('.', '..') else name)


def _model_config(t: Translation, environ: Mapping[str, str]) -> dict[str, Any] | None:
    """The model's config.json, or the published sizes of a model that is not on this machine."""
    name = t.effective('model')
    if not isinstance(name, str):
        return None
    path = model_files.find_config(name, environ)
    if path is not None:
        return model_files.read_config(path)
    known = None if model_files.is_path(name) else known_config(name)
    if known is not None and is_dry_run(t):
        t.warnings.append(f'config.json of {name} is not on this machine; the published sizes of the model are used for the estimate.')
    return known


def _fill(plan: Plan, t: Translation, batch: BatchPlan | None, world_size: int, config: dict[str, Any] | None) -> None:
    """Layout, schedule, memory and the equal command: whatever the errors leave possible."""
    sizes = {name: t.effective(name) for name in all_fields() if name.endswith('_parallel_size')}
    sizes.update({name: t.effective(name) for name in ('sequence_parallel', 'use_vllm', 'vllm_mode')})
    plan.layout, errors = resolve_layout(sizes, world_size)
    t.errors += errors
    if batch is None:
        return
    names = (
        'dataset',
        'val_dataset',
        'split_dataset_ratio',
        'streaming',
        'interleave_prob',
        'lr',
        'lr_scheduler_type',
        'lr_scheduler_kwargs',
        'warmup_steps',
        'warmup_ratio',
        'lr_decay_style',
    )
    schedule, errors = resolve_schedule(
        {name: t.effective(name) for name in names}, batch, train_iters=t.values.get('train_iters'), epochs=t.values.get('num_train_epochs')
    )
    t.errors += errors
    plan.schedule = schedule
    plan.command, plan.command_notes = megatron_command(t, schedule, plan.environment, world_size)
    if config is not None and plan.layout is not None:
        plan.memory = estimate_for(t, batch, config)
    elif config is None and t.effective('model') and is_dry_run(t):
        t.warnings.append(
            f'No memory estimate, and no check of family, attention and layout against the model: config.json of {t.effective("model")} is neither in '
            f'a local folder nor in the Hugging Face or ModelScope cache.'
        )
