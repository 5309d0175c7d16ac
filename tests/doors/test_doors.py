"""`swift rlhf --backend megatron`, however it is spelled, reaches our worker with ms-swift's launch arguments; nothing else changes."""

import importlib.util
import json
import os
import re
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest

TORCHRUN_2 = {'NPROC_PER_NODE': '2', 'MASTER_PORT': '29741'}


def reports(folder) -> list[dict]:
    """What each worker wrote down, by rank."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob('rank*.json'))]


def argument(argv: list[str], name: str) -> str:
    return argv[argv.index(f'--{name}') + 1]


def test_one_process_becomes_one_worker_and_its_output_dir_is_in_the_process_list(stub_env, job, tmp_path):
    done = stub_env.run(stub_env.swift, 'rlhf', *job, '--backend', 'megatron', STUB_OUT=str(tmp_path))
    assert done.returncode == 0, done.stderr
    (worker,) = reports(tmp_path)
    assert worker['argv'][0].endswith('swift_megatron_grpo/hooks/worker.py')
    assert argument(worker['argv'], 'output_dir').startswith(argument(job, 'output_dir'))
    assert worker['torch'] is False  # nothing of ours imports torch before the CPU platform had its chance
    assert not any(path.endswith('swift_megatron_grpo/hooks') for path in worker['path'])
    assert done.stdout.startswith('run sh: `') and 'torchrun.py' not in done.stdout


@pytest.mark.parametrize(
    'spelling',
    [
        ['--backend', 'megatron'],
        ['--backend=megatron'],
        ['--backend', 'transformers', '--backend', 'megatron'],
        ['--rlhf_type', 'megatron_grpo'],
        ['--rlhf-type=megatron_grpo'],
        ['--backend', 'megatron', '--ignore_args_error', 'True'],
    ],
    ids=' '.join,
)
def test_every_spelling_of_the_backend_is_ours(stub_env, job, tmp_path, spelling):
    done = stub_env.run(stub_env.swift, 'rlhf', *job, *spelling, STUB_OUT=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert len(reports(tmp_path)) == 1


@pytest.mark.parametrize('start', ['-m swift.cli.main', '-m swift.cli.rlhf', 'cli/rlhf.py'])
def test_the_modules_and_the_file_behind_the_command_are_doors_too(stub_env, job, tmp_path, start):
    swift_folder = Path(importlib.util.find_spec('swift').origin).parent
    begin = {
        '-m swift.cli.main': ['-m', 'swift.cli.main', 'rlhf'],
        '-m swift.cli.rlhf': ['-m', 'swift.cli.rlhf'],
        'cli/rlhf.py': [swift_folder / 'cli' / 'rlhf.py'],
    }[start]
    done = stub_env.run(stub_env.python, *begin, *job, '--backend', 'megatron', STUB_OUT=str(tmp_path))
    assert done.returncode == 0, done.stderr
    (worker,) = reports(tmp_path)
    assert worker['argv'][0].endswith('worker.py')


def test_two_processes_under_torchrun_with_ms_swifts_variables(stub_env, job, tmp_path):
    done = stub_env.run(stub_env.swift, 'rlhf', *job, '--backend', 'megatron', STUB_OUT=str(tmp_path), **TORCHRUN_2)
    assert done.returncode == 0, done.stderr
    assert [worker['world_size'] for worker in reports(tmp_path)] == ['2', '2']
    assert re.search(r'torchrun\.py --nproc_per_node 2 --master_port 29741 \S+/worker\.py ', done.stdout)


@pytest.mark.parametrize('suffix', ['.yaml', '.json'])
def test_a_configuration_file_comes_first_with_its_environment(stub_env, job, tmp_path, suffix):
    config = {name[2:]: value for name, value in zip(job[::2], job[1::2])}
    config |= {'backend': 'megatron', 'reward_funcs': ['accuracy', 'format'], 'ENV': {'FROM_YAML': 'yes', 'STUB_OUT': str(tmp_path / 'not')}}
    path = tmp_path / f'job{suffix}'
    path.write_text(json.dumps(config))  # JSON is YAML
    done = stub_env.run(stub_env.swift, 'rlhf', path, '--seed', '7', STUB_OUT=str(tmp_path))
    assert done.returncode == 0, done.stderr
    (worker,) = reports(tmp_path)  # STUB_OUT was set already, so the file did not change it
    assert (worker['extra'], worker['config_file']) == ('yes', str(path))
    assert argument(worker['argv'], 'seed') == '7'
    at = worker['argv'].index('--reward_funcs')
    assert worker['argv'][at + 1 : at + 3] == ['accuracy', 'format']


def test_a_configuration_file_that_is_not_there_is_named(stub_env):
    done = stub_env.run(stub_env.swift, 'rlhf', 'nowhere.yaml', '--backend', 'megatron')
    assert done.returncode == 2
    assert done.stderr.count("'nowhere.yaml' cannot be read") == 1


def test_wrong_input_is_said_once_before_any_process_starts(stub_env, job, tmp_path):
    at = job.index('--dataset')
    done = stub_env.run(stub_env.swift, 'rlhf', *job[:at], *job[at + 2 :], '--backend', 'megatron', STUB_OUT=str(tmp_path), **TORCHRUN_2)
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith('error: ')]
    assert sum('--dataset is needed' in error for error in errors) == 1
    assert 'run sh' not in done.stdout and reports(tmp_path) == []
    assert 'Traceback' not in done.stderr


@pytest.mark.parametrize('extra', [[], ['--ignore_args_error', 'True']])
def test_a_mistyped_backend_starts_nothing(stub_env, job, extra):
    done = stub_env.run(stub_env.swift, 'rlhf', *job, '--backend', 'megatorn', *extra)
    assert done.returncode == 2
    assert "--backend 'megatorn' is not known" in done.stderr and "'megatron'" in done.stderr
    assert 'run sh' not in done.stdout


@pytest.mark.parametrize('flag', ['--help', '-h'])
def test_help_names_our_own_arguments_and_where_the_others_are(stub_env, flag):
    done = stub_env.run(stub_env.swift, 'rlhf', '--rlhf_type', 'grpo', '--backend', 'megatron', flag)
    assert (done.returncode, done.stderr) == (0, '')
    assert done.stdout.startswith('usage: swift rlhf --rlhf_type grpo --backend megatron')
    assert '--dry_run {false,true,json}' in done.stdout and '--max_tokens_per_micro_batch' in done.stdout
    assert 'docs/arguments.md' in done.stdout


def _seconds_of_children() -> float:
    """Processor time, which other work on the machine adds little to."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_the_dry_run_answers_in_two_seconds_without_torch_or_swift(stub_env, job):
    # Each of these raises when somebody imports it.
    blocked = stub_env.root / 'blocked'
    for name in ('torch', 'transformers', 'vllm', 'megatron', 'mcore_bridge', 'numpy'):
        blocked.joinpath(name).mkdir(parents=True, exist_ok=True)
        blocked.joinpath(name, '__init__.py').write_text(f'raise ImportError("{name} must not be imported")\n')
    seconds = []
    for kind in ('true', 'json', 'json'):
        begun = _seconds_of_children()
        done = stub_env.run(
            stub_env.swift, 'rlhf', *job, '--backend', 'megatron', '--dry_run', kind, PYTHONPATH=str(blocked), NPROC_PER_NODE='2'
        )  # fmt: skip
        seconds.append(_seconds_of_children() - begun)
        assert done.returncode == 0, done.stdout + done.stderr
    assert {'arguments', 'batch_plan', 'errors'} <= set(json.loads(done.stdout))
    assert min(seconds) < 2.0, seconds


