"""The page's values become the command that `swift rlhf --backend megatron` takes, and the plan decides whether it starts. No gradio here."""

import shlex
import time

import pytest

from swift_megatron_grpo.args import resolve
from swift_megatron_grpo.args.fields import all_fields
from swift_megatron_grpo.errors import UserError
from swift_megatron_grpo.hooks import doors
from swift_megatron_grpo.hooks.web_ui import command, fields, plan_view

DEFAULTS = {
    'model': None, 'dataset': None, 'reward_funcs': None, 'tuner_type': 'lora', 'torch_dtype': None, 'per_device_train_batch_size': 1,
    'gradient_accumulation_steps': None, 'num_generations': 8, 'use_vllm': False, 'vllm_mode': None, 'vllm_tensor_parallel_size': 1,
    'vllm_gpu_memory_utilization': 0.9, 'vllm_server_host': None, 'sleep_level': 0, 'offload_model': False, 'learning_rate': None, 'beta': 0.04,
    'output_dir': None, 'logging_dir': None, 'add_version': True, 'deepspeed': None, 'seed': 42, 'adalora_target_r': 8, 'system': None,
    'resume_from_checkpoint': None, 'model_type': None, 'template': None, 'target_modules': 'all-linear',
}  # fmt: skip
# What the page holds when it is opened: ms-swift fills in settings that nobody chose.
PAGE = {
    'model': 'Qwen/Qwen2.5-7B-Instruct', 'dataset': ['data.jsonl'], 'reward_funcs': ['accuracy', 'format'], 'tuner_type': 'lora', 'seed': '42',
    'torch_dtype': 'bfloat16', 'gpu_id': ['0', '1', '2', '3'], 'use_ddp': False, 'ddp_num': '1', 'per_device_train_batch_size': 1,
    'gradient_accumulation_steps': 1, 'num_generations': 8, 'use_vllm': True, 'vllm_mode': None, 'vllm_gpu_memory_utilization': '0.5',
    'vllm_tensor_parallel_size': '1', 'vllm_server_host': '127.0.0.1', 'sleep_level': '0', 'offload_model': True, 'learning_rate': '1e-4',
    'beta': '0.04', 'output_dir': 'output', 'logging_dir': None, 'envs': '', 'more_params': '', 'dry_run': False, 'deepspeed': None,
    'system': '', **{control.element: control.value for control in fields.CONTROLS}, 'megatron_backend': 'megatron', fields.PLAN_KEY: '',
}  # fmt: skip


def drop_useless(given):
    """ms-swift's filter, as far as these tests need it: no mode is colocate, and each mode has settings that the other does not have."""
    for name in ('vllm_gpu_memory_utilization', 'sleep_level') if given.get('vllm_mode') == 'server' else ('vllm_server_host',):
        given.pop(name, None)


def job(**changes) -> command.Job:
    return command.collect(
        {**PAGE, **changes},
        defaults=DEFAULTS,
        is_list=lambda name: name == 'target_modules',
        drop_useless=drop_useless,
        device_variable='CUDA_VISIBLE_DEVICES',
    )


def argument(words: list[str], name: str) -> list[str]:
    """The values of an argument; [] where it is not there."""
    if f'--{name}' not in words:
        return []
    rest = words[words.index(f'--{name}') + 1 :]
    return rest[: next((at for at, word in enumerate(rest) if word.startswith('--')), len(rest))]


def test_the_page_as_it_is_opened_becomes_a_command_without_what_nobody_chose():
    assert job().words == [
        '--rlhf_type', 'grpo', '--backend', 'megatron', '--model', 'Qwen/Qwen2.5-7B-Instruct', '--dataset', 'data.jsonl',
        '--reward_funcs', 'accuracy', 'format', '--torch_dtype', 'bfloat16', '--gradient_accumulation_steps', '1', '--use_vllm', 'True',
        '--vllm_gpu_memory_utilization', '0.5', '--offload_model', 'True', '--learning_rate', '1e-4',
        '--vllm_mode', 'colocate',
    ]  # fmt: skip
    assert job().environ == {'NPROC_PER_NODE': '4', 'CUDA_VISIBLE_DEVICES': '0,1,2,3'}


