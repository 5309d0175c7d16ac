"""What can be refused before anything is loaded (import tier 0). Each check gives complete messages."""

from __future__ import annotations

import importlib.util
from typing import Any

from . import lr as lr_schedule
from .doctor import in_range, installed_version
from .engine_checks import engine
from .family_checks import against_family, against_model
from .path_checks import paths
from .registries import unknown_constant, unknown_name
from .translation import Translation, show

HF_SCHEDULE = ('lr_scheduler_type', 'lr_scheduler_kwargs', 'warmup_steps', 'warmup_ratio')
MEGATRON_SCHEDULE = (
    'lr_decay_style',
    'lr_decay_iters',
    'lr_warmup_iters',
    'lr_warmup_fraction',
    'lr_warmup_init',
    'min_lr',
    'lr_wsd_decay_style',
    'lr_wsd_decay_iters',
)
# (name, smallest, largest, whether the ends belong to it)
RANGES = (
    ('lr', 0.0, None, True),
    ('temperature', 0.0, None, False),
    ('top_p', 0.0, 1.0, True),
    ('min_p', 0.0, 1.0, True),
    ('vllm_gpu_memory_utilization', 0.0, 1.0, True),
    ('top_entropy_quantile', 0.0, 1.0, True),
    ('lora_rank', 1, None, True),
    ('max_completion_length', 1, None, True),
    ('max_length', 1, None, True),
    ('num_iterations', 1, None, True),
    ('beta', 0.0, None, True),
    ('weight_decay', 0.0, None, True),
    ('clip_grad', 0.0, None, True),
    ('warmup_ratio', 0.0, 1.0, True),
    ('train_iters', 1, None, True),
    ('num_train_epochs', 0.0, None, False),
    ('max_resample_times', 0, None, True),
    ('max_tokens_per_micro_batch', 1, None, True),
    ('max_tokens_per_forward_only_micro_batch', 1, None, True),
    ('weight_sync_bucket_mb', 1, None, True),
    ('max_staleness', 0, None, True),
    ('rollout_timeout', 0.0, None, False),
    ('sync_timeout', 0.0, None, False),
    ('reward_timeout', 0.0, None, False),
    ('step_timeout', 0.0, None, False),
    ('server_timeout', 0.0, None, False),
    ('dual_clip', 1.0, None, False),
    ('kl_cov_ratio', 0.0, 1.0, True),
    ('clip_cov_ratio', 0.0, 1.0, True),
    ('lora_dropout', 0.0, 1.0, True),
    ('split_dataset_ratio', 0.0, 1.0, True),
    ('freeze_parameters_ratio', 0.0, 1.0, True),
    ('sleep_level', 0, 2, True),
    ('vllm_max_model_len', 1, None, True),
    ('epsilon', 0.0, None, True),
    ('save_steps', 1, None, True),
    ('repetition_penalty', 0.0, None, False),
    ('ref_model_sync_steps', 1, None, True),
    ('early_stop_interval', 1, None, True),
    ('eval_delay', 0.0, None, True),
    ('ref_model_mixup_alpha', 0.0, 1.0, True),
)


def check_all(t: Translation, config: dict[str, Any] | None) -> None:
    """Every check below, in the order in which a reader would want to mend things."""
    for check in (
        required,
        names_of_model,
        schedule_names,
        ranges,
        engine,
        rewards_and_losses,
        tuner,
        best_checkpoint,
        layout_flags,
        newer_megatron,
        paths,
    ):
        check(t)
    if config is not None:
        against_model(t, config)
    elif t.effective('model_type') is not None:
        against_family(t, {'model_type': t.effective('model_type')})


def required(t: Translation) -> None:
    if not t.effective('model') and not t.effective('mcore_model'):
        t.errors.append('--model is needed: a Hugging Face or ModelScope id, or a folder with config.json and safetensors.')
    if not t.effective('dataset'):
        t.errors.append('--dataset is needed: ids or files (.jsonl, .json, .csv) whose rows hold the prompts in `messages` or `query`.')


def names_of_model(t: Translation) -> None:
    """Names of model types and templates that ms-swift does not know."""
    for name in ('model_type', 'template'):
        if t.effective(name) is not None:
            t.errors += unknown_constant(name, t.effective(name), t.effective('external_plugins') or [])


