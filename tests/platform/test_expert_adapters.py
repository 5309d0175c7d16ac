"""Adapters on experts: gradient norm, update and export in layouts that split experts over ranks and layers over stages equal those of one process."""
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.families import FAMILIES
from tests.platform import layouts
from tests.platform.layouts import Layout

pytestmark = pytest.mark.heavy

ADAPTED = ('qwen3_moe', 'qwen2_moe', 'deepseek_v3', 'glm4_moe')
LAYOUTS = [Layout(tp=2, sp=True, ep=2, world=2), Layout(pp=2, ep=2, world=4)]


@pytest.fixture(scope='module')
def one_process(ranks: Any, tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`one_process(family)` -> (folder, adapter, norm, updated adapter)."""
    root, known = tmp_path_factory.mktemp('adapters'), {}

    def run(family: str) -> tuple[Path, Path, float, dict[str, Any]]:
        if family not in known:
            kind, _, changes = FAMILIES[family]
            folder, adapter = tiny_model(kind, **changes), root / family
            ranks.run(layouts.draw_adapter, folder, adapter, world_size=1)
            (norm, ), updated, changed = ranks.run(layouts.adapter_step, folder, adapter, layouts.fields(Layout()), (False, ), world_size=1)[0]
            assert changed == 0 and norm > 0.01
            known[family] = folder, adapter, norm, updated
        return known[family]

    return run


@pytest.mark.parametrize('layout', LAYOUTS, ids=layouts.name)
@pytest.mark.parametrize('family', ADAPTED)
def test_adapters_on_experts_train_alike_in(ranks: Any, one_process: Any, family: str, layout: Layout) -> None:
    folder, adapter, norm, expected = one_process(family)
    stored = load_file(adapter / 'adapter_model.safetensors')
    assert sorted(expected) == sorted(stored)
    assert sum('.experts.' in name for name in stored) >= 3 * 4 * 2 * 3, 'layers with experts, experts, factors, projections'
    # What a rank owns alone must reach the shards of the distributed optimizer.
    optimizers = (True, ) if layout.tp > 1 else (False, )
    norms, updated, changed = ranks.run(layouts.adapter_step, folder, adapter, layouts.fields(layout), optimizers, world_size=layout.world)[0]
    assert norms == pytest.approx([norm], rel=1e-5)
    assert sorted(updated) == sorted(expected)
    moved = {name: float((expected[name] - stored[name]).abs().max()) for name in expected}
    assert min(moved.values()) > 1e-6, 'each factor moves'
    errors = {name: float((updated[name] - value).abs().max()) for name, value in expected.items()}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < 1e-6, f'{worst}: {errors[worst]:.1e}'
    assert changed == 0, 'the base and the bias of the routers stay to the bit'
