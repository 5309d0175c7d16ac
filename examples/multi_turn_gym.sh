#!/bin/bash
# Several turns with an environment that gives the reward; what the environment writes carries no loss.
#
# What you should see: num_turns among the metrics, and completions.jsonl with whole conversations.
# expect: dp_size=2 micro_batch_size=1 global_batch_size=32 steps_per_generation=1 num_rollout_prompts=4 num_prompts_per_dp_group=2
# expect: optimizer_steps=200 tuner_type=lora loss_scale=default
NPROC_PER_NODE=4 \
swift rlhf \
    --rlhf_type grpo \
    --backend megatron \
    --tensor_model_parallel_size 2 \
    --model Qwen/Qwen2.5-3B-Instruct \
    --dataset 'AI-MO/NuminaMath-TIR#2000' \
    --multi_turn_scheduler gym_scheduler \
    --use_gym_env true \
    --gym_env math_env \
    --max_turns 4 \
    --torch_dtype bfloat16 \
    --max_steps 200 \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 16 \
    --num_generations 8 \
    --max_completion_length 2048 \
    --use_vllm true \
    --vllm_mode colocate \
    --vllm_tensor_parallel_size 2 \
    --vllm_gpu_memory_utilization 0.4 \
    --vllm_max_model_len 8192 \
    --sleep_level 1 \
    --output_dir output/multi_turn_gym
