"""Mends in libraries other than torch that the CPU platform needs (import tier 2). Applied by `swift_megatron_grpo.cpu.activate`."""
import functools
import importlib.machinery
import importlib.util
import logging
import sys
import types
import warnings
from typing import Any
from unittest.mock import MagicMock

from swift_megatron_grpo.cpu.patches import PLATFORM
from swift_megatron_grpo.passport import Passport


@PLATFORM.patch(Passport(
    name='accelerate-sees-the-group',
    target='accelerate.state:PartialState.__init__',
    breaks="accelerate's gather_object and broadcast_object_list return their input: each rank keeps to itself, silently",
    reference='accelerate/state.py: without cpu=True a process without an accelerator counts as not distributed',
    versions='accelerate 1.x',
    remove_when='accelerate takes an initialised gloo group for what it is',
))
def accelerate_sees_the_group() -> None:
    from accelerate.state import PartialState
    original = PartialState.__init__

    @functools.wraps(original)
    def __init__(self: Any, cpu: bool = True, **kwargs: Any) -> None:
        original(self, cpu=True, **kwargs)

    PartialState.__init__ = __init__


@PLATFORM.patch(Passport(
    name='triton-names',
    target='sys:modules',
    breaks='ModuleNotFoundError: mcore_bridge and megatron.core.ssm import triton without a guard, for kernels never called here',
    reference='mcore_bridge/model/modules/kernels/qsa_block_sparse_attn.py; megatron/core/inference/contexts/fused_kv_append_kernel.py',
    versions='mcore-bridge 1.6.5; megatron-core 0.16.1',
    remove_when='these imports are guarded',
))
def triton_names() -> None:
    if importlib.util.find_spec('triton') is not None:
        return
    import torch.utils._triton
    torch.utils._triton.has_triton_package()  # cached: torch must go on knowing that there is none

    def decorator(function: Any = None, *args: Any, **kwargs: Any) -> Any:
        return function if callable(function) else (lambda inner: inner)

    def configured(*args: Any, **kwargs: Any) -> Any:
        return lambda inner: inner

    def anything(name: str) -> Any:
        if name.startswith('__'):
            raise AttributeError(name)
        return MagicMock(name=f'triton.{name}')

    modules = {}
    for name in ('triton', 'triton.language'):
        module = modules[name] = types.ModuleType(name)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__getattr__ = anything
        sys.modules[name] = module
    root = modules['triton']
    root.__version__ = '3.5.0'
    root.jit, root.autotune, root.heuristics, root.language = decorator, configured, configured, modules['triton.language']


class _OneStream(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return record.msg != 'CPU RNG state changed within GPU RNG context'


@PLATFORM.patch(Passport(
    name='quiet-random-fork',
    target='logging:getLogger',
    breaks='a warning for each forked random state: host and device draw from one generator here, as is documented',
    reference='megatron/core/tensor_parallel/random.py: CudaRNGStatesTracker.fork',
    versions='megatron-core 0.16.1',
    remove_when='the tracker works on torch.Generator objects',
))
def quiet_random_fork() -> None:
    logging.getLogger('megatron.core.tensor_parallel.random').addFilter(_OneStream())


@PLATFORM.patch(Passport(
    name='expected-warnings',
    target='warnings:filters',
    breaks='six lines on every rank that say that Apex and the fused kernels are missing, as they are meant to be here',
    reference='megatron/core/optimizer/clip_grads.py, optimizer.py; megatron/core/models/backends.py, gpt/gpt_layer_specs.py',
    versions='megatron-core>=0.16,<0.20',
    remove_when='megatron-core says it once, or at a lower level',
))
def expected_warnings() -> None:
    for message in ('Transformer Engine and Apex are not installed', 'Apex is not installed'):
        warnings.filterwarnings('ignore', message=message)


def apply() -> None:
    """Apply all patches of this module, once."""
    PLATFORM.apply('accelerate-sees-the-group', 'triton-names', 'quiet-random-fork', 'expected-warnings')
