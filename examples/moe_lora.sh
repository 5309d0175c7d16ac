#!/bin/bash
# A mixture of experts with LoRA: experts over 8 GPUs, attention over TP 2, adapters served to vLLM without merging.
#
# What you should see: a checkpoint of a few hundred MB (a PEFT adapter); the base weights never change.
# expect: dp_size=4 micro_batch_size=1 global_batch_size=32 steps_per_generation=1 num_rollout_prompts=4 num_prompts_per_dp_group=1
# expect: optimizer_steps=500 tuner_type=lora lr=5e-05
NPROC_PER_NODE=8 \
swift rlhf \
    --rlhf_type grpo \
    --backend megatron \
    --tensor_model_parallel_size 2 \
    --expert_model_parallel_size 8 \
    --sequence_parallel true \
    --model Qwen/Qwen3-30B-A3B-Instruct-2507 \
    --dataset 'AI-MO/NuminaMath-TIR#20000' \
    --reward_funcs accuracy \
    --tuner_type lora \
    --lora_rank 16 \
    --lora_alpha 32 \
    --target_modules all-linear \
    --router_aux_loss_coef 0.001 \
    --torch_dtype bfloat16 \
    --learning_rate 5e-5 \
    --lr_scheduler_type constant_with_warmup \
    --warmup_steps 20 \
    --max_steps 500 \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 8 \
    --num_generations 8 \
    --max_completion_length 4096 \
    --beta 0 \
    --loss_type dapo \
    --epsilon_high 0.28 \
    --use_vllm true \
    --vllm_mode colocate \
    --vllm_tensor_parallel_size 4 \
    --vllm_gpu_memory_utilization 0.5 \
    --vllm_max_model_len 8192 \
    --vllm_enable_lora true \
    --sleep_level 1 \
    --offload_model true \
    --output_dir output/moe_lora
