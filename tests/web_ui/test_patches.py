"""The patches on a page of stubs: what is ours is answered here, and everything else reaches ms-swift as it came. No gradio here."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from swift_megatron_grpo.hooks.web_ui import fields, patches
from tests.web_ui.test_command import DEFAULTS, PAGE

KEYS = [*PAGE]


class ShownError(Exception):
    """Stands for gradio.Error."""

    def __init__(self, text, duration=10):
        super().__init__(text)


class Runtime:
    group = 'llm_train'
    log_event: dict = {}

    @classmethod
    def _is_known_task(cls, task):
        return cls.group in task

    @staticmethod
    def parse_info_from_cmdline(task):
        return '1', {'output_dir': '/o', 'logging_dir': None, 'learning_rate': None, 'dataset': 'from args.json'}

    @classmethod
    def wait(cls, logging_dir, task):
        yield ['original', logging_dir, task]

    @staticmethod
    def kill_task(task):
        return ['killed', task]


@pytest.fixture
def page(monkeypatch):
    """The stub page with all patches but the section's; `said` holds what the page said."""
    said: list[str] = []

    class LLMGRPO:
        lang = 'en'
        default_dict = DEFAULTS
        saved: dict = {}

        @classmethod
        def valid_element_keys(cls):
            return KEYS

        @classmethod
        def valid_elements(cls):
            return dict.fromkeys(KEYS, SimpleNamespace())

        @staticmethod
        def prepare_sub_to_filter():
            return {}

        @staticmethod
        def remove_useless_args(given, relations):
            given.pop('vllm_server_host', None)

        @classmethod
        def save_cache(cls, model, record):
            cls.saved = record

        @classmethod
        def load_cache(cls, model, record):
            return cls.saved

        @classmethod
        def train(cls, *args):
            return 'original', args

        @classmethod
        def train_local(cls, *args):
            return cls.train(*args)

        @classmethod
        def update_all_settings(cls, model, train_record, base_tab):
            return ['unchanged'] * len(KEYS)

    runtime = type('Runtime', (Runtime,), {'log_event': {}})
    grpo_runtime = type('GRPORuntime', (runtime,), {'group': 'llm_grpo', 'lang': 'en'})
    tab = ModuleType('llm_grpo')
    tab.LLMGRPO, tab.GRPORuntime = LLMGRPO, grpo_runtime
    gradio = ModuleType('gradio')
    gradio.Error, gradio.Warning, gradio.Info = ShownError, said.append, said.append
    gradio.skip, gradio.update = lambda: 'skip', lambda **values: values
    helpers = ModuleType('transformers.utils')
    helpers.is_torch_cuda_available, helpers.is_torch_npu_available = lambda: True, lambda: False
    monkeypatch.setitem(sys.modules, 'gradio', gradio)
    monkeypatch.setitem(sys.modules, 'transformers.utils', helpers)
    monkeypatch.setitem(sys.modules, patches._GRPO, tab)
    monkeypatch.setitem(sys.modules, patches._RUNTIME, SimpleNamespace(Runtime=runtime))
    for patch in patches.REGISTRY:
        if patch.passport.name not in ('megatron-section', 'patience-at-the-start'):
            patch.function()
    return SimpleNamespace(grpo=LLMGRPO, runtime=runtime, grpo_runtime=grpo_runtime, said=said)


@pytest.fixture
def job(tmp_path):
    """Changes that make the page's values a job without errors; a list of values in the page's order comes from `values`."""
    data = tmp_path / 'data.jsonl'
    data.write_text('{"messages": [{"role": "user", "content": "1 + 1?"}], "solution": "2"}\n' * 64)
    return {
        'dataset': [str(data)], 'model': 'Qwen/Qwen3-8B', 'megatron_micro_batch_size': '8', 'megatron_global_batch_size': '32',
        'megatron_batch_check': 'exact', 'more_params': '--max_steps 6', 'output_dir': str(tmp_path / 'out'),
    }  # fmt: skip


def values(**changes) -> list:
    return [*({**PAGE, **changes}).values()]


def test_the_transformers_backend_reaches_ms_swift_with_every_value_as_it_came(page):
    given = values(megatron_backend='transformers')
    assert page.grpo.train(*given) == ('original', tuple(given))
    assert page.grpo.train_local(*given) == ('original', tuple(given))


