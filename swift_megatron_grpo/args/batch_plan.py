"""The batch arithmetic, in the words of the documentation (import tier 0; pure, no I/O).

All sizes count completions. With TP, PP and CP the tensor, pipeline and context parallel sizes:

    dp_size                  = world_size / (TP x PP x CP)
    global_batch_size        = micro_batch_size x dp_size x gradient_accumulation_steps
    generation_batch_size    = global_batch_size x steps_per_generation
    num_rollout_prompts      = generation_batch_size / num_generations
    num_train_prompts        = global_batch_size / num_generations
    num_prompts_per_dp_group = global_batch_size / num_generations / dp_size

(ms-swift, Megatron GRPO documentation). `swift rlhf` counts steps_per_generation in micro-steps, its default being
gradient_accumulation_steps; here it counts optimizer steps. Which unit a number is in follows from the names beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .plan import BatchPlan


@dataclasses.dataclass(kw_only=True, slots=True)
class BatchResult:
    """``plan`` is None only where the number of ranks does not divide; otherwise it is filled even beside errors, for the report."""

    plan: BatchPlan | None
    errors: list[str]
    warnings: list[str]


def _near(value: int, step: int) -> str:
    """The multiples of ``step`` around ``value``: '8 or 16'."""
    low, high = value // step * step, -(-value // step) * step
    return ' or '.join(str(number) for number in sorted({number for number in (low, high) if number > 0}))


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _whole(numerator: int, denominator: int) -> int | float:
    return numerator // denominator if numerator % denominator == 0 else numerator / denominator


def counts_micro_steps(given: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether steps_per_generation is in the unit of `swift rlhf` (micro-steps), and the names that say so."""
    swift = [name for name in ('gradient_accumulation_steps', 'per_device_train_batch_size') if name in given]
    megatron = [name for name in ('micro_batch_size', 'global_batch_size') if name in given]
    if 'gradient_accumulation_steps' in given or not megatron:
        return True, ' and '.join(swift) or 'no other batch argument'
    return False, ' and '.join(megatron)


