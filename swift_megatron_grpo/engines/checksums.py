"""Did the weights arrive? Checksums of what was sent and of what an engine holds (import tier 1).

Engines fuse weights (q, k and v in one tensor, all experts in another) and split or repeat them over their ranks. Sums do not mind: what a
holder should sum up to follows from its members and from how many elements all ranks hold together.
"""
from __future__ import annotations

import torch
from collections.abc import Callable, Mapping
from dataclasses import dataclass

RELATIVE = 1e-6  # sums are in float64; only their order differs
# Values in float64 at once, 128 MiB: a fused holder of experts or an embedding has gigabytes, and policy and engine lie beside it.
_CHUNK = 2**24


@dataclass(kw_only=True, slots=True, frozen=True)
class Checksum:
    """numel elements, sum of absolute values, sum of values (float64)."""
    numel: int
    absolute: float
    signed: float

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Checksum:
        """Pure. Reads the whole tensor once on its device, a chunk at a time, and waits for it."""
        absolute = signed = torch.zeros((), dtype=torch.float64, device=tensor.device)
        for part in tensor.detach().reshape(-1).split(_CHUNK):
            values = part.double()
            signed = signed + values.sum()
            absolute = absolute + values.abs_().sum()
        return cls(numel=tensor.numel(), absolute=float(absolute), signed=float(signed))

    def __add__(self, other: Checksum) -> Checksum:
        return Checksum(numel=self.numel + other.numel, absolute=self.absolute + other.absolute, signed=self.signed + other.signed)

    def times(self, factor: float) -> Checksum:
        return Checksum(numel=round(self.numel * factor), absolute=self.absolute * factor, signed=self.signed * factor)

    def equals(self, other: Checksum) -> bool:
        scale = max(abs(self.absolute), abs(other.absolute), 1e-30)
        return abs(self.absolute - other.absolute) <= RELATIVE * scale and abs(self.signed - other.signed) <= RELATIVE * scale


EMPTY = Checksum(numel=0, absolute=0.0, signed=0.0)


def expected(members: Mapping[str, Checksum], held_numel: int, ranks: int) -> Checksum | None:
    """What a holder with `held_numel` elements over `ranks` ranks should sum up to; None where the sizes do not say. Pure.

    Example, 2 ranks: a norm of 64 elements on each rank (held_numel 128) counts twice; q, k, v of 64, 32, 32 elements with 1 key-value
    head (held_numel 64 + 2 * 64) count once, twice and twice.
    """
    total = EMPTY
    for checksum in members.values():
        total = total + checksum
    if held_numel == total.numel:
        return total
    if held_numel == total.numel * ranks:
        if all(name.endswith('experts.down_proj_bias') for name in members):  # added once, by the first rank; the others hold zeros
            return Checksum(numel=held_numel, absolute=total.absolute, signed=total.signed)
        return total.times(ranks)
    repeated = [name for name in members if 'k_proj' in name or 'v_proj' in name]
    if repeated and len(repeated) < len(members):  # grouped attention with fewer key-value heads than ranks
        part = EMPTY
        for name in repeated:
            part = part + members[name]
        rest = total + part.times(-1)
        times, left = divmod(held_numel - rest.numel, part.numel)
        return rest + part.times(times) if left == 0 and 1 < times <= ranks else None
    if held_numel > total.numel and all('embed' in name or 'lm_head' in name for name in members):
        return total  # a vocabulary that is filled up, with zeros
    return None


def differences(sent: Mapping[str, Checksum], held: Mapping[str, Checksum], ranks: int,
                holder_of: Callable[[str], str]) -> tuple[list[tuple[str, str]], list[str]]:
    """(holder, what is wrong) of each that differs, and names of sent weights that could not be compared. Pure.

    Args:
        sent: by Hugging Face name.
        held: by the engine's name, summed over its ranks.
        ranks: of the engine.
        holder_of: Hugging Face name -> the engine's name.
    """
    members: dict[str, dict[str, Checksum]] = {}
    for name, checksum in sent.items():
        members.setdefault(holder_of(name), {})[name] = checksum
    wrong: list[tuple[str, str]] = []
    uncovered: list[str] = []
    for holder, parts in members.items():
        got = held.get(holder)
        want = expected(parts, got.numel, ranks) if got is not None else None
        if got is None or want is None:
            uncovered.extend(parts)
        elif not want.equals(got):
            wrong.append((holder, f'sum of absolute values {got.absolute:.9g} instead of {want.absolute:.9g}, '
                          f'sum {got.signed:.9g} instead of {want.signed:.9g}'))
    return wrong, uncovered
