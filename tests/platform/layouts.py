"""One tiny model in one parallel layout: what a rank computes, and the same from transformers. Used by the tests beside it."""
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

NUM_MICRO_BATCHES = 4
ROWS = 2
LENGTH = 32
PACKED_LENGTHS = (24, 4, 12, 8)  # multiples of 4: two chunks a rank of context parallel 2
ADAM = {'lr': 1e-3, 'betas': (0.9, 0.95), 'eps': 1e-3, 'weight_decay': 0.1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Parallel sizes; `world` follows from what a test starts."""
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int | None = None
    sp: bool = False
    world: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Of one training step: logits (rows, T, V) of each micro-batch, gradients and updated weights by Hugging Face name."""
    loss: float
    logits: list[torch.Tensor]
    exported: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    norms: list[float]  # with each optimizer that ran
    updated: dict[str, torch.Tensor]


def micro_batches(vocab_size: int, packed: bool) -> list[dict[str, Any]]:
    """NUM_MICRO_BATCHES dictionaries of full (not split) ids, labels, positions (B, T) and lengths of packed sequences or None."""
    generator = torch.Generator().manual_seed(3)
    out = []
    for _ in range(NUM_MICRO_BATCHES):
        lengths = list(PACKED_LENGTHS) if packed else None
        shape = (1, sum(PACKED_LENGTHS)) if packed else (ROWS, LENGTH)
        ids = torch.randint(3, vocab_size, shape, generator=generator)
        positions = (torch.cat([torch.arange(n) for n in lengths])[None] if packed else torch.arange(LENGTH).expand(shape).contiguous())
        out.append({'ids': ids, 'labels': torch.randint(3, vocab_size, shape, generator=generator), 'positions': positions,
                    'lengths': lengths})
    return out


# ---------------------------------------------------------------- transformers, in the test's own process


def reference(folder: Path, packed: bool) -> Outcome:
    """The same step with transformers and torch's AdamW, on the mean loss of all tokens."""
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation='eager').train()
    batches = micro_batches(model.config.vocab_size, packed)
    tokens = sum(batch['ids'].numel() for batch in batches)
    logits, total = [], 0.
    for batch in batches:
        pieces = batch['ids'].split(batch['lengths'], 1) if packed else [batch['ids']]
        out = torch.cat([model(piece).logits for piece in pieces], 1)
        loss = torch.nn.functional.cross_entropy(out.flatten(0, 1), batch['labels'].flatten(), reduction='sum') / tokens
        loss.backward()
        logits.append(out.detach())
        total += loss.item()
    before = {name: value.clone() for name, value in _state(model).items()}
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()
    torch.optim.AdamW(model.parameters(), **ADAM).step()
    return Outcome(loss=total, logits=logits, exported=before, gradients=by_checkpoint_name(model, gradients), norms=[norm],
                   updated=by_checkpoint_name(model, dict(_state(model))))


