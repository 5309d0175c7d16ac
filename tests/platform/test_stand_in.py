"""Norms, linear layers, experts, random states, recomputation and the optimizer of the stand-in, each against torch's own."""
import pytest
import torch
import torch.nn.functional as F

from swift_megatron_grpo.cpu.te.grouped import GroupedLinear
from swift_megatron_grpo.cpu.te.install import SplitAlongDim, thd_get_partitioned_indices
from swift_megatron_grpo.cpu.te.norm import LayerNorm, RMSNorm
from swift_megatron_grpo.cpu.te.optimizer import FusedAdam
from swift_megatron_grpo.cpu.te.rng import CudaRNGStatesTracker, checkpoint


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize('zero_centered', [False, True])
def test_norms_equal_torch(zero_centered):
    x, scale, shift = randn(3, 5, 16), randn(16, seed=1), randn(16, seed=2)
    stored = scale - 1 if zero_centered else scale
    rms, layer = (kind(16, eps=1e-6, zero_centered_gamma=zero_centered) for kind in (RMSNorm, LayerNorm))
    with torch.no_grad():
        rms.weight.copy_(stored), layer.weight.copy_(stored), layer.bias.copy_(shift)
    assert torch.allclose(rms(x), F.rms_norm(x, (16, ), scale, 1e-6), atol=1e-6)
    assert torch.allclose(layer(x), F.layer_norm(x, (16, ), scale, shift, 1e-6), atol=1e-6)


def test_norm_statistics_of_bf16_are_taken_in_fp32():
    x = (randn(4, 4096) * 50).bfloat16()
    norm = RMSNorm(4096, eps=1e-6, params_dtype=torch.bfloat16)
    exact = F.rms_norm(x.double(), (4096, ), None, 1e-6)
    assert norm(x).dtype == torch.bfloat16
    assert torch.equal(norm(x), exact.bfloat16())


@pytest.mark.parametrize('adam_w_mode', [True, False])
def test_five_steps_of_adam_equal_torch(adam_w_mode):
    mine = [torch.nn.Parameter(randn(4, 3, seed=i)) for i in range(2)]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in mine]
    settings = {'lr': 3e-3, 'betas': (0.9, 0.95), 'eps': 1e-8, 'weight_decay': 0.1}
    ours = FusedAdam(mine, adam_w_mode=adam_w_mode, **settings)
    reference = (torch.optim.AdamW if adam_w_mode else torch.optim.Adam)(theirs, **settings)
    for step in range(5):
        for index, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            a.grad = randn(4, 3, seed=10 * step + index)
            b.grad = a.grad.clone()
        ours.step()
        reference.step()
    for a, b in zip(mine, theirs, strict=True):
        assert (a - b).abs().max().item() <= 1e-7
    assert [group['step'] for group in ours.param_groups] == [5]
    assert 'step' not in ours.state[mine[0]]


def test_an_optimizer_that_is_reloaded_goes_on_as_if_it_had_not_been():
    weights = [torch.nn.Parameter(randn(6)) for _ in range(2)]
    optimizers = [FusedAdam([w], lr=1e-2) for w in weights]
    for step in range(3):
        for w, optimizer in zip(weights, optimizers, strict=True):
            w.grad = randn(6, seed=step)
            optimizer.step()
    fresh = FusedAdam([weights[1]], lr=1e-2)
    fresh.load_state_dict(optimizers[1].state_dict())
    for w, optimizer in zip(weights, (optimizers[0], fresh), strict=True):
        w.grad = randn(6, seed=9)
        optimizer.step()
    assert torch.equal(weights[0], weights[1])


def test_adam_refuses_what_it_does_not_do():
    with pytest.raises(NotImplementedError, match='master_weights'):
        FusedAdam([torch.nn.Parameter(randn(2))], master_weights=True)
    with pytest.raises(NotImplementedError, match='amsgrad'):
        FusedAdam([torch.nn.Parameter(randn(2))], amsgrad=True)


def test_a_named_random_state_neither_disturbs_nor_is_disturbed():
    tracker = CudaRNGStatesTracker()
    tracker.add('a', 1)
    tracker.add('b', 2)
    torch.manual_seed(7)
    expected = torch.rand(2)
    torch.manual_seed(7)
    with tracker.fork('a'):
        first = torch.rand(3)
    assert torch.equal(torch.rand(2), expected)
    with tracker.fork('b'):
        other = torch.rand(3)
    with tracker.fork('a'):
        second = torch.rand(3)
    both = torch.rand(6, generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.cat([first, second]), both)
    assert not torch.equal(other, first)
    with pytest.raises(ValueError, match="'a' or seed 3"):
        tracker.add('a', 3)
    with pytest.raises(ValueError, match="'c' or seed 2"):
        tracker.add('c', 2)


