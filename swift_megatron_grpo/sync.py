"""Weight sync: the policy's weights to the rollout engine, as a stage of its own (import tier 2).

Full training: every weight through mcore-bridge's export. LoRA: base and adapter are merged into scratch tensors while a layer is being
exported; the policy's base weights are never written to (adding and subtracting the adapter in place on bfloat16 weights lets them drift).
With `--vllm_enable_lora true` the base goes once and then the adapter alone.
"""
from __future__ import annotations

import contextlib
import torch
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict
from mcore_bridge import LoraParallelLinear
from peft.tuners.lora import LoraLayer
from swift.utils import get_logger
from typing import Any

from .engines.base import Bucket, RolloutEngine, buckets
from .engines.checksums import Checksum, differences
from .errors import RunError
from .residency import Residency, Stage
from .step.batch import StepBatch
from .step.forward import language_model

logger = get_logger()

MAX_LOGPROB_DIFFERENCE = 0.3  # nats a token


@contextlib.contextmanager
def merged_for_export(models: list[Any], adapter_name: str = 'default') -> Iterator[None]:
    """While the body runs, the bridge exports base + adapter; afterwards the very same tensors are back.

    All ranks (the bridge's export is collective). A decoder layer is merged while the bridge reads it, so that the second copy is one of one layer;
    adapters elsewhere (output layer, vision tower) stay merged as long as the body runs. Raises RuntimeError inside another one, which would add the
    adapter twice.
    """
    bridge = models[0].config.bridge
    if '_set_layer_state' in vars(bridge):
        raise RuntimeError('merged_for_export: the adapter is merged already; one export of merged weights must end before the next begins.')
    layers = {id(layer) for model in models for layer in language_model(model).decoder.layers}
    read_layer = bridge._set_layer_state

    def read_merged(layer: Any, *args: Any, **kwargs: Any) -> Any:
        with _merged([layer] if id(layer) in layers else [], adapter_name):
            return read_layer(layer, *args, **kwargs)

    bridge._set_layer_state = read_merged
    try:
        with _merged(models, adapter_name, without=layers):
            yield
    finally:
        del bridge._set_layer_state  # the method of the class is back


@contextlib.contextmanager
def _merged(roots: Sequence[torch.nn.Module], adapter_name: str, without: Collection[int] = ()) -> Iterator[None]:
    """While the body runs, layers with an adapter below `roots` show base + adapter as their base weights. without: ids of modules to leave out."""
    shown: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
    try:
        with torch.no_grad():
            for root in roots:
                for layer in _adapted(root, adapter_name, without):
                    for weight, delta in _deltas(layer, adapter_name):
                        shown.append((weight, weight.data))
                        weight.data = weight.data + delta.to(weight.dtype)
        yield
    finally:
        for weight, original in shown:
            weight.data = original


def _adapted(root: torch.nn.Module, adapter_name: str, without: Collection[int]) -> Iterator[LoraLayer]:
    if id(root) in without:
        return
    if isinstance(root, LoraLayer) and adapter_name in root.lora_A:
        yield root
    for child in root.children():
        yield from _adapted(child, adapter_name, without)


def _deltas(layer: LoraLayer, adapter_name: str) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    base = layer.get_base_layer()
    if isinstance(layer, LoraParallelLinear):
        weights = [getattr(base, f'weight{i}') for i in range(base.num_gemms)] if layer.is_grouped else [base.weight]
        yield from zip(weights, layer.get_delta_weights(adapter_name), strict=True)
    else:  # PEFT's own layers, in the vision tower
        yield base.weight, layer.get_delta_weight(adapter_name)


