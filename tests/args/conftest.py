"""One question to the installed ms-swift, transformers and Megatron-Core, asked when the first test needs the answer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from swift_megatron_grpo.args import Plan, lr, resolve
from swift_megatron_grpo.args.fields import all_fields
from swift_megatron_grpo.args.pending import is_unfinished

from . import cases

ROOT = Path(__file__).resolve().parents[2]


def steps_of(total: int) -> list[int]:
    return [0, min(1, total - 1), total // 2, total - 1]


def worker_plans() -> list[Plan]:
    """Plans whose worker command lines name every argument that is handed on, each with a value of its type."""
    samples = {'int': ['3'], 'float': ['0.25'], 'bool': ['true'], 'str': ['some text'], 'json': ['{"a": [1, "b c"]}']}
    argv = ['--rlhf_type', 'grpo', '--backend', 'megatron']
    for field in all_fields().values():
        if field.action in ('kept', 'renamed') and field.name not in ('rlhf_type', 'backend', 'dry_run', 'world_size'):
            kind = field.type[5:-1] if field.is_list else field.type
            words = [field.choices[-1]] if field.choices else samples[kind] * (2 if field.is_list else 1)
            argv += [f'--{field.name}', *words]
    scripts = ['--rlhf_type grpo --backend megatron --model some/model ' + text for _, text, *_ in cases.SCRIPTS]
    return [resolve(argv, {}), *(resolve(text.split(), {}) for text in scripts)]


@pytest.fixture(scope='session')
def upstream(tmp_path_factory):
    """The answer of tests/args/upstream.py to all that the tests want to know."""
    pytest.importorskip('swift')
    folder = tmp_path_factory.mktemp('upstream')
    model = folder / 'tiny'
    model.mkdir()
    (model / 'config.json').write_text(json.dumps(TINY), encoding='utf-8')
    data = folder / 'data.jsonl'
    data.write_text('{"messages": [{"role": "user", "content": "1"}], "solution": "1"}\n', encoding='utf-8')
    fixed = (
        f'--rlhf_type grpo --model {model} --model_type qwen3 --template qwen3 --dataset {data} --reward_funcs accuracy '
        f'--torch_dtype float32'
    )
    request = {
        'scripts': [[fixed.split() + text.split(), world, prompts] for _, text, world, prompts in cases.SCRIPTS],
        'worker_argvs': [plan.worker_argv for plan in worker_plans()],
        'transformers_rates': [],
        'megatron_rates': [],
    }
    for kind, peak, steps, ratio, total, kwargs in cases.SCHEDULES:
        warmup = lr.num_warmup_steps(steps, ratio, total)
        request['transformers_rates'].append([kind, peak, warmup, total, kwargs, steps_of(total)])
        flags, _ = lr.megatron_spelling(kind, lr=peak, kwargs=kwargs, warmup_steps=steps, warmup_ratio=ratio, total=total)
        request['megatron_rates'].append([flags, peak, total, steps_of(total)])
    answer = folder / 'answer.json'
    environment = {**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'}
    result = subprocess.run(
        [sys.executable, '-m', 'tests.args.upstream', str(answer)],
        input=json.dumps(request),
        text=True,
        capture_output=True,
        cwd=ROOT,
        env=environment,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(answer.read_text(encoding='utf-8'))


TINY = {
    'model_type': 'qwen3',
    'hidden_size': 64,
    'intermediate_size': 128,
    'num_hidden_layers': 2,
    'num_attention_heads': 2,
    'num_key_value_heads': 2,
    'head_dim': 32,
    'vocab_size': 100,
    'tie_word_embeddings': False,
    'max_position_embeddings': 512,
    'torch_dtype': 'float32',
}


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """An empty folder to stand in, with a tiny model (config.json alone) and 100 prompts; no variables of a launcher."""
    for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'NPROC_PER_NODE', 'NNODES'):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / 'tiny').mkdir()
    (tmp_path / 'tiny' / 'config.json').write_text(json.dumps(TINY), encoding='utf-8')
    write_prompts(tmp_path / 'data.jsonl', 100)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_prompts(path: Path, number: int) -> None:
    row = '{"messages": [{"role": "user", "content": "1 + 1"}], "solution": "2"}\n'
    path.write_text(row * number, encoding='utf-8')


def other_errors(plan) -> list[str]:
    """The errors of a plan without those that only say that a part of the trainer is not finished."""
    return [error for error in plan.errors if not is_unfinished(error)]
