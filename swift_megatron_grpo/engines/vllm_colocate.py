"""vLLM in the training processes (import tier 2). One engine for every `vllm_tensor_parallel_size` neighbouring ranks.

Built as ms-swift builds it (`GRPOVllmEngine`, external launcher). Differences: every request has a seed of its own; answers are refused
until a complete set of weights was loaded; after a load the prefix, multimodal and encoder caches are empty.
"""
from __future__ import annotations

import copy
import functools
import importlib.util
import torch
import torch.distributed as dist
from collections.abc import Iterable, Iterator, Sequence
from swift.infer_engine import RequestConfig
from swift.infer_engine.protocol import RolloutOutput
from swift.rlhf_trainers.utils import (VLLM_LORA_INT_ID, VLLM_LORA_NAME, VLLM_LORA_PATH, TensorLoRARequest,
                                       add_base_layer_suffix_by_param_names, aggressive_empty_cache, expand_vllm_param_name_aliases,
                                       finish_vllm_weight_reload, patch_vllm_load_adapter, patch_vllm_moe_model_weight_loader,
                                       set_expandable_segments, sleep_vllm_engine, vllm_supports_lora_load_inplace)
from swift.template import Template
from typing import Any

from .. import cpu
from ..errors import RunError
from .base import Bucket, EngineGroup, RolloutEngine, Sampling
from .checksums import EMPTY, Checksum
from .encoding import encode_once
from .vllm_names import holder_of


def _limited_engine() -> type:
    """ms-swift's engine, whose requests may have limits of their own. ms-swift asks for the limit once a request, in order."""
    from swift.infer_engine import GRPOVllmEngine

    class LimitedEngine(GRPOVllmEngine):
        limits: Iterator[int] | None = None

        def set_default_max_tokens(self, request_config: RequestConfig, inputs: dict[str, Any]) -> None:
            if self.limits is not None:
                request_config.max_tokens = next(self.limits)
            super().set_default_max_tokens(request_config, inputs)

    return LimitedEngine


def _media_limits(args: Any) -> dict[str, Any] | None:
    """What is asked for; no videos where the CPU platform has no torchvision (vLLM would try one at start)."""
    limits = args.vllm_limit_mm_per_prompt
    if cpu.is_active() and args.model_meta.is_multimodal and importlib.util.find_spec('torchvision') is None:
        return {'video': 0, **(limits or {})}
    return limits


