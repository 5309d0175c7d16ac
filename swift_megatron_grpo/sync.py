"""Weight sync: the policy's weights to the rollout engine, as a stage of its own (import tier 2).

Full training: every weight through mcore-bridge's export. LoRA: base and adapter are merged into a scratch tensor while a weight is being
exported; the policy's base weights are never written to (adding and subtracting the adapter in place on bfloat16 weights lets them drift).
"""
from __future__ import annotations

import contextlib
import torch
from collections.abc import Iterator
from mcore_bridge import LoraParallelLinear
from typing import Any

from .errors import RunError


@contextlib.contextmanager
def merged_for_export(models: list[Any], adapter_name: str = 'default') -> Iterator[None]:
    """While the body runs, LoRA layers show base + adapter as their base weights; afterwards the very same tensors are back.

    All ranks (the bridge's export is collective). Needs memory for a second copy of the adapted base weights of this rank.
    """
    shown: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
    try:
        with torch.no_grad():
            for model in models:
                for module in model.modules():
                    if isinstance(module, LoraParallelLinear) and adapter_name in module.lora_A:
                        base = module.get_base_layer()
                        weights = ([getattr(base, f'weight{i}') for i in range(base.num_gemms)] if module.is_grouped else [base.weight])
                        for weight, delta in zip(weights, module.get_delta_weights(adapter_name)):
                            shown.append((weight, weight.data))
                            weight.data = weight.data + delta.to(weight.dtype)
        yield
    finally:
        for weight, original in shown:
            weight.data = original


class WeightSync:
    """Brings weights to an engine and, when asked, proves that they arrived.

    Args:
        args: tuner_type, offload_bridge, verify_weight_sync.
        bridge: mcore-bridge's GPTBridge of the policy.
        models: unwrapped model chunks.
        engine: the rollout engine of this rank.
    """

    def __init__(self, args: Any, bridge: Any, models: list[Any], engine: Any):
        self.args = args
        self.bridge = bridge
        self.models = models
        self.engine = engine
        self.num_syncs = 0

    def run(self, version: int) -> int:
        """All ranks, collective. Returns the number of tensors that were brought."""
        is_lora = self.args.tuner_type != 'full'
        context = merged_for_export(self.models) if is_lora else contextlib.nullcontext()
        exported: dict[str, float] = {}
        verify = self._verifies_now()
        with context:
            count = self.engine.load_weights(self._export(exported if verify else None), version)
        self.num_syncs += 1
        if verify:
            self._verify(exported)
        return count

    def _export(self, sums: dict[str, float] | None) -> Iterator[tuple[str, torch.Tensor]]:
        device = 'cpu' if self.args.offload_bridge else None
        for name, tensor in self.bridge.export_weights(self.models, target_device=device, skip_unsupported_export=True):
            if sums is not None:
                sums[name] = float(tensor.detach().double().abs().sum())
            yield name, tensor

    def _verifies_now(self) -> bool:
        setting = str(self.args.verify_weight_sync)
        if setting == 'off':
            return False
        if setting == 'first':
            return self.num_syncs == 0
        return self.num_syncs % int(setting) == 0

    def _verify(self, exported: dict[str, float]) -> None:
        """Compares sums of absolute values: in total, and by name where both sides use one name.

        Engines fuse weights (q, k and v in one tensor) and split them over ranks; what has another name, or only a share of the tensor here,
        is covered by the total when the engine lies on one rank.
        """
        held = self.engine.checksums()
        if held is None or self.engine.group.size > 1:
            return
        for name, expected in exported.items():
            got = held.get(name)
            if got is not None and abs(got - expected) > 1e-6 * max(1.0, abs(expected)):
                raise RunError(f'Weight sync: {name} arrived with sum of absolute values {got:.9g} instead of {expected:.9g}.')
        names = set(exported)
        tied = {'lm_head.weight'} if 'lm_head.weight' not in held else set()
        total = sum(exported[name] for name in names - tied)
        got_total = sum(held.values())
        if abs(got_total - total) > 1e-5 * max(1.0, abs(total)):
            raise RunError(f'Weight sync: the engine holds weights with a total of absolute values {got_total:.9g}; the policy exported {total:.9g}.')
