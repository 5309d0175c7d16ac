"""Conversions of single arguments (import tier 0). One function an argument, found by its name in ``CONVERTERS``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .argv import Given
from .doctor import installed_version
from .fields import Field
from .module_names import module_names, parameter_prefixes, target_parameters
from .registries import may_register
from .translation import Translation, refuse, show

ADAM = ('adamw_torch', 'adamw_torch_fused', 'adamw_torch_xla', 'adamw_torch_npu_fused', 'adamw_hf', 'adamw_apex_fused', 'adam', 'adamw')
ATTENTION = {
    'flash_attn': 'flash',
    'flash_attention_2': 'flash',
    'flash_attention_3': 'flash_3',
    'flash_attention_4': 'flash_4',
    'sdpa': 'flash',
    'eager': 'unfused',
}
SEED_FOR_ZERO = 2**31 - 1
LOSSES = ('grpo', 'bnpo', 'dr_grpo', 'dapo', 'cispo', 'sapo', 'real', 'fipo', 'luspo', 'gmpo')  # those of step/loss.py, which needs torch
TUNERS = ('lora', 'full', 'lora_llm')
LOGGERS = ('tensorboard', 'wandb', 'swanlab')
TRANSFORMERS_CALLBACKS = ('activation_cpu_offload', 'adalora', 'deepspeed_elastic', 'early_stop', 'graceful_exit', 'lisa', 'perf_log')


def rlhf_type(t: Translation, item: Given, field: Field) -> None:
    if item.value not in ('grpo', 'megatron_grpo'):
        message = (
            f'only grpo is trained here; megatron rlhf --rlhf_type {item.value} of ms-swift trains it on Megatron'
            if item.value in ('dpo', 'kto', 'gkd', 'rm')
            else 'only grpo is trained here; leave --backend out to train it with transformers'
        )
        refuse(t, item, message)
    elif t.set('rlhf_type', 'grpo', item.name):
        t.row(item, 'kept' if item.value == 'grpo' else 'renamed', name='rlhf_type', value='grpo')


def backend(t: Translation, item: Given, field: Field) -> None:
    t.set('backend', 'megatron', item.name)
    t.row(item, 'kept')


def seed(t: Translation, item: Given, field: Field) -> None:
    if item.value < 0:
        t.errors.append(f'--seed is {item.value}; it is 0 or more.')
    elif item.value == 0:
        # a small stand-in would repeat the run of that seed
        t.set('seed', SEED_FOR_ZERO, item.name)
        t.row(item, 'converted', value=SEED_FOR_ZERO, reason="Megatron's random state wants a seed above 0")
    else:
        t.keep(item, field)


def max_steps(t: Translation, item: Given, field: Field) -> None:
    if item.value <= 0:
        t.row(item, 'no_effect', reason='no bound: the run goes by num_train_epochs')
    elif t.set('train_iters', item.value, item.name):
        t.row(item, 'renamed', name='train_iters', reason=field.reason)


def optim(t: Translation, item: Given, field: Field) -> None:
    if item.value in ADAM:
        target = 'adam'
    elif item.value in ('sgd', 'muon', 'dist_muon'):
        target = item.value
    else:
        message = (
            'Megatron has adam (with decoupled weight decay), sgd, muon and dist_muon; the nearest to '
            f'{item.value} is --optim adamw_torch'
            + (' with --optimizer_cpu_offload true' if '8bit' in item.value or 'paged' in item.value else '')
        )
        refuse(t, item, message)
        return
    if t.set('optimizer', target, item.name):
        t.row(item, 'converted', name='optimizer', value=target, reason=field.reason)
        if target == 'sgd':
            # torch.optim.SGD, which transformers builds, has no momentum unless told; Megatron's default is 0.9
            t.default('sgd_momentum', 0.0, 'sgd of transformers has no momentum')


def optimizer(t: Translation, item: Given, field: Field) -> None:
    if item.value in (None, 'default', 'multimodal'):
        reason = 'vit_lr and aligner_lr work by themselves' if item.value == 'multimodal' else 'the optimizer that optim names'
        t.row(item, 'no_effect', reason=reason)
    elif item.value not in ('adam', 'sgd', 'muon', 'dist_muon'):
        refuse(t, item, 'it belongs to the transformers trainer; adam, sgd, muon and dist_muon work here')
    elif t.set('optimizer', item.value, item.name):
        t.row(item, 'kept')


def gradient_checkpointing(t: Translation, item: Given, field: Field) -> None:
    granularity = t.asked('recompute_granularity')
    if granularity is None:
        if item.value:
            full_recompute(t)
        else:
            t.set('recompute_granularity', 'none', item.name)
    elif item.value == (granularity == 'none'):
        t.errors.append(
            f'--gradient_checkpointing is {show(item.value)}, and --recompute_granularity is {granularity}. They are one '
            f'setting here: leave '
            'one of them out.'
        )
    t.row(item, 'converted', name='recompute_granularity', value=granularity or t.values.get('recompute_granularity'), reason=field.reason)


def full_recompute(t: Translation) -> None:
    """What gradient checkpointing of transformers is: each layer keeps its input alone and is computed again on the way back."""
    t.set('recompute_granularity', 'full', 'gradient_checkpointing')
    for name, value in (('recompute_method', 'uniform'), ('recompute_num_layers', 1)):
        if t.asked(name) is None:
            t.set(name, value, 'gradient_checkpointing')


def logging_strategy(t: Translation, item: Given, field: Field) -> None:
    if item.value == 'steps':
        t.row(item, 'no_effect', reason='the default, which asks for nothing')
    elif item.value == 'no':
        t.set('logging_steps', 1_000_000_000, item.name)
        t.row(item, 'converted', name='logging_steps', value=1_000_000_000, reason='only the first step is logged')
    else:
        refuse(t, item, 'give the number of steps: --logging_steps N')


def report_to(t: Translation, item: Given, field: Field) -> None:
    bad = [name for name in item.value if name not in (*LOGGERS, 'none', 'all')]
    if bad:
        refuse(t, item, f'{", ".join(bad)} is no logger of the Megatron trainer; it has {", ".join(LOGGERS)} and none')
    elif 'all' in item.value:
        refuse(t, item, f'name the loggers: {" ".join(LOGGERS)}')
    elif t.set('report_to', item.value, item.name):
        t.row(item, 'kept')
        for name in {'wandb', 'swanlab'} & set(item.value):
            if installed_version('ms-swift') is not None and installed_version(name) is None:
                missing = f'--report_to {name} needs the package {name}, which is not installed here: pip install {name}.'
                (t.warnings if t.asked('dry_run') not in (None, 'false') else t.errors).append(missing)


def run_name(t: Translation, item: Given, field: Field) -> None:
    if 'wandb' in (t.asked('report_to') or ()):
        t.set('wandb_exp_name', item.value, item.name)
        t.row(item, 'renamed', name='wandb_exp_name')
    else:
        t.row(item, 'no_effect', reason='only wandb shows it; --report_to wandb')


def save_only_model(t: Translation, item: Given, field: Field) -> None:
    if item.value:
        for name in ('no_save_optim', 'no_save_rng'):
            t.set(name, True, item.name)
        t.row(
            item, 'converted', name='no_save_optim', value=True, reason='no_save_optim and no_save_rng: such a checkpoint cannot be resumed'
        )
    else:
        t.row(item, 'no_effect', reason='the default, which asks for nothing')


def save_strategy(t: Translation, item: Given, field: Field) -> None:
    if item.value == 'best':
        refuse(t, item, 'the best checkpoint is known after it was written; use steps with --load_best_model_at_end true')
    elif item.value not in ('steps', 'epoch', 'no'):
        t.errors.append(f'--save_strategy is {item.value!r}; it takes steps, epoch or no.')
    elif t.set('save_strategy', item.value, item.name):
        t.row(item, 'kept')


def eval_strategy(t: Translation, item: Given, field: Field) -> None:
    if item.value not in ('steps', 'epoch', 'no', None):
        t.errors.append(f'--eval_strategy is {item.value!r}; it takes steps, epoch or no.')
    elif t.set('eval_strategy', item.value, item.name):
        t.row(item, 'kept')


def share_of_steps(t: Translation, item: Given, field: Field) -> None:
    """save_steps and eval_steps: transformers reads a number below 1 as a share of all steps (rounded up)."""
    value = item.value
    if value is None:
        t.row(item, 'no_effect', reason='no value')
        return
    if value < 0 or (value >= 1 and value != int(value)):
        t.errors.append(f'--{item.name} is {value:g}; it is a whole number of optimizer steps, or a share of all steps below 1.')
        return
    if 0 < value < 1:
        total = t.asked('max_steps') or t.asked('train_iters') or -1
        if total <= 0:
            t.errors.append(
                f'--{item.name} {value:g} is a share of all steps, and their number is not known before the data is read. Give '
                '--max_steps, or a number of steps.'
            )
            return
        steps = -int(-total * value // 1)
        if t.set(item.name, steps, item.name):
            t.row(item, 'converted', value=steps, reason=f'{value:g} of {total} optimizer steps')
        return
    if t.set(item.name, int(value), item.name):
        t.row(item, 'kept', value=int(value))


def logging_steps(t: Translation, item: Given, field: Field) -> None:
    if item.value < 1:
        t.errors.append(f'--logging_steps is {item.value}; it is 1 or more. --logging_strategy no switches logging off.')
    elif t.set('logging_steps', item.value, item.name):
        t.row(item, 'kept')


def save_total_limit(t: Translation, item: Given, field: Field) -> None:
    if item.value == 1:
        t.set('save_total_limit', 2, item.name)
        t.row(item, 'converted', value=2, reason='the older checkpoint is kept until the newer one is complete')
    else:
        t.keep(item, field)


def resume_from_checkpoint(t: Translation, item: Given, field: Field) -> None:
    if item.value in (None, '', 'false', 'False'):
        t.row(item, 'no_effect', reason='no folder')
        return
    if t.set('resume_from_checkpoint', item.value, item.name):
        t.row(item, 'kept', reason=field.reason)


def report_missing(t: Translation, item: Given, field: Field) -> None:
    """max_new_tokens, response_length: older names of max_completion_length."""
    if item.value is None:
        t.row(item, 'no_effect', reason='no value')
    elif t.set('max_completion_length', item.value, item.name):
        t.row(item, 'renamed', name='max_completion_length')


def loss_type(t: Translation, item: Given, field: Field) -> None:
    value = item.value[0] if isinstance(item.value, list) and len(item.value) == 1 else item.value
    if not isinstance(value, str):
        t.errors.append(f'--loss_type takes one value for GRPO; {show(value)!r} are {len(value)}.')
    elif value not in LOSSES and ':' not in value and not may_register(value, t.asked('external_plugins') or []) and not t.asked('custom_register_path'):
        import difflib

        close = difflib.get_close_matches(value, LOSSES, n=1, cutoff=0.5)
        t.errors.append(
            f'--loss_type is {value!r}; it takes one of {", ".join(LOSSES)}, or module:function.'
            + (f' Did you mean {close[0]}?' if close else '')
        )
    elif t.set('loss_type', value, item.name):
        t.row(item, 'kept', value=value)


def callbacks(t: Translation, item: Given, field: Field) -> None:
    bad = [name for name in item.value if name in TRANSFORMERS_CALLBACKS]
    if bad:
        refuse(t, item, f'{", ".join(bad)} belongs to the transformers trainer')
    else:
        t.keep(item, field)


def task_type(t: Translation, item: Given, field: Field) -> None:
    if item.value in (None, 'causal_lm'):
        t.keep(item, field)
    else:
        refuse(t, item, 'GRPO trains causal_lm')


def attn_impl(t: Translation, item: Given, field: Field) -> None:
    if item.value is None or t.asked('attention_backend') is not None:
        t.row(item, 'no_effect', reason='attention_backend says it')
    elif item.value not in ATTENTION:
        t.errors.append(
            f'--attn_impl is {item.value!r}; {", ".join(ATTENTION)} are translated, and --attention_backend takes flash, '
            f'fused, unfused, auto.'
        )
    else:
        target = ATTENTION[item.value]
        if target == 'flash':
            t.row(item, 'converted', name='attention_backend', value='flash', reason=field.reason)
        elif t.set('attention_backend', target, item.name):
            t.row(item, 'converted', name='attention_backend', value=target, reason=field.reason)
        if target == 'unfused' and not t.asked('padding_free'):
            t.default('padding_free', False, 'unfused attention does not know packed sequences')


def sequence_parallel_size(t: Translation, item: Given, field: Field) -> None:
    if t.asked('context_parallel_size') is None and item.value == 1:
        t.row(item, 'no_effect', reason='the default, which asks for nothing')
    elif t.set('context_parallel_size', item.value, item.name):
        t.row(item, 'renamed', name='context_parallel_size', reason=field.reason)


def packing(t: Translation, item: Given, field: Field) -> None:
    if item.value:
        t.set('padding_free', True, item.name)
        t.row(item, 'converted', name='padding_free', value=True, reason=field.reason)
    else:
        t.row(item, 'no_effect', reason='the default, which asks for nothing')


def tuner_type(t: Translation, item: Given, field: Field) -> None:
    if item.value in TUNERS:
        t.keep(item, field)
        return
    import difflib

    reasons = {
        'adalora': 'its rank changes while it trains',
        'longlora': 'it changes the attention of transformers',
        'llamapro': 'it adds layers',
        'adapter': 'it adds modules to layers of transformers',
        'vera': 'mcore-bridge has LoRA only',
        'boft': 'mcore-bridge has LoRA only',
        'fourierft': 'mcore-bridge has LoRA only',
        'reft': 'it changes hidden states of transformers',
        'ia3': 'mcore-bridge has LoRA only',
    }
    if item.value in reasons:
        refuse(t, item, f'{reasons[item.value]}; lora, full and lora_llm work')
    else:
        close = difflib.get_close_matches(item.value, TUNERS, n=1, cutoff=0.4)
        t.errors.append(
            f'--tuner_type is {item.value!r}; it takes lora, full or lora_llm.' + (f' Did you mean {close[0]}?' if close else '')
        )


def external_plugins(t: Translation, item: Given, field: Field) -> None:
    """custom_register_path and external_plugins are one list; both may be given."""
    files = [*t.values.get('external_plugins', []), *(name for name in item.value if name not in t.values.get('external_plugins', []))]
    t.values['external_plugins'], t.source['external_plugins'] = files, item.name
    t.row(item, 'kept' if item.name == 'external_plugins' else 'renamed', name='external_plugins', value=files)


def vllm_speculative_config(t: Translation, item: Given, field: Field) -> None:
    if item.value is None:
        t.row(item, 'no_effect', reason='no value')
        return
    kwargs = t.asked('vllm_engine_kwargs')
    merged: dict[str, Any] = {**(kwargs if isinstance(kwargs, dict) else {}), 'speculative_config': item.value}
    t.values['vllm_engine_kwargs'], t.source['vllm_engine_kwargs'] = merged, item.name
    t.row(item, 'converted', name='vllm_engine_kwargs', value=merged, reason=field.reason)


def vllm_engine_kwargs(t: Translation, item: Given, field: Field) -> None:
    if 'vllm_speculative_config' in t.given and t.given['vllm_speculative_config'].value is not None:
        t.row(item, 'kept')  # merged there
    else:
        t.keep(item, field)


def verify_weight_sync(t: Translation, item: Given, field: Field) -> None:
    if item.value not in ('first', 'off') and not (item.value.isdigit() and int(item.value) > 0):
        t.errors.append(f'--verify_weight_sync is {item.value!r}; it takes first, off, or a number N (after every N-th sync).')
    else:
        t.keep(item, field)


def init_weights(t: Translation, item: Given, field: Field) -> None:
    if str(item.value).lower() in ('true', 'none'):
        t.row(item, 'no_effect', reason='the default, which asks for nothing')
    else:
        refuse(t, item, field.reason)


def tuner_backend(t: Translation, item: Given, field: Field) -> None:
    if item.value == 'peft':
        t.keep(item, field)
    else:
        refuse(t, item, field.reason)


def data_moves_on(t: Translation, item: Given, field: Field) -> None:
    """bridge_backend and calculate_per_token_loss: refused unless they are what happens anyhow."""
    if item.value in ('mcore-bridge', False):
        t.row(item, 'no_effect', reason='the default, which asks for nothing')
    else:
        refuse(t, item, field.reason)


CONVERTERS: dict[str, Callable[[Translation, Given, Field], None]] = {
    'rlhf_type': rlhf_type,
    'backend': backend,
    'seed': seed,
    'max_steps': max_steps,
    'optim': optim,
    'optimizer': optimizer,
    'gradient_checkpointing': gradient_checkpointing,
    'logging_strategy': logging_strategy,
    'report_to': report_to,
    'run_name': run_name,
    'save_only_model': save_only_model,
    'save_strategy': save_strategy,
    'eval_strategy': eval_strategy,
    'save_steps': share_of_steps,
    'eval_steps': share_of_steps,
    'logging_steps': logging_steps,
    'save_total_limit': save_total_limit,
    'resume_from_checkpoint': resume_from_checkpoint,
    'max_new_tokens': report_missing,
    'response_length': report_missing,
    'loss_type': loss_type,
    'callbacks': callbacks,
    'task_type': task_type,
    'attn_impl': attn_impl,
    'sequence_parallel_size': sequence_parallel_size,
    'packing': packing,
    'tuner_type': tuner_type,
    'external_plugins': external_plugins,
    'custom_register_path': external_plugins,
    'target_modules': module_names,
    'modules_to_save': module_names,
    'freeze_parameters': parameter_prefixes,
    'trainable_parameters': parameter_prefixes,
    'target_parameters': target_parameters,
    'vllm_speculative_config': vllm_speculative_config,
    'vllm_engine_kwargs': vllm_engine_kwargs,
    'verify_weight_sync': verify_weight_sync,
    'init_weights': init_weights,
    'tuner_backend': tuner_backend,
    'bridge_backend': data_moves_on,
    'calculate_per_token_loss': data_moves_on,
}