class WeightSync:
    """Brings weights to an engine and, when asked, proves that they arrived.

    Args:
        args: tuner_type, offload_bridge, verify_weight_sync, weight_sync_bucket_mb, torch_dtype.
        bridge: mcore-bridge's GPTBridge of the policy.
        models: unwrapped model chunks.
        engine: the rollout engine of this rank.
        residency: makes room on the device.
        agree: runs a function on all ranks, and raises one error on all of them (`parallel.agree`).
    """

    def __init__(self, args: Any, bridge: Any, models: list[Any], engine: RolloutEngine, residency: Residency,
                 agree: Callable[[str, Callable[[], Any]], list[Any]]):
        self.args = args
        self.bridge = bridge
        self.models = models
        self.engine = engine
        self.residency = residency
        self.agree = agree
        self.max_bucket_bytes = int(float(args.weight_sync_bucket_mb) * 2**20)
        self.num_syncs = 0
        self.num_buckets = 0  # of the last sync
        self.sends_adapter = args.tuner_type == 'lora' and engine.takes_adapters
        self.last_kind = ''  # 'full', 'adapter'
        self.wants_comparison = False  # the engine's weights cannot be read: its next rollouts are to be compared

    def run(self, version: int) -> int:
        """All ranks, collective. Returns the number of tensors that were brought."""
        verify = self._verifies_now()
        exported: dict[str, Checksum] | None = {} if verify else None
        self.engine.begin_sync()
        count = 0
        self.last_kind = 'adapter'
        if not self.sends_adapter or self.engine.needs_base:
            self.last_kind = 'full'
            count += self._send_all(version, exported)
        if self.sends_adapter:
            count += self._send_adapter(version)
        self.num_syncs += 1
        if exported:
            self.agree('Weight sync', lambda: self._verify(exported))
        return count

    def _send_all(self, version: int, sums: dict[str, Checksum] | None) -> int:
        merges = self.args.tuner_type != 'full' and not self.sends_adapter
        context = merged_for_export(self.models) if merges else contextlib.nullcontext()
        complete_as = -1 if self.sends_adapter else version  # the adapter is still to come
        if self.residency.stages_in_host_memory:
            self.residency.to(Stage.EXPORTING)
            with context:
                # A copy in any case: on a CPU an exported weight may be the policy's own memory, which is about to go.
                held = [(name, tensor.detach().to('cpu', copy=True)) for name, tensor in self._export(sums)]
            self.residency.to(Stage.LOADING)
            return self._load(iter(held), complete_as)
        self.residency.to(Stage.STREAMING)
        with context:
            return self._load(self._export(sums), complete_as)

    def _load(self, weights: Iterator[tuple[str, torch.Tensor]], version: int) -> int:
        self.num_buckets = 0

        def counted() -> Iterator[Bucket]:
            for bucket in buckets(weights, self.max_bucket_bytes):
                self.num_buckets += 1
                yield bucket

        return self.engine.load_weights(counted(), version)

    def _send_adapter(self, version: int) -> int:
        if self.residency.stage not in (Stage.STREAMING, Stage.LOADING):
            self.residency.to(Stage.EXPORTING if self.residency.stages_in_host_memory else Stage.STREAMING)
        elif self.residency.stage is Stage.LOADING:
            self.residency.to(Stage.EXPORTING)
        device = 'cpu' if self.args.offload_bridge else None
        tensors = {name: tensor.detach().clone() for name, tensor in
                   self.bridge.export_weights(self.models, target_device=device, peft_format=True)}
        if not tensors:
            raise RunError('Weight sync: the adapter has no weights to send.')
        if self.residency.stage is Stage.EXPORTING:
            self.residency.to(Stage.LOADING)
        config = asdict(self.models[0].peft_config['default'])
        return self.engine.load_adapter(tensors, config, version)

    def _export(self, sums: dict[str, Checksum] | None) -> Iterator[tuple[str, torch.Tensor]]:
        device = 'cpu' if self.args.offload_bridge else None
        for name, tensor in self.bridge.export_weights(self.models, target_device=device, skip_unsupported_export=True):
            if sums is not None:
                sums[name] = Checksum.of(tensor.detach().to(self.args.torch_dtype))
            yield name, tensor

    def _verifies_now(self) -> bool:
        setting = str(self.args.verify_weight_sync)
        if setting == 'off':
            return False
        if setting == 'first':
            return self.num_syncs == 0
        return self.num_syncs % int(setting) == 0

    def _verify(self, exported: dict[str, Checksum]) -> None:
        held = self.engine.checksums()
        if held is None:
            self.wants_comparison = True
            return
        wrong, uncovered = differences(exported, held, self.engine.group.size, self.engine.holder_of)
        if wrong:
            name, text = wrong[0]
            raise RunError(f'Weight sync: {name} did not arrive as it was sent: {text} ({len(wrong)} weights differ).')
        covered = len(exported) - len(uncovered)
        if covered == 0:
            raise RunError(f'Weight sync: none of the {len(exported)} weights could be compared, e.g. {uncovered[0]}. '
                           'To go on without this check, give --verify_weight_sync off.')
        logger.info(f'Weight sync: checksums of {covered} of {len(exported)} weights agree' +
                    (f'; not compared, e.g. {uncovered[:2]}' if uncovered else ''))

    def compare(self, steps: Sequence[StepBatch], policy_logprobs: Sequence[torch.Tensor]) -> None:
        """The proof where weights cannot be read: log-probabilities of the sampled tokens, the engine's against the policy's.

        All ranks, collective. policy_logprobs: for each step [K], own tokens of the last pipeline stage filled in, zeros elsewhere.
        Raises RunError where they differ by more than MAX_LOGPROB_DIFFERENCE in the mean: other kernels and bfloat16 give a few hundredths,
        weights that did not arrive give more than one.
        """
        self.wants_comparison = False
        total, count = 0.0, 0
        for step, policy_K in zip(steps, policy_logprobs, strict=True):
            if step.table.rollout_logprobs_K is None:
                continue
            own_K = policy_K != 0
            total += float((step.table.rollout_logprobs_K - policy_K)[own_K].abs().sum())
            count += int(own_K.sum())
        parts = self.agree('Weight sync', lambda: (total, count))
        tokens = sum(part[1] for part in parts)
        if tokens == 0:
            logger.warning('Weight sync: the engine gave no log-probabilities, so that its weights could not be verified.')
            return
        mean = sum(part[0] for part in parts) / tokens
        if mean > MAX_LOGPROB_DIFFERENCE:
            raise RunError(f"Weight sync: the engine's log-probabilities differ from the policy's by {mean:.3g} in the mean (at most "
                           f'{MAX_LOGPROB_DIFFERENCE:g} is explained by kernels and precision): the weights did not arrive. '
                           'To go on without this check, give --verify_weight_sync off.')
        logger.info(f"Weight sync: the engine's log-probabilities agree with the policy's (mean difference {mean:.2g})")
