"""From rollouts to micro-batches (import tier 2: ms-swift's template encodes and collates).

Three decisions, in this order:
1. which data-parallel index trains which rollout of an optimizer step: balanced by length, computed alike on every rank;
2. inside a data-parallel index the TP x PP x CP ranks share the encoding, each rollout is encoded once, and exchange the results;
3. how the rollouts are packed into micro-batches: as many as the token budget needs, equally many on every data-parallel index.
"""
from __future__ import annotations

import torch
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from swift.megatron.utils import get_padding_to
from swift.rl_core.data import GRPOSample
from swift.rlhf_trainers.gkd_helpers import encode_teacher_view
from swift.rlhf_trainers.utils import encode_sample
from swift.template import Template
from swift.utils import get_logger
from typing import Any

from ..errors import RunError
from ..parallel import Topology, agree, max_over
from ..types import MicroBatch, Rollout, TokenTable
from .packing import balance, balance_equal_counts, pack, pack_into, round_up
from .prompts import media_names

logger = get_logger()


@dataclass(kw_only=True, slots=True)
class EncodedRollout:
    """`template.encode` of prompt and answer, and which of its positions hold completion tokens."""
    rollout_index: int
    inputs: dict[str, Any]
    token_positions: list[int]  # positions in input_ids whose token carries loss

    @property
    def length(self) -> int:
        return len(self.inputs['input_ids'])


@dataclass(kw_only=True, slots=True)
class StepBatch:
    """One optimizer step of this data-parallel index. `table` covers the whole step, `micro_batches` this rank's share."""
    table: TokenTable
    micro_batches: list[MicroBatch]
    forward_only_micro_batches: list[MicroBatch]

    @property
    def num_sequences(self) -> int:
        return int(self.table.lengths_S.numel())

    def share_routes(self) -> None:
        """Gives the expert choices that a forward-only pass recorded to the training micro-batches, which hold the same rows."""
        for training, forward_only in zip(self.micro_batches, self.forward_only_micro_batches, strict=True):
            assert torch.equal(training.token_index_C, forward_only.token_index_C)
            training.routes = forward_only.routes

    def own_tokens(self, whole_K: torch.Tensor) -> torch.Tensor:
        """A vector over the whole step, zeros in place of the tokens of other data-parallel indices."""
        own_K = torch.zeros_like(whole_K)
        for micro_batch in self.micro_batches:
            index_C = micro_batch.token_index_C.to(whole_K.device)
            own_K[index_C] = whole_K[index_C]
        return own_K


