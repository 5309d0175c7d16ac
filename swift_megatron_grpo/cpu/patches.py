"""The registers of every change that the CPU platform makes to other people's code (import tier 0)."""
from swift_megatron_grpo.passport import PatchRegistry

# Applied by `swift_megatron_grpo.cpu.activate` in a worker process.
PLATFORM = PatchRegistry('CPU platform')
# Applied by `swift_megatron_grpo.cpu.vllm_plugin.register` in every process of a vLLM engine.
ENGINE = PatchRegistry('CPU engine')
