"""Every example plans without an error and gives the numbers that its own comments state."""

import os
import re
from pathlib import Path

import pytest

from swift_megatron_grpo.args import resolve, scripts

from .conftest import other_errors

EXAMPLES = Path(__file__).resolve().parents[2] / 'examples'
FILES = sorted(path for path in EXAMPLES.iterdir() if path.suffix in ('.sh', '.yaml'))


def expected_numbers(text: str) -> dict[str, str]:
    return dict(item.split('=', 1) for line in re.findall(r'^# expect: (.*)$', text, flags=re.MULTILINE) for item in line.split())


def plan_of(path: Path):
    script = scripts.read_yaml(str(path), {}) if path.suffix == '.yaml' else scripts.read_script(path.read_text(encoding='utf-8'), {})
    assert len(script.found) == 1
    item = script.found[0]
    argv = item.argv if item.has_backend else [*item.argv, '--backend', 'megatron']
    return resolve([*argv, '--dry_run', 'true'], item.environment), script


@pytest.mark.parametrize('path', FILES, ids=[path.name for path in FILES])
def test_an_example_plans_and_gives_the_numbers_in_its_comments(path, monkeypatch, tmp_path):
    monkeypatch.setenv('HOME', str(tmp_path))
    plan, _ = plan_of(path)
    assert other_errors(plan) == []
    numbers = expected_numbers(path.read_text(encoding='utf-8'))
    assert len(numbers) >= 5, 'an example states what it expects'
    known = {row.name: row.value for row in plan.arguments}
    for part in (plan.batch_plan, plan.schedule):
        known.update({name: getattr(part, name) for name in part.__slots__})
    assert {name: str(known[name]) for name in numbers} == numbers


def test_all_the_kinds_of_example_are_there():
    names = {path.name for path in FILES}
    assert names == {
        'dense_colocate.sh',
        'dense_colocate.yaml',
        'dense_server.sh',
        'from_deepspeed_after.sh',
        'from_deepspeed_before.sh',
        'moe_lora.sh',
        'multi_node.sh',
        'multi_turn_gym.sh',
        'multimodal.sh',
    }
    assert all(os.access(path, os.X_OK) for path in FILES if path.suffix == '.sh')


def test_the_server_example_has_both_commands():
    _, script = plan_of(EXAMPLES / 'dense_server.sh')
    assert script.servers == [
        'swift rollout --model Qwen/Qwen2.5-7B-Instruct --vllm_data_parallel_size 2 --vllm_max_model_len 4096 --port 8000'
    ]


def test_the_script_after_is_the_script_before_with_one_argument_more():
    before = scripts.read_script((EXAMPLES / 'from_deepspeed_before.sh').read_text(encoding='utf-8'), {})
    after = scripts.read_script((EXAMPLES / 'from_deepspeed_after.sh').read_text(encoding='utf-8'), {})
    assert (
        scripts.read_script(scripts.write_script(before), {}).found[0].argv
        == after.found[0].argv
        == ['--backend', 'megatron', *before.found[0].argv]
    )