def _state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def by_checkpoint_name(model: torch.nn.Module, named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights or gradients under the names of checkpoints, which transformers 5 does not always use in memory: it stacks a layer's experts."""
    from transformers.core_model_loading import revert_weight_conversion
    return revert_weight_conversion(model, named)


# ---------------------------------------------------------------- mcore-bridge, on a rank


def initialize(layout: Layout) -> None:
    """Megatron's process groups and random states. Collective."""
    from megatron.core import mpu
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    mpu.initialize_model_parallel(
        layout.tp, layout.pp, virtual_pipeline_model_parallel_size=layout.vpp, context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep, expert_tensor_parallel_size=layout.etp)
    model_parallel_cuda_manual_seed(1)


def build_models(folder: Path, layout: Layout, *, marked: bool = True, **options: Any) -> tuple[Any, list[torch.nn.Module]]:
    """(configuration, model chunks of this rank) with the folder's weights. Collective. `marked=False` leaves attributes to upstream."""
    from mcore_bridge import ModelConfig, get_mcore_model, hf_to_mcore_config
    from transformers import AutoConfig

    from swift_megatron_grpo.parallel_attributes import mark_tensor_parallel
    from swift_megatron_grpo.patches import PATCHES
    PATCHES.apply()
    fields = hf_to_mcore_config(AutoConfig.from_pretrained(folder))
    if fields.get('num_moe_experts'):
        fields['moe_router_load_balancing_type'] = 'none'
    fields.update(options)
    config = ModelConfig(
        params_dtype=torch.float32, tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp, context_parallel_size=layout.cp, expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp, sequence_parallel=layout.sp,
        overlap_p2p_comm=layout.vpp is not None, batch_p2p_comm=layout.vpp is None, calculate_per_token_loss=True, **fields)
    models = get_mcore_model(config)
    config.bridge.load_weights(models, str(folder))
    if marked:
        mark_tensor_parallel(models)
    return config, models


def _local_batch(batch: dict[str, Any]) -> dict[str, Any]:
    """This context-parallel rank's part of a micro-batch, with PackedSeqParams where it is packed."""
    from mcore_bridge import split_cp_inputs
    from megatron.core import mpu
    from megatron.core.packed_seq_params import PackedSeqParams
    cumulative = packed = None
    if batch['lengths'] is not None:
        cumulative = torch.tensor([0, *batch['lengths']]).cumsum(0).int()
        longest = max(batch['lengths'])
        packed = PackedSeqParams(qkv_format='thd', cu_seqlens_q=cumulative, cu_seqlens_kv=cumulative, max_seqlen_q=longest,
                                 max_seqlen_kv=longest, cu_seqlens_q_padded=cumulative, cu_seqlens_kv_padded=cumulative)
    split = (lambda x: split_cp_inputs(x, cumulative, 1)) if mpu.get_context_parallel_world_size() > 1 else (lambda x: x)
    return {name: split(batch[name]) for name in ('ids', 'labels', 'positions')} | {'packed': packed, 'cumulative': cumulative}


def _whole_logits(logits: torch.Tensor, batch: dict[str, Any], vocab_size: int) -> torch.Tensor:
    """(B, T/cp, V/tp) -> (B, T, V). Collective over the TP and the CP group."""
    from mcore_bridge.utils.megatron_utils import reconstruct_tensor_cp
    from megatron.core import mpu
    if mpu.get_tensor_model_parallel_world_size() > 1:
        parts = [torch.empty_like(logits) for _ in range(mpu.get_tensor_model_parallel_world_size())]
        torch.distributed.all_gather(parts, logits.contiguous(), group=mpu.get_tensor_model_parallel_group())
        logits = torch.cat(parts, -1)
    return reconstruct_tensor_cp(logits.contiguous(), batch['packed'], 1)[..., :vocab_size].clone()


class Step:
    """Forward and backward of all micro-batches through Megatron's schedule."""

    def __init__(self, layout: Layout, config: Any, vocab_size: int, packed: bool) -> None:
        from megatron.core import mpu
        self.layout, self.config, self.vocab_size = layout, config, vocab_size
        every = micro_batches(vocab_size, packed)
        dp, size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        self.mine = [_local_batch(batch) for batch in every[dp::size]]
        self.indices = list(range(NUM_MICRO_BATCHES))[dp::size]
        self.length = every[0]['ids'].shape[1]
        self.rows = every[0]['ids'].shape[0]

    def run(self, models: list[torch.nn.Module], *, forward_only: bool) -> tuple[float, dict[int, torch.Tensor]]:
        """(loss sum of this rank's tokens, logits by micro-batch index); both only on the last pipeline stage."""
        from megatron.core.pipeline_parallel import get_forward_backward_func
        logits: dict[int, torch.Tensor] = {}

        def forward_step(iterator: Any, model: torch.nn.Module) -> Any:
            index, batch = next(iterator)
            output = model(input_ids=batch['ids'], position_ids=batch['positions'], attention_mask=None, packed_seq_params=batch['packed'],
                           labels=None if forward_only else batch['labels'])

            def loss(tensor: torch.Tensor) -> Any:
                if forward_only:
                    logits[index] = _whole_logits(tensor.detach(), batch, self.vocab_size)
                    return tensor.float().sum() * 0, {'loss': 0.}
                total = tensor.float().sum()
                return total, torch.tensor(tensor.numel()), {'loss': total.item()}

            return output, loss

        # Interleaved stages each walk the micro-batches in the same order, with an iterator of their own.
        iterators = [iter(list(zip(self.indices, self.mine))) for _ in models]
        reduced = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iterators if len(models) > 1 else iterators[0], model=models,
            num_microbatches=len(self.mine), seq_length=self.length // self.layout.cp, micro_batch_size=self.rows,
            forward_only=forward_only)
        return sum(entry['loss'] for entry in reduced), logits


def _wrapped(config: Any, models: list[torch.nn.Module], distributed: bool) -> tuple[list[Any], Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed)
    wrapped = [DistributedDataParallel(config, ddp, model) for model in models]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer='adam', lr=ADAM['lr'], adam_beta1=ADAM['betas'][0], adam_beta2=ADAM['betas'][1], adam_eps=ADAM['eps'],
                        weight_decay=ADAM['weight_decay'], params_dtype=torch.float32, use_distributed_optimizer=distributed,
                        clip_grad=1e9),
        wrapped)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return wrapped, optimizer


def _export(config: Any, models: list[torch.nn.Module]) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for name, value in config.bridge.export_weights(models):
        if name in out:
            raise AssertionError(f'{name} is exported twice')
        out[name] = value.clone()
    return out


