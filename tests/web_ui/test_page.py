"""The Megatron section in a real browser against a running `swift web-ui`: fill in, see the plan, start, see a reward point, stop.

`make test-webui` makes the environment that this needs; where gradio, the driver or a browser is missing the tests are skipped and say so.
"""

import json
import shlex
import time
from pathlib import Path

import pytest

from tests.web_ui.browser import BROWSER_FLAGS, GrpoTab, browser_path, missing, small_job, web_ui

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing() or 'everything is here'),
    pytest.mark.slow,
    pytest.mark.heavy,
    pytest.mark.timeout(1500),
]
TRAINING_S = 600.0  # from the start button to the first curve, on two busy cores
STEPS = 2000


@pytest.fixture(scope='module')
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=browser_path(), args=list(BROWSER_FLAGS))
        yield chromium
        chromium.close()


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp('page')


@pytest.fixture(scope='module')
def address(folder):
    with web_ui(folder, 'en') as address:
        yield address


@pytest.fixture(scope='module')
def job(tmp_path_factory) -> dict[str, str]:
    return small_job(tmp_path_factory.mktemp('job'))


@pytest.fixture
def tab(browser, address, folder, request):
    opened = GrpoTab(browser, address)
    yield opened
    opened.page.screenshot(path=folder / f'{request.node.name}.png', full_page=True)
    opened.page.close()


def fill_in(tab: GrpoTab, job: dict[str, str], *, processes: int, more: str = '') -> None:
    """The small job, by hand: model, data, reward, precision, and the section."""
    tab.type_choice('model', job['model'])
    tab.choose('model_type', 'qwen3')
    tab.choose('template', 'chatml')
    tab.type_choice('dataset', job['dataset'])
    tab.number('max_length', 64)
    tab.type_choice('reward_funcs', 'share_of_digits')
    tab.choose('tuner_type', 'full')
    tab.choose('torch_dtype', 'float32')
    tab.choose('megatron_backend', 'megatron')
    tab.fill('megatron_num_processes', str(processes))
    tab.fill('megatron_tp', str(processes))
    tab.fill('megatron_micro_batch_size', '4')
    tab.fill('megatron_global_batch_size', '8')
    tab.choose('megatron_batch_check', 'exact')
    tab.check('megatron_use_vllm', False)
    tab.open('rollout_param')
    tab.number('num_generations', 4)
    tab.fill('max_completion_length', '4')
    tab.open('extra_params')
    tab.page.get_by_role('tab', name='GRPO advanced').click()
    tab.fill('external_plugins', job['plugin'])
    tab.fill('beta', '0')
    small = '--use_hf true --dataset_num_proc 1 --dataloader_num_workers 0 --save_steps 100000 --logging_steps 1'
    tab.fill('more_params', f'{small} --max_steps {STEPS} {more}')


def runs(folder: Path) -> list[Path]:
    return sorted((folder / 'output').glob('*/v*-*')) + sorted((folder / 'output').glob('v*-*'))


def processes_of(output: str) -> list[int]:
    """Live processes that have the run's folder on their command line."""
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            if output in ' '.join(process.cmdline()):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def test_the_section_is_there_and_hidden_until_it_is_asked_for(tab):
    assert not tab.page.locator('#megatron_tp').is_visible()
    assert tab.plan == ''
    tab.choose('megatron_backend', 'megatron')
    tab.page.locator('#megatron_tp').wait_for()
    text = tab.page.locator('#megatron_settings').inner_text()
    for argument in (
        'tensor_model_parallel_size', 'pipeline_model_parallel_size', 'virtual_pipeline_model_parallel_size', 'context_parallel_size',
        'expert_model_parallel_size', 'expert_tensor_parallel_size', 'sequence_parallel', 'micro_batch_size', 'global_batch_size',
        'recompute_granularity', 'max_tokens_per_micro_batch', 'use_vllm', 'vllm_mode', 'vllm_tensor_parallel_size', 'sleep_level',
        'verify_weight_sync',
    ):  # fmt: skip
        assert f'--{argument})' in text, argument
    # the page as it is has no data set and no reward: the plan says so before anything is started
    plan = tab.wait_for_plan('This run would not start', '--dataset is needed', 'No reward is named')
    assert 'Processes' in plan
    tab.choose('megatron_backend', 'transformers')
    tab.page.locator('#megatron_tp').wait_for(state='hidden')


def test_errors_of_the_plan_stop_the_start(tab, job, folder):
    fill_in(tab, job, processes=2, more='--learnin_rate 1e-3')
    tab.wait_for_plan('This run would not start', 'did you mean --learning_rate')
    tab.press('submit')
    tab.wait_for('message', tab.toast, 'Nothing was started', 'learnin_rate')
    assert runs(folder) == [] and not tab.page.locator('#running_cmd:visible').count()


