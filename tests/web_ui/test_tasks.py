"""Following a log and stopping a job, on small processes that stand for the `swift` command and its workers."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from swift_megatron_grpo.hooks.doors import WORKER
from swift_megatron_grpo.hooks.web_ui import tasks

OUTPUT = '/somewhere/v0-1'
ARGUMENTS = ['rlhf', '--rlhf_type', 'grpo', '--backend', 'megatron', '--output_dir', OUTPUT]
# A job as it runs: `swift` starts a launcher, which has the worker file on its command line too and starts the workers in sessions of their own.
PARENT = r'''
import os, subprocess, sys, time
os.write(1, b'up\n')
if {workers}:
    command = [sys.executable, {launcher!r}, '--nproc_per_node', '{workers}', {worker!r}, '--output_dir', {output!r}]
    sys.exit(subprocess.run(command).returncode)
time.sleep(600)
'''
LAUNCHER = r'''
import subprocess, sys
ranks = range(int(sys.argv[2]))
children = [subprocess.Popen([sys.executable, '-u', *sys.argv[3:], '--rank', str(rank)], start_new_session=True) for rank in ranks]
sys.exit(max(child.wait() for child in children))
'''
OBEYS = r'''
import os, signal, subprocess, sys, time
if os.fork() == 0 if sys.argv[-1] == '0' else False:
    time.sleep(2)  # a data loader's process: it has the command line of its rank
    os._exit(0)
signal.signal(signal.SIGUSR1, lambda *_: os._exit(0))
os.write(1, b'ready\n')
time.sleep(600)
'''
IS_BUSY = r'''
import os, signal, time
signal.signal(signal.SIGUSR1, lambda *_: None)
os.write(1, b'ready\n')
end = time.monotonic() + 600
while time.monotonic() < end:
    time.sleep(0.1)
'''
IGNORES_ALL = IS_BUSY.replace("signal.signal(signal.SIGUSR1, lambda *_: None)",
                              'signal.signal(signal.SIGUSR1, lambda *_: None); signal.signal(signal.SIGTERM, lambda *_: None)')


@pytest.fixture
def start(tmp_path, monkeypatch):
    """start(child, workers) -> psutil.Process of a job that is up. Ended with all it started when the test is over."""
    started = []
    worker = tmp_path / 'worker.py'
    monkeypatch.setattr(tasks, 'WORKER', worker)

    def run(child: str = OBEYS, workers: int = 2) -> psutil.Process:
        worker.write_text(child)
        launcher, program = tmp_path / 'torchrun.py', tmp_path / 'swift'
        launcher.write_text(LAUNCHER)
        program.write_text(PARENT.format(workers=workers, launcher=str(launcher), worker=str(worker), output=OUTPUT))
        process = subprocess.Popen([sys.executable, program, *ARGUMENTS], stdout=subprocess.PIPE, text=True)
        started.append((process, psutil.Process(process.pid)))
        for _ in range(1 + workers):
            assert process.stdout.readline() in ('up\n', 'ready\n')
        return psutil.Process(process.pid)

    yield run
    for process, known in started:
        if process.poll() is None:
            tasks.end(tasks.family_of(known), 5.0)
        process.stdout.close()


def task_of(pid: int, words: list[str] = ARGUMENTS) -> str:
    return f'pid:{pid}/create:2026-12-01, 10:00/running:1s/cmd:python swift {" ".join(words)}'


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_the_process_decides_what_a_task_is_and_not_the_text_of_the_page(start):
    process = start()
    assert tasks.process_of(task_of(process.pid)).pid == process.pid
    for text in (None, '', 'pid:x/cmd:', 'output', task_of(os.getpid()), task_of(2**22 + 1)):
        assert tasks.process_of(text) is None
    assert tasks.is_ours(['python', '/env/bin/swift', *ARGUMENTS])
    assert not tasks.is_ours(['python', '/env/bin/swift', 'rlhf', '--rlhf_type', 'grpo'])
    assert not tasks.is_ours(['python', '/env/bin/swift', 'sft', '--backend', 'megatron'])
    assert not tasks.is_ours(['bash'])


def test_workers_are_the_ranks_and_not_what_a_rank_started(start):
    process = start()
    assert len(process.children(recursive=True)) == 4  # the launcher, two ranks, and what one of them forked
    assert sorted(worker.cmdline()[-1] for worker in tasks.workers_of(process)) == ['0', '1']
    (launcher,) = process.children()
    assert not tasks.runs_worker(launcher.cmdline()) and launcher.pid in {member.pid for member in tasks.family_of(process)}


def test_workers_that_outlived_their_launcher_are_found_and_ended(start):
    process = start()
    workers = tasks.workers_of(process)
    process.suspend()  # else the command would end with its launcher
    process.children()[0].kill()
    assert {worker.pid for worker in tasks.workers_of(process)} == {worker.pid for worker in workers}
    tasks.end(tasks.family_of(process), 2.0)
    assert is_gone(process) and all(is_gone(worker) for worker in workers)


def test_the_first_press_lets_the_run_save_and_end(start):
    process = start()
    workers = tasks.workers_of(process)
    begun = time.monotonic()
    assert tasks.Stopper(wait_s=20.0).stop(process) is True
    assert time.monotonic() - begun < 10
    assert is_gone(process) and all(is_gone(worker) for worker in workers)


def test_a_second_press_ends_a_run_that_is_in_the_middle_of_a_step(start):
    process = start(IS_BUSY)
    workers = tasks.workers_of(process)
    stopper = tasks.Stopper(wait_s=0.5, grace_s=60.0, term_s=2.0)
    assert stopper.stop(process) is False
    assert not is_gone(process)
    assert stopper.stop(process) is True
    assert is_gone(process) and all(is_gone(worker) for worker in workers)


def test_a_run_that_does_not_end_in_time_is_killed_with_all_its_workers(start):
    process = start(IGNORES_ALL)
    workers = tasks.workers_of(process)
    assert tasks.Stopper(wait_s=0.2, grace_s=0.5, term_s=0.5).stop(process) is False
    _, left = psutil.wait_procs(workers, timeout=10)
    assert left == [] and is_gone(process)


def test_a_run_whose_workers_have_not_started_is_ended_at_once(start):
    process = start(workers=0)
    assert tasks.Stopper(term_s=5.0).stop(process) is True
    assert is_gone(process)


def test_the_tail_shows_a_progress_bar_as_one_line_and_keeps_the_last_lines(tmp_path):
    log = tmp_path / 'run.log'
    tail = tasks.Tail(str(log), lines=3)
    assert tail.read() is False and tail.text == ''
    log.write_bytes(b'one\ntwo\nthree\nTrain:   0%\rTrain:  50%')
    assert tail.read() is True
    assert tail.text == 'one\ntwo\nthree\nTrain:  50%'
    assert tail.read() is False
    with log.open('ab') as file:
        file.write('\rTrain: 100%\r\nfour 四\nTrain'.encode()[:-5] + b'\xff')
    tail.read()
    assert tail.text == 'three\nTrain: 100%\nfour 四\n\ufffd'


def test_a_log_is_followed_through_a_silence_until_the_job_ends(tmp_path):
    log, folder = tmp_path / 'run.log', tmp_path / 'runs'
    folder.mkdir()
    log.write_text('loading\n')
    alive = [True]
    shown = []

    def write_later():
        time.sleep(0.3)
        (folder / 'events.out.tfevents.1').write_bytes(b'point')
        time.sleep(0.2)
        log.write_text('loading\ndone\n')
        alive[0] = False

    threading.Thread(target=write_later).start()
    begun = time.monotonic()
    for text, has_points in tasks.follow(str(log), lambda: alive[0], lambda: False, lambda: tasks.event_files(str(folder)), poll_s=0.05):
        shown.append((text, has_points))
    assert shown[0] == ('loading', True) and ('loading', True) in shown[1:] and shown[-1] == ('loading\ndone', False)
    assert time.monotonic() - begun < 5


def test_following_ends_when_the_page_says_so(tmp_path):
    (tmp_path / 'run.log').write_text('x\n')
    assert [text for text, _ in tasks.follow(str(tmp_path / 'run.log'), lambda: True, lambda: True, list)] == ['x']


def test_the_worker_that_is_looked_for_is_the_file_that_the_launcher_starts():
    assert Path(WORKER).name == 'worker.py' and Path(WORKER).is_file()
