"""What a command resolves to: one dataclass a part (import tier 0: standard library only)."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(kw_only=True, slots=True)
class Argument:
    """One row of the translation report.

    ``name`` is the worker's name where there is one, else the given one; ``given_as`` is what the user typed, empty for defaults;
    ``action`` is kept, renamed, converted, no_effect, refused or default; ``reason`` says why, empty where nothing changed.
    """

    name: str
    value: Any
    given_as: str
    action: str
    reason: str = ''


@dataclasses.dataclass(kw_only=True, slots=True)
class BatchPlan:
    """The batch arithmetic in the documentation's names. All sizes count completions; prompts are sizes / num_generations.

    Worked example: world 8, TP 1, micro 4, accumulation 4, 4 steps a generation, G 8: dp_size 8, global_batch_size 128,
    generation_batch_size 512, num_rollout_prompts 64, num_train_prompts 16, num_prompts_per_dp_group 2.
    """

    world_size: int
    dp_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    global_batch_size: int
    steps_per_generation: int
    generation_batch_size: int
    num_generations: int
    num_rollout_prompts: int | float
    num_train_prompts: int | float
    num_prompts_per_dp_group: int | float
    batch_check: str
    num_iterations: int = 1
    # the same numbers as `swift rlhf` would have had without TP, PP and CP
    swift_global_batch_size: int = 0
    swift_steps_per_generation: int = 0
    notes: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(kw_only=True, slots=True)
class Layout:
    """Which ranks form which group, in Megatron's order (TP fastest, then CP, EP, DP, PP)."""

    world_size: int
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    virtual_pipeline_model_parallel_size: int
    context_parallel_size: int
    expert_model_parallel_size: int
    expert_tensor_parallel_size: int
    dp_size: int
    expert_dp_size: int
    sequence_parallel: bool
    groups: dict[str, list[list[int]]]
    vllm: dict[str, Any]


@dataclasses.dataclass(kw_only=True, slots=True)
class Schedule:
    """How long the run is. None means that it cannot be known before the start; ``notes`` says why.

    ``samples`` counts completions over the whole run, ``prompts`` the rows of the training data.
    """

    prompts: int | None
    prompts_per_epoch: int | None
    generations_per_epoch: int | None
    optimizer_steps_per_epoch: int | None
    samples_per_epoch: int | None
    num_train_epochs: float | None
    optimizer_steps: int | None
    generations: int | None
    samples: int | None
    learning_rate: dict[str, Any]
    notes: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(kw_only=True, slots=True)
class Plan:
    """All that is known of a command before anything heavy is imported.

    ``errors`` holds complete messages; a plan with errors must not be run. ``worker_argv`` is what every rank parses; ``effective`` has
    the value of every worker argument, given or not, before the worker itself fills in what is None.
    """

    is_megatron: bool
    dry_run: str = ''
    arguments: list[Argument] = dataclasses.field(default_factory=list)
    worker_argv: list[str] = dataclasses.field(default_factory=list)
    effective: dict[str, Any] = dataclasses.field(default_factory=dict)
    batch_plan: BatchPlan | None = None
    layout: Layout | None = None
    schedule: Schedule | None = None
    memory: dict[str, Any] | None = None
    command: str = ''
    command_notes: list[str] = dataclasses.field(default_factory=list)
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    warnings: list[str] = dataclasses.field(default_factory=list)
    errors: list[str] = dataclasses.field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.errors
