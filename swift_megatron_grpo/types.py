"""One container a stage (import tier 1: standard library and torch).

Shape alphabet, used in names and docstrings throughout the package:

    P  prompts of a generation            G  rollouts a prompt
    N  rollouts of a generation, P * G    F  reward functions
    S  sequences (rows) of a micro-batch  C  completion tokens of a micro-batch
    K  completion tokens of one optimizer step, over all ranks
    L  positions of a packed row          V  vocabulary, v this tensor-parallel rank's share of it

Words: a `rollout` is one sampled answer, a `group` the G rollouts of one prompt, a `generation` one sampling phase, an `update` one
optimizer step. `rollout_logprobs` come from the engine that sampled, `old_logprobs` from the policy at the start of the generation,
`new_logprobs` from the policy now, `ref_logprobs` from the reference model.

Everything about completion tokens is flat: no padding, one entry a token that carries loss. The order of the K tokens of an optimizer
step is canonical (by rollout index, then by position), so that a vector over them means the same on every rank and in every layout.
"""
from __future__ import annotations

import torch
from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True, slots=True)
class Rollout:
    """One sampled answer, in the light form that travels between ranks.

    Example: the second answer to the first prompt of a generation with G = 4, "42" and the end token, sampled by weights of version 3:

        Rollout(index=1, prompt_index=0, dataset_index=17, response_token_ids=[[19, 17, 2]], response_loss_mask=[],
                rollout_logprobs=[[-0.1, -0.3, -0.0]], finish_reason='stop', messages=[...], policy_version=3)
    """
    index: int  # 0 .. N-1, canonical: prompt_index * G + number of the answer
    prompt_index: int  # 0 .. P-1; the group
    dataset_index: int  # row of the data set
    response_token_ids: list[list[int]]  # one list a turn
    response_loss_mask: list[list[int]] = field(default_factory=list)  # 1 = carries loss; empty = all of them do
    rollout_logprobs: list[list[float]] = field(default_factory=list)  # one value a sampled token
    finish_reason: str | None = None  # 'stop', 'length', ...
    messages: list[dict[str, Any]] = field(default_factory=list)  # the whole conversation, the answer last
    num_prompt_tokens: int = 0  # as the engine counted: for balancing, and to see that the trainer encodes the same prompt
    rollout_infos: dict[str, Any] = field(default_factory=dict)
    media: dict[str, Any] = field(default_factory=dict)  # images/videos/audios that a multi-turn scheduler replaced
    routed_experts: Any = None  # router replay R3
    policy_version: int = 0  # of the weights that sampled it

    @property
    def is_truncated(self) -> bool:
        return self.finish_reason == 'length'

    @property
    def num_response_tokens(self) -> int:
        return sum(len(turn) for turn in self.response_token_ids)


@dataclass(kw_only=True, slots=True)
class TokenTable:
    """What the loss needs to know of the K completion tokens of one optimizer step, flat and canonical.

    The same length on every rank. Vectors that a forward pass fills (old_logprobs_K, ref_logprobs_K, teacher_logprobs_K) hold this data-parallel rank's own
    tokens and zeros elsewhere; a sum over the data-parallel group makes them whole.

    Example: two rollouts of 3 and 1 tokens: sequence_of_token_K = [0, 0, 0, 1], lengths_S = [3, 1].
    """
    rollout_indices_S: torch.Tensor  # int64, rollouts of this step, ascending
    lengths_S: torch.Tensor  # int64, completion tokens of each; 0 is allowed
    truncated_S: torch.Tensor  # bool
    groups_S: torch.Tensor  # int64, prompt index of each
    sequence_of_token_K: torch.Tensor  # int64, 0 .. S-1
    advantages_K: torch.Tensor  # float32
    weights_K: torch.Tensor  # float32, see step/weights.py
    rollout_logprobs_K: torch.Tensor | None = None  # float32
    old_logprobs_K: torch.Tensor | None = None  # float32; None: the training forward's own, detached
    ref_logprobs_K: torch.Tensor | None = None  # float32
    teacher_logprobs_K: torch.Tensor | None = None  # float32
    distillation_weights_K: torch.Tensor | None = None  # float32; with sdar_loss_coef: 1 / (unmasked tokens of the step)

    @property
    def num_tokens(self) -> int:
        return int(self.sequence_of_token_K.numel())

    def logprobs(self) -> dict[str, torch.Tensor]:
        """What forward passes filled in, by name: 'old', 'ref', 'teacher'."""
        values = {'old': self.old_logprobs_K, 'ref': self.ref_logprobs_K, 'teacher': self.teacher_logprobs_K}
        return {name: value for name, value in values.items() if value is not None}

    def set_logprobs(self, values: dict[str, torch.Tensor]) -> None:
        """The reverse of `logprobs`."""
        self.old_logprobs_K, self.ref_logprobs_K, self.teacher_logprobs_K = values.get('old'), values.get('ref'), values.get('teacher')


