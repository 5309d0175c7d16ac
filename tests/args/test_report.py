"""The dry run's output, the commands, the pages, and what they cost."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from swift_megatron_grpo.args import cli, docs, resolve
from swift_megatron_grpo.args.report import render_json, render_text

from .conftest import other_errors

ROOT = Path(__file__).resolve().parents[2]
ARGV = [
    *('--rlhf_type', 'grpo', '--backend', 'megatron', '--model', 'tiny', '--dataset', 'data.jsonl', '--reward_funcs', 'accuracy'),
    *('--tensor_model_parallel_size', '2', '--per_device_train_batch_size', '1', '--gradient_accumulation_steps', '8'),
    *('--learning_rate', '1e-6', '--deepspeed', 'zero2', '--vllm_mode', 'colocate'),
]
PARTS = ('weights', 'gradients', 'optimizer', 'reference', 'activations', 'logits', 'vllm')


def test_the_json_report_has_the_documented_keys(workplace):
    report = json.loads(render_json(resolve([*ARGV, '--dry_run', 'json'], {'NPROC_PER_NODE': '4'})))
    assert {'arguments', 'batch_plan', 'layout', 'schedule', 'memory', 'command', 'warnings', 'errors'} <= set(report)
    assert report['errors'] == []
    assert set(report['arguments'][0]) == {'name', 'value', 'given_as', 'action', 'reason'}
    numbers = {name: report['batch_plan'][name] for name in (
        'dp_size', 'micro_batch_size', 'gradient_accumulation_steps', 'global_batch_size', 'steps_per_generation', 'generation_batch_size',
        'num_generations', 'num_rollout_prompts', 'num_train_prompts', 'num_prompts_per_dp_group')}  # fmt: skip
    assert list(numbers.values()) == [2, 1, 8, 16, 1, 16, 8, 2, 2, 1]
    assert (report['schedule']['optimizer_steps'], report['schedule']['generations'], report['schedule']['samples']) == (150, 150, 2400)
    assert report['memory']['parameters_total'] == 95168
    assert all(isinstance(report['memory'][part], int) for part in PARTS)
    effective = report['effective']
    assert (effective['lr'], effective['clip_grad'], effective['weight_decay'], effective['temperature']) == (1e-6, 1.0, 0.1, 0.9)
    assert (effective['tuner_type'], effective['lora_rank'], effective['seed'], effective['tensor_model_parallel_size']) == (
        'lora',
        8,
        42,
        2,
    )
    actions = {row['given_as']: row['action'] for row in report['arguments'] if row['given_as']}
    assert actions['--learning_rate'] == 'renamed'
    assert actions['--deepspeed'] == 'no_effect'
    assert actions['--gradient_accumulation_steps'] == 'converted'


def test_the_text_report_shows_all_parts(workplace):
    text = render_text(resolve([*ARGV, '--dry_run', 'true', '--reward_funcs', 'nonsense'], {'NPROC_PER_NODE': '4'}))
    for words in (
        '--learning_rate -> lr = 1e-06',
        'deepspeed = zero2',
        'tuner_type = lora',
        'micro_batch_size 1 x dp_size 2 x gradient_accumulation_steps 8',
        'world 4 = TP 2 x CP 1 x DP 2 x PP 1',
        'TP        [0 1] [2 3]',
        'vLLM      [0] [1] [2] [3]',
        '150 optimizer steps',
        'step 0: 1e-06',
        'weights',
        'NPROC_PER_NODE=4 megatron rlhf',
        '--tuner_type lora',
        'Errors (1)',
        "'nonsense'",
    ):
        assert words in text, words


def test_the_equal_command_has_only_names_of_megatron_rlhf_and_says_what_it_lacks(workplace):
    from swift_megatron_grpo.args.fields import all_fields

    more = (
        '--lr_scheduler_type polynomial --lr_scheduler_kwargs {"power":2.0} --num_train_epochs 0.5 --num_iterations 2 '
        '--loss_type luspo --dual_clip 3'
    )
    plan = resolve([*ARGV, *more.split()], {'NPROC_PER_NODE': '4'})
    assert other_errors(plan) == []
    names = [word[2:] for word in plan.command.split() if word.startswith('--')]
    assert all(all_fields()[name].worlds in ('both', 'megatron') for name in names)
    assert '--train_iters 50' in plan.command
    for words in ('power 2.0', 'num_iterations', 'luspo', 'dual_clip 3.0'):
        assert any(words in note for note in plan.command_notes), (words, plan.command_notes)


def test_the_world_size_of_a_dry_run_can_be_given_and_that_of_a_run_cannot(workplace, monkeypatch):
    monkeypatch.setattr('swift_megatron_grpo.args.doctor.accelerators', list)
    plan = resolve([*ARGV, '--dry_run', 'json', '--world_size', '16'], {})
    assert other_errors(plan) == []
    assert (plan.batch_plan.world_size, plan.batch_plan.dp_size) == (16, 8)
    assert any('--world_size 16 is for a dry run' in error for error in resolve([*ARGV, '--world_size', '16'], {}).errors)
    assert resolve(ARGV, {'WORLD_SIZE': '4', 'LOCAL_RANK': '0', 'RANK': '1'}).batch_plan.world_size == 4
    assert resolve(ARGV, {'NPROC_PER_NODE': '4', 'NNODES': '2'}).batch_plan.world_size == 8
    assert resolve(ARGV, {'NPROC_PER_NODE': 'gpu', 'CUDA_VISIBLE_DEVICES': '0,1,2,3'}).batch_plan.world_size == 4
    assert any('give a number' in error for error in resolve(ARGV, {'NPROC_PER_NODE': 'auto', 'PATH': ''}).errors)
    assert any("NPROC_PER_NODE is 'four'" in error for error in resolve(ARGV, {'NPROC_PER_NODE': 'four'}).errors)


def test_c21_planning_needs_nothing_but_the_standard_library(workplace):
    program = (
        'import sys, time; begin = time.process_time()\n'
        'from swift_megatron_grpo.args import resolve\n'
        'from swift_megatron_grpo.args.report import render_text, render_json\n'
        f'plan = resolve({[*ARGV, "--dry_run", "true"]!r}, {{"NPROC_PER_NODE": "4"}})\n'
        'text = render_text(plan) + render_json(plan); seconds = time.process_time() - begin\n'
        'heavy = {"torch", "numpy", "swift", "transformers", "megatron", "vllm", "transformer_engine", "yaml", "peft", "datasets"}\n'
        'print(len(plan.errors), sorted(heavy & {name.split(".")[0] for name in sys.modules}), seconds)\n'
    )
    environment = {'PYTHONPATH': str(ROOT), 'PATH': '/usr/bin:/bin'}
    # -S: without site-packages, so that nothing of it can be found at all
    result = subprocess.run([sys.executable, '-S', '-c', program], capture_output=True, text=True, env=environment, check=True, timeout=60)
    errors, heavy, seconds = (
        result.stdout.rsplit(' ', 2)[0].split(' ', 1)[0],
        result.stdout.split(' ', 1)[1].rsplit(' ', 1)[0],
        result.stdout.split()[-1],
    )
    assert (errors, heavy) == ('0', '[]')
    assert float(seconds) < 2.0


def test_a_large_data_file_does_not_slow_the_dry_run(workplace, monkeypatch):
    """All lines are counted, in blocks; those of the beginning alone are read as JSON."""
    row = '{"messages": [{"role": "user", "content": "' + 'x' * 400 + '"}], "solution": "2"}\n'
    (workplace / 'data.jsonl').write_text(row * 200_000, encoding='utf-8')
    read, loads = [], json.loads
    monkeypatch.setattr(json, 'loads', lambda text: read.append(None) or loads(text))
    assert resolve(ARGV, {'NPROC_PER_NODE': '4'}).schedule.prompts == 200_000
    assert 0 < len(read) < 20_000


def test_the_pages_are_current():
    for name, language in (('arguments.md', 'en'), ('arguments_zh.md', 'zh')):
        page = (ROOT / 'docs' / name).read_text(encoding='utf-8')
        assert page == docs.render(language), f'docs/{name} is old: python -m swift_megatron_grpo.args.docs'
    assert docs.render('zh').count('| 保留') > 100


def test_every_sentence_of_the_table_has_its_chinese():
    from swift_megatron_grpo.args.fields import all_fields
    from swift_megatron_grpo.args.table.zh import SENTENCES

    assert [field.name for field in all_fields().values() if field.reason and field.reason not in SENTENCES] == []


def run_cli(capsys, *argv):
    code = cli.main(argv)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_script_with_the_line_ends_of_windows_is_read_and_said(workplace, capsys):
    script = 'NPROC_PER_NODE=4 swift rlhf \\\r\n  --rlhf_type grpo --model tiny --dataset data.jsonl --reward_funcs accuracy --gradient_accumulation_steps 8\r\n'
    (workplace / 'run.sh').write_bytes(script.encode())
    code, out, err = run_cli(capsys, 'plan', 'run.sh')
    assert code == 0
    assert 'run.sh: lines end with CR LF' in out + err
    (workplace / 'run.sh').write_bytes(script.replace('\r', '').encode())
    code, out, err = run_cli(capsys, 'plan', 'run.sh')
    assert 'CR LF' not in out + err


def test_plan_reads_a_script_and_writes_it_back(workplace, capsys):
    script = (
        'NPROC_PER_NODE=4 swift rlhf \\\n  --rlhf_type grpo --model tiny --dataset data.jsonl \\\n  --reward_funcs '
        'accuracy --gradient_accumulation_steps 8\n'
    )
    (workplace / 'run.sh').write_text(script, encoding='utf-8')
    code, out, _ = run_cli(capsys, 'plan', 'run.sh', '--write', 'new.sh', '--json', '--tensor_model_parallel_size', '2')
    report = json.loads(out)
    assert code == 0, report['errors']
    assert (report['batch_plan']['world_size'], report['batch_plan']['dp_size']) == (4, 2)
    written = script.replace('swift rlhf', 'swift rlhf --backend megatron').rstrip('\n') + ' --tensor_model_parallel_size 2\n'
    assert (workplace / 'new.sh').read_text(encoding='utf-8') == written
    code, out, _ = run_cli(capsys, 'plan', 'new.sh', '--json')
    assert (code, json.loads(out)['batch_plan'], json.loads(out)['command']) == (0, report['batch_plan'], report['command'])
    (workplace / 'bad.sh').write_text(script.replace('--reward_funcs', '--rewardfuncs'), encoding='utf-8')
    code, out, _ = run_cli(capsys, 'plan', 'bad.sh')
    assert code == 2
    assert 'did you mean --reward_funcs' in out


def test_plan_reads_standard_input_and_yaml(workplace, capsys, monkeypatch):
    import io

    monkeypatch.setattr(
        'sys.stdin',
        io.StringIO('swift rlhf --rlhf_type grpo --model tiny --dataset data.jsonl --reward_funcs accuracy --batch_check exact'),
    )
    code, out, _ = run_cli(capsys, 'plan', '-', '--world_size', '8', '--json')
    assert json.loads(out)['batch_plan']['world_size'] == 8
    assert code == 0
    yaml = 'rlhf_type: grpo\nmodel: tiny\ndataset: data.jsonl\nreward_funcs: accuracy\nbatch_check: exact\n'
    monkeypatch.setattr('sys.stdin', io.StringIO(yaml))
    code, out, _ = run_cli(capsys, 'plan', '-', '--world_size', '8', '--json')
    assert (code, json.loads(out)['batch_plan']['world_size']) == (0, 8)
    (workplace / 'run.yaml').write_text(
        'rlhf_type: grpo\nmodel: tiny\ndataset: data.jsonl\nreward_funcs: accuracy\nbatch_check: exact\n', encoding='utf-8'
    )
    code, out, _ = run_cli(capsys, 'plan', 'run.yaml', '--world_size', '8', '--write', 'new.yaml')
    assert code == 0
    assert 'backend: megatron' in (workplace / 'new.yaml').read_text(encoding='utf-8')


@pytest.mark.parametrize('name', ['missing.sh', 'missing.yaml'])
def test_plan_says_what_it_cannot_read(name, workplace, capsys):
    code, _, err = run_cli(capsys, 'plan', name)
    assert code == 2
    assert f'{name} cannot be read' in err


def test_plan_says_that_a_script_starts_no_training(workplace, capsys):
    (workplace / 'run.sh').write_text('swift rollout --model m\n', encoding='utf-8')
    code, _, err = run_cli(capsys, 'plan', 'run.sh')
    assert code == 2
    assert 'It starts: swift rollout --model m' in err


def test_doctor_names_what_is_missing_and_how_to_get_it(capsys, monkeypatch):
    import importlib.metadata

    real = importlib.metadata.version
    versions = {'ms-swift': '4.5.0', 'mcore-bridge': None}

    def version(name):
        if name in versions:
            if versions[name] is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return versions[name]
        return real(name)

    monkeypatch.setattr('swift_megatron_grpo.args.doctor.importlib.metadata.version', version)
    code, out, _ = run_cli(capsys, 'doctor')
    assert code == 2
    assert 'wrong    ms-swift        4.5.0; >= 4.6 and < 4.7 is needed' in out
    assert 'missing  mcore-bridge    for training: pip install "mcore-bridge>=1.6.5,<1.7"' in out


def test_doctor_asks_for_what_an_accelerator_needs_only_where_there_is_one(capsys, monkeypatch):
    import importlib.metadata

    versions = {'torch': '2.9.0+cpu', 'vllm': '0.10.2'}

    def version(name):
        if name in ('flash-attn', 'transformer-engine', 'transformer_engine', 'math-verify'):
            raise importlib.metadata.PackageNotFoundError(name)
        return versions.get(name, '4.6.0' if name == 'ms-swift' else '9.9')

    monkeypatch.setattr('swift_megatron_grpo.args.doctor.importlib.metadata.version', version)
    monkeypatch.setattr('swift_megatron_grpo.args.doctor.accelerators', list)
    _, out, _ = run_cli(capsys, 'doctor')
    assert 'flash-attn' not in out
    assert 'optional math-verify     not installed; --reward_funcs accuracy: pip install math_verify' in out
    assert 'wrong    vllm            0.10.2; >= 0.11 is needed for rollouts' in out
    monkeypatch.setattr('swift_megatron_grpo.args.doctor.accelerators', lambda: ['NVIDIA H200, 143771 MiB'])
    code, out, _ = run_cli(capsys, 'doctor')
    assert code == 2
    assert 'optional flash-attn' in out
    assert 'wrong    torch           a build for CPU alone' in out
    assert 'missing  transformer-engine for training' in out


def test_arguments_explains_one_and_lists_the_own_ones(capsys):
    code, out, _ = run_cli(capsys, 'arguments', '--learning_rate', 'quant-bits')
    assert code == 0
    assert '--learning_rate (float; default None): renamed -> lr' in out
    assert '--quant_bits (1, 2, 3, 4, 8, float8; default None): refused. Megatron trains unquantised weights' in out
    code, out, _ = run_cli(capsys, 'arguments')
    assert '--dual_clip (float; default None): kept. Lower-bound clip c > 1' in out
    code, out, _ = run_cli(capsys, 'arguments', 'learnin_rate')
    assert (code, 'did you mean --learning_rate' in out) == (2, True)