def test_a_dry_run_with_errors_reports_them_and_exits_with_2(stub_env, job):
    at = job.index('--dataset')
    done = stub_env.run(stub_env.swift, 'rlhf', *job[:at], *job[at + 2 :], '--backend', 'megatron', '--dry_run', 'json')
    assert done.returncode == 2
    assert any('dataset' in error for error in json.loads(done.stdout)['errors'])


@pytest.mark.parametrize(
    ('what', 'code', 'said'),
    [
        ('user error', 2, 'error: the dataset has 3 prompts and a step needs 4'),
        ('run error on rank 1', 1, 'error: rank 1: reward: the function digits raised on prompt 7'),
        ('crash on rank 1', 1, 'ZeroDivisionError: rank 1 divides by zero'),
        ('killed', 137, 'was ended by signal 9'),
    ],
)
def test_a_worker_that_fails_ends_all_ranks_at_once_with_its_own_words_and_code(stub_env, job, tmp_path, what, code, said):
    begun = time.perf_counter()
    command = [stub_env.swift, 'rlhf', *job, '--backend', 'megatron']
    done = stub_env.run(*command, STUB_OUT=str(tmp_path), STUB_DO=what, timeout=240, **TORCHRUN_2)
    assert time.perf_counter() - begun < 200  # the other rank sleeps for 600 s; seconds on a machine that has nothing else to do
    assert done.returncode == code, done.stderr
    assert done.stderr.count(said) == 1
    assert 'ChildFailedError' not in done.stderr and 'torch.distributed.elastic' not in done.stderr
    assert not any(is_alive(worker['pid']) for worker in reports(tmp_path))


