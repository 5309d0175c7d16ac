"""Each family against transformers: logits, loss, gradient, norm, updated weights, export. What sets families apart stands in tests/families.py."""
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.families import EXPERTS, FAMILIES
from tests.platform import layouts
from tests.platform.layouts import Layout

pytestmark = pytest.mark.heavy

# One process, then one layout of tensor and one of pipeline and context parallelism. tests/step/test_layouts.py has the latter for the two of
# WHOLE_RUNS through whole runs, tests/platform/test_layouts.py more layouts for them.
WHOLE_RUNS = ('qwen3', 'qwen3_moe')
SPLIT = {name: Layout(tp=2, sp=True, ep=2 if name in EXPERTS else 1, world=2) for name in FAMILIES}
STAGES = {name: Layout(pp=2, cp=2, ep=2 if name in EXPERTS else 1, world=4) for name in FAMILIES if name not in WHOLE_RUNS}
# Each expert split in two; gpt_oss is refused there (swift_megatron_grpo/args/family_checks.py).
EXPERTS_SPLIT = {name: Layout(tp=2, sp=True, ep=2, etp=2, world=4) for name in ('qwen2_moe', 'deepseek_v3', 'glm4_moe')}
RUNS = [*((name, Layout()) for name in FAMILIES), *SPLIT.items(), *STAGES.items(), *EXPERTS_SPLIT.items()]
# As Transformer Engine asks for it: attention sinks with context parallelism.
OPTIONS = {'gpt_oss': {'cp_comm_type': 'a2a'}}


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
    optimizers = (False, True) if layout == SPLIT[family] else (False, )  # what a rank owns alone must reach the shards of the distributed one
    outcome = ranks.run(layouts.one_step, folder, layouts.fields(layout), True, optimizers, world_size=layout.world, **OPTIONS.get(family, {}))[0]
    for mine, theirs in zip(outcome.logits, reference.logits, strict=True):
        assert (mine - theirs).abs().max().item() < 2e-5
    assert outcome.loss == pytest.approx(reference.loss, abs=2e-6)
    stored = load_file(Path(folder) / 'model.safetensors')
    assert sorted(outcome.exported) == sorted(stored)  # one_step refuses a name that comes twice
    assert [name for name in stored if not torch.equal(stored[name], outcome.exported[name])] == []
    wrong = {name: error_of(outcome.gradients[name], value) for name, value in reference.gradients.items()}
    assert {name: error for name, error in wrong.items() if error > 1e-5} == {}
    assert outcome.norms == pytest.approx(reference.norms * len(optimizers), rel=1e-5)
    assert [name for name, value in reference.updated.items() if not torch.allclose(outcome.updated[name], value, rtol=1e-5, atol=1e-6)] == []


def error_of(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm().clamp_min(1e-12)).item()
