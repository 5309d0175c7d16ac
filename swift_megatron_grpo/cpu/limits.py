"""What the CPU platform cannot stand in for, refused by name (import tier 0)."""
from collections.abc import Callable, Mapping
from typing import Any

from swift_megatron_grpo.errors import UserError

Asked = Callable[[Any], bool]


def _on(value: Any) -> bool:
    return value is not None and value is not False and value != 'none' and value != 'False'


def _is(*names: str) -> Asked:
    return lambda value: str(value) in names


# argument -> (when it asks for the thing, the thing, what else would do)
UNSUPPORTED: dict[str, tuple[Asked, str, str]] = {
    'fp8': (_on, 'FP8 arithmetic', 'leave it out (bf16 or fp32)'),
    'fp8_format': (_on, 'FP8 arithmetic', 'leave it out (bf16 or fp32)'),
    'fp8_param': (_on, 'FP8 parameters', 'leave it out'),
    'fp8_param_gather': (_on, 'FP8 parameters', 'leave it out'),
    'fp4': (_on, 'FP4 arithmetic', 'leave it out (bf16 or fp32)'),
    'fp4_format': (_on, 'FP4 arithmetic', 'leave it out (bf16 or fp32)'),
    'fp4_param': (_on, 'FP4 parameters', 'leave it out'),
    'fp4_param_gather': (_on, 'FP4 parameters', 'leave it out'),
    'tp_comm_overlap': (_on, "Transformer Engine's user buffers", 'leave it out: the result is the same'),
    'delay_wgrad_compute': (_on, 'delayed weight gradients', 'leave it out: the result is the same'),
    'overlap_moe_expert_parallel_comm': (_on, 'overlap of expert communication on CUDA streams', 'leave it out: the result is the same'),
    'symmetric_ar_type': (_on, 'symmetric-memory all-reduce', 'leave it out: the result is the same'),
    'nccl_ub': (_on, 'NCCL user buffers', 'leave it out: the result is the same'),
    'use_sharp': (_on, 'SHARP reductions', 'leave it out: the result is the same'),
    'apply_rope_fusion': (_on, 'the fused rotary-embedding kernel', 'apply_rope_fusion false: the result is the same'),
    'moe_permute_fusion': (_on, 'the fused permutation kernel', 'moe_permute_fusion false: the result is the same'),
    'moe_router_fusion': (_on, 'the fused router kernel', 'moe_router_fusion false: the result is the same'),
    'moe_enable_deepep': (_on, 'DeepEP', 'moe_token_dispatcher_type alltoall'),
    'moe_token_dispatcher_type': (_is('flex'), 'the flexible token dispatcher (DeepEP or HybridEP)', 'moe_token_dispatcher_type alltoall'),
    'use_transformer_engine_op_fuser': (_on, "Transformer Engine's operation fuser", 'leave it out: the result is the same'),
    'cross_entropy_fusion_impl': (_is('te'), "Transformer Engine's cross entropy", 'cross_entropy_fusion_impl native'),
    'enable_cuda_graph': (_on, 'CUDA graphs', 'leave it out: the result is the same'),
    'external_cuda_graph': (_on, 'CUDA graphs', 'leave it out: the result is the same'),
    'cuda_graph_impl': (_on, 'CUDA graphs', 'leave it out: the result is the same'),
    'use_precision_aware_optimizer': (_on, 'the precision-aware optimizer', 'leave it out (fp32 optimizer state)'),
    'optimizer_cpu_offload': (_on, 'optimizer state that lives apart from the device', 'leave it out: it is on the CPU anyway'),
    'cpu_offloading': (_on, 'activations that live apart from the device', 'leave it out: they are on the CPU anyway'),
    'fine_grained_activation_offloading': (_on, 'activations that live apart from the device', 'leave it out'),
    'use_megatron_fsdp': (_on, "Megatron's FSDP", 'leave it out (use_distributed_optimizer true shards the optimizer)'),
    'qk_clip': (_on, 'attention-logit clipping', 'leave it out'),
    'ddp_backend': (_is('nccl', 'hccl', 'mccl'), 'NCCL', 'ddp_backend gloo'),
    'load_in_4bit': (_on, 'bitsandbytes kernels', 'leave it out'),
    'load_in_8bit': (_on, 'bitsandbytes kernels', 'leave it out'),
}


def refuse_unsupported(args: Mapping[str, Any] | object) -> None:
    """Raise UserError that names every argument asking for something that only a GPU has. Pure; any process.

    `args` is an argument object of ms-swift or Megatron-Core, or a mapping from argument name to value. Names that it lacks are
    not looked at. One error lists all of them, so that one correction is enough.
    """
    given = args if isinstance(args, Mapping) else vars(args)
    faults = []
    for name, (asked, thing, instead) in UNSUPPORTED.items():
        if name in given and asked(given[name]):
            faults.append(f'  {name}={given[name]}: needs {thing}; {instead}')
    if faults:
        raise UserError('the CPU platform cannot stand in for what these arguments ask for:\n' + '\n'.join(faults)
                        + '\nOn a machine with an accelerator and Transformer Engine they are passed through.')
