"""What may be imported where: arguments are checked on a machine that has neither torch nor swift, mathematics needs torch alone."""

import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / 'swift_megatron_grpo'
HEAVY = ('torch', 'megatron', 'mcore_bridge', 'swift', 'vllm', 'transformers', 'transformer_engine', 'peft', 'accelerate', 'datasets', 'numpy')
TORCH_BRINGS = {'numpy'}

# By path inside the package; the longest prefix that fits decides. Everything that is not listed is tier 2 and free.
TIERS = {
    '__init__.py': 0,
    'compare.py': 0,
    'errors.py': 0,
    'passport.py': 0,
    'ports.py': 0,
    'args/': 0,
    'hooks/': 0,
    'deadlines.py': 0,
    'patches.py': 0,
    'cpu/__init__.py': 0,  # importing it is light; activate() is what workers call
    'cpu/limits.py': 0,
    'types.py': 1,
    'metrics.py': 1,
    'parallel_attributes.py': 1,
    'engines/__init__.py': 1,
    'engines/base.py': 1,
    'engines/encoding.py': 1,
    'step/__init__.py': 0,
    'step/loss_config.py': 0,
    'step/packing.py': 0,
    'step/prompts.py': 0,
    'step/advantage.py': 1,
    'step/completions.py': 1,
    'step/corrections.py': 1,
    'step/coupled.py': 1,
    'step/logprobs.py': 1,
    'step/loss.py': 1,
    'step/segments.py': 1,
    'step/weights.py': 1,
}
NOT_IMPORTABLE = {
    'hooks/torchrun.py': 'a program: it is torchrun',
    'hooks/worker.py': 'a program, imported by its own test',
}


def tier(relative: str) -> int:
    fitting = [prefix for prefix in TIERS if relative == prefix or (prefix.endswith('/') and relative.startswith(prefix))]
    return TIERS[max(fitting, key=len)] if fitting else 2


def modules(wanted: int) -> list[str]:
    found = []
    for path in sorted(PACKAGE.rglob('*.py')):
        relative = path.relative_to(PACKAGE).as_posix()
        if relative not in NOT_IMPORTABLE and tier(relative) == wanted:
            name = 'swift_megatron_grpo.' + relative.removesuffix('.py').replace('/', '.')
            found.append(name.removesuffix('.__init__'))
    return found


def heavy_after_importing(names: list[str]) -> set[str]:
    """Import the modules in a clean interpreter and say which heavy packages are loaded then."""
    program = (
        'import importlib, sys\n'
        f'for name in {names!r}:\n'
        '    importlib.import_module(name)\n'
        f'print(*[name for name in {HEAVY!r} if name in sys.modules])\n'
    )
    done = subprocess.run(
        [sys.executable, '-c', program], cwd=PACKAGE.parent, text=True, capture_output=True, timeout=120, stdin=subprocess.DEVNULL, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_tier_0_imports_the_standard_library_only():
    names = modules(0)
    assert {'swift_megatron_grpo', 'swift_megatron_grpo.errors', 'swift_megatron_grpo.args', 'swift_megatron_grpo.hooks.doors'} <= set(names)
    assert heavy_after_importing(names) == set()


def test_tier_1_adds_torch_and_nothing_else():
    names = modules(1)
    assert 'swift_megatron_grpo.types' in names
    assert heavy_after_importing(names) <= {'torch'} | TORCH_BRINGS


def test_every_listed_file_is_there():
    assert [path for path in TIERS if not (PACKAGE / path).exists()] == []


def test_the_tier_of_each_file_is_decided_by_the_longest_prefix():
    assert [tier('args/batch_plan.py'), tier('errors.py'), tier('trainer.py'), tier('cpu/te/linear.py'), tier('step/loss.py')] == [0, 0, 2, 2, 1]


# Imports everything, so that what others wrote is there, then forgets this package in a child for each module and imports that one first.
ONE_BY_ONE = """
import importlib, os, sys, traceback
if {activate}:
    from swift_megatron_grpo import cpu
    cpu.activate()
for name in {names!r}:
    try:
        importlib.import_module(name)
    except ImportError:
        pass  # a circle, which its own child tells better
failed = []
for name in {names!r}:
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        for loaded in [known for known in sys.modules if known.partition('.')[0] == 'swift_megatron_grpo']:
            del sys.modules[loaded]
        try:
            importlib.import_module(name)
        except BaseException:
            print(name, traceback.format_exc(), sep='\\n', flush=True)
            os._exit(1)
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0:
        failed.append(name)
print('failed:', *failed)
"""


@pytest.mark.parametrize('wanted', [0, 1, 2])
def test_every_module_can_be_the_first_to_be_imported(wanted):
    """Circles of imports break for whoever comes in by the other door: the command, a worker, a test."""
    program = ONE_BY_ONE.format(names=modules(wanted), activate=wanted == 2)
    done = subprocess.run(
        [sys.executable, '-c', program], cwd=PACKAGE.parent, text=True, capture_output=True, timeout=300, stdin=subprocess.DEVNULL, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == 'failed:', done.stdout
