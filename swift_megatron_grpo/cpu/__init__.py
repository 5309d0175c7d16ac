"""The CPU platform: Megatron-Core, ms-swift's Megatron side and vLLM on a machine without an accelerator (import tier 0 until activated).

`activate()` stands in for Transformer Engine, sends every CUDA device to the CPU, and mends what remains. Its changes reach every
library of the process, so it belongs in worker processes, as their first statement, before megatron, mcore_bridge or swift.megatron are
imported. It proves parallel logic, arithmetic and orchestration; kernels, NCCL, streams, overlap, sleep mode and FP8 it cannot show, and host
and device draw from one random stream here.
"""
import importlib.util
import logging
import os
import socket
import sys

from swift_megatron_grpo.cpu.limits import refuse_unsupported

__all__ = ['activate', 'has_accelerator', 'is_active', 'is_needed', 'refuse_unsupported', 'set_environment']

logger = logging.getLogger(__name__)

# Each is a default: what the user has set stays. The reasons stand beside them.
ENVIRONMENT = {
    'CUDA_DEVICE_MAX_CONNECTIONS': '1',  # Megatron asserts it with tensor parallel, also where it can have no effect
    'TORCHDYNAMO_DISABLE': '1',  # torch.compile meets wrapped factories, and would want a C++ compiler
    'VLLM_CPU_KVCACHE_SPACE': '1',  # GiB; the engine's own default is a large share of the memory that the trainer needs too
    'VLLM_ENABLE_V1_MULTIPROCESSING': '0',  # the engine in this process: a colocated one reads the trainer's tensors
    'VLLM_PLUGINS': 'swift_megatron_grpo_cpu',  # ms-swift's own vLLM plugin stops an engine where torchvision lacks
}

_state: dict[str, bool] = {}


def has_accelerator() -> bool:
    """Whether torch has a device that Megatron-Core or vLLM can use. Any process; imports torch, changes nothing."""
    import torch
    if torch.cuda.is_available():
        return True
    # Megatron-Core has no path for Apple's GPU, so that such a laptop takes the CPU platform.
    return torch.accelerator.is_available() and torch.accelerator.current_accelerator().type != 'mps'


def is_active() -> bool:
    """Whether `activate()` has switched the platform on in this process. Any process; no communication."""
    return _state.get('active', False)


def is_needed() -> bool:
    """Whether this machine has neither an accelerator nor Transformer Engine. Any process; imports torch, changes nothing."""
    if is_active():
        return True
    return importlib.util.find_spec('transformer_engine') is None and not has_accelerator()


def set_environment(prefix: str = '') -> None:
    """The defaults of ENVIRONMENT whose names begin with `prefix`, for this process and those that it starts. What is set stays."""
    for name, value in ENVIRONMENT.items():
        if name.startswith(prefix):
            os.environ.setdefault(name, value)


def _let_gloo_find_this_host() -> None:
    """gloo listens at the address of the host's own name, which a laptop or a container may not be able to resolve."""
    if os.environ.get('WORLD_SIZE', '1') != os.environ.get('LOCAL_WORLD_SIZE', '1'):
        return  # several hosts: the loopback interface would be wrong
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        loopback = [name for _, name in socket.if_nameindex() if name in ('lo', 'lo0')]
        if loopback:
            os.environ.setdefault('GLOO_SOCKET_IFNAME', loopback[0])


def activate() -> bool:
    """Switch the CPU platform on where it is needed; returns whether it is on. Idempotent; each worker process calls it first.

    Raises RuntimeError when Megatron-Core is already imported: its modules would have kept what is replaced here.
    """
    if is_active():
        return True
    if not is_needed():
        return False
    early = [name for name in ('megatron.core', 'mcore_bridge', 'transformer_engine') if name in sys.modules]
    if early:
        raise RuntimeError(f'the CPU platform must be activated before {early[0]} is imported (first statement of a worker process)')
    set_environment()
    _let_gloo_find_this_host()
    from swift_megatron_grpo.cpu import device, libraries, vision
    from swift_megatron_grpo.cpu.te import install
    device.apply()
    libraries.apply()
    vision.apply()
    install.apply()
    _state['active'] = True
    if os.environ.get('RANK', '0') == '0':
        # A warning, so that it is seen before anyone has set up logging.
        logger.warning('CPU platform: no accelerator and no Transformer Engine here; Megatron-Core runs on %s', device.describe())
    return True
