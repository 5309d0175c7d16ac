"""Arguments that act beside another one only (import tier 0): given alone they are said to be without effect, never ignored in silence."""

from __future__ import annotations

from typing import Any

from .translation import Translation, show

# (arguments, the one they belong to, its values that make them act; None: any value that is not empty)
BELONGS: tuple[tuple[str, str, tuple[Any, ...] | None], ...] = (
    ('ref_model_sync_steps ref_model_mixup_alpha', 'sync_ref_model', None),
    ('max_turns completion_length_limit_scope', 'multi_turn_scheduler', None),
    ('vllm_server_pass_dataset', 'vllm_mode', ('server',)),
    ('max_resample_times', 'dynamic_sample', None),
    ('reward_model_plugin reward_adapters reward_model_type reward_model_revision reward_template', 'reward_model', None),
    ('teacher_model_type offload_teacher_model', 'teacher_model', None),
    ('cosine_min_len_value_wrong cosine_max_len_value_wrong cosine_min_len_value_correct cosine_max_len_value_correct cosine_max_len',
     'reward_funcs', ('cosine',)),
    ('repetition_n_grams repetition_max_penalty', 'reward_funcs', ('repetition',)),
    ('soft_max_length soft_cache_length', 'reward_funcs', ('soft_overlong',)),
    ('rollout_importance_sampling_threshold', 'rollout_importance_sampling_mode', None),
    ('kl_cov_coef', 'kl_cov_ratio', None),
    ('clip_cov_low clip_cov_high', 'clip_cov_ratio', None),
    ('tau_pos tau_neg', 'loss_type', ('sapo',)),
    ('real_tau', 'loss_type', ('real',)),
    ('fipo_decay_rate fipo_clip_range fipo_clip_high_only fipo_safety_threshold', 'loss_type', ('fipo',)),
    ('rlsd_lambda rlsd_reweight_clip_range rlsd_lambda_warmup_steps rlsd_lambda_decay_steps rlsd_negative_only', 'advantage_reweight', None),
    ('sdar_gate_beta', 'sdar_loss_coef', None),
    ('chord_sft_per_device_train_batch_size chord_enable_phi_function chord_mu_warmup_steps chord_mu_decay_steps chord_mu_peak chord_mu_valley',
     'chord_sft_dataset', None),
    ('max_staleness allow_uncorrected_async', 'async_generate', None),
    ('vllm_server_host vllm_server_base_url vllm_server_port vllm_server_timeout vllm_server_group_port server_timeout', 'vllm_mode',
     ('server',)),
    ('vllm_max_lora_rank', 'vllm_enable_lora', None),
    ('lora_rank lora_alpha lora_dropout lora_bias lora_dtype use_rslora target_modules target_regex modules_to_save', 'tuner_type',
     ('lora', 'lora_llm')),
    ('freeze_parameters freeze_parameters_regex freeze_parameters_ratio trainable_parameters trainable_parameters_regex', 'tuner_type',
     ('full',)),
    ('recompute_method recompute_num_layers', 'recompute_granularity', ('full',)),
    ('recompute_modules', 'recompute_granularity', ('selective',)),
    ('sgd_momentum', 'optimizer', ('sgd',)),
    ('wandb_project wandb_exp_name', 'report_to', ('wandb',)),
    ('swanlab_project swanlab_exp_name', 'report_to', ('swanlab',)),
    ('tensorboard_dir tensorboard_queue_size', 'report_to', ('tensorboard',)),
    ('resume_only_model', 'resume_from_checkpoint', None),
    ('interleave_prob stopping_strategy', 'dataset', None),
    ('shuffle_buffer_size', 'streaming', None),
    ('moe_pad_expert_input_to_capacity moe_token_drop_policy', 'moe_expert_capacity_factor', None),
    ('mtp_loss_scaling_factor mtp_decoder_input_detach mtp_shared_weights', 'mtp_num_layers', None),
    ('fp8_recipe fp8_param_gather fp8_amax_history_len fp8_amax_compute_algo', 'fp8_format', None),
    ('fp4_recipe fp4_param_gather', 'fp4_format', None),
    ('optimizer_offload_fraction', 'optimizer_cpu_offload', None),
    ('manual_gc_steps manual_gc_eval', 'manual_gc', None),
)  # fmt: skip


def alone(t: Translation) -> list[str]:
    """One warning for each argument that was given away from what it belongs to, with a value other than its default."""
    from .fields import all_fields

    warnings = []
    for names, parent, acting in BELONGS:
        value = t.effective(parent)
        has = value if isinstance(value, list) else [value]
        acts = any(item in acting for item in has) if acting is not None else bool(value)
        if acts:
            continue
        given = [
            name
            for name in names.split()
            if name in t.given and t.given[name].value != all_fields()[name].default and not any(f'--{name}' in error for error in t.errors)
        ]
        if given:
            elsewhere = (
                ' The rollout server has its own.' if parent == 'multi_turn_scheduler' and t.effective('vllm_mode') == 'server' else ''
            )
            wanted = f'--{parent} {show(acting[0])}' if acting is not None else f'--{parent}'
            warnings.append(f'{", ".join("--" + name for name in given)} acts with {wanted} only, and has no effect here.{elsewhere}')
    return warnings