def test_begin_starts_only_the_plan_that_is_shown(page, job):
    assert page.grpo.train_local(*values(**job)) == ['skip'] * 5
    assert page.said == ['The plan below has changed since it was shown. Look at it, and press Begin again.']
    html, key = patches._show_plan(page.grpo, *values(**job))
    assert 'This run would start.' in html and len(key) == 16
    words, environ, log_file, shown, arguments, others = page.grpo.train_local(*values(**job, **{fields.PLAN_KEY: key}))
    assert words[1:6] == ['rlhf', '--rlhf_type', 'grpo', '--backend', 'megatron'] and '--ignore_args_error' not in words
    assert environ == {'NPROC_PER_NODE': '4', 'CUDA_VISIBLE_DEVICES': '0,1,2,3'}
    assert arguments.output_dir.startswith(f'{job["output_dir"]}/v0-') and log_file == f'{arguments.logging_dir}/run.log'
    assert 'nohup swift rlhf' in shown and others['dry_run'] is False
    # a value that was changed afterwards is another plan
    assert page.grpo.train_local(*values(**{**job, 'megatron_tp': '2'}, **{fields.PLAN_KEY: key})) == ['skip'] * 5


def test_errors_of_the_plan_and_of_the_page_are_said_and_start_nothing(page, job):
    for wrong, text in (
        ({'megatron_tp': '3'}, 'Nothing was started'),
        ({'more_params': '--max_steps 6 --learnin_rate 1'}, 'did you mean --learning_rate'),
        ({'envs': 'lonely'}, 'NAME=value'),
        ({'more_params': '--backend megatorn'}, 'megatorn'),
    ):
        given = values(**{**job, **wrong})
        for start in (page.grpo.train, page.grpo.train_local):
            with pytest.raises(ShownError, match=text):
                start(*given)
    html, key = patches._show_plan(page.grpo, *values(**{**job, 'envs': '<i>'}))
    assert key == '' and '&lt;i&gt;' in html
    assert page.grpo.saved == {}


def test_a_backend_in_other_params_is_ours_whatever_the_section_says(page, job):
    words = page.grpo.train(*values(**{**job, 'megatron_backend': 'transformers', 'more_params': '--max_steps 6 --backend megatron'}))[0]
    assert '--ignore_args_error' not in words and 'megatron' in words


def test_a_train_record_brings_its_backend_back(page, job):
    _, key = patches._show_plan(page.grpo, *values(**job))
    page.grpo.train(*values(**job, **{fields.PLAN_KEY: key}))
    assert page.grpo.saved['megatron_backend'] == 'megatron' and page.grpo.saved['megatron_global_batch_size'] == '32'
    assert fields.PLAN_KEY not in page.grpo.saved
    assert page.grpo.update_all_settings('m', 'yesterday', page.grpo) == ['unchanged'] * len(KEYS)
    page.grpo.saved = {'model': 'of the transformers backend'}
    updates = page.grpo.update_all_settings('m', 'yesterday', page.grpo)
    assert updates[KEYS.index('megatron_backend')] == {'value': 'transformers'} and updates.count('unchanged') == len(KEYS) - 1
    assert page.grpo.update_all_settings('m', None, page.grpo) == ['unchanged'] * len(KEYS)


def test_a_live_grpo_task_is_known_and_other_tabs_stay_as_they_were(page):
    assert page.runtime._is_known_task('llm_grpo') is True and page.runtime._is_known_task('llm_train') is True
    assert page.runtime._is_known_task('llm_rlhf') is False
    other = type('RLHFRuntime', (page.runtime,), {'group': 'llm_rlhf'})
    assert other._is_known_task('llm_grpo') is False


def test_what_args_json_does_not_say_comes_from_the_command_line_of_a_job_of_ours(page):
    task = 'pid:1/create:x/running:1s/cmd:python /env/bin/swift rlhf --backend megatron --logging_dir /o/runs --learning_rate 1e-4 --output_dir /o'
    assert page.runtime.parse_info_from_cmdline(task) == (
        '1', {'output_dir': '/o', 'logging_dir': '/o/runs', 'learning_rate': '1e-4', 'dataset': 'from args.json'},
    )  # fmt: skip
    assert page.runtime.parse_info_from_cmdline(task.replace('--backend megatron', ''))[1]['logging_dir'] is None


def test_tasks_that_are_not_ours_are_followed_and_killed_by_ms_swift(page):
    assert list(page.runtime.wait('/logs', 'pid:1/cmd:x')) == [['original', '/logs', 'pid:1/cmd:x']]
    assert page.grpo_runtime.kill_task('pid:1/cmd:x') == ['killed', 'pid:1/cmd:x']
