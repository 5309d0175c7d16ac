"""Every CUDA device becomes the CPU (import tier 1). Applied by `swift_megatron_grpo.cpu.activate`, in worker processes only."""
import contextlib
import functools
import os
import resource
import sys
import time
from typing import Any

import torch
import torch.distributed
import torch.utils._device

from swift_megatron_grpo.cpu.patches import PLATFORM
from swift_megatron_grpo.passport import Passport

CPU = torch.device('cpu')
UPSTREAM = 'megatron-core (and mcore-bridge, ms-swift) allocate with device="cuda" or torch.cuda.current_device()'
VERSIONS = 'torch>=2.9, megatron-core>=0.16,<0.20'
WHEN = 'megatron-core takes its device from torch.accelerator or from its configuration'

_FACTORIES = ('empty', 'zeros', 'ones', 'full', 'tensor', 'as_tensor', 'arange', 'eye', 'linspace', 'logspace', 'rand', 'randn', 'randint',
              'randperm', 'empty_like', 'zeros_like', 'ones_like', 'full_like', 'rand_like', 'randn_like', 'randint_like', 'empty_strided')
_NEW_METHODS = ('new_empty', 'new_zeros', 'new_ones', 'new_full', 'new_tensor')
_local_device = [0]


def to_cpu(device: Any) -> Any:
    """The CPU for what names a CUDA device (an index, 'cuda:1', torch.device), and anything else as it is."""
    if isinstance(device, bool) or device is None:
        return device
    if isinstance(device, int) or (isinstance(device, str) and device.startswith('cuda')):
        return CPU
    if isinstance(device, torch.device) and device.type == 'cuda':
        return CPU
    return device


def _names_device(value: Any) -> bool:
    return isinstance(value, (int, str, torch.device)) and not isinstance(value, bool)


def _wrap_factory(owner: Any, name: str) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get('device') is not None:
            kwargs['device'] = to_cpu(kwargs['device'])
        if kwargs.get('pin_memory'):
            kwargs['pin_memory'] = False
        return original(*args, **kwargs)

    setattr(owner, name, factory)


@PLATFORM.patch(Passport(
    name='device-factories',
    target='torch:empty, torch.Tensor:new_empty',
    breaks='"Torch not compiled with CUDA enabled" at the first buffer that Megatron allocates',
    reference=UPSTREAM,
    versions=VERSIONS,
    remove_when=WHEN,
))
def redirect_factories() -> None:
    # The cached list of constructors must hold the originals, or `with torch.device('meta')` stops working, silently.
    torch.utils._device._device_constructors()
    for name in _FACTORIES:
        _wrap_factory(torch, name)
    for name in _NEW_METHODS:
        _wrap_factory(torch.Tensor, name)


def _wrap_to(owner: type) -> None:
    original = owner.to

    @functools.wraps(original)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and _names_device(args[0]):
            args = (to_cpu(args[0]), *args[1:])
        if 'device' in kwargs:
            kwargs['device'] = to_cpu(kwargs['device'])
        return original(self, *args, **kwargs)

    owner.to = to


