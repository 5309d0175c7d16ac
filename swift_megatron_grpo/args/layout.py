"""Which rank belongs where (import tier 0; pure).

Megatron numbers ranks with the first letter of its order running fastest: tp-cp-ep-dp-pp. Dense layers know TP, CP, DP, PP;
expert layers know ETP, EP, their own DP, and PP (megatron.core.parallel_state.initialize_model_parallel).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .batch_plan import divisors
from .plan import Layout


def rank_groups(sizes: Sequence[tuple[str, int]], name: str) -> list[list[int]]:
    """Groups of ranks along one axis. ``sizes`` lists (axis, size), fastest first; the world is their product.

    Example: sizes (('tp', 2), ('dp', 2)), name 'dp': [[0, 2], [1, 3]].
    """
    world = 1
    for _, size in sizes:
        world *= size
    stride = 1
    for axis, size in sizes:
        if axis == name:
            starts = [rank for rank in range(world) if rank // stride % size == 0]
            return [[start + index * stride for index in range(size)] for start in starts]
        stride *= size
    raise KeyError(name)


def resolve_layout(values: dict[str, Any], world_size: int) -> tuple[Layout | None, list[str]]:
    """The layout, or None and the errors. ``values`` holds the worker's arguments by name."""
    tp, pp, cp = (values[f'{name}_size'] for name in ('tensor_model_parallel', 'pipeline_model_parallel', 'context_parallel'))
    ep, etp = values['expert_model_parallel_size'], values['expert_tensor_parallel_size']
    vpp = values.get('virtual_pipeline_model_parallel_size') or 1
    errors = []
    for name in (
        'tensor_model_parallel_size',
        'pipeline_model_parallel_size',
        'context_parallel_size',
        'expert_model_parallel_size',
        'expert_tensor_parallel_size',
    ):
        if values[name] < 1:
            errors.append(f'--{name} is {values[name]}; it is 1 or more.')
    if errors or world_size % (tp * pp * cp):
        return None, errors  # the batch plan has said it
    dp = world_size // (tp * pp * cp)
    if world_size % (etp * ep * pp):
        fitting = ' or '.join(str(d) for d in divisors(world_size // pp // etp)) if world_size % (pp * etp) == 0 else '1'
        errors.append(
            f'{world_size} processes do not divide by expert_tensor_parallel_size {etp} x expert_model_parallel_size {ep} x '
            f'pipeline_model_parallel_size {pp} = {etp * ep * pp}. expert_model_parallel_size may be {fitting}.'
        )
        return None, errors
    if vpp > 1 and pp == 1:
        errors.append(f'--virtual_pipeline_model_parallel_size {vpp} needs --pipeline_model_parallel_size 2 or more.')
    dense = (('tp', tp), ('cp', cp), ('dp', dp), ('pp', pp))
    expert_dp = world_size // (etp * ep * pp)
    expert = (('etp', etp), ('ep', ep), ('expert_dp', expert_dp), ('pp', pp))
    groups = {axis: rank_groups(dense, axis) for axis, _ in dense}
    groups.update({axis: rank_groups(expert, axis) for axis, _ in expert[:3]})
    vllm, problems = _vllm(values, world_size)
    return Layout(
        world_size=world_size,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        dp_size=dp,
        expert_dp_size=expert_dp,
        sequence_parallel=bool(values.get('sequence_parallel')) and tp > 1,
        groups=groups,
        vllm=vllm,
    ), errors + problems


def _vllm(values: dict[str, Any], world_size: int) -> tuple[dict[str, Any], list[str]]:
    if not values['use_vllm']:
        return {'engine': 'transformers', 'groups': [[rank] for rank in range(world_size)]}, []
    if values['vllm_mode'] == 'server':
        return {'engine': 'vllm', 'mode': 'server', 'groups': []}, []
    size = values['vllm_tensor_parallel_size']
    if size < 1 or world_size % size:
        near = sorted(divisors(world_size), key=lambda d: abs(d - size))[:2]
        return {'engine': 'vllm', 'mode': 'colocate', 'groups': []}, [
            f'--vllm_tensor_parallel_size {size} does not divide the {world_size} processes that the colocated engines share. The nearest '
            f'valid values are {" or ".join(str(d) for d in sorted(near))}.'
        ]
    return {
        'engine': 'vllm',
        'mode': 'colocate',
        'tensor_parallel_size': size,
        'groups': [list(range(start, start + size)) for start in range(0, world_size, size)],
    }, []
