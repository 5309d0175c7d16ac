"""Megatron-Core on the CPU platform against transformers, in each layout: logits, export, gradients, gradient norm, updated weights."""
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.platform import layouts
from tests.platform.layouts import Layout

DENSE = [
    Layout(),
    Layout(world=2),
    Layout(tp=2, world=2),
    Layout(tp=2, sp=True, world=2),
    Layout(pp=2, world=2),
    Layout(pp=2, vpp=2, world=2),
    Layout(cp=2, world=2),
]
EXPERTS = [
    Layout(),
    Layout(ep=2, world=2),
    Layout(cp=2, ep=2, world=2),
    Layout(tp=2, sp=True, world=2),  # expert sizes as ms-swift leaves them: each rank of the pair has all experts and half the tokens
    Layout(tp=2, sp=True, etp=2, world=2),
    Layout(tp=2, sp=True, ep=2, world=2),
    Layout(tp=2, sp=True, ep=2, etp=2, world=4),
]
SHAPES = [
    *(('qwen3', {}, layout) for layout in DENSE),
    *(('qwen3_moe', {}, layout) for layout in EXPERTS),
    *(('qwen3', {'tie_word_embeddings': True}, layout) for layout in (Layout(tp=2, world=2), Layout(pp=2, world=2))),
    # Multi-head latent attention: keys and values of different width, projections that every rank holds whole.
    *(('deepseek_v3', {}, layout) for layout in (Layout(), Layout(tp=2, sp=True, ep=2, world=2))),
]
# Rows of one length, unpacked, run where the way through attention differs; the others are packed only.
ROWS = [('qwen3', DENSE[index]) for index in (0, 2, 3, 4, 6)] + [('qwen3_moe', EXPERTS[index]) for index in (0, 1)]
RUNS = [(*shape, True) for shape in SHAPES] + [(*shape, False) for shape in SHAPES if (shape[0], shape[2]) in ROWS and not shape[1]]


# One layout of each kind stays in the quick suite.
QUICK = [('qwen3', DENSE[index]) for index in (0, 3, 4, 6)] + [('qwen3_moe', EXPERTS[1])]


def identify(run):
    kind, changes, layout, packed = run
    return f'{kind}{"-tied" if changes else ""}-{layouts.name(layout)}-{"packed" if packed else "rows"}'


@pytest.fixture(scope='module')
def references():
    return {}


def marked(run):
    kind, changes, layout, packed = run
    quick = packed and not changes and (kind, layout) in QUICK
    return pytest.param(run, id=identify(run), marks=pytest.mark.quick if quick else pytest.mark.heavy)


@pytest.fixture(scope='module', params=[marked(run) for run in RUNS])
def pair(request, ranks, tiny_model, references):
    """(what the ranks computed, what transformers computes, the folder)."""
    kind, changes, layout, packed = request.param
    folder = tiny_model(kind, **changes)
    key = (folder, packed)
    if key not in references:
        references[key] = layouts.reference(folder, packed)
    outcome = ranks.run(layouts.one_step, folder, layouts.fields(layout), packed, world_size=layout.world)[0]
    return outcome, references[key], folder


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def test_logits_and_loss_equal_transformers(pair):
    outcome, reference, _ = pair
    for mine, theirs in zip(outcome.logits, reference.logits, strict=True):
        assert mine.shape == theirs.shape
        assert (mine - theirs).abs().max().item() < 2e-5
    assert outcome.loss == pytest.approx(reference.loss, abs=2e-6)


def test_export_returns_the_safetensors_exactly(pair):
    outcome, _, folder = pair
    stored = load_file(Path(folder) / 'model.safetensors')
    assert sorted(outcome.exported) == sorted(stored)
    assert [name for name in stored if not torch.equal(stored[name], outcome.exported[name])] == []


def test_every_gradient_equals_transformers(pair):
    outcome, reference, _ = pair
    # A router's correction bias is exported and has no gradient.
    assert {name for name in outcome.gradients if not name.endswith('e_score_correction_bias')} == set(reference.gradients)
    wrong = {name: relative(outcome.gradients[name], value) for name, value in reference.gradients.items()}
    assert {name: error for name, error in wrong.items() if error > 1e-5} == {}


def test_gradient_norm_equals_the_one_process_norm(pair):
    outcome, reference, _ = pair
    assert outcome.norms == pytest.approx(reference.norms * 2, rel=1e-5)


def test_updated_weights_equal_torch_adamw(pair):
    outcome, reference, _ = pair
    assert {name: (outcome.updated[name] - value).abs().max().item()
            for name, value in reference.updated.items() if not torch.allclose(outcome.updated[name], value, rtol=1e-5, atol=1e-6)} == {}


