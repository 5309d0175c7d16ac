"""Real installs of the package into small virtual environments that see the running environment's packages.

A copy of the source tree is installed, so that nothing is built inside the repository. `stub_env` replaces the training pipeline (and only
that, and the CPU platform it would start) by one that writes down how it was started: these tests are about how a worker is reached.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = (
    'setup.py', 'setup.cfg', 'pyproject.toml', 'MANIFEST.in', 'README.md', 'LICENSE', 'requirements', 'swift_megatron_grpo_autoload.pth',
    'swift_megatron_grpo', 'plugins',
)  # fmt: skip
CONSOLE_SCRIPT = """#!{python}
import sys
from swift.cli.main import cli_main
if __name__ == '__main__':
    sys.exit(cli_main())
"""
STUB_PIPELINE = Path(__file__).with_name('stub_pipeline.py')


@dataclass
class Environment:
    """A virtual environment; `source` is the tree that was installed into it (None: nothing of ours)."""

    root: Path
    source: Path | None

    @property
    def python(self) -> Path:
        return self.root / 'bin' / 'python'

    @property
    def swift(self) -> Path:
        return self.root / 'bin' / 'swift'

    @property
    def site(self) -> Path:
        return self.root / 'lib' / f'python{sys.version_info[0]}.{sys.version_info[1]}' / 'site-packages'

    def environ(self, **extra: str) -> dict[str, str]:
        """The test's environment without what launchers and this package set; `extra` comes last."""
        ours = ('NPROC_PER_NODE', 'NNODES', 'NODE_RANK', 'MASTER_ADDR', 'MASTER_PORT', 'RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'PYTHONPATH')
        kept = {k: v for k, v in os.environ.items() if k not in ours and not k.startswith('SWIFT_')}
        return {**kept, 'OMP_NUM_THREADS': '1', 'HF_HUB_OFFLINE': '1', 'USE_HF': '1', 'PYTHONDONTWRITEBYTECODE': '1', **extra}

    def run(self, *command, timeout: float = 120, cwd: Path | None = None, **extra: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [str(part) for part in command], env=self.environ(**extra), cwd=cwd or self.root, text=True, capture_output=True,
            timeout=timeout, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip

    def pip(self, *arguments) -> None:
        done = self.run(self.python, '-m', 'pip', '--disable-pip-version-check', *arguments, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr

    def files(self) -> set[str]:
        """Everything in the environment but byte code."""
        return {str(p.relative_to(self.root)) for p in self.root.rglob('*') if '__pycache__' not in p.parts and p.suffix != '.pyc'}


def make_environment(root: Path) -> Environment:
    subprocess.run([sys.executable, '-m', 'venv', '--without-pip', str(root)], check=True)
    environment = Environment(root, None)
    environment.site.joinpath('zz_shared.pth').write_text(sysconfig.get_path('purelib') + '\n')
    environment.swift.write_text(CONSOLE_SCRIPT.format(python=environment.python))
    environment.swift.chmod(0o755)
    return environment


def copy_source(target: Path) -> Path:
    target.mkdir(parents=True)
    for name in SOURCES:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns('__pycache__'))
        else:
            shutil.copy(source, target / name)
    return target


def install(environment: Environment, source: Path, *options: str) -> Environment:
    environment.pip('install', '--quiet', '--no-deps', '--no-build-isolation', '--ignore-installed', *options, str(source))
    return Environment(environment.root, source)


@pytest.fixture(scope='session')
def bare_env(tmp_path_factory) -> Environment:
    """Nothing of ours."""
    return make_environment(tmp_path_factory.mktemp('bare') / 'env')


@pytest.fixture(scope='session')
def wheel_env(tmp_path_factory) -> Environment:
    """The package as a normal wheel."""
    folder = tmp_path_factory.mktemp('wheel')
    return install(make_environment(folder / 'env'), copy_source(folder / 'source'))


@pytest.fixture(scope='session')
def stub_env(tmp_path_factory) -> Environment:
    """An editable install whose pipeline writes down how it was started."""
    folder = tmp_path_factory.mktemp('stub')
    source = copy_source(folder / 'source')
    shutil.copy(STUB_PIPELINE, source / 'swift_megatron_grpo' / 'pipeline.py')
    (source / 'swift_megatron_grpo' / 'cpu' / '__init__.py').write_text('def is_needed():\n    return False\n')
    return install(make_environment(folder / 'env'), source, '--editable')


@pytest.fixture(scope='session')
def job(tmp_path_factory) -> list[str]:
    """The arguments of a complete GRPO job whose model and data exist as far as they are looked at before a start."""
    folder = tmp_path_factory.mktemp('job')
    model = folder / 'model'
    model.mkdir()
    model.joinpath('config.json').write_text(
        '{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 128, "intermediate_size": 384, "vocab_size": 320,'
        ' "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "tie_word_embeddings": true,'
        ' "torch_dtype": "float32"}'
    )
    rows = '{"messages": [{"role": "user", "content": "What is 1 + 1?"}], "solution": "2"}\n' * 16
    data = folder / 'data.jsonl'
    data.write_text(rows)
    return [
        '--rlhf_type', 'grpo', '--model', str(model), '--model_type', 'qwen3', '--template', 'qwen3', '--dataset', str(data),
        '--reward_funcs', 'accuracy', '--num_generations', '4', '--per_device_train_batch_size', '4', '--batch_check', 'exact', '--max_steps', '1',
        '--torch_dtype', 'float32', '--output_dir', str(folder / 'out'),
    ]  # fmt: skip
