"""vLLM's CPU build behind our adapter: a communicator that moves bytes, weights that can be loaded again, adapters that are copies."""
from collections.abc import Iterator

import pytest

from tests.platform import engine_cases
from tests.rank_pool import RankPool

pytestmark = pytest.mark.heavy
SECONDS = 500.  # importing vLLM and starting an engine takes half a minute of a free core, and many of a shared one


@pytest.fixture(scope='module')
def engine_ranks() -> Iterator[RankPool]:
    """A pool of its own: an engine keeps global state for the life of its process."""
    with RankPool(max_world=2) as pool:
        yield pool


def test_the_communicator_moves_bytes_and_pretends_nothing(engine_ranks):
    for halves, raw, numbers, disabled, lacking in engine_ranks.run(engine_cases.communicate, world_size=2, deadline=SECONDS):
        assert halves == [2.5, 2.5, 2.5]
        assert raw == [100, 101, 102, 103]
        assert numbers == [7., 8., 3.]
        assert disabled is False
        assert "no attribute 'all_gather'" in lacking


def test_adapter_tensors_are_copied_and_the_policys_own_stay(engine_ranks):
    assert engine_ranks.run(engine_cases.adapter_bytes, world_size=1, deadline=SECONDS) == [(False, True)]


def test_a_server_counts_its_ranks_as_devices(engine_ranks):
    counted = engine_ranks.run(engine_cases.server_devices, world_size=1, deadline=SECONDS)[0]
    assert counted >= 8


@pytest.mark.parametrize('kind', ['qwen3', 'qwen3_moe'])
def test_greedy_tokens_follow_the_weights_after_each_update(kind, tiny_model):
    folder = tiny_model(kind, num_hidden_layers=2)
    with RankPool(max_world=1) as pool:
        results = pool.run(engine_cases.reload_weights, folder, 2, world_size=1, deadline=SECONDS)[0]
    assert [equal for equal, _ in results] == [3, 3, 3]
    assert max(worst for _, worst in results) < 1e-4