class VllmColocateEngine(RolloutEngine):
    """vLLM on the trainer's own devices.

    Args:
        args: ms-swift's vllm_* arguments, model folder, torch_dtype.
        template: the trainer's template; a copy is used.
        group: engine ranks are neighbours in the world.
        max_num_seqs: sequences sampled at once.
        device: the rank's device.
    """

    def __init__(self, args: Any, template: Template, group: EngineGroup, *, max_num_seqs: int, device: torch.device):
        if cpu.is_active():  # vLLM finds it as an entry point too, where the package is installed
            from ..cpu import vllm_plugin
            vllm_plugin.register()
        self.group = group
        self.device = device
        self.takes_adapters = bool(args.vllm_enable_lora and args.tuner_type == 'lora')
        if self.takes_adapters:
            patch_vllm_load_adapter()  # vLLM reads adapters from files; ms-swift's request brings tensors
        rollout_template = copy.copy(template)
        rollout_template.padding_free = False
        rollout_template.sequence_parallel_size = 1
        engine_kwargs = dict(args.vllm_engine_kwargs or {})
        load_format = engine_kwargs.pop('load_format', 'auto')
        if args.router_replay_mode == 'R3':
            engine_kwargs['enable_return_routed_experts'] = True
        if args.vllm_enable_expert_parallel:
            engine_kwargs.setdefault('enable_expert_parallel', True)
        set_expandable_segments(False)
        self.engine = _limited_engine()(
            args.model_info.model_dir,
            torch_dtype=args.torch_dtype,
            model_type=args.model_type,
            use_async_engine=False,
            tensor_parallel_size=group.size,
            gpu_memory_utilization=args.vllm_gpu_memory_utilization,
            enable_prefix_caching=args.vllm_enable_prefix_caching,
            max_num_seqs=args.vllm_max_num_seqs or max_num_seqs,
            disable_custom_all_reduce=args.vllm_disable_custom_all_reduce,
            enforce_eager=args.vllm_enforce_eager,
            limit_mm_per_prompt=_media_limits(args),
            enable_sleep_mode=args.sleep_level > 0,
            max_model_len=args.vllm_max_model_len,
            seed=group.index,
            disable_cascade_attn=args.vllm_disable_cascade_attn,
            load_format=load_format,
            mm_processor_cache_gb=args.vllm_mm_processor_cache_gb,
            template=rollout_template,
            distributed_executor_backend='external_launcher',
            enable_lora=self.takes_adapters,
            max_loras=1,
            max_lora_rank=max(args.vllm_max_lora_rank, args.lora_rank),
            engine_kwargs=engine_kwargs,
            logprobs_mode='processed_logprobs')
        self.engine._batch_encode = functools.partial(encode_once, self.engine._batch_encode)
        set_expandable_segments(True)

    def load_weights(self, buckets: Iterable[Bucket], version: int) -> int:
        self.version = -1  # incomplete until the last line
        model = self.engine.inner_model
        names = expand_vllm_param_name_aliases(set(self._parameters())) if self.takes_adapters else set()
        count = 0
        patch_vllm_moe_model_weight_loader(model)
        for bucket in buckets:
            count += len(bucket)
            model.load_weights(iter(bucket) if not names else add_base_layer_suffix_by_param_names(iter(bucket), names))
        finish_vllm_weight_reload(model, model_config=self.engine.engine.model_config, target_device=self.device, strict=True)
        self.reset_caches()
        self.version = version
        self.needs_base = False
        return count

    def load_adapter(self, tensors: dict[str, torch.Tensor], config: dict[str, Any], version: int) -> int:
        self.version = -1
        if self.needs_base:
            raise RunError('Weight sync: an adapter was sent to an engine that does not hold the base weights.')
        inplace = {'load_inplace': True} if vllm_supports_lora_load_inplace() else {}
        if not inplace:
            self.engine.engine.remove_lora(VLLM_LORA_INT_ID)
        request = TensorLoRARequest(lora_name=VLLM_LORA_NAME, lora_int_id=VLLM_LORA_INT_ID, lora_path=VLLM_LORA_PATH, peft_config=config,
                                    lora_tensors=tensors, **inplace)
        if not self.engine.engine.add_lora(request):
            raise RunError('Weight sync: vLLM did not take the adapter.')
        self.reset_caches()
        self.version = version
        return len(tensors)

    def reset_caches(self) -> None:
        """Nothing that was computed with earlier weights may be used again."""
        self.engine.engine.reset_prefix_cache()
        self.engine.engine.reset_mm_cache()
        self.engine.engine.reset_encoder_cache()

    def generate(self, requests: Sequence[Any], sampling: Sampling) -> list[RolloutOutput]:
        if self.version < 0:
            raise RunError('Rollout was asked of a vLLM engine that does not hold a complete set of weights.')
        if not requests:
            return []
        config = sampling.request_config(seed=sampling.seed)
        self.engine.limits = iter(sampling.limits) if sampling.limits else None
        outputs = self.engine.infer(list(requests), config, use_tqdm=False)
        for output in outputs:
            if isinstance(output, Exception):
                raise RunError(f'vLLM could not answer a request: {output}') from output
        return outputs

    def checksums(self) -> dict[str, Checksum]:
        own = {name: Checksum.of(parameter) for name, parameter in self._parameters().items()}
        if self.group.size == 1:
            return own
        from vllm.distributed.parallel_state import get_tp_group
        parts: list[Any] = [None] * self.group.size
        dist.all_gather_object(parts, own, group=get_tp_group().cpu_group)
        whole: dict[str, Checksum] = {}
        for part in parts:
            for name, checksum in part.items():
                whole[name] = whole.get(name, EMPTY) + checksum
        return whole

    def holder_of(self, name: str) -> str:
        return holder_of(name, self.engine.inner_model, self._parameters().keys())

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        return dict(self.engine.inner_model.named_parameters())

    def sleep(self, level: int) -> None:
        if not level or self.engine.inner_model_executor.is_sleeping:
            return
        sleep_vllm_engine(self.engine.engine, level)  # empties the prefix cache too
        if level == 2:
            self.version = -1
            self.needs_base = True

    def wake(self, tags: Sequence[str]) -> None:
        if not self.engine.inner_model_executor.is_sleeping:
            return
        aggressive_empty_cache()  # what the trainer gave away is the allocator's until then
        if 'kv_cache' in tags:
            set_expandable_segments(False)  # vLLM's own memory pool cannot lie in them; going to sleep allows them again
        self.engine.engine.wake_up(tags=list(tags))

    def close(self) -> None:
        engine, self.engine = self.engine, None
        if engine is None:
            return
        engine.engine.engine_core.shutdown()
