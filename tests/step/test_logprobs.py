"""Chunks of the output layer, computed again in the backward pass."""
import pytest
import torch

from swift_megatron_grpo.step import logprobs


def gradient(chunked: bool, draws: bool = True) -> torch.Tensor:
    """Of the sum of 70 log-probabilities behind an output layer with dropout, in chunks of 64."""
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 16))
    hidden_Ch = torch.randn(70, 8).requires_grad_()
    targets_C = torch.arange(70) % 16
    torch.manual_seed(1)
    if chunked:
        values_C, _ = logprobs.chunked_logprobs(layer, hidden_Ch, targets_C, vocab_share=2**26, temperature=0.7, vocab_start=0, vocab_size=16, group=None,
                                                draws=draws)
    else:
        parts = [logprobs.vocab_parallel_logprobs(layer(hidden_Ch[a:b]), targets_C[a:b], temperature=0.7, vocab_size=16)[0] for a, b in ((0, 64), (64, 70))]
        values_C = torch.cat(parts)
    torch.manual_seed(2)  # other things draw before the backward pass
    values_C.sum().backward()
    assert hidden_Ch.grad is not None
    return hidden_Ch.grad


def test_a_layer_that_draws_is_computed_again_with_the_same_draws() -> None:
    assert gradient(chunked=True) == pytest.approx(gradient(chunked=False), abs=1e-6)
    assert (gradient(chunked=True, draws=False) - gradient(chunked=False)).abs().max() > 0.01, 'without it the test would see nothing'