def test_an_argument_that_would_be_swallowed_is_in_the_command_and_ignore_args_error_is_not():
    words = job(more_params='--learnin_rate 1e-3').words
    assert argument(words, 'learnin_rate') == ['1e-3']
    assert '--ignore_args_error' not in words
    errors = doors.resolve_ours(words, {'NPROC_PER_NODE': '4'}).errors
    assert any('learnin_rate' in error and '--learning_rate' in error for error in errors)


@pytest.mark.parametrize('element, typed, name, value', [
    ('megatron_tp', '4', 'tensor_model_parallel_size', ['4']),
    ('megatron_pp', ' 2 ', 'pipeline_model_parallel_size', ['2']),
    ('megatron_vpp', '2', 'virtual_pipeline_model_parallel_size', ['2']),
    ('megatron_cp', '2', 'context_parallel_size', ['2']),
    ('megatron_ep', '8', 'expert_model_parallel_size', ['8']),
    ('megatron_etp', '2', 'expert_tensor_parallel_size', ['2']),
    ('megatron_sequence_parallel', True, 'sequence_parallel', ['true']),
    ('megatron_micro_batch_size', '8', 'micro_batch_size', ['8']),
    ('megatron_global_batch_size', '128', 'global_batch_size', ['128']),
    ('megatron_max_tokens_per_micro_batch', '8192', 'max_tokens_per_micro_batch', ['8192']),
    ('megatron_batch_check', 'exact', 'batch_check', ['exact']),
    ('megatron_keep_global_batch', True, 'keep_global_batch', ['true']),
    ('megatron_recompute_granularity', 'selective', 'recompute_granularity', ['selective']),
    ('megatron_recompute_modules', 'core_attn mlp', 'recompute_modules', ['core_attn', 'mlp']),
    ('megatron_verify_weight_sync', 'off', 'verify_weight_sync', ['off']),
    ('megatron_weight_sync_bucket_mb', '64', 'weight_sync_bucket_mb', ['64']),
])  # fmt: skip
def test_a_control_of_the_section_sets_its_argument(element, typed, name, value):
    assert argument(job(**{element: typed}).words, name) == value
    assert argument(job().words, name) == []


def test_every_control_names_an_argument_that_exists_and_speaks_both_languages():
    table = all_fields()
    for control in fields.CONTROLS:
        assert control.argument in table or control is fields.NUM_PROCESSES, control.name
        assert control.kind == 'choice' or not control.choices
        for words in (control.en, control.zh):
            assert len(words) == 2 and all(words), control.name
        assert control.en != control.zh
    locale = fields.locale()
    assert locale['megatron_tp']['label'] == {'en': 'Tensor parallel', 'zh': '张量并行'}
    assert all(set(word) == {'en', 'zh'} for entry in locale.values() for word in entry.values())
    assert all(set(entry) == {'en', 'zh'} for entry in (*plan_view.WORDS.values(), *plan_view.NOTES.values()))
    # choices of the page are choices of the argument
    for control in fields.CONTROLS:
        allowed = table[control.argument].choices if control.argument else ()
        if allowed and control is not fields.BACKEND:
            assert {choice for choice in control.choices if choice} <= set(allowed), control.name


def test_a_global_batch_that_is_typed_wins_over_the_untouched_accumulation_and_that_is_said():
    typed = job(megatron_global_batch_size='128')
    assert argument(typed.words, 'gradient_accumulation_steps') == [] and typed.notes == ['accumulation']
    moved = job(megatron_global_batch_size='128', gradient_accumulation_steps=4)
    assert argument(moved.words, 'gradient_accumulation_steps') == ['4'] and moved.notes == []


def test_without_vllm_its_settings_are_left_out_since_a_mode_alone_would_ask_for_it():
    words = job(use_vllm=False, vllm_mode='colocate', sleep_level='1').words
    assert argument(words, 'use_vllm') == ['False']
    assert [word for word in words if word.startswith(('--vllm', '--sleep'))] == []
    assert resolve(words, {'NPROC_PER_NODE': '4'}).effective['use_vllm'] is False


def test_a_server_is_named_for_the_question_whether_it_runs():
    assert job(vllm_mode='server').server == ('127.0.0.1', '8000')
    assert job().server is None and job(vllm_mode='server', use_vllm=False).server is None