def _exported_gradients(config: Any, models: list[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Gradients by Hugging Face name: the bridge's export is linear in the weights, so that it serves gradients too."""
    saved = [(parameter, parameter.data) for model in models for parameter in model.parameters()]
    for parameter, _ in saved:
        parameter.data = parameter.main_grad.clone()
    try:
        return _export(config, models)
    finally:
        for parameter, data in saved:
            parameter.data = data


def one_step(folder: Path, layout_fields: dict[str, Any], packed: bool, optimizers: tuple[bool, ...] = (False, True),
             **options: Any) -> Outcome | None:
    """A whole training step on this rank, with each of `optimizers` (True: the distributed one). Rank 0 returns the outcome."""
    import torch.distributed as dist
    layout = Layout(**layout_fields)
    initialize(layout)
    config, models = build_models(folder, layout, **options)
    step = Step(layout, config, config.padded_vocab_size, packed)
    for model in models:
        model.eval()
    with torch.no_grad():
        _, logits = step.run(models, forward_only=True)
    exported = _export(config, models)
    norms, losses = {}, {}
    gradients: dict[str, torch.Tensor] = {}
    for distributed in optimizers:
        if norms:
            config, models = build_models(folder, layout, **options)
        wrapped, optimizer = _wrapped(config, models, distributed)
        for chunk in wrapped:
            chunk.train()
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses[distributed], _ = step.run(wrapped, forward_only=False)
        if not distributed:
            gradients = _exported_gradients(config, models)
        _, norms[distributed], _ = optimizer.step()
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, (losses[optimizers[-1]], logits))
    updated = _export(config, models)
    if dist.get_rank() != 0:
        return None
    whole: dict[int, torch.Tensor] = {}
    for _, part in everything:
        whole.update(part)
    tokens = NUM_MICRO_BATCHES * step.rows * step.length
    loss = sum(part for part, _ in everything) / tokens / layout.tp
    return Outcome(loss=loss, logits=[whole[index] for index in range(NUM_MICRO_BATCHES)], exported=exported, gradients=gradients,
                   norms=[float(norm) for norm in norms.values()], updated=updated)


def fields(layout: Layout) -> dict[str, Any]:
    """A layout as it travels to the ranks."""
    return asdict(layout)


def name(layout: Layout) -> str:
    """For test identifiers. Example: 'tp2-sp-ep2'; 'one' for a single process."""
    parts = [f'{key}{getattr(layout, key)}' for key in ('tp', 'pp', 'vpp', 'cp', 'ep', 'etp') if getattr(layout, key) not in (1, None)]
    return '-'.join(parts + ['sp'] * layout.sp) or (f'dp{layout.world}' if layout.world > 1 else 'one')


def save_and_reload(folder: Path, layout_fields: dict[str, Any], directory: str) -> tuple[bool, bool]:
    """Train one step, save model and distributed optimizer, spoil both, load; whether weights and moments came back bit for bit."""
    import torch.distributed as dist
    from megatron.core import dist_checkpointing, mpu
    layout = Layout(**layout_fields)
    initialize(layout)
    config, models = build_models(folder, layout)
    wrapped, optimizer = _wrapped(config, models, True)
    step = Step(layout, config, config.padded_vocab_size, True)
    for chunk in wrapped:
        chunk.train()
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    step.run(wrapped, forward_only=False)
    optimizer.step()
    metadata = {'distrib_optim_sharding_type': 'fully_reshardable', 'distrib_optim_fully_reshardable_mem_efficient': False,
                'dp_cp_group': mpu.get_data_parallel_group(with_context_parallel=True)}

    def state(loading: bool) -> dict[str, Any]:
        model = models[0].sharded_state_dict(metadata=metadata)
        return {'model': model, 'optimizer': optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)}

    if dist.get_rank() == 0:
        Path(directory).mkdir()
    dist.barrier()
    dist_checkpointing.save(state(False), directory)
    weights = [parameter.detach().clone() for parameter in models[0].parameters()]
    moments = [value.clone() for value in _moments(optimizer)]
    with torch.no_grad():
        for tensor in [*models[0].parameters(), *_moments(optimizer)]:
            tensor.fill_(7.)
    loaded = dist_checkpointing.load(state(True), directory)
    models[0].load_state_dict(loaded['model'])
    optimizer.load_state_dict(loaded['optimizer'])
    return (all(torch.equal(a, b) for a, b in zip(weights, models[0].parameters(), strict=True)),
            all(torch.equal(a, b) for a, b in zip(moments, _moments(optimizer), strict=True)) and len(moments) > 0)