def schedule_names(t: Translation) -> None:
    """One schedule: the names of transformers or those of Megatron, not both unless they say the same."""
    hf = [name for name in HF_SCHEDULE if name in t.given]
    megatron = [name for name in MEGATRON_SCHEDULE if name in t.given]
    if hf and megatron:
        shown = ', '.join(f'--{name} {t.asked(name)}' for name in (*hf, *megatron))
        low = (
            ' A smallest rate is --lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs \'{"min_lr": 1e-6}\'.'
            if 'min_lr' in megatron
            else ''
        )
        if not _same_schedule(t, hf, megatron):
            t.errors.append(
                f'Two learning-rate schedules are named: {shown}. Give the names of transformers ({", ".join(HF_SCHEDULE)}) or those of '
                f'Megatron ({", ".join(MEGATRON_SCHEDULE[:4])}, ...), not both.{low}'
            )
            return
        for name in megatron:
            t.values.pop(name, None)
    elif megatron:
        return
    ratio, steps = t.effective('warmup_ratio'), t.effective('warmup_steps')
    if ratio and steps:
        t.errors.append(f'--warmup_ratio is {ratio:g}, and --warmup_steps is {steps:g}. Give one of them.')
    if steps < 0:
        t.errors.append(f'--warmup_steps is {steps:g}; it is 0 or more.')
    if ratio and ratio >= 1:
        t.errors.append(f'--warmup_ratio is {ratio:g}; it is a share below 1. --warmup_steps {ratio:g} counts steps.')
    kwargs = t.effective('lr_scheduler_kwargs') or {}
    if not isinstance(kwargs, dict):
        t.errors.append(f'--lr_scheduler_kwargs is {kwargs!r}; it is a JSON object, such as \'{{"min_lr": 1e-6}}\'.')
        return
    t.errors += lr_schedule.check(t.effective('lr_scheduler_type'), kwargs, t.effective('lr') or 1.0)


def _same_schedule(t: Translation, hf: list[str], megatron: list[str]) -> bool:
    pairs = {'warmup_ratio': 'lr_warmup_fraction', 'warmup_steps': 'lr_warmup_iters', 'lr_scheduler_type': 'lr_decay_style'}
    inverse = {value: key for key, value in pairs.items()}
    return all(name in inverse and inverse[name] in hf and t.asked(name) == t.asked(inverse[name]) for name in megatron)


def ranges(t: Translation) -> None:
    for name, low, high, closed in RANGES:
        value = t.values.get(name)
        if value is None or isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        too_low = low is not None and (value < low if closed else value <= low)
        if too_low or (high is not None and value > high):
            bounds = (
                f'at least {low:g}'
                if closed and high is None
                else f'more than {low:g}'
                if high is None
                else f'between {low:g} and {high:g}'
            )
            t.errors.append(f'--{t.source.get(name, name)} is {value:g}; it is {bounds}.')
    if t.effective('bf16') and t.effective('fp16'):
        t.errors.append('--bf16 true and --fp16 true are both given; choose one.')