def test_recomputation_draws_the_same_dropout_again():
    tracker = CudaRNGStatesTracker()

    def run(recompute):
        tracker.reset()
        tracker.add('model-parallel-rng', 11)
        x = randn(64).requires_grad_()
        calls = []

        def block(y):
            calls.append(1)
            with tracker.fork():
                return F.dropout(y * 2, 0.5).square()

        out = checkpoint(block, x, get_rng_state_tracker=lambda: tracker) if recompute else block(x)
        with tracker.fork():
            later = torch.rand(1)  # work between forward and backward moves the state on
        out.sum().backward()
        with tracker.fork():
            after = torch.rand(1)
        return out.detach(), x.grad, later, after, len(calls)

    plain, again = run(False), run(True)
    for a, b in zip(plain[:4], again[:4], strict=True):
        assert torch.equal(a, b)
    assert (plain[4], again[4]) == (1, 2)
    with pytest.raises(NotImplementedError, match='distribute_saved_activations'):
        checkpoint(lambda x: x, randn(1), distribute_saved_activations=True)


def grouped(**options):
    layer = _unmarked(GroupedLinear)(3, 4, 2, **options)
    with torch.no_grad():
        for index in range(3):
            getattr(layer, f'weight{index}').copy_(randn(2, 4, seed=index))
    return layer


def _unmarked(kind):
    """Megatron's attributes belong to a worker process; the arithmetic does not need them."""
    return type(kind.__name__, (kind, ), {'_mark': lambda self, parameter, dim: None})


def test_each_expert_multiplies_its_own_tokens_and_an_idle_one_has_a_zero_gradient():
    layer = grouped(bias=False)
    x = randn(5, 4)
    out = layer(x, [2, 0, 3])
    assert torch.equal(out, torch.cat([x[:2] @ layer.weight0.T, x[2:] @ layer.weight2.T]))
    out.sum().backward()
    assert torch.equal(layer.weight1.grad, torch.zeros(2, 4))
    assert torch.allclose(layer.weight2.grad, x[2:].sum(0).expand(2, 4))
    with pytest.raises(ValueError, match=r'm_splits \[2, 0, 4\] for 3 experts and 5 tokens'):
        layer(x, [2, 0, 4])


def test_a_bias_that_is_returned_is_not_added():
    layer = grouped(bias=True, return_bias=True)
    with torch.no_grad():
        layer.bias0.fill_(3.)
    out, biases = layer(randn(2, 4), [2, 0, 0])
    assert torch.equal(out, randn(2, 4) @ layer.weight0.T)
    assert [bias[0].item() for bias in biases] == [3., 0., 0.]


def test_an_option_without_stand_in_is_refused_by_name():
    with pytest.raises(NotImplementedError, match='delay_wgrad_compute'):
        grouped(delay_wgrad_compute=True)


def test_split_gives_back_the_gradient_of_the_whole():
    x = randn(2, 6).requires_grad_()
    a, b = SplitAlongDim.apply(x, 1, [2, 4])
    assert torch.equal(a, x[:, :2]) and torch.equal(b, x[:, 2:]) and b.is_contiguous()
    (a.sum() * 2 + b.sum() * 3).backward()
    assert x.grad.tolist() == [[2., 2., 3., 3., 3., 3.]] * 2
    y = randn(2, 2).requires_grad_()
    c, d = SplitAlongDim.apply(y, 1, 1, True)
    assert c.shape == (2, )
    (c.sum() + 5 * d.sum()).backward()
    assert y.grad.tolist() == [[1., 5.]] * 2


def test_the_tokens_of_each_context_parallel_rank():
    cumulative = torch.tensor([0, 8, 12], dtype=torch.int32)
    assert thd_get_partitioned_indices(cumulative, 12, 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert thd_get_partitioned_indices(cumulative, 12, 2, 1).tolist() == [2, 3, 4, 5, 9, 10]
    with pytest.raises(ValueError, match='ends at 12, the buffer has 16'):
        thd_get_partitioned_indices(cumulative, 16, 2, 0)
