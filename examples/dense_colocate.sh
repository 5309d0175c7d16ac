#!/bin/bash
# A dense model on one machine with 8 GPUs: Megatron TP 2, vLLM in the same processes, full parameters.
#
# What you should see: reward rises within the first 50 steps; the plan estimates 41 GiB a GPU while training (the engine sleeps then).
# expect: dp_size=4 micro_batch_size=2 global_batch_size=128 steps_per_generation=1 num_rollout_prompts=16 num_prompts_per_dp_group=4
# expect: optimizer_steps=312 generations=312 tuner_type=full lr=1e-06
#
# See the plan without a GPU: swift-megatron-grpo plan examples/dense_colocate.sh
NPROC_PER_NODE=8 \
swift rlhf \
    --rlhf_type grpo \
    --backend megatron \
    --tensor_model_parallel_size 2 \
    --sequence_parallel true \
    --model Qwen/Qwen2.5-7B-Instruct \
    --dataset 'AI-MO/NuminaMath-TIR#5000' \
    --reward_funcs accuracy format \
    --tuner_type full \
    --torch_dtype bfloat16 \
    --learning_rate 1e-6 \
    --warmup_ratio 0.05 \
    --num_train_epochs 1 \
    --per_device_train_batch_size 2 \
    --gradient_accumulation_steps 16 \
    --num_generations 8 \
    --max_length 2048 \
    --max_completion_length 2048 \
    --beta 0.001 \
    --use_vllm true \
    --vllm_mode colocate \
    --vllm_tensor_parallel_size 2 \
    --vllm_gpu_memory_utilization 0.5 \
    --vllm_max_model_len 4096 \
    --sleep_level 1 \
    --offload_model true \
    --offload_optimizer true \
    --log_completions true \
    --output_dir output/dense_colocate
