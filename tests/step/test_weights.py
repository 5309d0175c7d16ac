"""Weights of tokens: literal numbers, and which denominators the overlong filter shrinks."""
import pytest
import torch

from swift_megatron_grpo.step.weights import token_weights


def weights(loss_type, lengths=(3, 0, 1), truncated=(False, False, False), overlong_filter=True):
    return token_weights(loss_type, lengths_S=torch.tensor(lengths), truncated_S=torch.tensor(truncated), overlong_filter=overlong_filter,
                         max_completion_length=10).tolist()


@pytest.mark.parametrize('loss_type, expected', [
    ('grpo', [1 / 9, 1 / 9, 1 / 9, 1 / 3]),
    ('sapo', [1 / 9, 1 / 9, 1 / 9, 1 / 3]),
    ('gmpo', [1 / 9, 1 / 9, 1 / 9, 1 / 3]),
    ('luspo', [1 / 3, 1 / 3, 1 / 3, 1 / 3]),
    ('bnpo', [1 / 4, 1 / 4, 1 / 4, 1 / 4]),
    ('real', [1 / 4, 1 / 4, 1 / 4, 1 / 4]),
    ('dapo', [1 / 4, 1 / 4, 1 / 4, 1 / 4]),
    ('cispo', [1 / 4, 1 / 4, 1 / 4, 1 / 4]),
    ('fipo', [1 / 4, 1 / 4, 1 / 4, 1 / 4]),
    ('dr_grpo', [1 / 30, 1 / 30, 1 / 30, 1 / 30]),
])
def test_three_sequences_of_three_none_and_one_token(loss_type, expected):
    assert weights(loss_type) == pytest.approx(expected)


@pytest.mark.parametrize('loss_type, expected', [
    ('grpo', [1 / 9, 1 / 9, 1 / 9, 0]),
    ('luspo', [1 / 3, 1 / 3, 1 / 3, 0]),
    ('bnpo', [1 / 3, 1 / 3, 1 / 3, 0]),  # the only denominator that shrinks
    ('dapo', [1 / 4, 1 / 4, 1 / 4, 0]),
    ('dr_grpo', [1 / 30, 1 / 30, 1 / 30, 0]),
])
def test_the_overlong_filter_takes_the_truncated_sequence_out(loss_type, expected):
    assert weights(loss_type, truncated=(False, False, True)) == pytest.approx(expected)
    assert weights(loss_type, truncated=(False, False, True), overlong_filter=False) == pytest.approx(weights(loss_type))


@pytest.mark.parametrize('loss_type', ['grpo', 'luspo', 'bnpo', 'dapo', 'dr_grpo', 'real'])
def test_nothing_left_gives_zeros(loss_type):
    assert weights(loss_type, truncated=(True, True, True)) == [0, 0, 0, 0]
    assert weights(loss_type, lengths=(0, 0, 0)) == []


def test_weights_are_float32_and_sum_to_one_over_a_long_step():
    lengths_S = torch.full((4096, ), 37)
    result = token_weights('grpo', lengths_S=lengths_S, truncated_S=torch.zeros(4096, dtype=torch.bool), overlong_filter=False,
                           max_completion_length=64)
    assert result.dtype == torch.float32
    assert float(result.double().sum()) == pytest.approx(1.0, abs=1e-6)
