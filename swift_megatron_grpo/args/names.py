"""What a name that does not exist may have meant (import tier 0)."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from .fields import all_fields

# What people type for Megatron's layout, from other launchers and from papers.
SHORT = {
    'tp': 'tensor_model_parallel_size',
    'tp_size': 'tensor_model_parallel_size',
    'tensor_parallel': 'tensor_model_parallel_size',
    'tensor_model_parallel': 'tensor_model_parallel_size',
    'pp': 'pipeline_model_parallel_size',
    'pp_size': 'pipeline_model_parallel_size',
    'pipeline_parallel_size': 'pipeline_model_parallel_size',
    'pipeline_parallel': 'pipeline_model_parallel_size',
    'cp': 'context_parallel_size',
    'cp_size': 'context_parallel_size',
    'context_parallel': 'context_parallel_size',
    'ep': 'expert_model_parallel_size',
    'ep_size': 'expert_model_parallel_size',
    'expert_parallel_size': 'expert_model_parallel_size',
    'etp': 'expert_tensor_parallel_size',
    'etp_size': 'expert_tensor_parallel_size',
    'vpp': 'virtual_pipeline_model_parallel_size',
    'vpp_size': 'virtual_pipeline_model_parallel_size',
    'virtual_pipeline_parallel_size': 'virtual_pipeline_model_parallel_size',
    'num_layers_per_virtual_pipeline_stage': 'virtual_pipeline_model_parallel_size',
    'sp': 'sequence_parallel',
    'sp_size': 'sequence_parallel_size',
    'mbs': 'micro_batch_size',
    'gbs': 'global_batch_size',
    'bs': 'per_device_train_batch_size',
    'batch_size': 'per_device_train_batch_size',
    'dp': 'keep_global_batch',
    'grad_accum': 'gradient_accumulation_steps',
    'gradient_accumulation': 'gradient_accumulation_steps',
    'vllm_tp': 'vllm_tensor_parallel_size',
    'tokens_per_micro_batch': 'max_tokens_per_micro_batch',
    'max_token_len_per_gpu': 'max_tokens_per_micro_batch',
    'max_tokens_per_gpu': 'max_tokens_per_micro_batch',
    'warmup': 'warmup_ratio',
    'epochs': 'num_train_epochs',
    'g': 'num_generations',
    'group_size': 'num_generations',
    'n_generations': 'num_generations',
    'kl_coeff': 'beta',
    'clip_eps': 'epsilon',
    'reward_func': 'reward_funcs',
}
# Names that two arguments of today share.
TWO_MEANINGS = {
    'tensor_parallel_size': ('tensor_model_parallel_size', 'vllm_tensor_parallel_size'),  # of the trainer; of the engine, in ms-swift 3
}
# Names of ms-swift 2.x and 3.x, of its Megatron part, and of Megatron-LM itself.
FORMER = {
    'train_type': 'tuner_type',
    'sft_type': 'tuner_type',
    'save_interval': 'save_steps',
    'eval_interval': 'eval_steps',
    'log_interval': 'logging_steps',
    'num_workers': 'dataloader_num_workers',
    'no_initialization': 'perform_initialization',
    'load': 'mcore_model',
    'adapter_load': 'mcore_adapter',
    'ref_load': 'mcore_ref_model',
    'ref_adapter_load': 'mcore_ref_adapter',
    'save': 'output_dir',
    'recompute_activations': 'recompute_granularity',
    'no_rope_fusion': 'apply_rope_fusion',
    'no_gradient_accumulation_fusion': 'gradient_accumulation_fusion',
    'bias_gelu_fusion': 'bias_activation_fusion',
    'bias_swiglu_fusion': 'bias_activation_fusion',
    'tensor_parallel_degree': 'tensor_model_parallel_size',
    'exit_interval': 'max_steps',
    'eval_batch_size': 'per_device_eval_batch_size',
    'model_id_or_path': 'model',
    'model_name_or_path': 'model',
    'template_type': 'template',
    'dtype': 'torch_dtype',
    'custom_train_dataset_path': 'dataset',
    'train_dataset': 'dataset',
    'custom_val_dataset_path': 'val_dataset',
    'lora_target_modules': 'target_modules',
    'lora_dropout_p': 'lora_dropout',
    'lora_r': 'lora_rank',
    'batch_size_per_device': 'per_device_train_batch_size',
    'evaluation_strategy': 'eval_strategy',
    'check_dataset_strategy': 'strict',
    'resume_checkpoint': 'resume_from_checkpoint',
    'vllm_device': 'vllm_mode',
    'vllm_server_mode': 'vllm_mode',
    'tensor_parallel_rollout': 'vllm_tensor_parallel_size',
    'tp_comm': 'tp_comm_overlap',
    'rlhf_beta': 'beta',
    'vllm_max_tokens': 'max_completion_length',
    'max_prompt_length': 'max_length',
    'use_flash_attn': 'attn_impl',
    'ref_model_id_or_path': 'ref_model',
    'reward_model_id': 'reward_model',
    'lr_warmup_ratio': 'warmup_ratio',
    'lr_warmup_steps': 'lr_warmup_iters',
    'min_learning_rate': 'min_lr',
    'multi_turn_func': 'multi_turn_scheduler',
    'lmdeploy_device': 'vllm_mode',
    'tuner': 'tuner_type',
    'distributed_optimizer': 'use_distributed_optimizer',
    'moe_aux_loss_coef': 'moe_aux_loss_coeff',
    'gradient_clipping': 'max_grad_norm',
    'distributed_timeout_minutes': 'ddp_timeout',
}
_RAY = 'It belongs to the Ray trainer of ms-swift, whose file has a group of arguments for each part; here all arguments stand at the top.'
_GONE = {
    'gc_collect_after_offload': 'Memory is given back after each offload by itself; leave it out.',
    'load_safetensors': 'Safetensors are read by themselves; leave it out.',
    'num_infer_workers': 'Colocated engines run in every process (--vllm_mode colocate), in groups of --vllm_tensor_parallel_size.',
    'tree_rollout': 'A scheduler branches by itself: --multi_turn_scheduler NAME, registered by a file given to --external_plugins.',
    'max_tree_deep': 'A scheduler branches by itself: --multi_turn_scheduler NAME, registered by a file given to --external_plugins.',
    'colocate_groups': _RAY,
    'train': _RAY,
    'rollout': _RAY,
    'use_lmdeploy': 'LMDeploy is no engine of GRPO any more; use --use_vllm true.',
    'use_flash_attention': 'Write --attention_backend flash.',
}
_HINT = {
    'exit_interval': 'the number of optimizer steps',
    'dp': 'the data-parallel size follows from the number of processes and TP, PP, CP',
}


def suggestions(name: str) -> list[str]:
    """The real names nearest to ``name``, best first, at most three."""
    key = name.lower().replace('-', '_')
    table = all_fields()
    if key in TWO_MEANINGS:
        return list(TWO_MEANINGS[key])
    if key in SHORT:
        return [SHORT[key]]
    if key in FORMER:
        return [FORMER[key]]
    if key in table:
        return [key]
    longer = [field for field in table if field.startswith(key)] if len(key) >= 5 else []
    close = difflib.get_close_matches(key, table, n=4, cutoff=0.72)
    ranked = sorted({*close, *longer[:2]}, key=lambda field: -difflib.SequenceMatcher(None, key, field).ratio())
    return [field for field in ranked if not field.startswith('_')][:3]


def unknown_message(name: str, words: Sequence[str] = ()) -> str:
    """The message for a name that no world knows: what was given, what it may have meant."""
    text = ' '.join(words)
    shown = f'--{name}' + (f' {text}' if 0 < len(text) <= 60 else '')
    key = name.lower().replace('-', '_')
    if key in ('help', 'h'):
        return '--help: `swift-megatron-grpo arguments [NAME]` explains each argument, and docs/arguments.md lists them all.'
    if key in _GONE:
        return f'{shown} is not an argument any more. {_GONE[key]}'
    near = suggestions(name)
    if not near:
        return (
            f'{shown} is not an argument of swift rlhf, of megatron rlhf or of this package, and nothing is near it. '
            'docs/arguments.md lists all names.'
        )
    kind = 'a former name' if key in FORMER else 'a short name' if key in SHORT or key in TWO_MEANINGS else 'not an argument'
    hint = f' ({_HINT[key]})' if key in _HINT else ''
    return f'{shown} is {kind}; did you mean ' + ' or '.join(f'--{field}' for field in near) + f'{hint}? Nothing is guessed.'