def rewards_and_losses(t: Translation) -> None:
    functions, models = t.effective('reward_funcs') or [], t.effective('reward_model') or []
    teacher = t.effective('teacher_model') or t.effective('teacher_model_server')
    gym = t.effective('use_gym_env') or t.effective('gym_env')
    if not functions and not models and not teacher and not gym and not t.effective('multi_turn_scheduler'):
        if t.effective('vllm_mode') == 'server' and t.effective('use_gym_env') is None:
            t.warnings.append(
                'No reward is named: the rollout server must run a gym environment (--use_gym_env true there), which gives it.'
            )
        else:
            t.errors.append(
                'No reward is named: give --reward_funcs (built in: accuracy, format, cosine, repetition, soft_overlong, ...; your own '
                'with --external_plugins), --reward_model, --gym_env, or --teacher_model.'
            )
    for name in functions:
        t.errors += unknown_name('reward_funcs', name, 'orms', t.effective('external_plugins'))
    for name in t.effective('reward_model_plugin') or []:
        t.errors += unknown_name('reward_model_plugin', name, 'rm_plugins', t.effective('external_plugins'))
    weights = t.effective('reward_weights')
    if weights is not None and len(weights) != len(functions) + len(models):
        t.errors.append(
            f'--reward_weights has {len(weights)} numbers; there are {len(functions)} reward functions and {len(models)} '
            f'reward models, so it '
            f'needs {len(functions) + len(models)}.'
        )
    if 'soft_overlong' in functions and t.effective('soft_cache_length') is None:
        t.errors.append('--reward_funcs soft_overlong needs --soft_cache_length (the number of tokens over which the penalty grows).')
    if t.effective('truncation_strategy') not in (None, 'left', 'delete'):
        t.errors.append(f'--truncation_strategy is {t.effective("truncation_strategy")!r}; GRPO takes left or delete.')
    if t.effective('num_generations') == 1 and not teacher:
        t.errors.append('--num_generations is 1; a group needs 2 or more to compare its rewards.')
    if t.effective('teacher_model') and t.effective('teacher_model_server'):
        t.errors.append('--teacher_model and --teacher_model_server are both given; one of them is the teacher.')
    _teacher_limits(t, bool(teacher), functions)
    _self_distillation(t, functions)
    _experts(t)
    if t.effective('kl_cov_ratio') and t.effective('clip_cov_ratio'):
        t.errors.append('--kl_cov_ratio and --clip_cov_ratio are both given; they are two answers to one question, choose one.')
    if t.effective('clip_cov_low') > t.effective('clip_cov_high'):
        t.errors.append(f'--clip_cov_low {t.effective("clip_cov_low"):g} lies above --clip_cov_high {t.effective("clip_cov_high"):g}.')


def _teacher_limits(t: Translation, teacher: bool, functions: list[str]) -> None:
    """A teacher gives an advantage for each token; what needs one for each sequence does not go with it (swift.arguments.rlhf_args)."""
    if not teacher:
        return
    if t.effective('loss_type') in ('real', 'fipo'):
        t.errors.append(
            f'--loss_type {t.effective("loss_type")} needs one advantage a sequence, and a teacher gives one a token. Use '
            f'grpo, bnpo, dr_grpo, dapo, '
            'cispo or sapo.'
        )
    if t.effective('off_policy_sequence_mask_delta') is not None:
        t.errors.append('--off_policy_sequence_mask_delta needs one advantage a sequence, and a teacher gives one a token. Leave it out.')
    if not functions:
        for name, value in (('dynamic_sample', True), ('scale_rewards', 'gdpo')):
            if t.effective(name) == value:
                t.errors.append(f'--{name} {value} needs --reward_funcs: with a teacher alone there are no rewards to compare.')


def _self_distillation(t: Translation, functions: list[str]) -> None:
    """RLSD and SDAR read a teacher token by token (swift.arguments.rlhf_args)."""
    asked = [name for name in ('advantage_reweight', 'sdar_loss_coef') if t.effective(name)]
    if len(asked) == 2:
        t.errors.append('--advantage_reweight and --sdar_loss_coef are two uses of one teacher; choose one.')
    for name in asked:
        if t.effective('teacher_model_server'):
            t.errors.append(f'--{name} {t.effective(name)} does not go with --teacher_model_server: whether a server cuts the answer into the same '
                            'tokens is not known. Use --teacher_model, or rows with a column teacher_prompt alone.')
    if t.effective('advantage_reweight'):
        if not functions:
            t.errors.append('--advantage_reweight rlsd needs --reward_funcs: it scales an advantage, and a teacher alone gives none.')
        for name, low, high in (('rlsd_lambda', 0.0, 1.0), ('rlsd_reweight_clip_range', 0.0, None)):
            if t.effective(name) < low or (high is not None and t.effective(name) > high):
                t.errors.append(f'--{name} is {t.effective(name):g}; it is {"from 0 to 1" if high else "0 or more"}.')
        if t.effective('loss_type') in ('real', 'fipo') or t.effective('off_policy_sequence_mask_delta') is not None:
            t.errors.append('--advantage_reweight rlsd gives one advantage a token; loss_type real, fipo and off_policy_sequence_mask_delta need one '
                            'a sequence.')
    if t.effective('sdar_loss_coef') and t.effective('sdar_gate_beta') <= 0:
        t.errors.append(f'--sdar_gate_beta is {t.effective("sdar_gate_beta"):g}; it is above 0.')


