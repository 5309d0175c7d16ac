#!/bin/bash
# Two machines with 8 GPUs each. Run this file on both: NODE_RANK=0 on the first, NODE_RANK=1 on the second, MASTER_ADDR the first's address.
#
# What you should see: one progress line on the last process; the same numbers as on one machine with the same global batch.
# expect: world_size=16 dp_size=2 micro_batch_size=1 global_batch_size=64 steps_per_generation=2 num_rollout_prompts=16 num_prompts_per_dp_group=4
# expect: optimizer_steps=1000 generations=500 tuner_type=full
NNODES=2 \
NODE_RANK=${NODE_RANK:-0} \
MASTER_ADDR=${MASTER_ADDR:-127.0.0.1} \
MASTER_PORT=29500 \
NPROC_PER_NODE=8 \
swift rlhf \
    --rlhf_type grpo \
    --backend megatron \
    --tensor_model_parallel_size 4 \
    --pipeline_model_parallel_size 2 \
    --sequence_parallel true \
    --model Qwen/Qwen2.5-32B-Instruct \
    --dataset 'AI-MO/NuminaMath-TIR#50000' \
    --reward_funcs accuracy \
    --tuner_type full \
    --torch_dtype bfloat16 \
    --learning_rate 1e-6 \
    --max_steps 1000 \
    --micro_batch_size 1 \
    --global_batch_size 64 \
    --steps_per_generation 2 \
    --num_generations 8 \
    --max_completion_length 4096 \
    --max_tokens_per_micro_batch 8192 \
    --beta 0.001 \
    --use_vllm true \
    --vllm_mode colocate \
    --vllm_tensor_parallel_size 4 \
    --vllm_gpu_memory_utilization 0.5 \
    --vllm_max_model_len 8192 \
    --sleep_level 1 \
    --offload_model true \
    --offload_optimizer true \
    --output_dir output/multi_node