@dataclass(kw_only=True, slots=True)
class MicroBatch:
    """One forward of the model: collated inputs and where its C completion tokens are.

    `inputs` is what ms-swift's collator returns (on the CPU): packed, [1, L], or padded, [S, T]. `logit_positions_C` are flat
    positions in it of the hidden states that predict the tokens `target_ids_C`. `token_index_C` points into the step's TokenTable.
    A micro-batch that only fills up a pipeline has C = 0.
    """
    inputs: dict[str, Any]
    num_sequences: int  # S
    num_rows: int  # rows of input_ids: 1 when packed, else S
    num_positions: int  # L, or S * T
    num_input_tokens: int  # without padding
    target_ids_C: torch.Tensor  # int64
    logit_positions_C: torch.Tensor  # int64
    token_index_C: torch.Tensor  # int64
    sequence_ids_C: torch.Tensor  # int64, 0 .. S-1, row of the micro-batch
    temperature: float | None = None  # of its logits; None: the policy's
    # Router replay R3: experts that the engine chose, int16 [rows, positions of a row, layers, top-k]
    rollout_routes: torch.Tensor | None = None
    # Router replay R2: number of the model chunk -> experts of each of its routers, int16 [this rank's positions, top-k]
    routes: dict[int, list[torch.Tensor | None]] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class LossInputs:
    """The C completion tokens of one micro-batch, for a pure loss function. All float tensors are float32 and flat, [C].

    Sequences are never split over micro-batches, so sequence-level quantities can be computed from here.
    """
    new_logprobs_C: torch.Tensor  # carries the gradient
    old_logprobs_C: torch.Tensor  # no gradient
    advantages_C: torch.Tensor
    weights_C: torch.Tensor  # sums to the share of this micro-batch in the step; 0 = masked
    sequence_ids_C: torch.Tensor  # int64
    num_sequences: int  # S, rows without any token included
    ref_logprobs_C: torch.Tensor | None = None
    rollout_logprobs_C: torch.Tensor | None = None
    entropies_C: torch.Tensor | None = None  # no gradient
    keep_C: torch.Tensor | None = None  # bool
    coefficient_C: torch.Tensor | None = None
    coupled_loss: torch.Tensor | None = None  # 0-dim float32, of the whole step: the same on every micro-batch
    teacher_logprobs_C: torch.Tensor | None = None  # with sdar_loss_coef
    distillation_weights_C: torch.Tensor | None = None


@dataclass(kw_only=True, slots=True)
class Sums:
    """Metrics as sums and counts, to be reduced once an optimizer step. Values are 0-dim tensors, so that nothing synchronizes.

    Example: `sums.add('kl', total, count)` on every micro-batch; after one all-reduce the mean is total / count.
    """
    means: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    maxima: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, name: str, total: torch.Tensor, count: torch.Tensor) -> None:
        if name in self.means:
            old_total, old_count = self.means[name]
            total, count = old_total + total, old_count + count
        self.means[name] = (total, count)

    def maximum(self, name: str, value: torch.Tensor) -> None:
        """The minimum of x is kept as the maximum of -x, under a name that ends in `min`."""
        self.maxima[name] = torch.maximum(self.maxima[name], value) if name in self.maxima else value