@pytest.mark.parametrize('changes, expected', [
    ({}, '4'),
    ({'gpu_id': ['0']}, None),
    ({'gpu_id': ['cpu']}, None),
    ({'gpu_id': 'cpu', 'use_ddp': True, 'ddp_num': '2'}, '2'),
    ({'use_ddp': True, 'ddp_num': '2'}, '2'),
    ({'use_ddp': True, 'ddp_num': '2', 'megatron_num_processes': '8'}, '8'),
    ({'envs': 'NPROC_PER_NODE=16 NNODES=2'}, '16'),
])  # fmt: skip
def test_the_number_of_processes(changes, expected):
    assert job(**changes).environ.get('NPROC_PER_NODE') == expected


def test_variables_are_read_as_a_shell_reads_them_and_what_is_none_is_refused():
    assert job(gpu_id=['cpu'], envs='A=1 B="two words"').environ == {'A': '1', 'B': 'two words'}
    with pytest.raises(UserError, match="'lonely' among the environment variables"):
        job(envs='A=1 lonely')
    with pytest.raises(UserError, match='GPUs or cpu, not both'):
        job(gpu_id=['cpu', '0'])


def test_other_params_are_words_or_json_and_come_last():
    assert job(more_params='--max_steps 5 --lr_scheduler_kwargs \'{"min_lr_rate": 0.2}\'').words[-4:] == [
        '--max_steps', '5', '--lr_scheduler_kwargs', '{"min_lr_rate": 0.2}',
    ]  # fmt: skip
    assert job(more_params='{"max_steps": 5, "reward_funcs": ["a", "b"]}').words[-5:] == ['--max_steps', '5', '--reward_funcs', 'a', 'b']
    for wrong in ('{"max_steps": 5', '--system "open'):
        with pytest.raises(UserError, match='Other params'):
            job(more_params=wrong)


@pytest.mark.parametrize('section, more, expected', [
    ('transformers', '', 'transformers'),
    ('megatron', '', 'megatron'),
    ('transformers', '--backend megatron', 'megatron'),
    ('transformers', '--rlhf_type megatron_grpo', 'megatron'),
    ('megatron', '--backend transformers', 'transformers'),
    ('transformers', '{"backend": "megatorn"}', 'megatorn'),
])  # fmt: skip
def test_a_backend_that_other_params_name_is_never_a_line_in_a_log(section, more, expected):
    assert command.asked_backend({'megatron_backend': section, 'more_params': more}) == expected


@pytest.mark.parametrize('text', ["--system it's", '{"max_steps": 1', '--max_steps 1'])
def test_what_ms_swift_takes_as_other_params_of_its_own_backend_goes_on_to_it(text):
    assert command.asked_backend({'megatron_backend': 'transformers', 'more_params': text}) == 'transformers'
    assert command.asked_backend({'megatron_backend': 'transformers', 'more_params': text + ' --backend megatron'}) == 'megatron'


def test_a_mistyped_backend_stops_the_start():
    with pytest.raises(UserError, match="'megatorn' is not known"):
        doors.resolve_ours(job(more_params='--backend megatorn').argv, {})


def test_a_run_gets_a_folder_of_its_own_which_every_worker_names(tmp_path):
    now = time.strptime('2026-12-01 10:30:00', '%Y-%m-%d %H:%M:%S')
    described = job(output_dir=str(tmp_path))
    first, output, logging = command.start_command(described, '/env/bin/swift', now)
    assert (output, logging) == (f'{tmp_path}/v0-20261201-103000', f'{tmp_path}/v0-20261201-103000/runs')
    assert first[:2] == ['/env/bin/swift', 'rlhf'] and first[-6:] == [
        '--add_version', 'False', '--output_dir', output, '--logging_dir', logging,
    ]  # fmt: skip
    (tmp_path / 'v0-20261201-103000').mkdir()
    assert command.start_command(described, 'swift', now)[1].endswith('/v1-20261201-103000')
    typed = job(more_params=f'--output_dir {tmp_path}/here --add_version false --logging_dir {tmp_path}/logs')
    assert command.start_command(typed, 'swift', now)[1:] == (f'{tmp_path}/here', f'{tmp_path}/logs')
    plan = resolve(first[2:], {})
    assert plan.worker_argv[plan.worker_argv.index('--output_dir') + 1] == output
    assert plan.worker_argv[plan.worker_argv.index('--tensorboard_dir') + 1] == logging


