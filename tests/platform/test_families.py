"""Each family against transformers: logits, loss, gradient, norm, updated weights, export. What sets families apart stands in tests/families.py."""
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.families import DENSE, EXPERTS, FAMILIES
from tests.platform import layouts
from tests.platform.layouts import Layout

pytestmark = pytest.mark.heavy

# Where positions are scaled in another way, the layout makes no difference of its own.
SPLIT = {**{name: Layout(tp=2, sp=True, world=2) for name in DENSE if '-rope-' not in name},
         **{name: Layout(tp=2, sp=True, ep=2, world=2) for name in EXPERTS}}
RUNS = [*((name, Layout()) for name in FAMILIES), *SPLIT.items()]


@pytest.fixture(scope='module')
def references() -> dict[str, Any]:
    return {}


@pytest.mark.parametrize('family, layout', RUNS, ids=[f'{name}-{layouts.name(layout)}' for name, layout in RUNS])
def test_a_family_computes_what_transformers_computes(ranks: Any, tiny_model: Any, references: dict[str, Any], family: str, layout: Layout) -> None:
    kind, _, changes = FAMILIES[family]
    folder = tiny_model(kind, **changes)
    if family not in references:
        references[family] = layouts.reference(folder, True)
    reference = references[family]
    outcome = ranks.run(layouts.one_step, folder, layouts.fields(layout), True, world_size=layout.world)[0]
    for mine, theirs in zip(outcome.logits, reference.logits, strict=True):
        assert (mine - theirs).abs().max().item() < 2e-5
    assert outcome.loss == pytest.approx(reference.loss, abs=2e-6)
    stored = load_file(Path(folder) / 'model.safetensors')
    assert sorted(outcome.exported) == sorted(stored)  # one_step refuses a name that comes twice
    assert [name for name in stored if not torch.equal(stored[name], outcome.exported[name])] == []
    wrong = {name: error_of(outcome.gradients[name], value) for name, value in reference.gradients.items()}
    assert {name: error for name, error in wrong.items() if error > 1e-5} == {}
    assert outcome.norm_distributed == pytest.approx(reference.norm_plain, rel=1e-5)
    assert [name for name, value in reference.updated.items() if not torch.allclose(outcome.updated[name], value, rtol=1e-5, atol=1e-6)] == []


def error_of(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm().clamp_min(1e-12)).item()