def test_the_engine_is_one_setting_in_two_places(tab):
    tab.choose('megatron_backend', 'megatron')
    tab.open('rollout_param')
    tab.check('megatron_use_vllm', False)
    tab.wait_for('box', lambda: str(tab.is_checked('use_vllm')), 'False')
    tab.check('use_vllm', True)
    tab.wait_for('box', lambda: str(tab.is_checked('megatron_use_vllm')), 'True')
    tab.fill('megatron_vllm_tensor_parallel_size', '2')
    tab.wait_for('number', lambda: tab.value('vllm_tensor_parallel_size'), '2')
    tab.fill('vllm_tensor_parallel_size', '4')
    tab.wait_for('number', lambda: tab.value('megatron_vllm_tensor_parallel_size'), '4')
    tab.choose('megatron_vllm_mode', 'server')
    tab.wait_for('mode', lambda: tab.value('vllm_mode'), 'server')
    tab.wait_for_plan('vLLM, server')


def test_the_transformers_backend_gets_ms_swifts_own_command(tab, job, folder):
    fill_in(tab, job, processes=2)
    tab.choose('megatron_backend', 'transformers')
    tab.fill('more_params', '--max_steps 1')
    tab.check('dry_run', True)
    tab.press('submit')
    tab.element('running_cmd').wait_for()
    shown = tab.wait_for('command', lambda: tab.value('running_cmd'), 'swift rlhf')
    assert '--ignore_args_error True' in shown and 'megatron' not in shown.replace(str(folder), '') and 'tensor_model_parallel_size' not in shown


def test_fill_in_see_the_plan_start_see_a_reward_point_and_stop(tab, job, folder):
    fill_in(tab, job, processes=2)
    tab.wait_for_plan(
        'This run would start.', '2 = TP 2 x DP 1', '8 = 4 x DP 1 x 2 (2 prompts x 4)', f'{STEPS} optimizer steps', 'transformers',
        absent=('would not start',),
    )  # fmt: skip
    tab.page.screenshot(path=folder / 'plan.png', full_page=True)
    tab.press('submit')
    tab.element('running_cmd').wait_for()
    shown = shlex.split(tab.wait_for('command', lambda: tab.value('running_cmd'), 'nohup swift rlhf'))
    output = shown[shown.index('--output_dir') + 1]
    assert shown[:5] == ['NPROC_PER_NODE=2', 'nohup', 'swift', 'rlhf', '--rlhf_type'] and '--ignore_args_error' not in shown
    assert shown[shown.index('--backend') + 1] == 'megatron' and tab.value('logging_dir') == f'{output}/runs'
    assert output in tab.wait_for('task', lambda: tab.value('running_tasks'), 'pid:', 'swift rlhf')

    tab.press('show_log')
    tab.wait_for('log', lambda: tab.value('log'), 'run sh', seconds=TRAINING_S)
    tab.wait_for('curves', lambda: ' '.join(tab.curves()), 'train/reward', 'train/completions/mean_length', seconds=TRAINING_S)
    rewards = [row['reward'] for row in map(json.loads, Path(output, 'logging.jsonl').read_text().splitlines()) if 'reward' in row]
    assert rewards and all(0.0 <= reward <= 1.0 for reward in rewards) and len(rewards) < STEPS
    tab.page.screenshot(path=folder / 'reward.png', full_page=True)
    assert len(processes_of(output)) >= 3  # the command and its two workers at least

    tab.press('kill_task')
    tab.wait_for('message', tab.toast, 'ends after the optimizer step')
    begun = time.monotonic()
    while processes_of(output) and time.monotonic() - begun < 180:
        tab.page.wait_for_timeout(500)
    assert processes_of(output) == []
    (checkpoint,) = Path(output).glob('checkpoint-*')  # nothing that was trained is lost
    done = json.loads((checkpoint / 'trainer_state.json').read_text())['iteration']
    assert done == int(checkpoint.name.split('-')[1]) and 0 < done < STEPS
    assert f'Stopped on request after {done} optimizer steps' in Path(output, 'runs', 'run.log').read_text()


def test_the_page_speaks_chinese(browser, tmp_path_factory):
    folder = tmp_path_factory.mktemp('chinese')
    with web_ui(folder, 'zh') as address:
        tab = GrpoTab(browser, address)
        tab.choose('megatron_backend', 'megatron')
        plan = tab.wait_for_plan('不能开始')
        text = tab.page.locator('#megatron_param').inner_text()
        tab.page.screenshot(path=folder / 'chinese.png', full_page=True)
        tab.page.close()
    assert 'Megatron 设置' in text and '张量并行(--tensor_model_parallel_size)' in text and '权重同步检查' in text
    assert '进程' in plan and '--dry_run true 的完整报告' in plan
