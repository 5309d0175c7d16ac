#!/bin/bash
# from_deepspeed_before.sh with one argument more; `swift-megatron-grpo plan examples/from_deepspeed_before.sh --write FILE` writes it.
# Batch, steps, tuner and learning rate are those of the script before; DeepSpeed has no effect here, and the report says so.
# expect: global_batch_size=64 generation_batch_size=64 optimizer_steps=7500 tuner_type=lora lr=0.0001
MODEL=${MODEL:-Qwen/Qwen2.5-7B-Instruct}

NPROC_PER_NODE=8 \
swift rlhf --backend megatron \
    --rlhf_type grpo \
    --model "$MODEL" \
    --dataset 'AI-MO/NuminaMath-TIR#20000' \
    --reward_funcs accuracy format \
    --torch_dtype bfloat16 \
    --num_train_epochs 3 \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 8 \
    --num_generations 8 \
    --max_completion_length 1024 \
    --warmup_ratio 0.05 \
    --deepspeed zero3 \
    --use_vllm true \
    --vllm_mode colocate \
    --vllm_gpu_memory_utilization 0.5 \
    --vllm_max_model_len 4096 \
    --move_model_batches 16 \
    --dataloader_num_workers 4 \
    --output_dir output/from_deepspeed
