"""Memory a device, from config.json and the layout alone (import tier 0; pure). Allocator slack and workspaces are not in it.

Bytes a parameter with bf16 or fp16 weights: 2 weights, 4 main gradients, and 12 optimizer state (fp32 copy and two moments), the last
divided over data parallel ranks by the distributed optimizer (arXiv 1910.02054). With fp32 weights: 4, 4 and 8.

Activations of one micro-batch of T tokens on a device (T is the token budget / CP; 2 or 4 bytes a value; arXiv 2205.05198, with the
widths of grouped-query attention and gated MLPs, and flash attention, which keeps no score matrix):
    a layer = T x (4 hidden / (TP if sequence parallel else 1) + width / TP)
with width = q + k + v + attention output + 3 x MLP width (x experts a token in MoE layers). Full recomputation keeps T x hidden a layer,
and one layer at a time in full. The first pipeline stage holds the micro-batches of all stages behind it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from .model_files import text_config
from .parameters import ModelCount, count, num_experts

GIB = 1024**3
DEVICE_BYTES = 80 * 10**9
# Rows of logits held at once: log-probabilities are computed in chunks of completion positions.
LOGIT_ROWS = 1024
PARTS = ('weights', 'gradients', 'optimizer', 'reference', 'activations', 'logits', 'vllm')


@dataclasses.dataclass(kw_only=True, slots=True)
class Settings:
    """What the estimate depends on beside the model."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    sequence_parallel: bool = False
    full: bool = True
    lora_rank: int = 8
    bytes_per_value: int = 2
    distributed_optimizer: bool = True
    optimizer: str = 'adam'
    has_reference: bool = False
    recompute: str = 'full'
    tokens: int = 4096  # token budget of a micro-batch
    num_micro_batches: int = 1
    trains_vision: bool = False
    optimizer_on_host: bool = False
    vllm_share: float = 0.0  # of the device, 0 where no engine is colocated
    engine_sleeps: bool = False
    offload_model: bool = False
    offload_optimizer: bool = False

    @property
    def expert_dp(self) -> int:
        """Ranks that hold the same experts; at least 1, since the product of all sizes is the world."""
        return max(1, self.tp * self.cp * self.dp // (self.ep * self.etp))


def _stage_layers(model: ModelCount, pp: int, stage: int) -> range:
    total = len(model.layers)
    return range(stage * total // pp, (stage + 1) * total // pp)


def estimate(model: ModelCount, s: Settings, device_bytes: int = DEVICE_BYTES) -> dict[str, Any]:
    """Bytes by part on the fullest device, over all pipeline stages.

    The keys in PARTS hold the bytes of each part. ``train_bytes`` is their sum while training,
    ``rollout_bytes`` while sampling; ``total_bytes`` the larger of them.
    """
    stages = [_stage(model, s, stage, device_bytes) for stage in range(s.pp)]
    fullest = max(stages, key=lambda part: part['total_bytes'])
    trainable = model.total if s.full else _lora_total(model, s.lora_rank)
    if s.full and not s.trains_vision:
        trainable -= model.vision
    return {
        'parameters_total': model.total,
        'parameters_active': model.active,
        'parameters_trainable': trainable,
        'device_bytes': device_bytes,
        'stage': stages.index(fullest),
        **fullest,
        'fits': fullest['total_bytes'] <= device_bytes,
        'settings': dataclasses.asdict(s),
        'formula': formula(s),
    }


def _lora_total(model: ModelCount, rank: int) -> int:
    return rank * sum(layer.lora_per_rank + layer.lora_experts_per_rank for layer in model.layers)


def _stage(model: ModelCount, s: Settings, stage: int, device_bytes: int) -> dict[str, Any]:
    layers = [model.layers[index] for index in _stage_layers(model, s.pp, stage)]
    first, last = stage == 0, stage == s.pp - 1
    ends = (model.embedding if first else 0) + (model.output if last else 0) + (model.embedding if last and model.tied and s.pp > 1 else 0)
    vision = model.vision if first else 0
    dense = sum(layer.sharded for layer in layers) // s.tp + sum(layer.replicated for layer in layers) + ends // s.tp + vision
    dense += model.final_norm if last else 0
    experts = sum(layer.experts for layer in layers) // (s.ep * s.etp)
    if s.full:
        train_dense, train_experts = dense - (0 if s.trains_vision else vision), experts
    else:
        # a LoRA pair has one sharded and one replicated side; counted as replicated, which is the upper bound
        train_dense = s.lora_rank * sum(layer.lora_per_rank for layer in layers)
        train_experts = s.lora_rank * sum(layer.lora_experts_per_rank for layer in layers) // s.ep
    value = s.bytes_per_value
    weights = value * (dense + experts + (0 if s.full else train_dense + train_experts))
    gradients = 4 * (train_dense + train_experts)
    moments = {'adam': 8, 'sgd': 4}.get(s.optimizer, 4)
    state = moments + (4 if value == 2 else 0)
    share_dense, share_experts = (s.dp * s.cp, s.expert_dp) if s.distributed_optimizer else (1, 1)
    optimizer = 0 if s.optimizer_on_host else state * (train_dense // share_dense + train_experts // share_experts)
    reference = value * (dense + experts) if s.has_reference and s.full else 0
    activations, logits = _activations(model, layers, s, stage)
    vllm = int(s.vllm_share * device_bytes)
    parts = {
        'weights': weights,
        'gradients': gradients,
        'optimizer': optimizer,
        'reference': reference,
        'activations': activations,
        'logits': logits if last else 0,
        'vllm': vllm,
    }
    train = sum(parts.values()) - (vllm if s.engine_sleeps else 0)
    resident = (0 if s.offload_model else weights + gradients + reference) + (0 if s.offload_optimizer else optimizer)
    rollout = resident + vllm if vllm else 0
    return {**parts, 'train_bytes': train, 'rollout_bytes': rollout, 'total_bytes': max(train, rollout)}


def _activations(model: ModelCount, layers: list[Any], s: Settings, stage: int) -> tuple[int, int]:
    tokens = -(-s.tokens // s.cp)
    across = s.tp if s.sequence_parallel else 1
    value = s.bytes_per_value
    per_layer = [value * tokens * (4 * model.hidden_size // across + layer.token_width // s.tp) for layer in layers]
    in_flight = min(s.num_micro_batches, s.pp - stage) if s.pp > 1 else 1
    if s.vpp > 1:
        # interleaving holds more warm-up micro-batches: (vpp - 1) / vpp of a stage more (arXiv 2104.04473)
        in_flight = min(s.num_micro_batches, in_flight + -(-(s.pp - 1) * (s.vpp - 1) // s.vpp))
    if s.recompute == 'full':
        held = value * tokens * model.hidden_size // across * len(layers) * in_flight + max(per_layer, default=0)
    else:
        held = sum(per_layer) * in_flight
    embedding = value * tokens * model.hidden_size // across if stage == 0 else 0
    # two rows of fp32 beside the model's own precision: the shifted logits and their exponentials
    logits = min(tokens, LOGIT_ROWS) * model.vocab_size // s.tp * (value + 8)
    return held + embedding, logits


def formula(s: Settings) -> list[str]:
    """The estimate in words and numbers, one line a part."""
    value = s.bytes_per_value
    state = {'adam': 8, 'sgd': 4}.get(s.optimizer, 4) + (4 if value == 2 else 0)
    trained = 'parameters' if s.full else f'adapter parameters (rank {s.lora_rank})'
    over = f' / data parallel {s.dp * s.cp} (experts {s.expert_dp})' if s.distributed_optimizer else ''
    across = s.tp if s.sequence_parallel else 1
    tokens = -(-s.tokens // s.cp)
    per_layer = f'{value} x {tokens} tokens x (4 hidden / {across} + width / TP {s.tp})'
    return [
        f'parameters a device = layers of the stage (attention, MLP) / TP {s.tp} + experts / (EP {s.ep} x ETP {s.etp}) + '
        f'norms, routers + embedding / TP',
        f'weights = {value} x parameters',
        f'gradients = 4 x trained {trained}',
        f'optimizer = {state} x trained {trained}{over}',
        'reference = '
        + (
            f'{value} x parameters'
            if s.has_reference and s.full
            else '0 (' + ('beta 0' if s.full and not s.has_reference else 'adapter off') + ')'
        ),
        (
            'activations = '
            + (
                f'{value} x {tokens} tokens x hidden / {across} x layers x micro-batches in flight + one layer ({per_layer})'
                if s.recompute == 'full'
                else f'layers x micro-batches in flight x {per_layer}'
            )
        ),
        f'logits = up to {LOGIT_ROWS} completion positions x vocabulary / TP {s.tp} x {value + 8}',
        f'vllm = {s.vllm_share:g} of the device' + (', asleep while training' if s.engine_sleeps else ''),
    ]


def render(memory: Mapping[str, Any]) -> list[str]:
    """The lines of the report."""
    lines = [
        f'  {memory["parameters_total"] / 1e9:.3f} B parameters, {memory["parameters_active"] / 1e9:.3f} B active a token, '
        f'{memory["parameters_trainable"] / 1e9:.4f} B trained; fullest stage {memory["stage"]}'
    ]
    for name in PARTS:
        lines.append(f'  {name:<12}{memory[name] / GIB:>9.2f} GiB')
    lines.append(f'  {"training":<12}{memory["train_bytes"] / GIB:>9.2f} GiB')
    if memory['rollout_bytes']:
        lines.append(f'  {"sampling":<12}{memory["rollout_bytes"] / GIB:>9.2f} GiB')
    lines.append(f'  {"fits" if memory["fits"] else "does NOT fit"} a device of {memory["device_bytes"] / 1e9:.0f} GB ({memory["device_bytes"] / GIB:.1f} GiB)')
    best = memory['smallest_layout']
    if best is not None:
        lines.append(
            f'  fewest such devices that hold training alone: {best["devices"]} (TP {best["tp"]}, PP {best["pp"]}, EP {best["ep"]})'
        )
    return lines + [f'  {text}' for text in memory['formula']]


def smallest_layout(
    config: Mapping[str, Any],
    *,
    full: bool,
    has_reference: bool,
    tokens: int,
    lora_rank: int = 8,
    device_bytes: int = DEVICE_BYTES,
    max_devices: int = 1024,
    engine_sleeps: bool = True,
) -> dict[str, Any] | None:
    """The layout with the fewest devices that fits while training: TP up to 8 (one machine), then EP, then PP, DP filling the rest.

    Sequence parallel and full recomputation are on, the engine sleeps or is elsewhere. Returns {'devices', 'tp', 'pp', 'ep', 'dp',
    'train_bytes'}; None where nothing up to max_devices fits.
    """
    model = count(config)
    if model is None:
        return None
    devices = 1
    while devices <= max_devices:
        fitting = []
        for tp, pp, ep in _candidates(model, num_experts(text_config(dict(config))), devices):
            s = Settings(
                tp=tp,
                pp=pp,
                ep=ep,
                dp=devices // (tp * pp),
                sequence_parallel=tp > 1,
                full=full,
                lora_rank=lora_rank,
                has_reference=has_reference,
                tokens=tokens,
                num_micro_batches=pp,
                engine_sleeps=engine_sleeps,
            )
            used = max(_stage(model, s, stage, device_bytes)['train_bytes'] for stage in range(pp))
            if used <= device_bytes:
                fitting.append({'devices': devices, 'tp': tp, 'pp': pp, 'ep': ep, 'dp': s.dp, 'train_bytes': used})
        if fitting:
            return min(fitting, key=lambda item: (item['pp'], item['tp'], item['ep'], item['train_bytes']))
        devices *= 2
    return None


def _candidates(model: ModelCount, experts: int, devices: int) -> Iterator[tuple[int, int, int]]:
    """(TP, PP, EP) that divide the devices, the heads and the experts."""
    for pp in range(1, len(model.layers) + 1):
        for tp in (1, 2, 4, 8):
            if devices % (pp * tp) or model.num_heads % tp:
                continue
            for ep in (1, 2, 4, 8, 16, 32, 64, 128, 256):
                if ep == 1 or (experts and experts % ep == 0 and devices % (pp * ep) == 0):
                    yield tp, pp, ep