class BatchBuilder:
    """Builds the optimizer steps of a generation.

    Args:
        args: the run's arguments (micro_batch_size, token budgets, padding_free, parallel sizes).
        template: ms-swift's template, in training mode.
        topology: this rank's place.
        device: device for the table of tokens.
    """

    def __init__(self, args: Any, template: Template, topology: Topology, device: torch.device):
        self.args = args
        self.template = template
        self.topology = topology
        self.device = device
        self._prompts_differ = False  # said once

    def build(self, rollouts: Sequence[Rollout], samples: dict[int, Any], num_steps: int, *,
              encode: Callable[[Rollout, Any], EncodedRollout] | None = None) -> list[StepBatch]:
        """All ranks, collective.

        Args:
            rollouts: all N of the generation, in canonical order, equal on every rank.
            samples: rollout index -> sample with its data set row; every rank can build them, those of its own index are used.
            num_steps: optimizer steps of the generation; each trains N / num_steps rollouts in canonical order.
            encode: (rollout, its entry of `samples`) -> what the model reads; default `encode`. With `encode_for_teacher` the tokens have the same
                place in the table.
        """
        steps = [rollouts[i * len(rollouts) // num_steps:(i + 1) * len(rollouts) // num_steps] for i in range(num_steps)]
        owners = [self._assign(step) for step in steps]
        mine = [[step[i] for i in owner[self.topology.dp_rank]] for step, owner in zip(steps, owners)]
        encoded = self._encode_shared([rollout for step in mine for rollout in step], samples, encode or self.encode)
        if encode is None:
            self._compare_prompts([rollout for step in mine for rollout in step], encoded)
        lengths = self._completion_lengths(rollouts, encoded)
        bins = self._bins(mine, encoded)
        return [
            StepBatch(
                table=(table := self._table(step, lengths)),
                micro_batches=self._micro_batches(own, training, encoded, table),
                forward_only_micro_batches=self._micro_batches(own, forward_only, encoded, table),
            ) for step, own, (training, forward_only) in zip(steps, mine, bins)
        ]

    # -- who trains what -------------------------------------------------------------------------------------------------------------------

    def _assign(self, step: Sequence[Rollout]) -> list[list[int]]:
        estimates = [rollout.num_prompt_tokens + rollout.num_response_tokens for rollout in step]
        if self.args.padding_free:
            return balance(estimates, self.topology.dp_size)
        return balance_equal_counts(estimates, self.topology.dp_size)

    # -- encoding --------------------------------------------------------------------------------------------------------------------------

    def _encode_shared(self, rollouts: Sequence[Rollout], samples: dict[int, Any],
                       encode: Callable[[Rollout, Any], EncodedRollout]) -> dict[int, EncodedRollout]:
        rank, size = self.topology.model_rank, len(self.topology.model_ranks)

        def encode_mine() -> list[EncodedRollout]:
            return [_named(encode, rollout, samples[rollout.index]) for rollout in rollouts[rank::size]]

        parts = agree('Encoding of rollouts', encode_mine, self.topology.model_group)
        return {encoded.rollout_index: encoded for part in parts for encoded in part}

    def encode(self, rollout: Rollout, sample: GRPOSample) -> EncodedRollout:
        """One rollout through ms-swift's `encode_sample`. The prompt is what the engine saw: with truncation_strategy left its last max_length
        tokens. The answer was limited when it was sampled."""
        encoded = self._encode_within(None, sample)
        limit = self.template.max_length
        if limit is not None and self.template.truncation_strategy == 'left' and len(rollout.response_token_ids) == 1:
            num_prompt_tokens = next((i for i, label in enumerate(encoded['labels']) if label != -100), 0)
            if num_prompt_tokens > limit:
                encoded = self._encode_within(limit + len(encoded['input_ids']) - num_prompt_tokens, sample)
        return self._encoded(rollout, encoded)

    def encode_for_teacher(self, rollout: Rollout, sample: GRPOSample) -> EncodedRollout:
        """The answer after the teacher's prompt, which is not cut; after the policy's where the sample has no other (ms-swift's
        `encode_teacher_view`)."""
        return self._encoded(rollout, self._encode_within(None, sample, encode_teacher_view if sample.teacher_messages is not None else encode_sample))

    def encode_expert(self, rollout: Rollout, row: dict[str, Any]) -> EncodedRollout:
        """A row of `--chord_sft_dataset` with its answer, within max_length by the template's own rule."""
        try:
            encoded = self.template.encode(row, return_length=True)
        except Exception as error:  # whatever stands in the way of encoding
            raise RunError(f'--chord_sft_dataset: row {rollout.dataset_index} cannot be encoded ({type(error).__name__}: {error}). Take it out, raise '
                           '--max_length, or use --truncation_strategy left.') from error
        return self._encoded(rollout, encoded)

    def _encoded(self, rollout: Rollout, encoded: dict[str, Any]) -> EncodedRollout:
        encoded.pop('_extra_kwargs', None)
        encoded['input_ids'] = list(encoded['input_ids'])
        encoded['labels'] = list(encoded['labels'])
        # Token 0 is never predicted: a completion token always has a position before it.
        positions = [i for i, label in enumerate(encoded['labels']) if label != -100 and i > 0]
        self._check_rollout_logprobs(rollout, len(positions))
        return EncodedRollout(rollout_index=rollout.index, inputs=encoded, token_positions=positions)

    def _encode_within(self, limit: int | None, sample: GRPOSample,
                       encode: Callable[[GRPOSample, Template], dict[str, Any]] = encode_sample) -> dict[str, Any]:
        configured, self.template.max_length = self.template.max_length, limit
        if sample.response_token_ids:
            # In a conversation ms-swift's template gives loss to the end marks that it puts after a truncated turn. They were not sampled.
            self.template._add_dynamic_eos = lambda *args, **kwargs: None
        try:
            return encode(sample, self.template)
        finally:
            self.template.max_length = configured
            vars(self.template).pop('_add_dynamic_eos', None)

    def _compare_prompts(self, rollouts: Sequence[Rollout], encoded: dict[int, EncodedRollout]) -> None:
        """A warning where the engine's prompt and the trainer's have different lengths: then the answer is trained behind another prompt."""
        if self._prompts_differ or self.topology.dp_rank > 0 or self.topology.model_rank > 0:
            return
        for rollout in rollouts:
            positions = encoded[rollout.index].token_positions
            masked = any(mask[:1] == [0] for mask in rollout.response_loss_mask)  # the answer begins with what carries no loss
            if len(rollout.response_token_ids) == 1 and positions and not masked and rollout.num_prompt_tokens not in (0, positions[0]):
                self._prompts_differ = True
                logger.warning(
                    f'The engine answered rollout {rollout.index} (data set row {rollout.dataset_index}) behind a prompt of {rollout.num_prompt_tokens} tokens, '
                    f'and the template of the trainer makes {positions[0]} of it: the policy is trained behind another prompt than it was asked. Engine and '
                    'trainer need the same --template, --system, --max_length, --truncation_strategy and --max_pixels; a rollout server has its own.')
                return

    @staticmethod
    def _check_rollout_logprobs(rollout: Rollout, num_tokens: int) -> None:
        earlier_answers = sum(message['role'] == 'assistant' for message in rollout.messages) - len(rollout.response_token_ids)
        if earlier_answers > 0 and num_tokens > rollout.num_response_tokens > 0:
            raise RunError(f'The prompt in data set row {rollout.dataset_index} holds {earlier_answers} answers of the assistant, and they carry loss: '
                           f'{num_tokens} tokens would be trained, and {rollout.num_response_tokens} were sampled. Give --loss_scale last_round, which is '
                           'the default without --multi_turn_scheduler, or take these answers out.')
        if not rollout.rollout_logprobs:
            return
        given = sum(len(turn) for turn in rollout.rollout_logprobs)
        if given != num_tokens:
            raise RunError(f'Rollout {rollout.index} (prompt {rollout.prompt_index}, data set row {rollout.dataset_index}) has {num_tokens} '
                           f'completion tokens that carry loss, but the engine or the multi-turn scheduler gave {given} log-probabilities. '
                           'There must be one for each such token, in order.')

    # -- tables ----------------------------------------------------------------------------------------------------------------------------

    def _completion_lengths(self, rollouts: Sequence[Rollout], encoded: dict[int, EncodedRollout]) -> list[int]:
        """Completion tokens of every rollout of the generation. Own ones are exact; the others' come by one all-reduce."""
        own = [len(encoded[r.index].token_positions) if r.index in encoded else 0 for r in rollouts]
        if self.topology.dp_size == 1:
            return own
        return max_over(own, self.topology.dp_group, self.device)

    def _table(self, step: Sequence[Rollout], lengths: Sequence[int]) -> TokenTable:
        lengths_S = torch.tensor([lengths[r.index] for r in step], dtype=torch.int64)
        sequence_of_token_K = torch.repeat_interleave(torch.arange(len(step)), lengths_S)
        num_tokens = int(lengths_S.sum())
        rollout_logprobs = None
        if all(r.rollout_logprobs or r.num_response_tokens == 0 for r in step):
            flat = [value for r in step for turn in r.rollout_logprobs for value in turn]
            if len(flat) == num_tokens:
                rollout_logprobs = torch.tensor(flat, dtype=torch.float32, device=self.device)
        return TokenTable(
            rollout_indices_S=torch.tensor([r.index for r in step], dtype=torch.int64, device=self.device),
            lengths_S=lengths_S.to(self.device),
            truncated_S=torch.tensor([r.is_truncated for r in step], dtype=torch.bool, device=self.device),
            groups_S=torch.tensor([r.prompt_index for r in step], dtype=torch.int64, device=self.device),
            sequence_of_token_K=sequence_of_token_K.to(self.device),
            advantages_K=torch.zeros(num_tokens, dtype=torch.float32, device=self.device),
            weights_K=torch.zeros(num_tokens, dtype=torch.float32, device=self.device),
            rollout_logprobs_K=rollout_logprobs,
        )

    # -- micro-batches ---------------------------------------------------------------------------------------------------------------------

    def _bins(self, mine: Sequence[Sequence[Rollout]],
              encoded: dict[int, EncodedRollout]) -> list[tuple[list[list[int]], list[list[int]]]]:
        """For each step (training bins, forward-only bins) of indices into `mine[step]`, equally many on every data-parallel index."""
        args = self.args
        row_multiple = 2 * self.topology.cp_size if self.topology.cp_size > 1 else 1
        lengths = [[round_up(encoded[r.index].length, row_multiple) for r in step] for step in mine]
        if not args.padding_free:
            size = args.micro_batch_size
            rows = [[list(range(i, min(i + size, len(step)))) for i in range(0, len(step), size)] for step in mine]
            counts = max_over([len(r) for r in rows], self.topology.dp_group, self.device)
            filled = [r + [[]] * (round_up(count, self._count_multiple) - len(r)) for r, count in zip(rows, counts)]
            return [(bins, bins) for bins in filled]
        longest = max_over([max(step, default=0) for step in lengths], self.topology.dp_group, self.device)
        training_budgets = [args.max_tokens_per_micro_batch or args.micro_batch_size * length for length in longest]
        forward_budgets = [args.max_tokens_per_forward_only_micro_batch or budget for budget in training_budgets]
        needed = [len(pack(step, budget)) for step, budget in zip(lengths, training_budgets)]
        needed += [len(pack(step, budget)) for step, budget in zip(lengths, forward_budgets)]
        counts = [round_up(count, self._count_multiple) for count in max_over(needed, self.topology.dp_group, self.device)]
        training = [pack_into(step, budget, count) for step, budget, count in zip(lengths, training_budgets, counts)]
        if forward_budgets == training_budgets:
            return [(bins, bins) for bins in training]
        forward = [pack_into(step, budget, count) for step, budget, count in zip(lengths, forward_budgets, counts[len(mine):])]
        return list(zip(training, forward))

    @property
    def _count_multiple(self) -> int:
        """The interleaved schedule wants a multiple of its group size."""
        if self.args.virtual_pipeline_model_parallel_size is None:
            return 1
        return self.args.microbatch_group_size_per_vp_stage or self.topology.pp_size

    def _micro_batches(self, own: Sequence[Rollout], bins: Sequence[Sequence[int]], encoded: dict[int, EncodedRollout],
                       table: TokenTable) -> list[MicroBatch]:
        starts = dict(zip(table.rollout_indices_S.tolist(), (table.lengths_S.cumsum(0) - table.lengths_S).tolist()))
        shortest = min(own, key=lambda r: (encoded[r.index].length, r.index))
        return [self._micro_batch([own[i] for i in items] or [shortest], encoded, starts, filler=not items) for items in bins]

    def _micro_batch(self, rollouts: Sequence[Rollout], encoded: dict[int, EncodedRollout], starts: dict[int, int],
                     filler: bool) -> MicroBatch:
        rows = [encoded[r.index] for r in rollouts]
        # The collator appends padding to these lists in place.
        batch = [{**row.inputs, 'input_ids': list(row.inputs['input_ids']), 'labels': list(row.inputs['labels'])} for row in rows]
        inputs = self.template.data_collator(batch, padding_to=get_padding_to(self.args))
        row_length = inputs['input_ids'].shape[-1]
        positions, targets, index, sequences = [], [], [], []
        offset = 0
        multiple = 2 * self.topology.cp_size if self.topology.cp_size > 1 else 1
        for number, row in enumerate([] if filler else rows):
            start = offset if self.args.padding_free else number * row_length
            positions += [start + p - 1 for p in row.token_positions]
            targets += [row.inputs['input_ids'][p] for p in row.token_positions]
            index += range(starts[row.rollout_index], starts[row.rollout_index] + len(row.token_positions))
            sequences += [number] * len(row.token_positions)
            offset += round_up(row.length, multiple)
        return MicroBatch(
            inputs=inputs,
            num_sequences=len(rows),
            num_rows=1 if self.args.padding_free else len(rows),
            num_positions=inputs['input_ids'].numel(),
            num_input_tokens=sum(row.length for row in rows),
            target_ids_C=torch.tensor(targets, dtype=torch.int64),
            logit_positions_C=torch.tensor(positions, dtype=torch.int64),
            token_index_C=torch.tensor(index, dtype=torch.int64),
            sequence_ids_C=torch.tensor(sequences, dtype=torch.int64),
            rollout_routes=self._rollout_routes(rollouts, rows, row_length) if self.args.router_replay_mode == 'R3' else None,
        )

    def _rollout_routes(self, rollouts: Sequence[Rollout], rows: Sequence[EncodedRollout], row_length: int) -> torch.Tensor:
        """The engine's expert choices where its tokens lie in the micro-batch, int16 [rows, row_length, layers, top-k]; 0 for padding."""
        multiple = 2 * self.topology.cp_size if self.topology.cp_size > 1 else 1
        placed: torch.Tensor | None = None
        offset = 0
        for number, (rollout, row) in enumerate(zip(rollouts, rows)):
            routes = rollout_routes(rollout, row.length)
            if placed is None:
                placed = routes.new_zeros(1 if self.args.padding_free else len(rows), row_length, *routes.shape[1:])
            place = (0, offset) if self.args.padding_free else (number, 0)
            placed[place[0], place[1]:place[1] + routes.shape[0]] = routes
            offset += round_up(row.length, multiple)
        assert placed is not None
        return placed


def _named(encode: Callable[[Rollout, Any], EncodedRollout], rollout: Rollout, sample: Any) -> EncodedRollout:
    """`encode(rollout, sample)`; what stands in its way is raised with the rollout's name."""
    try:
        return encode(rollout, sample)
    except RunError:
        raise
    except Exception as error:  # an image that is gone, for instance
        media = media_names(sample if isinstance(sample, dict) else vars(sample))
        raise RunError(f'Rollout {rollout.index} of data set row {rollout.dataset_index}{media} cannot be encoded: '
                       f'{type(error).__name__}: {error}') from error


def rollout_routes(rollout: Rollout, num_tokens: int) -> torch.Tensor:
    """int16 [tokens, layers, top-k] of one rollout; the last token, which nothing is predicted from, may be missing.

    Raises RunError for a rollout without routes, or with those of another number of tokens.
    """
    name = f'rollout {rollout.index} (data set row {rollout.dataset_index})'
    if rollout.routed_experts is None:
        raise RunError(f'--router_replay_mode R3: the engine gave no routes for {name}. It needs a vLLM that returns them '
                       '(enable_return_routed_experts, vLLM 0.14 or newer); R2 needs none.')
    routes = torch.as_tensor(rollout.routed_experts).to(torch.int16)
    if routes.dim() == 4 and routes.shape[0] == 1:
        routes = routes[0]
    if routes.dim() != 3 or routes.shape[0] not in (num_tokens, num_tokens - 1):
        raise RunError(f'--router_replay_mode R3: {name} has {num_tokens} tokens, and the engine gave routes of shape {tuple(routes.shape)}; '
                       '[tokens, layers, top-k] was expected.')
    return routes