@pytest.mark.parametrize(
    ('number', 'to_all'),
    [(signal.SIGTERM, False), (signal.SIGINT, True), (signal.SIGINT, False), (signal.SIGHUP, False), (signal.SIGUSR1, False)],
)
@pytest.mark.parametrize('world', [1, 2])
def test_signals_reach_the_workers(stub_env, job, tmp_path, number, to_all, world):
    """to_all: as a terminal sends Ctrl-C, to the whole group; else to the launcher alone."""
    environ = stub_env.environ(STUB_OUT=str(tmp_path), STUB_DO='wait', **(TORCHRUN_2 if world == 2 else {}))
    command = [str(stub_env.swift), 'rlhf', *job, '--backend', 'megatron']
    process = subprocess.Popen(
        command, env=environ, cwd=tmp_path, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        preexec_fn=heed_signals,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while len(reports(tmp_path)) < world and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(reports(tmp_path)) == world
        if to_all:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        _, stderr = process.communicate(timeout=100)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == (130 if number == signal.SIGINT else 128 + number), stderr
    assert ('interrupted: the workers end now, in 5 s at most' in stderr) == (number == signal.SIGINT)  # no terminal here
    assert not any(is_alive(worker['pid']) for worker in reports(tmp_path))


def heed_signals() -> None:
    """Under nohup, or in the background of a script, a process and its children are started with some signals ignored."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f'/proc/{pid}/stat') as stat:
        return stat.read().rsplit(')', 1)[1].split()[0] != 'Z'


@pytest.mark.slow
def test_rlhf_main_in_a_users_program_is_a_door(stub_env, job, tmp_path):
    program = tmp_path / 'train.py'
    program.write_text(f'from swift.pipelines import rlhf_main\nrlhf_main({[*job, "--backend", "megatron"]!r})\nprint("after")\n')
    done = stub_env.run(stub_env.python, program, STUB_OUT=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert len(reports(tmp_path)) == 1
    assert done.stdout.rstrip().endswith('after')  # the program goes on, as it does after ms-swift's own rlhf_main

    failed = stub_env.run(stub_env.python, program, STUB_OUT=str(tmp_path), STUB_DO='user error')
    assert failed.returncode == 1
    assert 'RunError: the training process ended with exit code 2' in failed.stderr


@pytest.mark.slow
def test_backend_transformers_is_ms_swifts_own_path(stub_env, job):
    # A model that cannot be loaded: what fails, and where, shows whose trainer was asked.
    theirs = [word for word in job if word not in ('--batch_check', 'exact')]
    done = stub_env.run(stub_env.swift, 'rlhf', *theirs, '--backend', 'transformers', '--use_vllm', 'false', timeout=180)
    assert done.returncode != 0
    assert 'swift/cli/rlhf.py' in done.stdout.splitlines()[0]
    assert 'remaining_argv' not in done.stderr
    assert 'worker.py' not in done.stdout


@pytest.mark.slow
def test_the_explicit_door_works_with_the_implicit_one_off(stub_env, job, tmp_path):
    plugin = stub_env.source / 'plugins' / 'megatron_grpo.py'
    command = [stub_env.swift, 'rlhf', '--external_plugins', plugin, *job, '--backend', 'megatron', '--tensor_model_parallel_size', '2']
    done = stub_env.run(*command, STUB_OUT=str(tmp_path), SWIFT_MEGATRON_GRPO_AUTOLOAD='0', timeout=180, **TORCHRUN_2)
    assert done.returncode == 0, done.stderr[-3000:]
    workers = reports(tmp_path)
    assert [worker['world_size'] for worker in workers] == ['2', '2']
    assert all(worker['argv'][0].endswith('worker.py') for worker in workers)
    assert argument(workers[0]['argv'], 'tensor_model_parallel_size') == '2'


@pytest.mark.slow
def test_the_plugin_without_a_backend_only_registers_the_trainer(stub_env):
    program = (
        'from swift.trainers.trainer_factory import TrainerFactory as F\n'
        'from swift.utils import import_external_file\n'
        'before = "megatron_grpo" in F.TRAINER_MAPPING\n'
        f'import_external_file({str(stub_env.source / "plugins" / "megatron_grpo.py")!r})\n'
        'print(before, F.TRAINER_MAPPING["megatron_grpo"], F.TRAINING_ARGS_MAPPING["megatron_grpo"])\n'
    )
    expected = 'swift_megatron_grpo.trainer.MegatronGRPOTrainer swift_megatron_grpo.config.MegatronGRPOArguments'
    off = stub_env.run(stub_env.python, '-c', program, SWIFT_MEGATRON_GRPO_AUTOLOAD='0')
    assert off.stdout.splitlines()[-1:] == [f'False {expected}'], off.stderr
    on = stub_env.run(stub_env.python, '-c', program)
    assert on.stdout.splitlines()[-1:] == [f'True {expected}'], on.stderr


@pytest.mark.slow
@pytest.mark.parametrize('command', [['rlhf', '--rlhf_type', 'dpo', '--help'], ['sft', '--help']], ids=' '.join)
def test_other_commands_print_the_same_with_and_without_us(bare_env, wheel_env, command):
    # ms-swift prints sets, whose order is the hash seed's.
    plain = bare_env.run(bare_env.swift, *command, timeout=180, COLUMNS='200', PYTHONHASHSEED='0')
    ours = wheel_env.run(wheel_env.swift, *command, timeout=180, COLUMNS='200', PYTHONHASHSEED='0')
    assert plain.returncode == ours.returncode == 0, ours.stderr
    assert '--help' in plain.stdout
    assert ours.stdout.replace(str(wheel_env.root), 'ENV') == plain.stdout.replace(str(bare_env.root), 'ENV')
