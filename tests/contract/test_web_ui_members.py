"""What the Megatron section of `swift web-ui` leans on in ms-swift 4.6's page, by inspection: no gradio is needed."""

import ast
import importlib.util
import inspect

import pytest

from swift_megatron_grpo.hooks.web_ui import fields
from swift_megatron_grpo.hooks.web_ui.patches import REGISTRY
from swift_megatron_grpo.metrics import curve_names
from tests.contract.upstream import binds, signature, source_file, tree

GRPO = 'swift.ui.llm_grpo.llm_grpo'
RUNTIME = 'swift.ui.llm_train.runtime'
SIGNATURES = {
    (GRPO, 'LLMGRPO.do_build_ui'): 'cls, base_tab',
    (GRPO, 'LLMGRPO.prepare_sub_to_filter'): 'cls',
    ('swift.ui.llm_train.llm_train', 'LLMTrain.train'): 'cls, *args',
    ('swift.ui.llm_train.llm_train', 'LLMTrain.train_local'): 'cls, *args',
    ('swift.ui.llm_train.llm_train', 'LLMTrain.remove_useless_args'): 'cls, uncleaned_kwargs, tabs_relation_dict',
    ('swift.ui.llm_train.hyper', 'Hyper.do_build_ui'): 'cls, base_tab',
    ('swift.ui.base', 'BaseUI.build_ui'): 'cls, base_tab',
    ('swift.ui.base', 'BaseUI.after_build_ui'): 'cls, base_tab',
    ('swift.ui.base', 'BaseUI.elements'): 'cls',
    ('swift.ui.base', 'BaseUI.element'): 'cls, elem_id',
    ('swift.ui.base', 'BaseUI.valid_elements'): 'cls',
    ('swift.ui.base', 'BaseUI.valid_element_keys'): 'cls',
    ('swift.ui.base', 'BaseUI.save_cache'): 'cls, key, value',
    ('swift.ui.base', 'BaseUI.load_cache'): 'cls, key, timestamp',
    ('swift.ui.base', 'BaseUI.update_all_settings'): 'cls, model, train_record, base_tab',
    (RUNTIME, 'Runtime._is_known_task'): 'cls, task',
    (RUNTIME, 'Runtime._validate_logging_dir'): 'cls, logging_dir',
    (RUNTIME, 'Runtime.wait'): 'cls, logging_dir, task',
    (RUNTIME, 'Runtime.kill_task'): 'task',
    (RUNTIME, 'Runtime.parse_info_from_cmdline'): 'task',
    (RUNTIME, 'Runtime.refresh_tasks'): 'running_task=None, group=None',
    (RUNTIME, 'Runtime.plot'): 'task',
    (RUNTIME, 'Runtime.get_plot'): 'cls, task',
    (RUNTIME, 'Runtime.break_log_event'): 'cls, task',
}


def text_of(module: str) -> str:
    return source_file(module).read_text(encoding='utf-8')


def function(module: str, qualified: str) -> ast.FunctionDef:
    body = tree(module).body
    for name in qualified.split('.'):
        found = next(node for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name)
        body = found.body
    assert isinstance(found, ast.FunctionDef)
    return found


@pytest.mark.parametrize(('module', 'name'), SIGNATURES, ids=lambda value: value)
def test_signature(module, name):
    assert signature(module, name) == SIGNATURES[module, name]


def test_every_patch_names_a_member_that_is_there():
    assert len(REGISTRY) == 8
    for patch in REGISTRY:
        for target in patch.passport.target.split(', '):
            module, _, attribute = target.partition(':')
            if module.startswith('swift.') or importlib.util.find_spec('gradio') is not None:
                assert binds(module, attribute.split('.')[0]), target
        assert patch.passport.versions in ('ms-swift>=4.6,<4.7', 'gradio>=5.32.1,<6')


def test_what_the_section_takes_from_the_tabs_module_is_bound_there():
    for name in ('LLMGRPO', 'BaseUI', 'GRPOHyper', 'GRPORuntime'):
        assert binds(GRPO, name), name


def test_the_section_is_built_before_the_elements_are_handed_to_the_start_button():
    build = ast.unparse(function(GRPO, 'LLMGRPO.do_build_ui'))
    assert build.index('GRPOHyper.build_ui(base_tab)') < build.index('submit.click(cls.train_local, list(cls.valid_elements().values())')
    assert 'GRPORuntime.element(\'kill_task\').click(GRPORuntime.kill_task, [GRPORuntime.element(\'running_tasks\')]' in build
    loop = ast.unparse(function('swift.ui.base', 'BaseUI.build_ui'))
    assert loop.index('cls.do_build_ui(base_tab)') < loop.index('ui.after_build_ui(base_tab)')


def test_the_log_button_calls_the_follower_of_the_base_class():
    build = ast.unparse(function(RUNTIME, 'Runtime.do_build_ui'))
    assert "base_tab.element('show_log').click(Runtime.update_log" in build and '.then(Runtime.wait,' in build


def test_the_page_reads_of_the_arguments_what_our_command_gives_it():
    """train_local is ms-swift's own; it gets our namespace in place of an RLHFArguments object."""
    from swift_megatron_grpo.hooks.web_ui import patches

    ours = inspect.getsource(patches._train)
    local = function('swift.ui.llm_train.llm_train', 'LLMTrain.train_local')
    read = {node.attr for node in ast.walk(local) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == 'sft_args'}
    assert read == {'vllm_mode', 'vllm_server_host', 'vllm_server_port', 'logging_dir', 'output_dir', 'model'}
    assert all(f'{name}=' in ours for name in read)
    outputs = [node for node in ast.walk(local) if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple)]
    assert [len(node.value.elts) for node in outputs] == [5]


def test_the_settings_that_the_section_mirrors_are_on_the_page():
    rollout = text_of('swift.ui.llm_grpo.rollout')
    for control in fields.CONTROLS:
        if control.mirrors:
            assert f"elem_id='{control.mirrors}'" in rollout, control.mirrors


def test_the_faults_that_the_patches_mend_are_still_there():
    """When one of these fails, its patch can go."""
    assert 'if not Runtime._is_known_task(task)' in text_of(RUNTIME)  # and Runtime's group is llm_train
    parse = ast.unparse(function(RUNTIME, 'Runtime.parse_info_from_cmdline'))
    assert 'for key in all_args.keys():' in parse and '_json.get(key)' in parse
    assert "['pkill', '-9', '-f', output_dir]" in text_of(RUNTIME)
    assert 'if fail_cnt > 50:' in text_of(RUNTIME)
    assert "'--ignore_args_error', 'True'" in text_of('swift.ui.llm_train.llm_train')
    assert '(\'more_params\', \'train_stage\', \'use_ddp\', \'ddp_num\', \'gpu_id\', \'envs\')' in text_of('swift.ui.llm_train.llm_train')


def test_the_curves_that_the_page_draws_are_names_that_the_trainer_writes():
    plots = next(node for node in ast.walk(tree(RUNTIME)) if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == 'grpo_plot')
    names = [row['name'] for row in ast.literal_eval(plots.value)]
    assert names == ['train/loss', 'train/reward', 'train/learning_rate', 'train/completions/mean_length', 'train/kl']
    logged = {'loss': 0.5, 'reward': 1.0, 'learning_rate': 1e-6, 'completions/mean_length': 3.0, 'kl': 0.0, 'eval_reward': 0.5, 'memory': '1GiB'}
    written = curve_names(logged)
    assert set(names) < set(written)
    assert written['train/completions/mean_length'] == 3.0 and written['eval/reward'] == 0.5 and 'train/memory' not in written