def test_the_command_that_is_shown_is_the_one_that_is_started():
    described = job(system='a "quoted" text', envs='A="x y"')
    words, output, logging = command.start_command(described, '/env/bin/swift', time.localtime())
    line = command.shell_line(described, words, f'{logging}/run.log')
    assert line.startswith("NPROC_PER_NODE=4 CUDA_VISIBLE_DEVICES=0,1,2,3 A='x y' nohup swift rlhf --rlhf_type grpo --backend megatron")
    shown = shlex.split(line)
    assert shown[shown.index('rlhf') : -4] == words[1:]
    assert shown[-4:] == ['>', f'{logging}/run.log', '2>&1', '&']


def test_a_checkpoint_that_is_chosen_as_the_model_is_gone_on_from(tmp_path):
    (tmp_path / 'args.json').write_text('{"model": "Qwen/Qwen3-8B", "model_type": "qwen3", "template": "qwen3", "no_save_optim": null}')
    assert argument(job(model=str(tmp_path)).words, 'model') == [str(tmp_path)]  # not a checkpoint of Megatron training
    (tmp_path / 'latest_checkpointed_iteration.txt').write_text('3')
    words = job(model=str(tmp_path)).words
    assert [argument(words, name) for name in ('model', 'model_type', 'resume_from_checkpoint', 'resume_only_model')] == [
        ['Qwen/Qwen3-8B'], ['qwen3'], [str(tmp_path)], [],
    ]  # fmt: skip
    (tmp_path / 'args.json').write_text('{"model": "Qwen/Qwen3-8B", "no_save_optim": true}')
    assert argument(job(model=str(tmp_path)).words, 'resume_only_model') == ['True']


def test_a_plan_belongs_to_its_values_and_not_to_the_moment():
    assert job().key == job().key
    assert len({job().key, job(megatron_tp='2').key, job(envs='A=1').key, job(output_dir='elsewhere').key}) == 4


def test_the_page_shows_layout_batch_length_engine_and_errors_in_its_language(tmp_path):
    rows = tmp_path / 'data.jsonl'
    rows.write_text('{"messages": [{"role": "user", "content": "1 + 1?"}], "solution": "2"}\n' * 64)
    described = job(
        dataset=[str(rows)], model='Qwen/Qwen3-8B', megatron_tp='2', megatron_sequence_parallel=True, megatron_micro_batch_size='8',
        megatron_global_batch_size='32', megatron_batch_check='exact', more_params='--max_steps 6',
    )  # fmt: skip
    plan = doors.resolve_ours([*described.argv, '--dry_run', 'true'], described.environ)
    assert plan.errors == []
    summary = dict(plan_view.summary(plan, 'en'))
    assert summary['Processes'] == '4 = TP 2 x DP 2 + SP'
    assert summary['Completions a step'] == '32 = 8 x DP 2 x 2 (4 prompts x 8)'
    assert summary['A generation'] == '32 completions, 4 prompts, 1 optimizer step'
    assert summary['The run'] == '6 optimizer steps' and summary['Rollouts'] == 'vLLM, colocate'
    assert summary['Memory a device'].startswith('training ') and summary['Memory a device'].endswith('fits a device of 80 GB')
    english, chinese = (plan_view.html(plan, described.notes, lang) for lang in ('en', 'zh'))
    assert 'This run would start.' in english and 'Gradient accumulation steps 1' in english
    assert '可以开始。' in chinese and '梯度累计步数 1 不使用' in chinese
    assert 'Batch plan (sizes count completions)' in english  # the whole report


def test_errors_are_shown_escaped_and_stop_the_start():
    described = job(megatron_tp='3', more_params='--reward_funcs <b>')
    plan = doors.resolve_ours(described.argv, described.environ)
    html = plan_view.html(plan, [], 'zh')
    assert plan.errors and '不能开始' in html and '<b>' not in html.replace('<b>不能开始：</b>', '').replace('<b>警告</b>', '')
    assert plan_view.error_text(plan.errors, 'en').startswith('Nothing was started: ')
    assert 'GPUs or cpu' in plan_view.refusal('Choose GPUs or cpu', 'en')