@pytest.mark.heavy
def test_without_our_attributes_the_norm_leaves_shards_out(ranks, tiny_model, references):
    """The fault that swift_megatron_grpo.parallel_attributes mends. When this fails, upstream has mended it."""
    folder = tiny_model('qwen3')
    reference = references.get((folder, True)) or layouts.reference(folder, True)
    layout = Layout(tp=2, world=2)
    outcome = ranks.run(layouts.one_step, folder, layouts.fields(layout), True, world_size=2, marked=False)[0]
    assert reference.norms == pytest.approx([2.0657], abs=1e-3)
    assert max(outcome.norms) < 0.95 * reference.norms[0]


@pytest.mark.heavy
def test_without_our_attributes_experts_under_tensor_parallel_keep_half_a_gradient(ranks, tiny_model):
    """The other fault: expert sizes as ms-swift leaves them, tensor parallel 2. When this fails, upstream has mended it."""
    folder = tiny_model('qwen3_moe')
    reference = layouts.reference(folder, True)
    outcome = ranks.run(layouts.one_step, folder, layouts.fields(Layout(tp=2, sp=True, world=2)), True, world_size=2, marked=False)[0]
    name = 'model.layers.3.mlp.experts.0.up_proj.weight'
    assert relative(outcome.gradients[name], reference.gradients[name]) > 0.1


@pytest.mark.heavy
@pytest.mark.parametrize('options', [{'recompute_granularity': 'full', 'recompute_method': 'uniform', 'recompute_num_layers': 1},
                                     {'recompute_granularity': 'selective', 'recompute_modules': ['core_attn', 'mlp']}],
                         ids=['full', 'selective'])
def test_recomputation_changes_no_gradient(options, ranks, tiny_model, references):
    folder = tiny_model('qwen3')
    reference = references.get((folder, True)) or layouts.reference(folder, True)
    outcome = ranks.run(layouts.one_step, folder, layouts.fields(Layout(tp=2, sp=True, world=2)), True, world_size=2, **options)[0]
    assert max(relative(outcome.gradients[name], value) for name, value in reference.gradients.items()) < 1e-5


@pytest.mark.heavy
def test_a_vocabulary_that_tensor_parallel_does_not_divide_is_padded(ranks, tiny_model):
    folder = tiny_model('qwen3', vocab_size=101)
    reference = layouts.reference(folder, True)
    for layout in (Layout(tp=2, world=2), Layout(tp=2, sp=True, world=2)):
        outcome = ranks.run(layouts.one_step, folder, layouts.fields(layout), True, world_size=2)[0]
        assert outcome.exported['lm_head.weight'].shape == (101, 64)
        assert max((a - b).abs().max().item() for a, b in zip(outcome.logits, reference.logits, strict=True)) < 2e-5


@pytest.mark.heavy
@pytest.mark.parametrize('layout', [Layout(world=2), Layout(tp=2, world=2), Layout(pp=2, world=2), Layout(ep=2, world=2)], ids=layouts.name)
def test_checkpoint_of_model_and_distributed_optimizer_comes_back_bit_for_bit(layout, ranks, tiny_model, tmp_path):
    folder = tiny_model('qwen3_moe' if layout.ep > 1 else 'qwen3')
    directory = str(tmp_path / 'checkpoint')
    assert ranks.run(layouts.save_and_reload, folder, layouts.fields(layout), directory, world_size=2) == [(True, True)] * 2


@pytest.mark.heavy
def test_an_adapters_norm_and_update_are_the_same_in_every_layout(ranks, tiny_model, tmp_path):
    """The whole factor of a LoRA pair lies on every tensor-parallel rank and counts once; the base stays as it is to the bit."""
    folder = tiny_model('qwen3')
    adapter = layouts.write_adapter(folder, tmp_path / 'adapter')
    (plain, distributed), expected, _ = ranks.run(layouts.adapter_step, folder, adapter, layouts.fields(Layout()), world_size=1)[0]
    assert plain == pytest.approx(distributed, rel=1e-6) and plain > 0.01
    for layout in (Layout(tp=2, world=2), Layout(tp=2, sp=True, world=2), Layout(pp=2, world=2), Layout(cp=2, world=2)):
        norms, updated, changed = ranks.run(layouts.adapter_step, folder, adapter, layouts.fields(layout), world_size=2)[0]
        assert norms == pytest.approx([plain, plain], rel=1e-5), layout
        assert sorted(updated) == sorted(expected)
        assert max((updated[name] - value).abs().max().item() for name, value in expected.items()) < 1e-6
        assert changed == 0
