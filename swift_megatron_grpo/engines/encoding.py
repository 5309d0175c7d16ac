"""A prompt is encoded once, not once a rollout (import tier 1).

The G requests of a group differ in their names and in their seeds. ms-swift's engines encode each of them: template, tokenizer and, for
pictures, the processor, G times the same.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

Encoded = tuple[list[dict[str, Any]], list[Any]]


def encode_once(encode: Callable[[list[Any], bool], Encoded], requests: Sequence[Any], strict: bool) -> Encoded:
    """What `encode(requests, strict)` returns, with one encoding for each run of requests that ask for the same.

    Args:
        encode: ms-swift's `InferEngine._batch_encode`; it changes no request.
        requests: dataclasses; the requests of a group are neighbours.
        strict: an encoding that fails is raised. Otherwise failures are told by position, so that every request is encoded.

    Every request has a dictionary of its own; the values (token ids, pictures) are shared and must not be changed in place.
    """
    if not strict:
        return encode(list(requests), strict)
    firsts: list[Any] = []
    number: list[int] = []
    for request in requests:
        if not firsts or not _same_prompt(request, firsts[-1]):
            firsts.append(request)
        number.append(len(firsts) - 1)
    inputs, errors = encode(firsts, strict)
    return [dict(inputs[i]) for i in number], errors


def _same_prompt(one: Any, other: Any) -> bool:
    """Whether two requests differ in nothing but their names. Values that cannot be compared count as different."""
    if type(one) is not type(other):
        return False
    try:
        return all(bool(getattr(one, field.name) == getattr(other, field.name)) for field in dataclasses.fields(one) if field.name != 'uuid')
    except (TypeError, ValueError):  # e.g. arrays, whose == is an array
        return False