def resolve_batch(given: Mapping[str, Any], *, world_size: int, tp: int, pp: int, cp: int, ulysses: int = 1) -> BatchResult:
    """The batch plan of a command.

    ``given`` holds the arguments that the user gave, by name, out of: per_device_train_batch_size, micro_batch_size,
    gradient_accumulation_steps, global_batch_size, steps_per_generation, generation_batch_size, num_generations, num_iterations,
    batch_check, keep_global_batch. ``ulysses`` is sequence_parallel_size of `swift rlhf`: there the ranks of a sequence group share a
    micro-batch, and the trainer multiplies its gradient accumulation by their number, so that an optimizer step and a generation hold as
    many completions as without it (swift.rlhf_trainers.grpo_trainer). The same is done here.
    """
    errors: list[str] = []
    warnings: list[str] = []
    model_ranks = tp * pp * cp
    if min(tp, pp, cp, world_size) < 1 or world_size % model_ranks:
        sizes = ' or '.join(str(d) for d in divisors(world_size) if d > 1) or '1'
        return BatchResult(
            plan=None,
            errors=[
                f'{world_size} processes do not divide by tensor_model_parallel_size {tp} x pipeline_model_parallel_size {pp} x '
                f'context_parallel_size {cp} = {model_ranks}. Start {_near(world_size, max(model_ranks, 1))} processes '
                f'(NPROC_PER_NODE x NNODES, or --world_size for a dry run), or choose sizes whose product is {sizes}.'
            ],
            warnings=[],
        )
    dp = world_size // model_ranks
    micro = given.get('micro_batch_size', given.get('per_device_train_batch_size', 1))
    accumulation = given.get('gradient_accumulation_steps', 1)
    num_generations = given.get('num_generations', 8)
    num_iterations = given.get('num_iterations', 1)
    batch_check = _batch_check(given)
    numbers = {
        'micro_batch_size': micro,
        'gradient_accumulation_steps': accumulation,
        'num_generations': num_generations,
        'num_iterations': num_iterations,
    }
    for name in ('global_batch_size', 'steps_per_generation', 'generation_batch_size'):
        numbers.update({name: given[name]} if name in given else {})
    for name, number in numbers.items():
        if number < 1:
            errors.append(f'--{name} is {number}; it is 1 or more.')
    if errors:
        return BatchResult(plan=None, errors=errors, warnings=[])

    swift_global = micro * world_size * accumulation
    in_micro_steps, beside = counts_micro_steps(given)
    accumulation_here = accumulation * ulysses if in_micro_steps else accumulation
    global_batch = _global_batch(given, micro, dp, accumulation_here, swift_global, errors, warnings)
    effective_accumulation = max(1, global_batch // (micro * dp))
    steps = _steps(given, in_micro_steps, beside, accumulation, global_batch, errors)
    swift_accumulation = accumulation if in_micro_steps else effective_accumulation
    generation = given['generation_batch_size'] if 'generation_batch_size' in given else global_batch * steps
    notes = _notes(given, swift_global, global_batch, micro, dp, model_ranks, in_micro_steps, beside, steps, ulysses)
    plan = BatchPlan(
        world_size=world_size,
        dp_size=dp,
        micro_batch_size=micro,
        gradient_accumulation_steps=effective_accumulation,
        global_batch_size=global_batch,
        steps_per_generation=steps,
        generation_batch_size=generation,
        num_generations=num_generations,
        num_rollout_prompts=_whole(generation, num_generations),
        num_train_prompts=_whole(global_batch, num_generations),
        num_prompts_per_dp_group=_whole(global_batch, num_generations * dp),
        batch_check=batch_check,
        num_iterations=num_iterations,
        swift_global_batch_size=global_batch if 'global_batch_size' in given else swift_global,
        swift_steps_per_generation=max(1, steps * swift_accumulation),
        notes=notes,
    )
    warnings += notes
    if not errors:
        errors += check(plan)
    if not errors and batch_check == 'exact' and given.get('batch_check', 'auto') == 'auto' and not meets_documented_condition(plan):
        # for a reader of the report; a script of `swift rlhf` has nothing to mend here
        plan.notes = [
            *notes,
            f'num_prompts_per_dp_group {plan.num_prompts_per_dp_group:g} is not a whole multiple of micro_batch_size {micro}, which the '
            'documentation of Megatron GRPO asks for. The data path here does not need it; --batch_check documented enforces it.',
        ]
    return BatchResult(plan=plan, errors=errors, warnings=warnings)


def _batch_check(given: Mapping[str, Any]) -> str:
    """auto: a batch in Megatron's names is held to Megatron's documentation, a batch in the names of `swift rlhf` to what it needs."""
    asked = given.get('batch_check', 'auto')
    if asked != 'auto':
        return str(asked)
    return 'documented' if 'micro_batch_size' in given or 'global_batch_size' in given else 'exact'


def _global_batch(
    given: Mapping[str, Any], micro: int, dp: int, accumulation: int, swift_global: int, errors: list[str], warnings: list[str]
) -> int:
    keep = given.get('keep_global_batch', False)
    if 'global_batch_size' not in given:
        return swift_global if keep else micro * dp * accumulation
    global_batch: int = given['global_batch_size']
    if keep and global_batch != swift_global:
        errors.append(
            f'--global_batch_size is {global_batch}, and --keep_global_batch true asks for micro_batch_size {micro} x world_size x '
            f'gradient_accumulation_steps = {swift_global}. Leave one of them out.'
        )
    elif global_batch % (micro * dp):
        fitting = list(divisors(global_batch // dp)) if global_batch % dp == 0 else []
        other = f', or a micro_batch_size of {" or ".join(str(d) for d in fitting[-4:])}' if fitting else ''
        errors.append(
            f'--global_batch_size {global_batch} does not divide by micro_batch_size {micro} x dp_size {dp} = {micro * dp}. '
            f'The nearest valid global_batch_size is {_near(global_batch, micro * dp)}{other}.'
        )
    elif 'gradient_accumulation_steps' in given and not keep and global_batch != micro * dp * accumulation:
        errors.append(
            f'--global_batch_size is {global_batch}, and --gradient_accumulation_steps {accumulation} x micro_batch_size {micro} x '
            f'dp_size {dp} is {micro * dp * accumulation}. Leave one of them out, or give gradient_accumulation_steps '
            f'{global_batch // (micro * dp)}.'
        )
    elif 'per_device_train_batch_size' in given and 'gradient_accumulation_steps' not in given and 'steps_per_generation' in given:
        warnings.append(
            '--global_batch_size stands beside --per_device_train_batch_size: steps_per_generation is read as optimizer steps. '
            'Give gradient_accumulation_steps instead to count micro-steps as swift rlhf does.'
        )
    return global_batch


def _steps(
    given: Mapping[str, Any],
    in_micro_steps: bool,
    beside: str,
    accumulation: int,
    global_batch: int,
    errors: list[str],
) -> int:
    """Optimizer steps a generation."""
    steps: int | None = None
    asked = given.get('steps_per_generation')
    if asked is not None and in_micro_steps:
        if asked % accumulation:
            errors.append(
                f'--steps_per_generation {asked} is not a multiple of gradient_accumulation_steps {accumulation}, and beside {beside} '
                f'it counts micro-steps as in swift rlhf. The nearest valid values are {_near(asked, accumulation)}; or name '
                'micro_batch_size and global_batch_size, and it counts optimizer steps.' + _sampled_in_parts(asked, accumulation)
            )
        steps = max(1, asked // accumulation)
    elif asked is not None:
        steps = asked
    generation = given.get('generation_batch_size')
    if generation is not None:
        if generation % global_batch:
            errors.append(
                f'--generation_batch_size {generation} is not a multiple of global_batch_size {global_batch}. The nearest valid values '
                f'are {_near(generation, global_batch)}.' + _sampled_in_parts(generation, global_batch)
            )
        elif steps is not None and generation != global_batch * steps:
            errors.append(
                f'--generation_batch_size is {generation}, and global_batch_size {global_batch} x {steps} optimizer steps a generation '
                f'(--steps_per_generation {asked}) is {global_batch * steps}. Leave one of them out.'
            )
        steps = max(1, generation // global_batch)
    if steps is None:
        steps = 1  # `swift rlhf` takes steps_per_generation = gradient_accumulation_steps
    return steps


def _sampled_in_parts(size: int, step: int) -> str:
    """What to know where `swift rlhf` samples several times for one optimizer step: the weights are the same each time."""
    if size >= step or step % size:
        return ''
    return f' swift rlhf would sample {step // size} times for one optimizer step, from the same weights: {step} is the same training.'


def _notes(
    given: Mapping[str, Any],
    swift_global: int,
    global_batch: int,
    micro: int,
    dp: int,
    model_ranks: int,
    in_micro_steps: bool,
    beside: str,
    steps: int,
    ulysses: int,
) -> list[str]:
    notes = []
    if ulysses > 1 and in_micro_steps and 'global_batch_size' not in given:
        notes.append(
            f'sequence_parallel_size {ulysses} multiplies gradient_accumulation_steps {given.get("gradient_accumulation_steps", 1)}, as in '
            'swift rlhf: an optimizer step and a generation hold as many completions as without it.'
        )
    if 'steps_per_generation' in given:
        unit = 'micro-steps, as in swift rlhf' if in_micro_steps else 'optimizer steps, as in megatron rlhf'
        notes.append(
            f'steps_per_generation {given["steps_per_generation"]} beside {beside} counts {unit}: {steps} optimizer '
            f'step{"s" if steps > 1 else ""} a generation.'
        )
    if model_ranks > 1 and 'global_batch_size' not in given and global_batch != swift_global:
        wider = swift_global // (micro * dp * ulysses)
        notes.append(
            f'The documented formula gives global_batch_size {global_batch}; under data parallel alone the script had {swift_global}. '
            f'To keep {swift_global}: --keep_global_batch true, or --gradient_accumulation_steps {wider}'
            + (f' with --steps_per_generation {steps * wider}.' if 'steps_per_generation' in given else '.')
        )
        if 'generation_batch_size' in given and steps * global_batch == given['generation_batch_size'] != swift_global:
            before = given['generation_batch_size'] / swift_global
            notes.append(
                f'generation_batch_size {given["generation_batch_size"]} is kept: it feeds {steps} optimizer steps, and {before:g} under data '
                'parallel alone. --keep_global_batch true keeps both numbers.'
            )
    return notes


def meets_documented_condition(plan: BatchPlan) -> bool:
    """num_prompts_per_dp_group is a whole multiple of micro_batch_size."""
    return plan.global_batch_size % (plan.num_generations * plan.dp_size * plan.micro_batch_size) == 0


def check(plan: BatchPlan) -> list[str]:
    """The verdict on a plan: an empty list, or one message that names the nearest valid values.

    Both settings of batch_check need whole groups in a generation. ``documented`` also asks for the published condition.
    """
    size, group = plan.generation_batch_size, plan.num_generations
    if size % group:
        near = sorted((d for d in divisors(size) if d > 1), key=lambda d: abs(d - group))[:3]
        whole = plan.swift_global_batch_size * plan.steps_per_generation
        kept = (
            f' Under data parallel alone the script had {whole}: --keep_global_batch true keeps it.'
            if whole != size and whole % group == 0
            else ''
        )
        return [
            f'generation_batch_size {size} does not divide by num_generations {group}, so a generation would end inside a '
            f'group. The nearest '
            f'valid generation_batch_size is {_near(size, group)}'
            + (f', the nearest num_generations {" or ".join(str(d) for d in sorted(near))}.' if near else '.')
            + kept
        ]
    if plan.batch_check == 'exact':
        return []
    if meets_documented_condition(plan):
        return []
    unit = plan.num_generations * plan.dp_size * plan.micro_batch_size
    shown = plan.num_prompts_per_dp_group
    ways = [f'global_batch_size {_near(plan.global_batch_size, unit)}']
    if isinstance(shown, int):

        def fitting(d: int) -> bool:
            return plan.global_batch_size % (d * plan.dp_size) == 0

        micros = [d for d in divisors(shown) if d != plan.micro_batch_size and fitting(d)]
        if micros:
            ways.append(f'micro_batch_size {" or ".join(str(d) for d in micros[-3:])}')
    per_group = plan.dp_size * plan.micro_batch_size
    groups = [d for d in divisors(plan.global_batch_size) if d > 1 and plan.global_batch_size % (d * per_group) == 0]
    if groups:
        nearest = sorted(sorted(groups, key=lambda d: abs(d - plan.num_generations))[:2])
        ways.append(f'num_generations {" or ".join(str(d) for d in nearest)}')
    return [
        f'num_prompts_per_dp_group = global_batch_size {plan.global_batch_size} / num_generations {plan.num_generations} / '
        f'dp_size {plan.dp_size} '
        f'= {shown:g} is not a whole multiple of micro_batch_size {plan.micro_batch_size} (the documented condition). Nearest '
        f'valid settings: '
        + '; or '.join(ways)
        + '. The data path here does not need the condition: --batch_check exact trains this batch as it is.'
    ]
