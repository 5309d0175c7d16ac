#!/bin/bash
# Rollouts on two GPUs of their own, training on six: two commands. The server may run on another machine; give its address then.
#
# What you should see: the trainer waits until the server answers, checks the first weight transfer, then logs one line a step.
# expect: dp_size=3 micro_batch_size=1 global_batch_size=48 steps_per_generation=2 num_rollout_prompts=12 num_prompts_per_dp_group=2
# expect: optimizer_steps=832 generations=416 tuner_type=lora lr=0.0001

# 1. the rollout server, unchanged from ms-swift
CUDA_VISIBLE_DEVICES=6,7 \
swift rollout \
    --model Qwen/Qwen2.5-7B-Instruct \
    --vllm_data_parallel_size 2 \
    --vllm_max_model_len 4096 \
    --port 8000 &

# 2. the trainer; 32 micro-steps at an accumulation of 16 are 2 optimizer steps a generation
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5 \
NPROC_PER_NODE=6 \
swift rlhf \
    --rlhf_type grpo \
    --backend megatron \
    --tensor_model_parallel_size 2 \
    --model Qwen/Qwen2.5-7B-Instruct \
    --dataset 'AI-MO/NuminaMath-TIR#5000' \
    --reward_funcs accuracy \
    --torch_dtype bfloat16 \
    --num_train_epochs 1 \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 16 \
    --steps_per_generation 32 \
    --num_generations 8 \
    --max_completion_length 2048 \
    --use_vllm true \
    --vllm_mode server \
    --vllm_server_host 127.0.0.1 \
    --vllm_server_port 8000 \
    --output_dir output/dense_server
