"""A prompt is encoded once a group, and every request gets the same as if it had been encoded alone."""
from dataclasses import dataclass, field
from typing import Any

import pytest

from swift_megatron_grpo.engines.encoding import encode_once


@dataclass
class Request:
    text: str
    uuid: str = ''
    images: list[Any] = field(default_factory=list)


class Encoder:

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, requests: list[Request], strict: bool) -> tuple[list[dict[str, Any]], list[Any]]:
        self.seen += [request.text for request in requests]
        return [{'input_ids': [ord(letter) for letter in request.text]} for request in requests], []


def requests_of(*texts: str) -> list[Request]:
    return [Request(text, f'r{i}') for i, text in enumerate(texts)]


def test_neighbours_that_ask_for_the_same_are_encoded_once() -> None:
    encode = Encoder()
    inputs, errors = encode_once(encode, requests_of('a', 'a', 'b', 'b', 'a'), True)
    assert encode.seen == ['a', 'b', 'a']
    assert [entry['input_ids'] for entry in inputs] == [[97], [97], [98], [98], [97]] and errors == []
    assert inputs[0] is not inputs[1]  # an engine may take entries out of it
    assert inputs[0]['input_ids'] is inputs[1]['input_ids']


def test_another_picture_is_another_prompt() -> None:
    encode = Encoder()
    encode_once(encode, [Request('a', images=['x']), Request('a', images=['y']), Request('a', images=['y'])], True)
    assert encode.seen == ['a', 'a']


class Array:

    def __eq__(self, other: object) -> Any:

        class Many:

            def __bool__(self) -> bool:
                raise ValueError('the truth value of an array is ambiguous')

        return Many()


def test_what_cannot_be_compared_is_encoded() -> None:
    encode = Encoder()
    encode_once(encode, [Request('a', images=[Array()]), Request('a', images=[Array()])], True)
    assert encode.seen == ['a', 'a']


def test_where_failures_are_told_by_position_every_request_is_encoded() -> None:
    encode = Encoder()
    encode_once(encode, requests_of('a', 'a'), False)
    assert encode.seen == ['a', 'a']


def test_an_encoding_that_fails_is_raised() -> None:

    def encode(requests: list[Request], strict: bool) -> Any:
        raise ValueError('too long')

    with pytest.raises(ValueError, match='too long'):
        encode_once(encode, requests_of('a', 'a'), True)