def _experts(t: Translation) -> None:
    if not t.effective('chord_sft_dataset'):
        return
    for name, low, high in (('sft_per_device_train_batch_size', 1, None), ('mu_warmup_steps', 0, None), ('mu_decay_steps', 0, None),
                            ('mu_peak', 0, 1), ('mu_valley', 0, 1)):
        value = t.effective(f'chord_{name}')
        allowed = f'from {low} to {high}' if high is not None else f'{low} or more'
        if value is None:
            t.errors.append(f'--chord_sft_dataset needs --chord_{name} ({allowed}).')
        elif value < low or (high is not None and value > high):
            t.errors.append(f'--chord_{name} is {value:g}; it is {allowed}.')
    if t.effective('router_replay_mode') not in (None, 'disabled'):
        t.errors.append(f'--chord_sft_dataset does not go with --router_replay_mode {t.effective("router_replay_mode")}: no rollout has routed the '
                        'expert answers. Leave one of them out.')


# Modules by Megatron's names, and ms-swift's word for them. On Ascend mcore-bridge adapts the output layer.
NOT_ADAPTED = ('word_embeddings', 'embedding', 'position_embeddings', 'all-embedding')


def tuner(t: Translation) -> None:
    kind = t.effective('tuner_type')
    if kind != 'full' and t.effective('ref_model') and t.effective('beta') == 0.0:
        t.warnings.append(
            f'--ref_model {t.effective("ref_model")} has no effect with --beta 0: there is no reference, in swift rlhf neither.'
        )
        t.values['ref_model'] = None
    elif kind != 'full' and t.effective('ref_model'):
        t.errors.append(
            f'--ref_model is given with --tuner_type {kind}: the reference of an adapter is the model without it, in swift rlhf too. Leave '
            '--ref_model out, or give --ref_adapters.'
        )
    if kind == 'full' and t.effective('adapters'):
        t.errors.append(
            '--tuner_type full is given with --adapters; merge them first (swift export --merge_lora true), or train with '
            '--tuner_type lora.'
        )
    not_adapted = NOT_ADAPTED + (('output_layer', ) if installed_version('torch-npu') is None else ())
    whole = [name for name in t.effective('target_modules') or [] if name.rsplit('.', 1)[-1] in not_adapted]
    if kind != 'full' and whole:
        t.errors.append(
            f'--target_modules {" ".join(whole)}: mcore-bridge has no adapters on embeddings and on the output layer. '
            '--modules_to_save embed_tokens lm_head trains them whole, beside the adapter.'
        )
    for name in ('ref_adapters', 'mcore_adapter', 'mcore_ref_adapter'):
        if kind == 'full' and t.effective(name):
            t.errors.append(
                f'--tuner_type full is given with --{name}, and ms-swift would train LoRA then. Merge the adapter first (swift export '
                '--merge_lora true) and give the folder as --model or --ref_model, or train with --tuner_type lora.'
            )
    if kind == 'lora_llm' and t.asked('merge_lora') is False:
        t.errors.append('--tuner_type lora_llm needs --merge_lora true: its checkpoints are whole models.')
    if t.effective('optimizer') not in ('muon', 'dist_muon'):
        for name in ('muon_lr', 'muon_min_lr'):
            if t.asked(name) is not None:
                t.errors.append(f'--{name} {t.asked(name):g} belongs to --optimizer muon or dist_muon.')
    if len(t.effective('adapters') or []) > 1:
        t.errors.append(f'--adapters has {len(t.effective("adapters"))} entries; one adapter can be trained on.')
    if kind == 'lora_llm' and not t.effective('no_save_optim'):
        t.errors.append('--tuner_type lora_llm needs --save_only_model true: its optimizer state cannot be stored.')
    if 0 < (t.effective('freeze_parameters_ratio') or 0) < 1 and t.effective('pipeline_model_parallel_size') > 1:
        t.errors.append(
            '--freeze_parameters_ratio counts layers of the whole model and does not go with --pipeline_model_parallel_size '
            f'{t.effective("pipeline_model_parallel_size")}. Use --freeze_parameters.'
        )


