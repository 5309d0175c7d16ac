"""A small model learns to add two-digit numbers with GRPO, on two CPU processes with real Megatron-Core and real vLLM: `make demo`."""
