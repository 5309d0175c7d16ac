"""Run micro-batches through Megatron's schedule and get log-probabilities of completion tokens (import tier 2).

One path for the training pass and for every forward-only pass (old, reference, step statistics): the same inputs, the same precision,
the same temperature division. That is why the first ratio of a generation is exactly 1 in float32.
"""
from __future__ import annotations

import contextlib
import torch
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from mcore_bridge import split_cp_inputs
from megatron.core import mpu
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.utils import unwrap_model
from typing import Any

from ..parallel import Topology, sum_over_context_parallel
from ..types import MicroBatch
from .logprobs import chunked_logprobs
from .routing import RouteBook

# (micro-batch, logprobs_C, entropies_C) -> scalar to differentiate (forward-only passes return zero)
Consumer = Callable[[MicroBatch, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class Counters:
    """How much the models ran: what the tests of "no needless pass" look at. Padding counts: it is computed."""
    forwards: int = 0
    positions: int = 0


class OutputHead:
    """The output layer of the last pipeline stage, taken out of the model's forward.

    After `attach` the model returns hidden states, [b, s, h] (sequence-parallel: this rank's share of s), and `logits` maps selected hidden
    states to this tensor-parallel rank's logits. The hook is `GPTModel._forward_output_layer`, set on the instance.
    """

    def __init__(self, gpt_model: Any):
        self._layer = gpt_model._forward_output_layer
        self._module = gpt_model.output_layer
        self._tied_weight: Callable[[], torch.Tensor] | None = (
            gpt_model.shared_embedding_or_output_weight if gpt_model.share_embeddings_and_output_weights else None)
        self.draws = any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in self._module.modules())
        self.config = gpt_model.config
        self.sequence_parallel = bool(self.config.sequence_parallel) and self.config.tensor_model_parallel_size > 1
        gpt_model._forward_output_layer = self._pass_hidden_states

    @staticmethod
    def attach(gpt_model: Any) -> OutputHead | None:
        return OutputHead(gpt_model) if gpt_model.post_process else None

    @staticmethod
    def _pass_hidden_states(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states

    def whole_sequence(self, hidden_bsh: torch.Tensor) -> torch.Tensor:
        """[b, s, h] with s whole again. Collective over the tensor-parallel group when sequence-parallel."""
        if not self.sequence_parallel:
            return hidden_bsh
        # Backward: this rank's slice of a gradient that `logits` has already summed over the tensor-parallel group.
        return gather_from_sequence_parallel_region(
            hidden_bsh.transpose(0, 1).contiguous(), tensor_parallel_output_grad=False).transpose(0, 1)

    def logits(self, hidden_Ch: torch.Tensor) -> torch.Tensor:
        """[C, h] -> [C, v], this rank's share. The gradient of the input is summed over the tensor-parallel group."""
        weight = self._tied_weight() if self._tied_weight is not None else None
        linears = [m for m in self._module.modules() if getattr(m, 'sequence_parallel', False)] if self.sequence_parallel else []
        for linear in linears:
            linear.sequence_parallel = False
        try:
            dtype = next(self._module.parameters()).dtype if weight is None else weight.dtype
            return self._layer(hidden_Ch.to(dtype)[:, None], weight=weight)[:, 0]
        finally:
            for linear in linears:
                linear.sequence_parallel = True


class PolicyForward:
    """Runs micro-batches through one model (the policy, or the reference).

    Args:
        trainer: the trainer, for its argument object and its `_prepare_batch` (pipeline stage, packed-sequence parameters, CP slices).
        models: model chunks of this pipeline stage, wrapped or not.
        topology: this rank's place.
        temperature: sampling temperature; logits are divided by it.
        routes: records and replays expert choices; None: every forward routes freely.
    """

    def __init__(self, trainer: Any, models: list[Any], topology: Topology, temperature: float, routes: RouteBook | None = None):
        self.trainer = trainer
        self.models = models
        self.topology = topology
        self.temperature = temperature
        self.routes = routes
        self.counters = Counters()
        self.heads: dict[int, OutputHead] = {}
        for model in models:
            gpt_model = language_model(model)
            head = OutputHead.attach(gpt_model)
            if head is not None:
                self.heads[id(gpt_model)] = head

    @contextlib.contextmanager
    def free_routing(self) -> Iterator[None]:
        """While the body runs, no expert choice is replayed: for a reference or teacher that is the policy without its adapter."""
        routes, self.routes = self.routes, None
        try:
            yield
        finally:
            self.routes = routes

    def run(self, micro_batches: Sequence[MicroBatch], consumer: Consumer, *, forward_only: bool) -> None:
        """One run of Megatron's schedule. All ranks, collective; every rank brings the same number of micro-batches.

        On the last pipeline stage `consumer` is called once a micro-batch. In training the scalar that it returns is differentiated as it is:
        Megatron's division by the number of micro-batches and of data-parallel ranks is undone here and nowhere else (its schedule
        multiplies by the context-parallel size and divides by the number of micro-batches; its gradient buffers divide by the size
        of the data x context group).
        """
        num_micro_batches = len(micro_batches)
        undo_division = float(num_micro_batches * self.topology.dp_size)

        def loss_func(micro_batch: MicroBatch, cu_seqlens: torch.Tensor | None, head: OutputHead,
                      hidden: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            logprobs_C, entropies_C = self._logprobs(micro_batch, cu_seqlens, head, hidden)
            loss = consumer(micro_batch, logprobs_C, entropies_C)
            if forward_only:
                return hidden.new_zeros((), dtype=torch.float32), {}
            return loss * undo_division, {}

        def forward_step(data: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Any]:
            micro_batch = next(data)
            gpt_model = language_model(model)
            batch = self.trainer._prepare_batch(dict(micro_batch.inputs), gpt_model.vp_stage)
            for key in ('labels', 'loss_scale'):
                batch.pop(key, None)
            self.counters.forwards += 1
            self.counters.positions += micro_batch.num_positions
            packed = batch.get('packed_seq_params')
            cu_seqlens = packed.cu_seqlens_q if packed is not None else None
            with self.routes.around_forward(micro_batch, gpt_model, cu_seqlens) if self.routes is not None else contextlib.nullcontext():
                hidden = model(**batch)
            head = self.heads.get(id(gpt_model))
            return hidden, lambda output: loss_func(micro_batch, cu_seqlens, head, output)

        iterators = [iter(micro_batches) for _ in self.models]
        args = self.trainer.args
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(self.models) > 1 else iterators[0],
            model=self.models,
            num_microbatches=num_micro_batches,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            forward_only=forward_only,
        )
        if self.routes is not None:
            self.routes.finish([language_model(model) for model in self.models])

    def _logprobs(self, micro_batch: MicroBatch, cu_seqlens: torch.Tensor | None, head: OutputHead,
                  hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(logprobs_C, entropies_C), whole on every tensor- and context-parallel rank of the last stage."""
        device = hidden.device
        positions_C = micro_batch.logit_positions_C.to(device, non_blocking=True)
        targets_C = micro_batch.target_ids_C.to(device, non_blocking=True)
        hidden = head.whole_sequence(hidden).reshape(-1, hidden.shape[-1])
        num_tokens = targets_C.numel()
        here_C = None
        if self.topology.cp_size > 1:
            positions_C, here_C = self._positions_here(micro_batch, cu_seqlens, device)
            targets_C = targets_C[here_C]
        is_empty = targets_C.numel() == 0 and torch.is_grad_enabled()
        if is_empty:
            # One position whose value is dropped: the graph and its collectives are those of any other micro-batch, and every parameter gets a
            # gradient (0), the output layer's too. With overlap_grad_reduce Megatron reduces a bucket only when each of its parameters has one.
            positions_C, targets_C = positions_C.new_zeros(1), targets_C.new_zeros(1)
        vocab_size = int(head.config.padded_vocab_size)
        tp_rank = mpu.get_tensor_model_parallel_rank()
        share = -(-vocab_size // self.topology.tp_size)
        logprobs, entropies = chunked_logprobs(
            head.logits,
            hidden[positions_C],
            targets_C,
            vocab_share=share,
            temperature=self.temperature if micro_batch.temperature is None else micro_batch.temperature,
            vocab_start=tp_rank * share,
            vocab_size=vocab_size,
            group=self.topology.tp_group if self.topology.tp_size > 1 else None,
            draws=head.draws,
        )
        if is_empty:
            logprobs, entropies = logprobs[:0], entropies[:0]
        if here_C is None:
            return logprobs, entropies
        whole = logprobs.new_zeros(num_tokens).index_copy(0, here_C, logprobs)
        whole_entropies = entropies.new_zeros(num_tokens).index_copy(0, here_C, entropies)
        return (sum_over_context_parallel(whole, self.topology),
                sum_over_context_parallel(whole_entropies, self.topology))

    def _positions_here(self, micro_batch: MicroBatch, cu_seqlens: torch.Tensor | None,
                        device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Which of the C tokens are predicted at a position that this context-parallel rank holds, and where.

        Returns (local flat positions, their indices in 0 .. C-1). The slots are sliced exactly as the model's inputs are.
        """
        slots = torch.full((micro_batch.num_positions,), -1, dtype=torch.int64, device=device)
        slots[micro_batch.logit_positions_C.to(device)] = torch.arange(micro_batch.target_ids_C.numel(), device=device)
        rows = 1 if cu_seqlens is not None else micro_batch.num_rows
        mode = self.trainer.args.cp_partition_mode
        kwargs = {'cp_partition_mode': mode} if mode != 'zigzag' else {}
        local = split_cp_inputs(slots.view(rows, -1), cu_seqlens, -1, **kwargs).reshape(-1)
        positions = (local >= 0).nonzero(as_tuple=True)[0]
        return positions, local[positions]


def language_model(model: Any) -> Any:
    """The GPT model inside DDP, Float16 and multimodal wrappers."""
    inner = unwrap_model([model])[0]
    return inner.language_model if hasattr(inner, 'language_model') else inner


def collect_logprobs(forward: PolicyForward, steps: Sequence[Any], device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Forward-only over whole optimizer steps, in one run of the schedule.

    All ranks, collective. The models run in evaluation mode without gradients, as ms-swift's passes do.

    Returns:
        For each step (logprobs_K, entropies_K), float32: this data-parallel rank's tokens filled in, zeros elsewhere. Meaningful on the last
        pipeline stage only.
    """
    results = [(torch.zeros(step.table.num_tokens, device=device), torch.zeros(step.table.num_tokens, device=device)) for step in steps]
    micro_batches, owner = [], {}
    for step, result in zip(steps, results):
        for micro_batch in step.forward_only_micro_batches:
            micro_batches.append(micro_batch)
            owner[id(micro_batch)] = result

    def store(micro_batch: MicroBatch, logprobs_C: torch.Tensor, entropies_C: torch.Tensor) -> torch.Tensor:
        logprobs_K, entropies_K = owner[id(micro_batch)]
        index_C = micro_batch.token_index_C.to(device)
        logprobs_K[index_C] = logprobs_C.detach()
        entropies_K[index_C] = entropies_C
        return logprobs_K.new_zeros(())

    was_training = [model.training for model in forward.models]
    for model in forward.models:
        model.eval()
    try:
        with torch.no_grad():
            forward.run(micro_batches, store, forward_only=True)
    finally:
        for model, training in zip(forward.models, was_training):
            model.train(training)
    return results