def _moments(optimizer: Any) -> list[torch.Tensor]:
    chained = optimizer.chained_optimizers if hasattr(optimizer, 'chained_optimizers') else [optimizer]
    return [value for part in chained for state in part.optimizer.state.values() for key, value in sorted(state.items())
            if key in ('exp_avg', 'exp_avg_sq')]


# ---------------------------------------------------------------- adapters

ADAPTER_TARGETS = {'self_attn': ('q_proj', 'k_proj', 'v_proj', 'o_proj'), 'mlp': ('gate_proj', 'up_proj', 'down_proj')}


def write_adapter(base: Path, folder: Path, rank: int = 4) -> Path:
    """A PEFT adapter with random factors for every projection of a dense model; projections that Megatron fuses share their first factor."""
    import json

    from safetensors.torch import load_file, save_file
    generator = torch.Generator().manual_seed(11)
    weights, out = load_file(base / 'model.safetensors'), {}
    shared: dict[str, torch.Tensor] = {}
    for key in sorted(weights):
        parts = key.split('.')
        if len(parts) < 6 or parts[4] not in ADAPTER_TARGETS.get(parts[3], ()):
            continue
        fused = f'{parts[2]}.{parts[3]}' + (f'.{parts[4]}' if parts[4] in ('o_proj', 'down_proj') else '')
        rows, columns = weights[key].shape
        if fused not in shared:
            shared[fused] = torch.randn(rank, columns, generator=generator) * 0.1
        name = f'base_model.model.{key.removesuffix(".weight")}'
        out[f'{name}.lora_A.weight'] = shared[fused].clone()
        out[f'{name}.lora_B.weight'] = torch.randn(rows, rank, generator=generator) * 0.1
    folder.mkdir(parents=True)
    save_file(out, folder / 'adapter_model.safetensors')
    settings = {'peft_type': 'LORA', 'task_type': 'CAUSAL_LM', 'r': rank, 'lora_alpha': 8, 'lora_dropout': 0., 'bias': 'none',
                'base_model_name_or_path': str(base), 'target_modules': [name for names in ADAPTER_TARGETS.values() for name in names]}
    (folder / 'adapter_config.json').write_text(json.dumps(settings))
    return folder


def draw_adapter(folder: Path, directory: Path, rank: int = 4) -> None:
    """A PEFT adapter with random factors for every linear layer that ms-swift's all-linear means, experts included. In one process."""
    import json

    import peft
    from safetensors.torch import save_file
    initialize(Layout())
    config, models = build_models(folder, Layout(), marked=False)
    model = peft.get_peft_model(models[0], _every_linear(models[0], rank))
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if 'lora_' in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    directory.mkdir(parents=True)
    save_file({name: value.contiguous().clone() for name, value in config.bridge.export_weights(models, peft_format=True)},
              directory / 'adapter_model.safetensors')
    settings = {'peft_type': 'LORA', 'task_type': 'CAUSAL_LM', 'r': rank, 'lora_alpha': 8, 'lora_dropout': 0., 'bias': 'none',
                'base_model_name_or_path': str(folder), 'target_modules': sorted(config.bridge._peft_target_modules)}
    (directory / 'adapter_config.json').write_text(json.dumps(settings))


def _every_linear(model: Any, rank: int = 4) -> Any:
    import mcore_bridge.tuners  # noqa: F401  (teaches PEFT Megatron's layers)
    import peft
    from swift.megatron.utils.utils import find_all_linears
    return peft.LoraConfig(r=rank, lora_alpha=8, target_modules=find_all_linears(model))


def adapter_step(folder: Path, adapter: Path, layout_fields: dict[str, Any],
                 optimizers: tuple[bool, ...] = (False, True)) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """One step of LoRA: ([norm with each of `optimizers`; True: the distributed one], the updated adapter by PEFT name, base weights changed)."""
    import peft

    from swift_megatron_grpo.parallel_attributes import mark_tensor_parallel
    layout = Layout(**layout_fields)
    initialize(layout)
    norms = []
    for distributed in optimizers:
        config, models = build_models(folder, layout, marked=False)
        for model in models:
            peft.get_peft_model(model, _every_linear(model))
        config.bridge.load_weights(models, str(adapter), peft_format=True)
        mark_tensor_parallel(models)
        frozen = [(t, t.detach().clone()) for model in models for t in [*(p for p in model.parameters() if not p.requires_grad), *model.buffers()]]
        wrapped, optimizer = _wrapped(config, models, distributed)
        for chunk in wrapped:
            chunk.train()
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        Step(layout, config, config.padded_vocab_size, True).run(wrapped, forward_only=False)
        _, norm, _ = optimizer.step()
        norms.append(float(norm))
    updated = {name: value.clone() for name, value in config.bridge.export_weights(models, peft_format=True)}
    return norms, updated, sum(not torch.equal(t, before) for t, before in frozen)
