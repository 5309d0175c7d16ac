#!/bin/bash
# A vision-language model: the language part is trained, the vision tower and its connector stay as they are.
#
# What you should see: images are encoded once a sample; rows whose image cannot be read are named with their number.
# expect: dp_size=4 micro_batch_size=1 global_batch_size=64 steps_per_generation=1 num_rollout_prompts=8 num_prompts_per_dp_group=2
# expect: optimizer_steps=1250 tuner_type=full lr=1e-06 freeze_vit=True
NPROC_PER_NODE=4 \
MAX_PIXELS=602112 \
swift rlhf \
    --rlhf_type grpo \
    --backend megatron \
    --model Qwen/Qwen2.5-VL-3B-Instruct \
    --dataset 'AI-ModelScope/clevr_cogen_a_train#10000' \
    --reward_funcs accuracy format \
    --tuner_type full \
    --freeze_llm false \
    --freeze_vit true \
    --freeze_aligner true \
    --torch_dtype bfloat16 \
    --learning_rate 1e-6 \
    --num_train_epochs 1 \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 16 \
    --num_generations 8 \
    --max_length 4096 \
    --max_completion_length 1024 \
    --use_vllm true \
    --vllm_mode colocate \
    --vllm_gpu_memory_utilization 0.4 \
    --vllm_max_model_len 5120 \
    --vllm_limit_mm_per_prompt '{"image": 4}' \
    --sleep_level 1 \
    --offload_model true \
    --output_dir output/multimodal
