"""Table rows: training loop, optimizer, logging, checkpoints, evaluation (see fields.py for the columns)."""

ROWS = r"""
output_dir | both | str | null | null | kept | - | always handed on; default output/<model name>, as in swift rlhf
per_device_train_batch_size | swift | int | 1 | - | converted | micro_batch_size | completions in one micro-batch of one data-parallel rank
num_train_epochs | both | float | 3.0 | null | kept | - | a fraction is kept; max_steps wins; 3.0 where nothing is said, as in swift rlhf
max_steps | swift | int | -1 | - | renamed | train_iters | optimizer steps; -1 means: by epochs
learning_rate | swift | float | null | - | renamed | lr | default 1e-4 for lora, 1e-5 for full, as in swift rlhf
lr_scheduler_type | swift | str | "cosine" | - | kept | - | the schedule is computed by the functions of transformers, so it is exact
lr_scheduler_kwargs | swift | json | null | - | kept | - |
warmup_steps | swift | float | 0 | - | kept | - |
optim | swift | str | "adamw_torch_fused" | - | converted | optimizer | adamw_* is adam with decoupled weight decay; sgd is sgd with momentum 0
optim_args | swift | str | null | - | no_effect | - | the Adam and SGD of Megatron read no such arguments
weight_decay | both | float | 0.1 | 0.1 | kept | - |
adam_beta1 | both | float | 0.9 | 0.9 | kept | - |
adam_beta2 | both | float | 0.95 | 0.95 | kept | - |
adam_epsilon | swift | float | 1e-08 | - | renamed | adam_eps |
optim_target_modules | swift | list[str] | null | - | refused | - | GaLore and APOLLO have no distributed form in Megatron; leave it out
gradient_accumulation_steps | swift | int | null | - | converted | global_batch_size | global_batch_size = micro_batch_size x dp_size x gradient_accumulation_steps
average_tokens_across_devices | swift | bool | true | - | no_effect | - | token weights always come from the counts of the whole optimizer step
max_grad_norm | swift | float | 1.0 | - | renamed | clip_grad |
label_smoothing_factor | swift | float | 0.0 | - | no_effect | - | GRPO does not read it, in swift rlhf neither
bf16 | both | bool | null | null | kept | - |
fp16 | both | bool | null | null | kept | - |
bf16_full_eval | swift | bool | false | - | no_effect | - | evaluation runs in torch_dtype
fp16_full_eval | swift | bool | false | - | no_effect | - | evaluation runs in torch_dtype
tf32 | swift | bool | null | - | no_effect | - | matrix multiplications run in torch_dtype
gradient_checkpointing | swift | bool | true | - | converted | recompute_granularity | true: every layer is recomputed (full, uniform, 1); false: none; recompute_* given by hand win
gradient_checkpointing_kwargs | swift | json | null | - | no_effect | - | Megatron has its own recomputation; there is no reentrant choice
torch_compile | swift | bool | false | - | no_effect | - | Megatron's fused kernels take this place
torch_compile_backend | swift | str | null | - | no_effect | - | Megatron's fused kernels take this place
torch_compile_mode | swift | str | null | - | no_effect | - | Megatron's fused kernels take this place
use_liger_kernel | swift | bool | false | - | no_effect | - | log-probabilities are computed in chunks without a second copy of the logits anyhow
liger_kernel_config | swift | json | null | - | no_effect | - | log-probabilities are computed in chunks without a second copy of the logits anyhow
use_cache | swift | bool | false | - | no_effect | - | training never keeps a key-value cache
neftune_noise_alpha | swift | float | null | - | refused | - | noise on embeddings changes the policy that is scored, and no Megatron path adds it; leave it out
torch_empty_cache_steps | swift | int | null | - | no_effect | - | memory is given back at the borders of a generation
auto_find_batch_size | swift | bool | false | - | refused | - | the batch is fixed before the ranks start; use --max_tokens_per_micro_batch to bound memory
logging_strategy | swift | str | "steps" | - | converted | logging_steps | steps: as it is; no: never; epoch is refused, name --logging_steps
logging_steps | both | int | 5 | 5 | kept | - |
logging_first_step | swift | bool | true | - | no_effect | - | step 1 is always logged
log_on_each_node | swift | bool | true | - | no_effect | - | one rank logs, and nothing is filtered
logging_nan_inf_filter | swift | bool | true | - | no_effect | - | one rank logs, and nothing is filtered
include_num_input_tokens_seen | swift | bool | "no" | - | no_effect | - | GRPO does not read it, in swift rlhf neither
log_level | swift | str | "passive" | - | no_effect | - | one rank logs, and nothing is filtered
log_level_replica | swift | str | "warning" | - | no_effect | - | one rank logs, and nothing is filtered
disable_tqdm | swift | bool | null | - | no_effect | - | one rank logs, and nothing is filtered
report_to | both | list[str] | ["tensorboard"] | ["tensorboard"] | kept | - | tensorboard, wandb, swanlab, or none
run_name | swift | str | null | - | renamed | wandb_exp_name |
project | swift | str | "huggingface" | - | no_effect | - | Trackio is not among the loggers of the Megatron trainer
trackio_space_id | swift | str | null | - | no_effect | - | Trackio is not among the loggers of the Megatron trainer
trackio_bucket_id | swift | str | null | - | no_effect | - | Trackio is not among the loggers of the Megatron trainer
trackio_static_space_id | swift | str{False} | null | - | no_effect | - | Trackio is not among the loggers of the Megatron trainer
eval_strategy | swift | str | null | - | kept | - | no, steps or epoch; as save_strategy where it is not given; no without validation data
eval_steps | both | float | null | null | kept | - |
eval_delay | swift | float | 0 | - | kept | - | optimizer steps; epochs with eval_strategy epoch
per_device_eval_batch_size | swift | int | 1 | - | no_effect | - | the engine batches evaluation itself; the result is a mean over samples and does not depend on it
prediction_loss_only | swift | bool | false | - | no_effect | - | GRPO does not read it, in swift rlhf neither
eval_on_start | swift | bool | false | - | kept | - |
eval_do_concat_batches | swift | bool | true | - | no_effect | - | GRPO does not read it, in swift rlhf neither
eval_use_gather_object | swift | bool | false | - | no_effect | - | GRPO does not read it, in swift rlhf neither
eval_accumulation_steps | swift | int | null | - | no_effect | - | GRPO does not read it, in swift rlhf neither
include_for_metrics | swift | list[str] | [] | - | no_effect | - | GRPO does not read it, in swift rlhf neither
batch_eval_metrics | swift | bool | false | - | no_effect | - | GRPO does not read it, in swift rlhf neither
save_only_model | swift | bool | false | - | converted | no_save_optim | true: no_save_optim and no_save_rng
save_strategy | both | str | "steps" | "steps" | kept | - | steps, epoch or no
save_steps | both | float | 500 | 500 | kept | - | a fraction of all steps is turned into steps where max_steps is known
save_on_each_node | swift | bool | false | - | no_effect | - | every rank writes its shard to the common output_dir
save_total_limit | both | int | null | null | kept | - |
enable_jit_checkpoint | swift | bool | false | - | refused | - | there is no checkpoint on a termination signal; lower save_steps
push_to_hub | swift | bool | false | - | refused | - | upload the checkpoint afterwards: swift export --push_to_hub true
hub_private_repo | swift | bool | null | - | no_effect | - | nothing is pushed during training
hub_model_id | swift | str | null | - | no_effect | - | nothing is pushed during training
hub_strategy | swift | str | "every_save" | - | no_effect | - | nothing is pushed during training
hub_always_push | swift | bool | false | - | no_effect | - | nothing is pushed during training
hub_revision | swift | str | null | - | no_effect | - | nothing is pushed during training
load_best_model_at_end | swift | bool | false | - | kept | - | the best checkpoint is linked as the last one at the end
metric_for_best_model | both | str | null | null | kept | - |
greater_is_better | both | bool | null | null | kept | - |
ignore_data_skip | swift | bool | false | - | refused | - | a resumed run always goes on behind the prompts that it has used; --resume_only_model true starts the data anew
restore_callback_states_from_checkpoint | swift | bool | false | - | no_effect | - | callbacks of transformers do not run here
full_determinism | swift | bool | false | - | refused | - | set NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 and NCCL_ALGO=Ring in the environment instead
use_cpu | swift | bool | false | - | no_effect | - | the CPU platform switches itself on where there is no accelerator
accelerator_config | swift | json | null | - | no_effect | - | accelerate does not run here
parallelism_config | swift | str | null | - | refused | - | use tensor_model_parallel_size, context_parallel_size and their like
dataloader_drop_last | swift | bool | false | - | no_effect | - | GRPO always drops an incomplete generation, in swift rlhf too
dataloader_num_workers | both | int | null | 4 | kept | - | default 1, as in swift rlhf
dataloader_pin_memory | both | bool | true | true | kept | - |
dataloader_persistent_workers | both | bool | true | true | kept | - |
dataloader_prefetch_factor | both | int | null | 2 | kept | - |
dataloader_multiprocessing_context | both | str{fork,spawn,forkserver} | null | null | kept | - |
dataloader_in_order | swift | bool | true | - | no_effect | - | the order of prompts comes from seed and dataset_shuffle alone
label_names | swift | list[str] | null | - | no_effect | - | GRPO does not read it, in swift rlhf neither
train_sampling_strategy | swift | str | "random" | - | no_effect | - | the order of prompts comes from seed and dataset_shuffle alone
length_column_name | swift | str | "length" | - | no_effect | - | GRPO does not read it, in swift rlhf neither
ddp_find_unused_parameters | swift | bool | null | - | no_effect | - | Megatron's own data parallel engine does not read it
ddp_bucket_cap_mb | swift | int | null | - | no_effect | - | Megatron's own data parallel engine does not read it
ddp_broadcast_buffers | swift | bool | null | - | no_effect | - | Megatron's own data parallel engine does not read it
ddp_static_graph | swift | bool | null | - | no_effect | - | Megatron's own data parallel engine does not read it
fsdp | swift | str | null | - | no_effect | - | Megatron's layout and distributed optimizer take the place of DeepSpeed and FSDP
fsdp_config | swift | json | null | - | no_effect | - | Megatron's layout and distributed optimizer take the place of DeepSpeed and FSDP
deepspeed | swift | json | null | - | no_effect | - | Megatron's layout and distributed optimizer take the place of DeepSpeed and FSDP
debug | swift | str | "" | - | refused | - | non-finite values are reported by the trainer itself (--nonfinite_update)
skip_memory_metrics | swift | bool | true | - | no_effect | - | memory is logged with each step
do_train | swift | bool | false | - | no_effect | - | this command trains
do_eval | swift | bool | false | - | no_effect | - | this command trains
do_predict | swift | bool | false | - | no_effect | - | this command trains
resume_from_checkpoint | swift | str | null | - | kept | - | a checkpoint folder of this backend; it also becomes mcore_model or mcore_adapter with finetune false
local_rank | both | int | -1 | null | no_effect | - | torchrun sets it
sortish_sampler | swift | bool | false | - | no_effect | - | evaluation always generates with the rollout engine
predict_with_generate | swift | bool | false | - | no_effect | - | evaluation always generates with the rollout engine
generation_max_length | swift | int | null | - | no_effect | - | evaluation always generates with the rollout engine
generation_num_beams | swift | int | null | - | no_effect | - | evaluation always generates with the rollout engine
generation_config | swift | str | null | - | no_effect | - | evaluation always generates with the rollout engine
vit_gradient_checkpointing | both | bool | null | null | kept | - |
router_aux_loss_coef | swift | float | 0.0 | - | renamed | moe_aux_loss_coeff |
enable_dft_loss | both | bool | false | false | no_effect | - | belongs to supervised fine-tuning
enable_channel_loss | both | bool | false | false | no_effect | - | belongs to supervised fine-tuning
safe_serialization | swift | bool | true | - | no_effect | - | safetensors are always written
max_shard_size | both | str | "5GB" | "5GB" | kept | - |
check_model | both | bool | true | true | kept | - |
acc_strategy | swift | str{token,seq} | "token" | - | no_effect | - | GRPO does not read it, in swift rlhf neither
train_dataloader_shuffle | both | bool | true | true | no_effect | - | dataset_shuffle decides for GRPO
group_by_length | both | bool | false | false | no_effect | - | the order of prompts comes from seed and dataset_shuffle alone
max_epochs | swift | int | null | - | refused | - | use --num_train_epochs, or --max_steps with streaming data
aligner_lr | both | float | null | null | kept | - |
vit_lr | both | float | null | null | kept | - |
use_logits_to_keep | swift | bool | null | - | no_effect | - | the output layer always runs over completion positions only
ds3_gather_for_generation | swift | bool | true | - | no_effect | - | Megatron's layout and distributed optimizer take the place of DeepSpeed and FSDP
resume_only_model | swift | bool | false | - | kept | - | true: weights only; iteration, optimizer and data start anew
optimizer | both | str | null | "adam" | kept | - | adam, sgd, muon, dist_muon; the plugin names galore, lorap, muonclip and default belong to the transformers trainer
mrl_dims | both | json | null | null | no_effect | - | belongs to supervised fine-tuning
eval_metric | swift | str | null | - | no_effect | - | GRPO does not read it, in swift rlhf neither
callbacks | both | list[str] | [] | [] | kept | - | callbacks of the Megatron trainer; those of the transformers trainer are refused by name
early_stop_interval | swift | int | null | - | kept | - | counted over a resumed run too
eval_use_evalscope | swift | bool | false | - | refused | - | run `swift eval` on a checkpoint
eval_dataset | swift | list[str] | [] | - | refused | - | run `swift eval` on a checkpoint; validation prompts go to --val_dataset
eval_dataset_args | swift | json | null | - | no_effect | - | belongs to eval_use_evalscope
eval_limit | swift | int | null | - | no_effect | - | belongs to eval_use_evalscope
eval_generation_config | swift | json | null | - | no_effect | - | belongs to eval_use_evalscope
extra_eval_args | swift | json | null | - | no_effect | - | belongs to eval_use_evalscope
use_galore | swift | bool | false | - | refused | - | GaLore projects whole matrices, and Megatron shards them; use lora, or full with --use_distributed_optimizer
galore_target_modules | swift | list[str] | null | - | no_effect | - | belongs to use_galore
galore_rank | swift | int | 128 | - | no_effect | - | belongs to use_galore
galore_update_proj_gap | swift | int | 50 | - | no_effect | - | belongs to use_galore
galore_scale | swift | float | 1.0 | - | no_effect | - | belongs to use_galore
galore_proj_type | swift | str | "std" | - | no_effect | - | belongs to use_galore
galore_optim_per_parameter | swift | bool | false | - | no_effect | - | belongs to use_galore
galore_with_embedding | swift | bool | false | - | no_effect | - | belongs to use_galore
galore_quantization | swift | bool | false | - | no_effect | - | belongs to use_galore
galore_proj_quant | swift | bool | false | - | no_effect | - | belongs to use_galore
galore_proj_bits | swift | int | 4 | - | no_effect | - | belongs to use_galore
galore_proj_group_size | swift | int | 256 | - | no_effect | - | belongs to use_galore
galore_cos_threshold | swift | float | 0.4 | - | no_effect | - | belongs to use_galore
galore_gamma_proj | swift | int | 2 | - | no_effect | - | belongs to use_galore
galore_queue_size | swift | int | 5 | - | no_effect | - | belongs to use_galore
lisa_activated_layers | swift | int | 0 | - | refused | - | LISA thaws layers step by step, and Megatron fixes its gradient buffers at the start; use lora or full
lisa_step_interval | swift | int | 20 | - | no_effect | - | belongs to lisa_activated_layers
use_flash_ckpt | swift | bool | false | - | no_effect | - | a checkpoint is moved into place when it is complete
logging_dir | swift | str | null | - | renamed | tensorboard_dir |
warmup_ratio | swift | float | 0.0 | - | kept | - |
use_ray | both | bool | false | false | refused | - | start with torchrun (NPROC_PER_NODE, NNODES); rollouts on other machines: --vllm_mode server
ray_exp_name | both | str | null | null | no_effect | - | belongs to use_ray
device_groups | both | str | null | null | no_effect | - | belongs to use_ray
load_args | both | bool | false | false | kept | - |
swanlab_token | swift | str | null | - | no_effect | - | the Megatron logger reads swanlab_project and swanlab_exp_name; set SWANLAB_API_KEY and SWANLAB_MODE in the environment
swanlab_project | both | str | "ms-swift" | "megatron-swift" | kept | - |
swanlab_workspace | swift | str | null | - | no_effect | - | the Megatron logger reads swanlab_project and swanlab_exp_name; set SWANLAB_API_KEY and SWANLAB_MODE in the environment
swanlab_exp_name | both | str | null | null | kept | - |
swanlab_notification_method | swift | str | null | - | no_effect | - | the Megatron logger reads swanlab_project and swanlab_exp_name; set SWANLAB_API_KEY and SWANLAB_MODE in the environment
swanlab_webhook_url | swift | str | null | - | no_effect | - | the Megatron logger reads swanlab_project and swanlab_exp_name; set SWANLAB_API_KEY and SWANLAB_MODE in the environment
swanlab_secret | swift | str | null | - | no_effect | - | the Megatron logger reads swanlab_project and swanlab_exp_name; set SWANLAB_API_KEY and SWANLAB_MODE in the environment
swanlab_sender_email | swift | str | null | - | no_effect | - | the Megatron logger reads swanlab_project and swanlab_exp_name; set SWANLAB_API_KEY and SWANLAB_MODE in the environment
swanlab_receiver_email | swift | str | null | - | no_effect | - | the Megatron logger reads swanlab_project and swanlab_exp_name; set SWANLAB_API_KEY and SWANLAB_MODE in the environment
swanlab_smtp_server | swift | str | null | - | no_effect | - | the Megatron logger reads swanlab_project and swanlab_exp_name; set SWANLAB_API_KEY and SWANLAB_MODE in the environment
swanlab_smtp_port | swift | int | null | - | no_effect | - | the Megatron logger reads swanlab_project and swanlab_exp_name; set SWANLAB_API_KEY and SWANLAB_MODE in the environment
swanlab_email_language | swift | str | "zh" | - | no_effect | - | the Megatron logger reads swanlab_project and swanlab_exp_name; set SWANLAB_API_KEY and SWANLAB_MODE in the environment
swanlab_mode | swift | str{cloud,local} | "cloud" | - | no_effect | - | the Megatron logger reads swanlab_project and swanlab_exp_name; set SWANLAB_API_KEY and SWANLAB_MODE in the environment
add_version | both | bool | true | true | kept | - |
create_checkpoint_symlink | both | bool | false | false | refused | - | Megatron training never made the link, in ms-swift neither; link the folder after the run
zero_hpz_partition_size | swift | int | null | - | no_effect | - | Megatron's layout and distributed optimizer take the place of DeepSpeed and FSDP
deepspeed_autotp_size | swift | int | null | - | no_effect | - | Megatron's layout and distributed optimizer take the place of DeepSpeed and FSDP
"""
