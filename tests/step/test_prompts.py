"""Rows that are no prompts are named before anything is sampled for them."""
import pytest

from swift_megatron_grpo.errors import UserError
from swift_megatron_grpo.step.prompts import PromptSource


def test_a_row_without_messages_is_named_with_what_it_has() -> None:
    rows = [{'messages': [{'role': 'user', 'content': 'a'}]}, {'messages': None, 'prompt': 'x'}]
    source = PromptSource(rows, 2, shuffle=False, seed=0)
    with pytest.raises(UserError, match=r'Data set row 1 has no messages \(it has prompt\)'):
        source.take(0)
