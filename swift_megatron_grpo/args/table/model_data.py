"""Table rows: model, template, data, tuner (see fields.py for the columns)."""

ROWS = r"""
hub_token | both | str | null | null | kept | - |
seed | both | int | 42 | 42 | converted | - | Megatron's random state wants a seed above 0
data_seed | both | int | 42 | 42 | kept | - |
remove_unused_columns | both | bool | true | true | kept | - |
ddp_backend | both | str{nccl,gloo} | null | "nccl" | kept | - | where it is not given: nccl on accelerators, gloo without
ddp_timeout | both | int | 18000000 | 18000000 | kept | - |
tuner_backend | both | str{peft,unsloth} | "peft" | "peft" | refused | - | unsloth does not know Megatron; peft is used
tuner_type | both | str | "lora" | "full" | kept | - | lora where nothing is said, as in swift rlhf; lora, full and lora_llm work
model | both | str | null | null | kept | - |
model_type | both | str | null | null | kept | - |
model_revision | both | str | null | null | refused | - | give the local path of that revision instead
task_type | both | str{causal_lm,seq_cls,embedding,reranker,generative_reranker,decision} | null | null | kept | - | causal_lm only
torch_dtype | both | str{bfloat16,float16,float32} | null | null | kept | - | also sets bf16 and fp16
attn_impl | both | str | null | null | converted | attention_backend | flash_attn and flash_attention_2: flash; flash_attention_3: flash_3; sdpa: flash (same mathematics); eager: unfused, without packing
experts_impl | both | str | null | null | no_effect | - | experts run as grouped matrix multiplications (--moe_grouped_gemm)
new_special_tokens | both | list[str] | [] | [] | kept | - |
num_labels | both | int | null | null | no_effect | - | belongs to classification
problem_type | both | str{regression,single_label_classification,multi_label_classification} | null | null | no_effect | - | belongs to classification
rope_scaling | both | str | null | null | kept | - |
device_map | both | json | null | null | no_effect | - | the layout places the layers
max_memory | both | json | null | null | no_effect | - | the layout places the layers
max_model_len | both | int | null | null | kept | - |
local_repo_path | both | str | null | null | kept | - |
init_strategy | both | str{zero,uniform,normal,xavier_uniform,xavier_normal,kaiming_uniform,kaiming_normal,orthogonal} | null | null | refused | - | weights are read from the checkpoint; initialise them with transformers and save them first
template | both | str | null | null | kept | - |
system | both | str | null | null | kept | - |
max_length | both | int | null | null | kept | - |
max_pixels | both | int | null | null | kept | - |
agent_template | both | str | null | null | kept | - |
norm_bbox | both | str{norm1000,none} | null | null | kept | - |
use_chat_template | both | bool | null | null | kept | - |
padding_side | both | str{left,right} | "right" | "right" | no_effect | - | sequences are packed, or padded on the right, whatever the engine does
padding_free | both | bool | false | true | kept | - | the gradient does not depend on it; packed where nothing is said
sequence_parallel_size | both | int | 1 | 1 | renamed | context_parallel_size | where context_parallel_size is not given; gradient_accumulation_steps is multiplied by it, as in swift rlhf, so that an optimizer step and a generation keep their size
is_binary_loss_scale | both | bool | null | null | kept | - |
template_backend | both | str{swift,jinja} | "swift" | "swift" | kept | - |
response_prefix | both | str | null | null | kept | - |
enable_thinking | both | bool | null | null | kept | - |
preserve_thinking | both | bool | null | null | kept | - |
add_non_thinking_prefix | both | bool | true | true | kept | - |
disable_ignore_empty_think | both | bool | false | false | kept | - |
dataset | both | list[str] | [] | [] | kept | - |
val_dataset | both | list[str] | [] | [] | kept | - |
cached_dataset | both | list[str] | [] | [] | refused | - | GRPO reads prompts, not tokens, in swift rlhf too; give --dataset
cached_val_dataset | both | list[str] | [] | [] | refused | - | GRPO reads prompts, not tokens, in swift rlhf too; give --dataset
split_dataset_ratio | both | float | 0.0 | 0.0 | kept | - |
dataset_num_proc | both | int | 1 | 1 | kept | - |
load_from_cache_file | both | bool | false | false | kept | - |
val_dataset_shuffle | both | bool | false | false | kept | - |
streaming | both | bool | false | false | kept | - |
interleave_prob | both | list[float] | null | null | kept | - |
stopping_strategy | both | str{first_exhausted,all_exhausted} | "first_exhausted" | "first_exhausted" | kept | - |
shuffle_buffer_size | both | int | 1000 | 1000 | kept | - |
download_mode | both | str{force_redownload,reuse_dataset_if_exists} | "reuse_dataset_if_exists" | "reuse_dataset_if_exists" | kept | - |
columns | both | json | null | null | kept | - |
strict | both | bool | false | false | kept | - |
disable_auto_column_mapping | both | bool | false | false | kept | - |
model_name | both | list[str] | null | null | kept | - |
model_author | both | list[str] | null | null | kept | - |
custom_dataset_info | both | list[str] | [] | [] | kept | - |
decision_drop_instructions | both | float | 0.0 | 0.0 | no_effect | - | belongs to decision tasks
decision_subsample_options | both | int | 0 | 0 | no_effect | - | belongs to decision tasks
decision_state_as_text | both | float | 0.0 | 0.0 | no_effect | - | belongs to decision tasks
decision_shuffle_fields | both | bool | false | false | no_effect | - | belongs to decision tasks
quant_method | both | str{bnb,hqq,eetq,quanto,fp8} | null | null | refused | - | Megatron trains unquantised weights (no QLoRA); leave it out, or train with --tuner_type lora in bfloat16
quant_bits | both | str{1,2,3,4,8,float8} | null | null | refused | - | Megatron trains unquantised weights (no QLoRA); leave it out, or train with --tuner_type lora in bfloat16
hqq_axis | both | int | null | null | no_effect | - | belongs to quant_method
bnb_4bit_compute_dtype | both | str{float16,bfloat16,float32} | null | null | no_effect | - | belongs to quant_method
bnb_4bit_quant_type | both | str{fp4,nf4} | "nf4" | "nf4" | no_effect | - | belongs to quant_method
bnb_4bit_use_double_quant | both | bool | true | true | no_effect | - | belongs to quant_method
bnb_4bit_quant_storage | both | str | null | null | no_effect | - | belongs to quant_method
num_beams | both | int | 1 | 1 | no_effect | - | rollouts are sampled, and their log-probabilities are always recorded
stream | both | bool | null | null | no_effect | - | rollouts are sampled, and their log-probabilities are always recorded
logprobs | both | bool | false | false | no_effect | - | rollouts are sampled, and their log-probabilities are always recorded
top_logprobs | both | int | null | null | no_effect | - | rollouts are sampled, and their log-probabilities are always recorded
adapters | both | list[str] | [] | [] | kept | - |
external_plugins | both | list[str] | [] | [] | kept | - |
custom_register_path | both | list[str] | [] | [] | renamed | external_plugins |
model_kwargs | both | json | null | null | kept | - |
enable_npu_model_patch | both | bool | true | true | no_effect | - | no model of transformers is trained
load_data_args | both | bool | false | false | kept | - |
packing | both | bool | false | false | converted | padding_free | rollouts are packed into micro-batches; see --max_tokens_per_micro_batch
packing_length | both | int | null | null | no_effect | - | rollouts are packed by --max_tokens_per_micro_batch
packing_num_proc | both | int | 1 | 1 | no_effect | - | rollouts are packed by --max_tokens_per_micro_batch
packing_strategy | both | str{binpack,sequential} | "binpack" | "binpack" | no_effect | - | rollouts are packed by --max_tokens_per_micro_batch
lazy_tokenize | both | bool | null | null | no_effect | - | GRPO encodes prompts when they are used
use_hf | both | bool | false | false | kept | - |
ignore_args_error | both | bool | false | false | no_effect | - | unknown arguments are always refused
use_swift_lora | both | bool | false | false | refused | - | use --tuner_type lora
freeze_parameters | both | list[str] | [] | [] | converted | - | prefixes of transformers become those of Megatron
freeze_parameters_regex | both | str | null | null | kept | - |
freeze_parameters_ratio | both | float | 0.0 | 0.0 | kept | - |
trainable_parameters | both | list[str] | [] | [] | converted | - | prefixes of transformers become those of Megatron
trainable_parameters_regex | both | str | null | null | kept | - |
freeze_llm | both | bool | false | false | kept | - |
freeze_vit | both | bool | true | true | kept | - |
freeze_aligner | both | bool | true | true | kept | - |
target_modules | both | list[str] | ["all-linear"] | ["all-linear"] | converted | - | names of transformers become names of Megatron: q_proj, k_proj, v_proj: linear_qkv; o_proj: linear_proj; gate_proj, up_proj: linear_fc1; down_proj: linear_fc2
target_regex | both | str | null | null | kept | - |
target_parameters | swift | list[str] | null | - | converted | - | expert weights are linear layers in Megatron: all-linear covers them
modules_to_save | both | list[str] | [] | [] | converted | - | embed_tokens: word_embeddings; lm_head: output_layer
lora_alpha | both | float | 32.0 | 32.0 | kept | - |
lora_dropout | both | float | 0.05 | 0.05 | kept | - |
lora_bias | both | str{none,all} | "none" | "none" | kept | - |
lora_dtype | both | str{float16,bfloat16,float32} | null | null | kept | - |
lorap_lr_ratio | swift | float | null | - | refused | - | LoRA+ needs two learning rates a layer; leave it out
use_rslora | both | bool | false | false | kept | - |
use_dora | swift | bool | false | - | refused | - | mcore-bridge has no DoRA; use --use_rslora true or plain LoRA
lora_ga_batch_size | swift | int | 2 | - | no_effect | - | belongs to init_weights lora-ga
lora_ga_iters | swift | int | 2 | - | no_effect | - | belongs to init_weights lora-ga
lora_ga_max_length | swift | int | 1024 | - | no_effect | - | belongs to init_weights lora-ga
lora_ga_direction | swift | str | "ArB2r" | - | no_effect | - | belongs to init_weights lora-ga
lora_ga_scale | swift | str | "stable" | - | no_effect | - | belongs to init_weights lora-ga
lora_ga_stable_gamma | swift | int | 16 | - | no_effect | - | belongs to init_weights lora-ga
init_weights | swift | str | "true" | - | refused | - | only the usual LoRA initialisation (B = 0) exists in mcore-bridge
fourier_n_frequency | swift | int | 2000 | - | no_effect | - | belongs to another tuner_type
fourier_scaling | swift | float | 300.0 | - | no_effect | - | belongs to another tuner_type
boft_block_size | swift | int | 4 | - | no_effect | - | belongs to another tuner_type
boft_block_num | swift | int | 0 | - | no_effect | - | belongs to another tuner_type
boft_n_butterfly_factor | swift | int | 1 | - | no_effect | - | belongs to another tuner_type
boft_dropout | swift | float | 0.0 | - | no_effect | - | belongs to another tuner_type
vera_rank | swift | int | 256 | - | no_effect | - | belongs to another tuner_type
vera_projection_prng_key | swift | int | 0 | - | no_effect | - | belongs to another tuner_type
vera_dropout | swift | float | 0.0 | - | no_effect | - | belongs to another tuner_type
vera_d_initial | swift | float | 0.1 | - | no_effect | - | belongs to another tuner_type
adapter_act | swift | str | "gelu" | - | no_effect | - | belongs to another tuner_type
adapter_length | swift | int | 128 | - | no_effect | - | belongs to another tuner_type
adalora_target_r | swift | int | 8 | - | no_effect | - | belongs to another tuner_type
adalora_init_r | swift | int | 12 | - | no_effect | - | belongs to another tuner_type
adalora_tinit | swift | int | 0 | - | no_effect | - | belongs to another tuner_type
adalora_tfinal | swift | int | 0 | - | no_effect | - | belongs to another tuner_type
adalora_deltaT | swift | int | 1 | - | no_effect | - | belongs to another tuner_type
adalora_beta1 | swift | float | 0.85 | - | no_effect | - | belongs to another tuner_type
adalora_beta2 | swift | float | 0.85 | - | no_effect | - | belongs to another tuner_type
adalora_orth_reg_weight | swift | float | 0.5 | - | no_effect | - | belongs to another tuner_type
llamapro_num_new_blocks | swift | int | 4 | - | no_effect | - | belongs to another tuner_type
llamapro_num_groups | swift | int | null | - | no_effect | - | belongs to another tuner_type
reft_layer_key | swift | str | null | - | no_effect | - | belongs to another tuner_type
reft_layers | swift | list[int] | null | - | no_effect | - | belongs to another tuner_type
reft_rank | swift | int | 4 | - | no_effect | - | belongs to another tuner_type
reft_intervention_type | swift | str{NoreftIntervention,LoreftIntervention,ConsreftIntervention,LobireftIntervention,DireftIntervention,NodireftIntervention} | "LoreftIntervention" | - | no_effect | - | belongs to another tuner_type
reft_args | swift | str | null | - | no_effect | - | belongs to another tuner_type
"""
