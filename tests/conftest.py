"""Fixtures that all tests share: ranks, and tiny models."""
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rank_pool import RankPool


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What starts ranks is heavy; one layout of each kind, marked `quick`, stays in make test-quick.

    Where several processes share the files, those with heavy or slow tests come first: the short ones fill what is left at the end.
    """
    for item in items:
        if 'ranks' in getattr(item, 'fixturenames', ()) and item.get_closest_marker('quick') is None:
            item.add_marker(pytest.mark.heavy)
    if hasattr(config, 'workerinput'):  # of pytest-xdist
        long = {item.path for item in items if item.get_closest_marker('heavy') or item.get_closest_marker('slow')}
        items.sort(key=lambda item: item.path not in long)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """A failure is printed when it happens, not at the end of a run of half an hour."""
    terminal = config.pluginmanager.get_plugin('terminalreporter')
    if terminal is not None and not hasattr(config, 'workerinput'):
        config.pluginmanager.register(_AtOnce(terminal), 'failures-at-once')


class _AtOnce:

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._terminal.write_line(f'\n{report.nodeid} ({report.when}) failed:', red=True)
            self._terminal.write_line('\n'.join(report.longreprtext.splitlines()[-12:]))


@pytest.fixture(scope='session')
def ranks() -> Iterator[RankPool]:
    """Up to four ranks with the CPU platform, started when a test first runs a case: `ranks.run(function, *args, world_size=2)`."""
    pool = RankPool(max_world=4)
    try:
        yield pool
    finally:
        pool.close()


@pytest.fixture(scope='session')
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_model('qwen3', tie_word_embeddings=True)` -> folder of a tiny random model with tokenizer, built once a session."""
    from tests import tiny_models
    root = tmp_path_factory.mktemp('models')
    built: dict[str, Path] = {}

    def build(kind: str = 'qwen3', *, seed: int = 0, **changes: Any) -> Path:
        key = f'{kind} {seed} {sorted(changes.items())}'
        if key not in built:
            built[key] = tiny_models.build(kind, root / f'{kind}-{len(built)}', seed=seed, **changes)
        return built[key]

    return build