@PLATFORM.patch(Passport(
    name='device-moves',
    target='torch.Tensor:to, torch.Tensor:cuda, torch.nn.Module:to, torch.nn.Module:cuda',
    breaks='"Torch not compiled with CUDA enabled" when a module or a batch is moved to the device',
    reference=UPSTREAM,
    versions=VERSIONS,
    remove_when=WHEN,
))
def redirect_moves() -> None:
    def stay(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    _wrap_to(torch.Tensor)
    _wrap_to(torch.nn.Module)
    torch.Tensor.cuda = stay
    torch.Tensor.pin_memory = stay
    torch.nn.Module.cuda = stay


class Stream:
    """A stream on which everything has already happened: work on the CPU is done when the call returns."""
    cuda_stream = 0
    device = CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> 'Stream':
        return self

    def __exit__(self, *exc: Any) -> None:
        pass

    def wait_stream(self, stream: 'Stream') -> None:
        pass

    def wait_event(self, event: 'Event') -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def record_event(self, event: 'Event | None' = None) -> 'Event':
        event = Event() if event is None else event
        event.record(self)
        return event


class Event:
    """An event of such a stream; `elapsed_time` is real wall time in milliseconds."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seconds: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.seconds = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: 'Event') -> float:
        if self.seconds is None or end.seconds is None:
            raise RuntimeError('elapsed_time of an event that was not recorded')
        return (end.seconds - self.seconds) * 1e3


class _DeviceContext(contextlib.nullcontext):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


class _Properties:
    name = 'cpu'
    major, minor = 8, 0  # the bf16-capable generation: what decides on precision follows the arithmetic that the CPU has
    multi_processor_count = os.cpu_count() or 1

    def __init__(self) -> None:
        self.total_memory = _memory()[1]


def _memory() -> tuple[int, int]:
    """(free, total) bytes of the machine."""
    page = os.sysconf('SC_PAGE_SIZE')
    return os.sysconf('SC_AVPHYS_PAGES') * page, os.sysconf('SC_PHYS_PAGES') * page


def resident_bytes() -> int:
    """Resident memory of this process in bytes: what stands in for allocated device memory."""
    try:
        with open('/proc/self/statm', encoding='ascii') as file:
            return int(file.read().split()[1]) * os.sysconf('SC_PAGE_SIZE')
    except OSError:
        return peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Largest resident memory of this process so far, in bytes. It cannot be reset."""
    unit = 1 if sys.platform == 'darwin' else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@PLATFORM.patch(Passport(
    name='cuda-runtime',
    target='torch.cuda:Stream, torch.cuda:current_device',
    breaks='torch.cuda raises "No CUDA GPUs are available" from streams, events, memory figures and synchronisation',
    reference=UPSTREAM,
    versions=VERSIONS,
    remove_when=WHEN,
))
def stand_in_cuda_runtime() -> None:
    stream = Stream()

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    def set_device(device: Any) -> None:
        _local_device[0] = device if isinstance(device, int) else 0

    replacements = {
        'Stream': Stream, 'Event': Event, 'device': _DeviceContext, 'device_of': _DeviceContext,
        'current_stream': lambda device=None: stream, 'default_stream': lambda device=None: stream,
        'stream': lambda stream=None: contextlib.nullcontext(), 'set_stream': nothing,
        'current_device': lambda: _local_device[0], 'set_device': set_device,
        'device_count': lambda: int(os.environ.get('LOCAL_WORLD_SIZE', '1')),
        'synchronize': nothing, 'empty_cache': nothing, 'ipc_collect': nothing, 'init': nothing, '_lazy_init': nothing,
        'memory_allocated': lambda device=None: resident_bytes(), 'memory_reserved': lambda device=None: resident_bytes(),
        'max_memory_allocated': lambda device=None: peak_resident_bytes(), 'max_memory_reserved': lambda device=None: peak_resident_bytes(),
        'reset_peak_memory_stats': nothing, 'reset_max_memory_allocated': nothing, 'memory_stats': lambda device=None: {},
        'mem_get_info': lambda device=None: _memory(), 'get_device_name': lambda device=None: 'cpu',
        'get_device_capability': lambda device=None: (_Properties.major, _Properties.minor),
        'get_device_properties': lambda device=None: _Properties(),
        'is_current_stream_capturing': lambda: False, 'is_bf16_supported': lambda including_emulation=True: True,
    }
    for name, value in replacements.items():
        setattr(torch.cuda, name, value)
    for name in ('range_push', 'range_pop', 'mark'):
        setattr(torch.cuda.nvtx, name, nothing)


@PLATFORM.patch(Passport(
    name='one-random-stream',
    target='torch.cuda:get_rng_state, torch.cuda:manual_seed, torch.cuda:_lazy_call',
    breaks="Megatron's RNG tracker reads and sets CUDA generators; dropout in a tensor-parallel region would draw from no seed",
    reference='megatron/core/tensor_parallel/random.py',
    versions=VERSIONS,
    remove_when=WHEN,
))
def one_random_stream() -> None:
    # torch.manual_seed seeds the one generator there is and then calls manual_seed_all, which has nothing left to seed.
    generator = torch.default_generator
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda device='cuda': torch.get_rng_state()
    torch.cuda.set_rng_state = torch.cuda.random.set_rng_state = lambda new_state, device='cuda': torch.set_rng_state(new_state)
    torch.cuda.get_rng_state_all = torch.cuda.random.get_rng_state_all = lambda: [torch.get_rng_state()]
    torch.cuda.set_rng_state_all = torch.cuda.random.set_rng_state_all = lambda new_states: torch.set_rng_state(new_states[0])
    torch.cuda.manual_seed = torch.cuda.random.manual_seed = lambda seed: generator.manual_seed(int(seed)) and None
    torch.cuda.manual_seed_all = torch.cuda.random.manual_seed_all = lambda seed: None
    torch.cuda.initial_seed = torch.cuda.random.initial_seed = torch.initial_seed
    torch.cuda.default_generators = (generator,) * max(8, os.cpu_count() or 1)
    torch.cuda._lazy_call = lambda function, **kwargs: function()


@PLATFORM.patch(Passport(
    name='cuda-type-names',
    target='torch.Tensor:type, torch.cuda:FloatTensor',
    breaks='"Wrapped parameters must be one of ..." from the optimizers: they compare Tensor.type() with torch.cuda.FloatTensor',
    reference='megatron/core/optimizer/{distrib_optimizer,optimizer,clip_grads}.py',
    versions=VERSIONS,
    remove_when='megatron-core compares dtypes instead of type names',
))
def cuda_type_names() -> None:
    for kind in ('Float', 'Double', 'Half', 'BFloat16', 'Long', 'Int', 'Short', 'Char', 'Byte', 'Bool'):
        setattr(torch.cuda, f'{kind}Tensor', getattr(torch, f'{kind}Tensor'))
    original = torch.Tensor.type

    @functools.wraps(original)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = original(self, *args, **kwargs)
        # Only Megatron is told the CUDA name: for every other caller a CPU tensor stays what it is.
        if isinstance(name, str) and sys._getframe(1).f_globals.get('__name__', '').startswith('megatron.'):
            return name.replace('torch.', 'torch.cuda.', 1)
        return name

    torch.Tensor.type = type_


@PLATFORM.patch(Passport(
    name='integer-splits',
    target='torch.distributed:all_to_all_single',
    breaks='"only integer tensors ... int" from gloo: the MoE dispatcher passes its split sizes as tensors or numpy integers',
    reference='megatron/core/tensor_parallel/mappings.py (all_to_all), megatron/core/transformer/moe/token_dispatcher.py',
    versions=VERSIONS,
    remove_when='the dispatcher converts its splits with tolist()',
))
def integer_splits() -> None:
    original = torch.distributed.all_to_all_single

    def integers(splits: Any) -> Any:
        return None if splits is None else [int(n) for n in splits]

    @functools.wraps(original)
    def all_to_all_single(output: torch.Tensor, input: torch.Tensor, output_split_sizes: Any = None, input_split_sizes: Any = None,
                          group: Any = None, async_op: bool = False) -> Any:
        return original(output, input, integers(output_split_sizes), integers(input_split_sizes), group, async_op)

    torch.distributed.all_to_all_single = torch.distributed.distributed_c10d.all_to_all_single = all_to_all_single


@PLATFORM.patch(Passport(
    name='uneven-lists',
    target='torch.distributed:all_gather, torch.distributed:reduce_scatter',
    breaks='"invalid tensor size" from gloo with expert tensor parallelism: each rank of the group holds another number of tokens',
    reference='megatron/core/tensor_parallel/mappings.py: _gather_along_first_dim and _reduce_scatter_along_first_dim with split sizes',
    versions='torch 2.13 (gloo)',
    remove_when='gloo gathers and scatters lists of tensors of different sizes, as NCCL does',
))
def uneven_lists() -> None:
    c10d = torch.distributed.distributed_c10d
    even_gather, even_scatter = torch.distributed.all_gather, torch.distributed.reduce_scatter

    def even(tensors: list[torch.Tensor]) -> bool:
        return len({tensor.shape for tensor in tensors}) == 1

    @functools.wraps(even_gather)
    def all_gather(tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        if async_op or even(tensor_list):
            return even_gather(tensor_list, tensor, group, async_op)
        for index, (rank, out) in enumerate(zip(torch.distributed.get_process_group_ranks(group), tensor_list, strict=True)):
            part = tensor.contiguous() if index == torch.distributed.get_rank(group) else torch.empty_like(out)
            torch.distributed.broadcast(part, rank, group)
            out.copy_(part)
        return None

    @functools.wraps(even_scatter)
    def reduce_scatter(output: torch.Tensor, input_list: list[torch.Tensor], op: Any = torch.distributed.ReduceOp.SUM, group: Any = None,
                       async_op: bool = False) -> Any:
        if async_op or even(input_list):
            return even_scatter(output, input_list, op, group, async_op)
        for index, (rank, part) in enumerate(zip(torch.distributed.get_process_group_ranks(group), input_list, strict=True)):
            total = part.clone(memory_format=torch.contiguous_format)
            torch.distributed.reduce(total, rank, op, group)
            if index == torch.distributed.get_rank(group):
                output.copy_(total)
        return None

    torch.distributed.all_gather = c10d.all_gather = all_gather
    torch.distributed.reduce_scatter = c10d.reduce_scatter = reduce_scatter


@PLATFORM.patch(Passport(
    name='no-compilation',
    target='torch.jit:script',
    breaks='TorchScript and the inductor cannot read the wrapped factories, and want a C++ compiler',
    reference='megatron/core/jit.py; swift/sequence_parallel/zigzag_ring_attn.py',
    versions=VERSIONS,
    remove_when='the factories are no longer wrapped',
))
def no_compilation() -> None:
    torch.jit._state.disable()


def apply() -> None:
    """Apply all patches of this module, once."""
    PLATFORM.apply('device-factories', 'device-moves', 'cuda-runtime', 'one-random-stream', 'cuda-type-names', 'integer-splits',
                   'uneven-lists', 'no-compilation')


def describe() -> str:
    """One phrase for the log: threads and memory."""
    free, total = _memory()
    return f'{torch.get_num_threads()} thread(s) of {os.cpu_count()} CPU core(s), {free / 2**30:.0f} of {total / 2**30:.0f} GiB free'