def best_checkpoint(t: Translation) -> None:
    """load_best_model_at_end, early_stop_interval: each checkpoint must have an evaluation (transformers.TrainingArguments)."""
    name = next((name for name in ('load_best_model_at_end', 'early_stop_interval') if t.effective(name)), None)
    if name is None:
        return
    given = f'--{name} {show(t.effective(name))}'
    save, evaluate = t.effective('save_strategy'), t.effective('eval_strategy')
    if evaluate == 'no':
        t.errors.append(
            f'{given} goes by evaluations, and nothing is evaluated: give --val_dataset or --split_dataset_ratio, '
            f'and --eval_strategy {save}.'
        )
    elif save != evaluate:
        t.errors.append(
            f'{given} needs the same --save_strategy ({save}) and --eval_strategy ({evaluate}), as in swift rlhf: '
            'a checkpoint is judged by the evaluation of its step.'
        )
    elif save == 'steps' and t.effective('eval_steps') and t.effective('save_steps') % t.effective('eval_steps'):
        t.errors.append(
            f'{given} needs --save_steps ({t.effective("save_steps")}) to be a multiple of --eval_steps '
            f'({t.effective("eval_steps")}), as in swift rlhf: a checkpoint is judged by the evaluation of its step.'
        )


def newer_megatron(t: Translation) -> None:
    """Arguments that the installed Megatron-Core does not know: said, not ignored in silence."""
    for name in ('optimizer_cuda_graph', 'apply_dsa_kernel_fusion', 'csa_dense_mode', 'mhc_recompute_layer_num'):
        version = installed_version('megatron-core') if name in t.given else None
        if version is not None and not in_range(version, '0.17', None):
            t.warnings.append(f'--{name} has no effect with Megatron-Core {version}: newer ones read it.')


def layout_flags(t: Translation) -> None:
    pp = t.effective('pipeline_model_parallel_size')
    for name in ('decoder_first_pipeline_num_layers', 'decoder_last_pipeline_num_layers'):
        if pp == 1 and t.effective(name) is not None:
            t.errors.append(
                f'--{name} {t.effective(name)} divides layers over pipeline stages, and there is one stage. Give '
                f'--pipeline_model_parallel_size 2 '
                'or more, or leave it out.'
            )
    if t.effective('recompute_granularity') == 'selective' and t.effective('recompute_method') is not None:
        t.errors.append(
            f'--recompute_method {t.effective("recompute_method")} belongs to --recompute_granularity full; selective recomputes by '
            '--recompute_modules.'
        )
    if t.effective('tp_comm_overlap') and not t.effective('sequence_parallel'):
        t.errors.append('--tp_comm_overlap true needs --sequence_parallel true.')
    if t.asked('sequence_parallel') and t.effective('tensor_model_parallel_size') == 1:
        t.warnings.append('--sequence_parallel true has no effect with --tensor_model_parallel_size 1.')
    if t.effective('router_replay_mode') == 'R2' and t.effective('max_tokens_per_forward_only_micro_batch') is not None:
        t.errors.append(
            '--router_replay_mode R2 records in passes without gradient what training replays, so both need the same micro-batches: leave '
            '--max_tokens_per_forward_only_micro_batch out.'
        )
    if t.effective('replay_rollouts') is not None and t.effective('eval_strategy') not in (None, 'no'):
        t.errors.append(
            '--replay_rollouts loads no engine, so there is nothing to evaluate with. Give --eval_strategy no, or leave the validation '
            'data out.'
        )
    _optimizer(t)
    if t.effective('optimizer') == 'muon' and (t.effective('overlap_grad_reduce') or t.effective('overlap_param_gather')):
        t.errors.append('--optimizer muon does not go with --overlap_grad_reduce or --overlap_param_gather; use --optimizer dist_muon.')


def _optimizer(t: Translation) -> None:
    kind = t.effective('optimizer')
    if kind == 'sgd':
        if t.asked('use_distributed_optimizer'):
            t.errors.append('--use_distributed_optimizer true goes with adam, and the optimizer is sgd. Leave it out, or use --optim adamw_torch.')
        t.default('use_distributed_optimizer', False, "Megatron's distributed optimizer takes adam only")
    if kind in ('muon', 'dist_muon') and importlib.util.find_spec('emerging_optimizers') is None:
        missing = f'--optimizer {kind} needs the package emerging-optimizers (module emerging_optimizers), which is not installed here.'
        (t.warnings if t.asked('dry_run') not in (None, 'false') else t.errors).append(missing)
