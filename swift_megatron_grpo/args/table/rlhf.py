"""Table rows: rollouts, rewards, losses, reward and teacher models (see fields.py for the columns)."""

ROWS = r"""
loss_type | both | list[str] | null | null | kept | - | grpo, bnpo, dr_grpo, dapo, cispo, sapo, real, fipo; also luspo, gmpo, and module:function
truncation_strategy | both | str{delete,left,right,split} | null | null | kept | - | left (default) or delete
loss_scale | both | str | null | "last_round" | kept | - | last_round; default with multi_turn_scheduler, as in swift rlhf
dataset_shuffle | both | bool | true | true | kept | - |
max_new_tokens | both | int | null | null | renamed | max_completion_length |
temperature | both | float | 0.9 | 0.9 | kept | - |
top_k | both | int | -1 | -1 | kept | - |
top_p | both | float | 1.0 | 1.0 | kept | - |
repetition_penalty | both | float | 1.0 | 1.0 | kept | - |
stop_words | both | list[str] | [] | [] | kept | - |
structured_outputs_regex | both | str | null | null | kept | - |
lora_rank | both | int | 8 | 8 | kept | - |
reward_model | both | list[str] | null | null | kept | - |
reward_adapters | swift | list[str] | [] | - | kept | - |
reward_model_type | swift | list[str] | null | - | kept | - |
reward_model_revision | swift | list[str] | null | - | kept | - |
reward_template | swift | list[str] | null | - | kept | - |
num_ppo_epochs | swift | int | 4 | - | no_effect | - | belongs to PPO
whiten_rewards | swift | bool | false | - | no_effect | - | belongs to PPO
kl_coef | swift | float | 0.05 | - | no_effect | - | belongs to PPO
cliprange | swift | float | 0.2 | - | no_effect | - | belongs to PPO
vf_coef | swift | float | 0.1 | - | no_effect | - | belongs to PPO
cliprange_value | swift | float | 0.2 | - | no_effect | - | belongs to PPO
gamma | swift | float | 1.0 | - | no_effect | - | belongs to PPO
lam | swift | float | 0.95 | - | no_effect | - | belongs to PPO
num_mini_batches | swift | int | 1 | - | no_effect | - | belongs to PPO
local_rollout_forward_batch_size | swift | int | 64 | - | no_effect | - | belongs to PPO
num_sample_generations | swift | int | 10 | - | no_effect | - | belongs to PPO
response_length | swift | int | null | - | renamed | max_completion_length |
missing_eos_penalty | swift | float | null | - | no_effect | - | belongs to PPO
vllm_gpu_memory_utilization | both | float | 0.9 | 0.9 | kept | - |
vllm_tensor_parallel_size | both | int | 1 | 1 | kept | - |
vllm_pipeline_parallel_size | swift | int | 1 | - | refused | - | a colocated engine shares the processes of the trainer; give the server --vllm_pipeline_parallel_size
vllm_enable_expert_parallel | swift | bool | false | - | kept | - |
vllm_max_num_seqs | both | int | null | null | kept | - |
vllm_max_model_len | both | int | null | null | kept | - |
vllm_disable_custom_all_reduce | swift | bool | true | - | kept | - |
vllm_enforce_eager | both | bool | false | false | kept | - |
vllm_limit_mm_per_prompt | both | json | null | null | kept | - |
vllm_max_lora_rank | swift | int | 16 | - | kept | - |
vllm_enable_prefix_caching | both | bool | true | true | kept | - |
vllm_use_async_engine | swift | bool | null | - | no_effect | - | the colocated engine is driven step by step; the server decides for itself
vllm_quantization | swift | str | null | - | refused | - | weights are synchronised after each update, and a quantised engine cannot take them; leave it out
vllm_reasoning_parser | swift | str | null | - | refused | - | the whole completion is trained on, in swift rlhf too; leave it out
vllm_disable_cascade_attn | both | bool | false | false | kept | - |
vllm_mm_processor_cache_gb | both | float | null | null | kept | - |
vllm_speculative_config | swift | json | null | - | converted | vllm_engine_kwargs | becomes the key speculative_config
vllm_engine_kwargs | both | json | null | null | kept | - |
vllm_data_parallel_size | swift | int | 1 | - | kept | - |
min_p | swift | float | 0.0 | - | kept | - |
use_vllm | both | bool | false | true | kept | - | false where nothing is said, as in swift rlhf; true where vllm_mode is given
vllm_mode | both | str{server,colocate} | null | null | kept | - | colocate or server
vllm_enable_lora | both | bool | false | false | kept | - |
vllm_server_base_url | both | list[str] | null | null | kept | - |
vllm_server_host | both | list[str] | null | null | kept | - |
vllm_server_port | both | list[int] | [8000] | [8000] | kept | - |
vllm_server_timeout | both | float | 240.0 | 240.0 | kept | - |
vllm_server_group_port | both | list[int] | null | null | kept | - |
enable_flattened_weight_sync | swift | bool | true | - | no_effect | - | weights always travel in buckets (--weight_sync_bucket_mb)
async_generate | both | bool | false | false | kept | - |
sleep_level | both | int{0,1,2} | 0 | 0 | kept | - | 0 with a server, with async_generate and without vLLM, as in swift rlhf
move_model_batches | both | int | null | null | no_effect | - | weights always travel in buckets (--weight_sync_bucket_mb)
offload_optimizer | both | bool | false | false | kept | - |
offload_model | both | bool | false | false | kept | - |
wandb_log_unique_prompts | both | bool | null | null | no_effect | - | completions.jsonl holds every completion once
generation_batch_size | both | int | null | null | kept | - | completions of one generation
steps_per_generation | both | int | null | null | converted | - | micro-steps in swift rlhf, optimizer steps here; the optimizer steps a generation are kept
teacher_tag_key | both | str | "dataset" | "dataset" | kept | - |
epsilon | both | float | 0.2 | 0.2 | kept | - |
epsilon_high | both | float | null | null | kept | - |
delta | both | float | null | null | kept | - |
cosine_min_len_value_wrong | both | float | -0.5 | -0.5 | kept | - |
cosine_max_len_value_wrong | both | float | 0.0 | 0.0 | kept | - |
cosine_min_len_value_correct | both | float | 1.0 | 1.0 | kept | - |
cosine_max_len_value_correct | both | float | 0.5 | 0.5 | kept | - |
cosine_max_len | both | int | null | null | kept | - |
repetition_n_grams | both | int | 3 | 3 | kept | - |
repetition_max_penalty | both | float | -1.0 | -1.0 | kept | - |
reward_model_plugin | both | list[str] | null | null | kept | - |
chord_sft_dataset | swift | list[str] | [] | - | kept | - |
chord_sft_per_device_train_batch_size | swift | int | null | - | kept | - |
chord_enable_phi_function | swift | bool | false | - | kept | - |
chord_mu_warmup_steps | swift | int | null | - | kept | - |
chord_mu_decay_steps | swift | int | null | - | kept | - |
chord_mu_peak | swift | float | null | - | kept | - |
chord_mu_valley | swift | float | null | - | kept | - |
sync_ref_model | both | bool | false | false | kept | - |
ref_model_sync_steps | both | int | 512 | 512 | kept | - |
ref_model_mixup_alpha | both | float | 0.6 | 0.6 | kept | - |
multi_turn_scheduler | both | str | null | null | kept | - |
max_turns | both | int | null | null | kept | - |
completion_length_limit_scope | both | str{total,per_round} | "per_round" | "per_round" | kept | - | total bounds the answers of a conversation together; a rollout server bounds each round
vllm_server_pass_dataset | both | bool | false | false | kept | - |
use_gym_env | both | bool | null | null | kept | - |
gym_env | both | str | null | null | kept | - |
dynamic_sample | both | bool | false | false | kept | - |
max_resample_times | both | int | 3 | 3 | kept | - |
overlong_filter | both | bool | false | false | kept | - |
soft_max_length | both | int | null | null | kept | - |
soft_cache_length | both | int | null | null | kept | - |
scale_rewards | both | str{group,batch,none,gdpo} | null | null | kept | - |
log_entropy | both | bool | false | false | kept | - |
top_entropy_quantile | both | float | 1.0 | 1.0 | kept | - |
importance_sampling_level | both | str{token,sequence,sequence_token} | "token" | "token" | kept | - |
tau_pos | both | float | 1.0 | 1.0 | kept | - |
tau_neg | both | float | 1.05 | 1.05 | kept | - |
advantage_estimator | both | str{grpo,rloo,reinforce_plus_plus} | "grpo" | "grpo" | kept | - |
kl_in_reward | both | bool | null | null | kept | - |
teacher_kl_coef | both | float | 1.0 | 1.0 | kept | - |
advantage_reweight | swift | str{rlsd} | null | - | kept | - | needs rows with a column teacher_prompt
rlsd_lambda | swift | float | 0.5 | - | kept | - |
rlsd_reweight_clip_range | swift | float | 0.2 | - | kept | - |
rlsd_lambda_warmup_steps | swift | int | 0 | - | kept | - |
rlsd_lambda_decay_steps | swift | int | 0 | - | kept | - |
rlsd_negative_only | swift | bool | false | - | kept | - |
sdar_loss_coef | swift | float | 0.0 | - | kept | - | needs rows with a column teacher_prompt, or a teacher_model
sdar_gate_beta | swift | float | 5.0 | - | kept | - |
real_tau | both | float | 0.5 | 0.5 | kept | - |
fipo_decay_rate | both | float | 32.0 | 32.0 | kept | - |
fipo_clip_range | both | float | 0.2 | 0.2 | kept | - |
fipo_clip_high_only | both | bool | true | true | kept | - |
fipo_safety_threshold | both | float | 4.0 | 4.0 | kept | - |
num_generations_eval | both | int | null | null | kept | - |
rollout_importance_sampling_mode | both | str{token_truncate,token_mask,sequence_truncate,sequence_mask} | null | null | kept | - |
rollout_importance_sampling_threshold | both | float | 2.0 | 2.0 | kept | - |
log_rollout_offpolicy_metrics | both | bool | false | false | kept | - |
off_policy_sequence_mask_delta | both | float | null | null | kept | - |
num_generations | both | int | 8 | 8 | kept | - |
reward_funcs | both | list[str] | [] | [] | kept | - |
reward_weights | both | list[float] | null | null | kept | - |
log_completions | both | bool | false | false | kept | - |
num_iterations | both | int | 1 | 1 | kept | - |
teacher_model | both | str | null | null | kept | - |
teacher_adapters | swift | list[str] | [] | - | refused | - | merge the adapter into the teacher first: swift export --merge_lora true
teacher_model_type | both | str | null | null | kept | - |
teacher_model_revision | both | str | null | null | refused | - | give the local path of that revision instead
teacher_deepspeed | swift | str | null | - | no_effect | - | Megatron's layout and distributed optimizer take the place of DeepSpeed and FSDP
teacher_model_server | both | str | null | null | kept | - |
offload_teacher_model | both | bool | false | false | kept | - |
rlhf_type | both | str{dpo,orpo,simpo,kto,cpo,rm,ppo,grpo,gkd,megatron_grpo} | "dpo" | "dpo" | kept | - | grpo; megatron_grpo is the same
ref_model | both | str | null | null | kept | - |
ref_adapters | both | list[str] | [] | [] | kept | - |
ref_model_type | swift | str | null | - | no_effect | - | read from the checkpoint
ref_model_revision | swift | str | null | - | refused | - | give the local path of that revision instead
beta | both | float | null | null | kept | - |
label_smoothing | both | float | 0 | 0.0 | no_effect | - | belongs to another rlhf_type
max_completion_length | both | int | 512 | 512 | kept | - |
rpo_alpha | both | float | null | null | no_effect | - | belongs to another rlhf_type
ld_alpha | swift | float | null | - | no_effect | - | belongs to another rlhf_type
discopop_tau | swift | float | 0.05 | - | no_effect | - | belongs to another rlhf_type
loss_weights | swift | list[float] | null | - | no_effect | - | belongs to another rlhf_type
cpo_alpha | swift | float | 1.0 | - | no_effect | - | belongs to another rlhf_type
simpo_gamma | swift | float | 1 | - | no_effect | - | belongs to another rlhf_type
desirable_weight | both | float | 1.0 | 1.0 | no_effect | - | belongs to another rlhf_type
undesirable_weight | both | float | 1.0 | 1.0 | no_effect | - | belongs to another rlhf_type
center_rewards_coefficient | both | float | null | null | no_effect | - | belongs to another rlhf_type
sft_alpha | both | float | 0 | 0.0 | no_effect | - | belongs to another rlhf_type
lmbda | both | float | 0.5 | 0.5 | no_effect | - | belongs to another rlhf_type
seq_kd | both | bool | false | false | no_effect | - | belongs to another rlhf_type
gkd_logits_topk | both | int | null | null | no_effect | - | belongs to another rlhf_type
"""
