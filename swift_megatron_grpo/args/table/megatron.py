"""Table rows: Megatron's own: layout, kernels, precision, optimizer, checkpoint (see fields.py for the columns)."""

ROWS = r"""
mcore_ref_model | megatron | str | - | null | kept | - |
mcore_ref_adapter | megatron | str | - | null | kept | - |
reference_free | megatron | bool | - | false | no_effect | - | belongs to another rlhf_type
f_divergence_type | megatron | str | - | "reverse_kl" | no_effect | - | belongs to another rlhf_type
calculate_KL | megatron | bool | - | null | no_effect | - | belongs to another rlhf_type
_teacher_use_disable_adapter | megatron | bool | - | false | refused | - | internal to ms-swift
offload_bridge | megatron | bool | - | false | kept | - |
router_replay_mode | megatron | str{disabled,R2,R3} | - | "disabled" | kept | - |
micro_batch_size | megatron | int | - | 1 | kept | - | the same as per_device_train_batch_size; beside it steps_per_generation counts optimizer steps
global_batch_size | megatron | int | - | 16 | kept | - | wins over the formula where it is consistent
recompute_granularity | megatron | str{selective,full,none} | - | "selective" | kept | - | full where nothing is said, which is gradient_checkpointing true of swift rlhf
recompute_method | megatron | str{uniform,block} | - | null | kept | - |
recompute_num_layers | megatron | int | - | null | kept | - |
recompute_modules | megatron | list[str] | - | ["core_attn"] | kept | - |
train_iters | megatron | int | - | null | kept | - | the same as max_steps
masked_softmax_fusion | megatron | bool | - | true | kept | - |
bias_dropout_fusion | megatron | bool | - | true | kept | - |
bias_activation_fusion | megatron | bool | - | true | kept | - |
apply_rope_fusion | megatron | bool | - | false | kept | - |
gradient_accumulation_fusion | megatron | bool | - | true | kept | - |
cross_entropy_loss_fusion | megatron | bool | - | true | kept | - |
cross_entropy_fusion_impl | megatron | str{native,te} | - | "native" | kept | - |
calculate_per_token_loss | megatron | bool | - | false | refused | - | each token has its weight from the counts of the whole step, whatever the layout; choose with --loss_type
attention_backend | megatron | str | - | "flash" | kept | - |
optimizer_cpu_offload | megatron | bool | - | false | kept | - |
optimizer_offload_fraction | megatron | float | - | 1.0 | kept | - |
optimizer_cuda_graph | megatron | bool | - | false | kept | - | read by Megatron-Core newer than 0.16 only
use_precision_aware_optimizer | megatron | bool | - | false | kept | - |
main_grads_dtype | megatron | str{fp32,bf16} | - | "fp32" | kept | - |
main_params_dtype | megatron | str{fp32,fp16} | - | "fp32" | kept | - |
exp_avg_dtype | megatron | str{fp32,fp16,bf16,fp8} | - | "fp32" | kept | - |
exp_avg_sq_dtype | megatron | str{fp32,fp16,bf16,fp8} | - | "fp32" | kept | - |
manual_gc | megatron | bool | - | false | kept | - |
manual_gc_steps | megatron | int | - | 0 | kept | - |
manual_gc_eval | megatron | bool | - | true | kept | - |
data_sharding | megatron | bool | - | false | no_effect | - | prompts are dealt out by prompt id
te_rng_tracker | megatron | bool | - | false | kept | - |
data_parallel_random_init | megatron | bool | - | false | kept | - |
mlp_padding_free | megatron | bool | - | false | kept | - |
lr_warmup_init | megatron | float | - | 0.0 | kept | - | Megatron's own schedule; not together with lr_scheduler_type, lr_scheduler_kwargs, warmup_steps or warmup_ratio
lr | megatron | float | - | null | kept | - | the same as learning_rate
lr_decay_style | megatron | str{constant,linear,cosine,inverse-square-root,WSD} | - | "cosine" | kept | - | Megatron's own schedule; not together with lr_scheduler_type, lr_scheduler_kwargs, warmup_steps or warmup_ratio
lr_decay_iters | megatron | int | - | null | kept | - | Megatron's own schedule; not together with lr_scheduler_type, lr_scheduler_kwargs, warmup_steps or warmup_ratio
lr_warmup_iters | megatron | int | - | 0 | kept | - | Megatron's own schedule; not together with lr_scheduler_type, lr_scheduler_kwargs, warmup_steps or warmup_ratio
lr_warmup_fraction | megatron | float | - | null | kept | - | Megatron's own schedule; not together with lr_scheduler_type, lr_scheduler_kwargs, warmup_steps or warmup_ratio
min_lr | megatron | float | - | 0 | kept | - | Megatron's own schedule; not together with lr_scheduler_type, lr_scheduler_kwargs, warmup_steps or warmup_ratio
lr_wsd_decay_style | megatron | str{exponential,linear,cosine,minus_sqrt} | - | "exponential" | kept | - | Megatron's own schedule; not together with lr_scheduler_type, lr_scheduler_kwargs, warmup_steps or warmup_ratio
lr_wsd_decay_iters | megatron | int | - | null | kept | - | Megatron's own schedule; not together with lr_scheduler_type, lr_scheduler_kwargs, warmup_steps or warmup_ratio
weight_decay_incr_style | megatron | str{constant,linear,cosine} | - | "constant" | kept | - |
start_weight_decay | megatron | float | - | null | kept | - |
end_weight_decay | megatron | float | - | null | kept | - |
clip_grad | megatron | float | - | 1.0 | kept | - | the same as max_grad_norm
adam_eps | megatron | float | - | 1e-08 | kept | - | the same as adam_epsilon
sgd_momentum | megatron | float | - | 0.9 | kept | - |
muon_momentum | megatron | float | - | 0.9 | kept | - |
muon_split_qkv | megatron | bool | - | true | kept | - |
muon_use_nesterov | megatron | bool | - | false | kept | - |
muon_scale_mode | megatron | str{spectral,unit_rms_norm,shape_scaling} | - | "spectral" | kept | - |
muon_fp32_matmul_prec | megatron | str{low,medium,high} | - | "medium" | kept | - |
muon_coefficient_type | megatron | str | - | "quintic" | kept | - |
muon_num_ns_steps | megatron | int | - | 5 | kept | - |
muon_tp_mode | megatron | str{blockwise,duplicated,distributed} | - | "blockwise" | kept | - |
muon_extra_scale_factor | megatron | float | - | 1.0 | kept | - |
muon_scalar_optimizer | megatron | str | - | "adam" | kept | - |
muon_lr | megatron | float | - | null | kept | - |
muon_min_lr | megatron | float | - | null | kept | - |
no_save_optim | megatron | bool | - | false | kept | - |
no_save_rng | megatron | bool | - | false | kept | - |
mcore_model | megatron | str | - | null | kept | - |
mcore_adapter | megatron | str | - | null | kept | - |
no_load_optim | megatron | bool | - | false | kept | - |
no_load_rng | megatron | bool | - | false | kept | - |
finetune | megatron | bool | - | true | kept | - |
perform_initialization | megatron | bool | - | false | kept | - |
use_cpu_initialization | megatron | bool | - | false | kept | - |
async_save | megatron | bool | - | false | kept | - |
use_persistent_ckpt_worker | megatron | bool | - | false | kept | - |
dist_ckpt_save_pre_mcore_014 | megatron | bool | - | false | kept | - |
dist_ckpt_optim_fully_reshardable | megatron | bool | - | false | kept | - | true: the run can go on with other TP and PP; moments are gathered for each checkpoint
distrib_optim_fully_reshardable_mem_efficient | megatron | bool | - | false | kept | - |
use_distributed_optimizer | megatron | bool | - | true | kept | - |
use_megatron_fsdp | megatron | bool | - | false | refused | - | the weight sync and the loss weights are not proven for it; use tensor and pipeline parallel with the distributed optimizer
strict_fsdp_dtensor_load | megatron | bool | - | true | no_effect | - | belongs to use_megatron_fsdp
data_parallel_sharding_strategy | megatron | str{no_shard,optim,optim_grads,optim_grads_params} | - | "optim_grads_params" | no_effect | - | belongs to use_megatron_fsdp
tensor_model_parallel_size | megatron | int | - | 1 | kept | - |
pipeline_model_parallel_size | megatron | int | - | 1 | kept | - |
decoder_first_pipeline_num_layers | megatron | int | - | null | kept | - |
decoder_last_pipeline_num_layers | megatron | int | - | null | kept | - |
account_for_embedding_in_pipeline_split | megatron | bool | - | false | kept | - |
account_for_loss_in_pipeline_split | megatron | bool | - | false | kept | - |
overlap_p2p_comm | megatron | bool | - | true | kept | - |
batch_p2p_comm | megatron | bool | - | null | kept | - |
align_param_gather | megatron | bool | - | true | kept | - |
sequence_parallel | megatron | bool | - | false | kept | - |
context_parallel_size | megatron | int | - | 1 | kept | - |
cp_comm_type | megatron | str | - | null | kept | - |
cp_partition_mode | megatron | str{zigzag,contiguous} | - | "zigzag" | kept | - |
sequence_packing_scheduler | megatron | str{dp_balanced,default_dynamic_cp} | - | null | refused | - | micro-batches are packed and balanced by --max_tokens_per_micro_batch
tp_comm_overlap | megatron | bool | - | false | kept | - |
overlap_grad_reduce | megatron | bool | - | false | kept | - |
overlap_param_gather | megatron | bool | - | false | kept | - |
overlap_param_gather_with_optimizer_step | megatron | bool | - | false | kept | - |
align_grad_reduce | megatron | bool | - | true | kept | - |
nccl_comm_warmup | megatron | bool | - | false | kept | - |
virtual_pipeline_model_parallel_size | megatron | int | - | null | kept | - |
microbatch_group_size_per_vp_stage | megatron | int | - | null | kept | - |
pipeline_model_parallel_layout | megatron | str | - | null | kept | - |
expert_model_parallel_size | megatron | int | - | 1 | kept | - |
expert_tensor_parallel_size | megatron | int | - | 1 | kept | - |
tensorboard_dir | megatron | str | - | null | kept | - |
tensorboard_queue_size | megatron | int | - | 50 | kept | - |
wandb_project | megatron | str | - | "megatron-swift" | kept | - |
wandb_exp_name | megatron | str | - | null | kept | - |
eval_iters | megatron | int | - | -1 | kept | - | 0 switches evaluation off; other values bound the number of evaluation batches
fp8_format | megatron | str{e4m3,hybrid} | - | null | kept | - |
fp8_recipe | megatron | str{tensorwise,delayed,mxfp8,blockwise} | - | "delayed" | kept | - |
fp8_param_gather | megatron | bool | - | false | kept | - |
fp8_amax_history_len | megatron | int | - | 1024 | kept | - |
fp8_amax_compute_algo | megatron | str{most_recent,max} | - | "max" | kept | - |
fp4_format | megatron | str{e2m1} | - | null | kept | - |
fp4_recipe | megatron | str{nvfp4} | - | "nvfp4" | kept | - |
fp4_param_gather | megatron | bool | - | false | kept | - |
apply_query_key_layer_scaling | megatron | bool | - | null | kept | - |
attention_softmax_in_fp32 | megatron | bool | - | true | kept | - |
accumulate_allreduce_grads_in_fp32 | megatron | bool | - | false | kept | - |
moe_router_load_balancing_type | megatron | list[str] | - | null | kept | - |
moe_router_dtype | megatron | str{none,fp32,fp64} | - | "fp32" | kept | - |
moe_token_dispatcher_type | megatron | str{allgather,alltoall,flex} | - | "alltoall" | kept | - |
moe_enable_deepep | megatron | bool | - | false | kept | - |
moe_grouped_gemm | megatron | bool | - | true | kept | - |
moe_permute_fusion | megatron | bool | - | false | kept | - |
moe_aux_loss_coeff | megatron | list[float] | - | 0.0 | kept | - |
moe_z_loss_coeff | megatron | float | - | null | kept | - |
moe_shared_expert_overlap | megatron | bool | - | false | kept | - |
moe_layer_recompute | megatron | bool | - | false | kept | - |
moe_expert_capacity_factor | megatron | float | - | null | kept | - |
moe_pad_expert_input_to_capacity | megatron | bool | - | false | kept | - |
moe_token_drop_policy | megatron | str{probs,position} | - | "probs" | kept | - |
engram_tokenizer_map | megatron | str | - | null | kept | - |
mtp_num_layers | megatron | int | - | null | refused | - | the policy loss does not reach layers of multi-token prediction, so they would be loaded and not trained; leave it out
mtp_loss_scaling_factor | megatron | float | - | 0.1 | kept | - |
mtp_decoder_input_detach | megatron | bool | - | false | kept | - |
mtp_shared_weights | megatron | bool | - | false | kept | - |
bridge_backend | megatron | str{mcore-bridge,megatron-bridge} | - | "mcore-bridge" | refused | - | mcore-bridge is used: it has LoRA and multimodal models
save_safetensors | megatron | bool | - | true | kept | - |
save_missing_weights | megatron | bool | - | false | kept | - |
merge_lora | megatron | bool | - | null | kept | - |
vit_gradient_checkpointing_kwargs | megatron | json | - | null | kept | - |
vit_attn_impl | megatron | str | - | null | kept | - |
dsa_indexer_loss_coeff | megatron | float | - | 0.0 | kept | - |
dsa_indexer_use_sparse_loss | megatron | bool | - | false | kept | - |
apply_dsa_kernel_fusion | megatron | bool | - | false | kept | - | read by Megatron-Core newer than 0.16 only
csa_dense_mode | megatron | bool | - | false | kept | - | read by Megatron-Core newer than 0.16 only
use_fused_mhc | megatron | bool | - | false | kept | - |
mhc_recompute_layer_num | megatron | int | - | null | kept | - | read by Megatron-Core newer than 0.16 only
megatron_extra_kwargs | megatron | json | - | null | kept | - |
language_model_only | megatron | bool | - | false | kept | - |
apply_wd_to_qk_layernorm | megatron | bool | - | false | kept | - |
linear_decoupled_in_proj | megatron | bool | - | false | kept | - |
skip_megatron_init | megatron | bool | - | false | refused | - | internal to ms-swift
"""
