"""What becomes of single arguments, of contradictions and of names that do not exist."""

import json
import re
from pathlib import Path

import pytest

from swift_megatron_grpo.args import convert, resolve
from swift_megatron_grpo.args.fields import all_fields

from .conftest import TINY, other_errors

BASE = (
    '--rlhf_type grpo --backend megatron --model tiny --dataset data.jsonl --reward_funcs accuracy --num_generations 8 --batch_check exact'
)


def plan_of(text, world_size=8, base=BASE):
    return resolve(base.split() + (text if isinstance(text, list) else text.split()), {'NPROC_PER_NODE': str(world_size)})


def values_of(plan):
    """The worker's command line as a dictionary of words."""
    result, name = {}, None
    for word in plan.worker_argv:
        if word.startswith('--'):
            name = word[2:]
            result[name] = []
        else:
            result[name].append(word)
    return {key: words[0] if len(words) == 1 else words for key, words in result.items()}


def action_of(plan, given_as):
    return next(row for row in plan.arguments if row.given_as == f'--{given_as}')


def test_a_command_without_backend_is_left_alone(workplace):
    plan = resolve(['--rlhf_type', 'grpo', '--model', 'tiny', '--nonsense', '3'], {})
    assert (plan.is_megatron, plan.errors, plan.worker_argv, plan.arguments) == (False, [], [], [])


@pytest.mark.parametrize('given, trained', [('0', '2147483647'), ('1', '1'), ('42', '42')])
def test_a_seed_of_0_is_one_that_megatron_takes(workplace, given, trained):
    plan = plan_of(f'--seed {given}')
    assert (values_of(plan)['seed'], other_errors(plan)) == (trained, [])
    assert action_of(plan, 'seed').action == ('converted' if given == '0' else 'kept')


def test_a_seed_below_0_is_refused(workplace):
    assert '--seed is -1; it is 0 or more.' in plan_of(['--seed', '-1']).errors


CHORD = '--chord_sft_dataset data.jsonl --chord_sft_per_device_train_batch_size 1 --chord_mu_warmup_steps 0 --chord_mu_decay_steps 10 --chord_mu_peak 0.5'


@pytest.mark.parametrize(
    ('text', 'words'),
    [
        ('--chord_mu_valley 0.1', None),
        ('', '--chord_sft_dataset needs --chord_mu_valley (from 0 to 1)'),
        ('--chord_mu_valley 2', '--chord_mu_valley is 2'),
        ('--chord_mu_valley 0.1 --router_replay_mode R2', 'no rollout has routed'),
    ],
)
def test_expert_answers_are_taken_with_all_that_they_need(text, words, workplace):
    errors = other_errors(plan_of(f'{CHORD} {text}'))
    assert len(errors) == (0 if words is None else 1)
    assert words is None or words in errors[0]


def test_sgd_goes_without_the_distributed_optimizer(workplace):
    plan = plan_of('--optim sgd')
    assert (values_of(plan)['use_distributed_optimizer'], other_errors(plan)) == ('false', [])
    assert 'goes with adam' in other_errors(plan_of('--optim sgd --use_distributed_optimizer true'))[0]


def test_the_losses_that_the_plan_knows_are_those_of_the_registry():
    text = Path(convert.__file__).parents[1].joinpath('step', 'loss.py').read_text(encoding='utf-8')
    assert set(re.findall(r"@register_loss\('(\w+)'", text)) == set(convert.LOSSES)


def test_an_adapter_is_not_merged_at_each_save_as_in_swift_rlhf(workplace):
    assert values_of(plan_of(''))['merge_lora'] == 'false'
    assert values_of(plan_of('--merge_lora true'))['merge_lora'] == 'true'
    assert 'merge_lora' not in values_of(plan_of('--tuner_type full'))


def test_folders_that_hold_nothing_to_go_on_from_are_said_once(workplace):
    (workplace / 'empty').mkdir()
    assert ['generation-000000.jsonl' in error for error in other_errors(plan_of('--replay_rollouts empty'))] == [True]
    assert len(other_errors(plan_of('--resume_from_checkpoint nosuchdir'))) == 1


def test_muon_needs_its_package(workplace):
    assert 'emerging-optimizers' in other_errors(plan_of('--optim muon'))[0]
    plan = plan_of('--optim muon --dry_run true')
    assert other_errors(plan) == [] and any('emerging-optimizers' in warning for warning in plan.warnings)


def test_missing_data_are_said_once(workplace):
    errors = resolve(
        ['--rlhf_type', 'grpo', '--backend', 'megatron', '--model', 'tiny', '--reward_funcs', 'accuracy'], {'NPROC_PER_NODE': '8'}
    ).errors
    assert [error for error in errors if 'data' in error] == [error for error in errors if error.startswith('--dataset is needed')]


def test_megatron_grpo_is_the_same_as_backend_megatron(workplace):
    plan = plan_of('', base=BASE.replace('grpo --backend megatron', 'megatron_grpo'))
    assert plan.is_megatron
    assert other_errors(plan) == []
    assert values_of(plan)['rlhf_type'] == 'grpo'


def test_other_training_types_are_refused_by_name(workplace):
    plan = plan_of('', base=BASE.replace('grpo', 'dpo', 1))
    assert any('--rlhf_type dpo' in error and 'megatron rlhf --rlhf_type dpo' in error for error in plan.errors)


def test_a_script_without_tuner_rate_or_epochs_keeps_the_meaning_of_swift_rlhf(workplace):
    plan = plan_of('')
    values = values_of(plan)
    assert other_errors(plan) == []
    assert values['tuner_type'] == 'lora'
    assert values['lr'] == '0.0001'
    assert values['num_train_epochs'] == '3.0'
    assert values['beta'] == '0.04'
    assert values['lr_scheduler_type'] == 'cosine'
    assert values['use_vllm'] == 'false'
    assert values['output_dir'] == 'output/tiny'
    assert (values['recompute_granularity'], values['recompute_method'], values['recompute_num_layers']) == ('full', 'uniform', '1')
    assert values_of(plan_of('--tuner_type full'))['lr'] == '1e-05'


def test_c17_the_effective_numbers_of_a_usual_script(workplace):
    text = (
        '--per_device_train_batch_size 2 --gradient_accumulation_steps 4 --learning_rate 1e-6 --warmup_ratio 0.1 '
        '--lr_scheduler_type cosine '
        '--max_grad_norm 0.5 --max_steps 3'
    )
    plan = plan_of(text, world_size=1)
    values = values_of(plan)
    assert other_errors(plan) == []
    assert (values['lr'], values['clip_grad'], values['train_iters'], values['tuner_type']) == ('1e-06', '0.5', '3', 'lora')
    assert (values['micro_batch_size'], values['global_batch_size'], values['steps_per_generation']) == ('2', '8', '1')
    assert plan.schedule.optimizer_steps == 3
    assert plan.schedule.learning_rate['warmup_steps'] == 1
    # warm-up 1 of 3: step 0 at 0, step 1 at the peak, step 2 half-way down
    assert plan.schedule.learning_rate['step_0'] == 0.0
    assert plan.schedule.learning_rate['step_1'] == 1e-6
    assert plan.schedule.learning_rate['step_last'] == pytest.approx(0.5e-6, abs=1e-18)


@pytest.mark.parametrize(
    ('typed', 'meant'),
    [
        ('learnin_rate', 'learning_rate'),
        ('learning_rat', 'learning_rate'),
        ('num_generation', 'num_generations'),
        ('warm_up_ratio', 'warmup_ratio'),
        ('tp', 'tensor_model_parallel_size'),
        ('pp', 'pipeline_model_parallel_size'),
        ('cp', 'context_parallel_size'),
        ('ep', 'expert_model_parallel_size'),
        ('etp', 'expert_tensor_parallel_size'),
        ('vpp', 'virtual_pipeline_model_parallel_size'),
        ('train_type', 'tuner_type'),
        ('save_interval', 'save_steps'),
        ('num_workers', 'dataloader_num_workers'),
        ('log_interval', 'logging_steps'),
        ('load', 'mcore_model'),
    ],
)
def test_a_name_that_does_not_exist_gets_a_suggestion_and_is_not_swallowed(typed, meant, workplace):
    plan = plan_of(f'--{typed} 2 --ignore_args_error true')
    assert len(other_errors(plan)) == 1
    assert f'--{typed} 2' in plan.errors[0]
    assert f'did you mean --{meant}' in plan.errors[0]


@pytest.mark.parametrize(
    ('text', 'name', 'value', 'action'),
    [
        ('--learning_rate 1e-6', 'lr', '1e-06', 'renamed'),
        ('--max_steps 7', 'train_iters', '7', 'renamed'),
        ('--max_grad_norm 0.3', 'clip_grad', '0.3', 'renamed'),
        ('--adam_epsilon 1e-6', 'adam_eps', '1e-06', 'renamed'),
        ('--optim adamw_torch', 'optimizer', 'adam', 'converted'),
        ('--optim sgd', 'sgd_momentum', '0.0', 'converted'),
        ('--optim muon', 'optimizer', 'muon', 'converted'),
        ('--gradient_checkpointing false', 'recompute_granularity', 'none', 'converted'),
        ('--save_only_model true', 'no_save_rng', 'true', 'converted'),
        ('--router_aux_loss_coef 0.001', 'moe_aux_loss_coeff', '0.001', 'renamed'),
        ('--logging_dir runs', 'tensorboard_dir', 'runs', 'renamed'),
        ('--attn_impl flash_attention_3', 'attention_backend', 'flash_3', 'converted'),
        ('--attn_impl eager', 'padding_free', 'false', 'converted'),
        ('--sequence_parallel_size 2', 'context_parallel_size', '2', 'renamed'),
        ('--max_new_tokens 99', 'max_completion_length', '99', 'renamed'),
        ('--packing true', 'padding_free', 'true', 'converted'),
        ('--padding_free false', 'padding_free', 'false', 'kept'),
        ('--target_modules q_proj k_proj v_proj o_proj', 'target_modules', ['linear_qkv', 'linear_proj'], 'converted'),
        ('--modules_to_save embed_tokens lm_head', 'modules_to_save', ['word_embeddings', 'output_layer'], 'converted'),
        ('--freeze_parameters model.embed_tokens', 'freeze_parameters', 'embedding.word_embeddings', 'converted'),
        ('--save_total_limit 1', 'save_total_limit', '2', 'converted'),
        ('--max_steps 40 --save_steps 0.26', 'save_steps', '11', 'converted'),
        ('--report_to none', 'report_to', 'none', 'kept'),
        ('--no_dataset_shuffle', 'dataset_shuffle', 'false', 'kept'),
        ('--dataset-num-proc 3', 'dataset_num_proc', '3', 'kept'),
        ('--beta=0', 'beta', '0.0', 'kept'),
        ('--bf16', 'bf16', 'true', 'kept'),
        ('--stop_words a b', 'stop_words', ['a', 'b'], 'kept'),
    ],
)
def test_a_value_keeps_its_meaning_under_megatrons_name(text, name, value, action, workplace):
    plan = plan_of(f'--dry_run true {text}')
    assert other_errors(plan) == []
    assert values_of(plan)[name] == value
    given = next(word for word in reversed(text.split()) if word.startswith('--')).lstrip('-').partition('=')[0]
    assert action_of(plan, given).action == action


@pytest.mark.parametrize(
    'text',
    [
        '--deepspeed zero3',
        '--ddp_find_unused_parameters true',
        '--move_model_batches 8',
        '--ds3_gather_for_generation false',
        '--fsdp fsdp2',
    ],
)
def test_what_has_no_meaning_on_megatron_is_said_and_does_not_fail(text, workplace):
    plan = plan_of(text)
    assert other_errors(plan) == []
    row = action_of(plan, text.split()[0].lstrip('-'))
    assert row.action == 'no_effect'
    assert row.reason


@pytest.mark.parametrize(
    ('text', 'words'),
    [
        ('--advantage_reweight rlsd', None),
        ('--sdar_loss_coef 0.1', None),
        ('--advantage_reweight rlsd --sdar_loss_coef 0.1', 'choose one'),
        ('--advantage_reweight rlsd --teacher_model_server http://127.0.0.1:1', 'teacher_model_server'),
        ('--advantage_reweight rlsd --loss_type real', 'one a sequence'),
        ('--advantage_reweight rlsd --rlsd_lambda 1.5', 'from 0 to 1'),
        ('--sdar_loss_coef 0.1 --sdar_gate_beta 0', 'above 0'),
    ],
)
def test_self_distillation_is_taken_and_its_contradictions_are_refused(text, words, workplace):
    errors = other_errors(plan_of(text))
    assert len(errors) == (0 if words is None else 1)
    assert words is None or words in errors[0]


@pytest.mark.parametrize(
    ('text', 'words'),
    [
        ('--quant_bits 4', 'no QLoRA'),
        ('--quant_method bnb', 'no QLoRA'),
        ('--use_galore true', 'GaLore'),
        ('--lisa_activated_layers 2', 'LISA'),
        ('--tuner_type llamapro', 'adds layers'),
        ('--tuner_type adalora', 'rank changes'),
        ('--tuner_type vera', 'LoRA only'),
        ('--tuner_type reft', 'hidden states'),
        ('--use_dora true', 'no DoRA'),
        ('--optim adafactor', 'adamw_torch'),
        ('--tuner_backend unsloth', 'unsloth'),
        ('--callbacks early_stop', 'transformers trainer'),
        ('--use_megatron_fsdp true', 'distributed optimizer'),
        ('--lr_scheduler_type reduce_lr_on_plateau', 'evaluation metric'),
    ],
)
def test_what_cannot_work_is_refused_by_name_with_the_reason(text, words, workplace):
    plan = plan_of(text)
    assert len(other_errors(plan)) == 1, plan.errors
    assert text.split()[0] in plan.errors[0]
    assert words in other_errors(plan)[0]


@pytest.mark.parametrize(
    'text', ['--use_galore false', '--neftune_noise_alpha 0', '--tuner_backend peft', '--push_to_hub false', '--use_dora false']
)
def test_a_refused_argument_that_asks_for_nothing_is_no_error(text, workplace):
    plan = plan_of(text)
    assert other_errors(plan) == []
    assert action_of(plan, text.split()[0].lstrip('-')).action in ('no_effect', 'kept')


@pytest.mark.parametrize(
    ('text', 'shown'),
    [
        ('--learning_rate 1e-6 --lr 1e-5', ('1e-06', '1e-05')),
        ('--max_steps 3 --train_iters 4', ('3', '4')),
        ('--per_device_train_batch_size 2 --micro_batch_size 4', ('2', '4')),
        ('--sequence_parallel_size 2 --context_parallel_size 4', ('2', '4')),
        ('--max_grad_norm 0.5 --clip_grad 1.0', ('0.5', '1.0')),
        ('--warmup_ratio 0.1 --lr_warmup_fraction 0.2', ('0.1', '0.2')),
        ('--gradient_checkpointing false --recompute_granularity full', ('false', 'full')),
    ],
)
def test_two_names_of_one_setting_that_differ_are_refused_and_both_shown(text, shown, workplace):
    plan = plan_of(text)
    assert len(other_errors(plan)) == 1, plan.errors
    assert all(word in plan.errors[0] for word in shown)


@pytest.mark.parametrize(
    'text',
    ['--learning_rate 1e-6 --lr 1e-6', '--max_steps 3 --train_iters 3', '--warmup_ratio 0.1 --lr_warmup_fraction 0.1', '--max_steps -1'],
)
def test_two_names_of_one_setting_that_agree_are_fine(text, workplace):
    assert other_errors(plan_of(text)) == []


def test_megatrons_own_names_are_taken_as_they_are(workplace):
    plan = plan_of(
        '--micro_batch_size 1 --global_batch_size 32 --lr 1e-6 --train_iters 10 --min_lr 1e-7 --lr_warmup_fraction 0.1 --clip_grad 0.5'
    )
    values = values_of(plan)
    assert other_errors(plan) == []
    assert (values['min_lr'], values['lr_warmup_fraction'], values['train_iters']) == ('1e-07', '0.1', '10')
    assert 'lr_scheduler_type' not in values


@pytest.mark.parametrize(
    ('text', 'words'),
    [
        ('--vllm_mode colocate --vllm_server_host 10.0.0.1', 'the engine is here or there'),
        ('--vllm_mode server', '--vllm_server_host'),
        ('--use_vllm true', '--vllm_mode'),
        ('--use_vllm false --vllm_mode colocate', '--use_vllm false'),
        ('--vllm_mode colocate --vllm_tensor_parallel_size 3', 'nearest valid values are 2 or 4'),
        ('--num_generations 7', 'num_generations'),
        ('--async_generate true', '--vllm_mode server'),
        ('--vllm_mode server --vllm_server_host a --async_generate true', '--rollout_importance_sampling_mode'),
        ('--reward_weights 1 2', 'needs 1'),
        ('--reward_funcs acuracy', 'Did you mean accuracy?'),
        ('--reward_funcs soft_overlong', '--soft_cache_length'),
        ('--truncation_strategy right', 'left or delete'),
        ('--tuner_type lora --ref_model other/model', '--ref_adapters'),
        ('--virtual_pipeline_model_parallel_size 2', '--pipeline_model_parallel_size 2'),
        ('--decoder_first_pipeline_num_layers 1', 'there is one stage'),
        ('--tensor_model_parallel_size 3', 'do not divide'),
        ('--tensor_model_parallel_size 4', 'attention heads'),
        ('--pipeline_model_parallel_size 4', 'layers'),
        ('--expert_model_parallel_size 2', 'has no experts'),
        ('--target_modules q_proj lm_head', '--target_modules output_layer: mcore-bridge has no adapters'),
        ('--target_modules all-linear all-embedding', '--modules_to_save embed_tokens'),
        ('--streaming true', '--max_steps'),
        ('--dataset data.jsnol', 'does not exist'),
        ('--dataset ./date.jsonl', 'There is ./data.jsonl'),
        ('--model ./tinny', 'There is ./tiny'),
        ('--external_plugins plug.py', 'does not exist'),
        ('--resume_from_checkpoint nowhere', 'does not exist'),
        ('--temperature 0', 'more than 0'),
        ('--learning_rate -1', 'at least 0'),
        ('--learning_rate fast', 'a number'),
        ('--num_train_epochs nan', 'a finite number'),
        ('--warmup_steps inf', 'a finite number'),
        ('--num_generations 2.5', 'a whole number'),
        ('--scale_rewards grup', 'Did you mean group?'),
        ('--vllm_mode colocated', 'Did you mean colocate?'),
        ('--loss_type gpro', 'Did you mean grpo?'),
        ('--lr_scheduler_type cosin', 'Did you mean cosine?'),
        ('--lr_scheduler_type cosine_with_min_lr', 'min_lr'),
        ('--warmup_steps 3 --warmup_ratio 0.1', 'Give one of them'),
        ('--bf16 true --fp16 true', 'choose one'),
        ('--save_steps 0.5', '--max_steps'),
        ('--dual_clip 1', 'more than 1'),
        ('--tuner_type full --vllm_mode colocate --vllm_enable_lora true', 'adapter'),
        ('--verify_weight_sync sometimes', 'first, off'),
        ('--backend megatorn', 'megatron'),
        ('--min_p 0.1', 'transformers engine'),
        ('--multi_turn_scheduler gym_sheduler --vllm_mode colocate', 'Did you mean gym_scheduler?'),
        ('--multi_turn_scheduler gym_scheduler --gym_env maths_env --vllm_mode colocate', 'Did you mean math_env?'),
        ('--use_gym_env true --vllm_mode colocate', '--multi_turn_scheduler gym_scheduler'),
        ('--vllm_mode server --vllm_server_host a b c --vllm_server_group_port 1 2', '3 servers'),
        ('--vllm_mode server --vllm_server_host a b c --vllm_server_port 1 2', '3 hosts'),
        ('--reward_model m/r --reward_model_plugin genrn', 'Did you mean genrm?'),
        ('--tuner_type full --ref_adapters some/adapter', 'ms-swift would train LoRA then'),
        ('--tuner_type lora_llm --save_only_model true --merge_lora false', '--merge_lora true'),
        ('--muon_lr 1e-3', '--optimizer muon'),
    ],
)
def test_a_contradiction_or_a_wrong_value_is_refused_before_a_model_is_loaded(text, words, workplace):
    plan = plan_of(text)
    assert plan.errors, 'an error was expected'
    assert any(words in error for error in plan.errors), plan.errors


@pytest.mark.parametrize(
    'text',
    [
        '--pipeline_model_parallel_size 2 --virtual_pipeline_model_parallel_size 1 --per_device_train_batch_size 2',
        '--pipeline_model_parallel_size 2 --decoder_first_pipeline_num_layers 1 --per_device_train_batch_size 2',
        '--num_iterations 2',
        '--sync_ref_model true --tuner_type full',
        '--vllm_mode server --vllm_server_host a --async_generate true --rollout_importance_sampling_mode token_truncate',
        '--reward_model some/model --reward_model_plugin genrm',
        '--loss_type luspo',
        '--loss_type my.module:loss',
        '--dynamic_sample true --overlong_filter true',
    ],
)
def test_what_upstream_refuses_and_this_trainer_has_is_accepted(text, workplace):
    assert other_errors(plan_of(text)) == []


def test_a_missing_model_data_set_and_reward_are_three_errors(workplace):
    plan = resolve(['--rlhf_type', 'grpo', '--backend', 'megatron'], {})
    assert [next(name for name in ('--model', '--dataset', '--reward_funcs') if name in error) for error in plan.errors if '--' in error][
        :3
    ] == [
        '--model',
        '--dataset',
        '--reward_funcs',
    ]


def test_a_reward_of_a_plugin_is_read_from_its_source(workplace):
    (workplace / 'plug.py').write_text("from swift.rewards import ORM, orms\norms['mine'] = ORM\n", encoding='utf-8')
    assert other_errors(plan_of('--external_plugins plug.py --reward_funcs mine')) == []
    plan = plan_of('--external_plugins plug.py --reward_funcs mien')
    assert len(other_errors(plan)) == 1
    assert 'Did you mean mine?' in plan.errors[0]
    (workplace / 'plug.py').write_text('from elsewhere import register\nregister()\n', encoding='utf-8')
    assert other_errors(plan_of('--external_plugins plug.py --reward_funcs mien')) == [], (
        'what the text does not tell is left to the worker'
    )


@pytest.mark.parametrize('text', [
    "orms |= {'mine': ORM}", "registry = orms\nregistry['mine'] = ORM", "orms.__setitem__('mine', ORM)", "orms: dict = {'mine': ORM}",
    "import importlib\nimportlib.import_module('of_my_own')", "__import__('of_my_own')", "exec(open('of_my_own.py').read())",
    'x' + '.a' * 20_000, '-' * 50_000 + '1',
])  # fmt: skip
def test_a_plugin_that_may_register_a_name_in_another_way_is_left_to_the_worker(workplace, text):
    (workplace / 'plug.py').write_text(f'from swift.rewards import ORM, orms\n{text}\n', encoding='utf-8')
    assert other_errors(plan_of('--external_plugins plug.py --reward_funcs mine')) == []


@pytest.mark.parametrize('text', ["import importlib\nimportlib.import_module('of_my_own')", 'x' + '.a' * 20_000])
def test_a_plugin_that_may_register_a_model_in_another_way_is_left_to_the_worker(workplace, text):
    (workplace / 'plug.py').write_text(f'{text}\n', encoding='utf-8')
    assert other_errors(plan_of('--external_plugins plug.py --model_type of_my_own')) == []


def test_a_resumed_run_names_megatrons_checkpoint_arguments(workplace):
    (workplace / 'checkpoint-5').mkdir()
    assert 'not a complete checkpoint' in plan_of('--resume_from_checkpoint checkpoint-5').errors[0]
    (workplace / 'checkpoint-5' / 'latest_checkpointed_iteration.txt').write_text('5', encoding='utf-8')
    (workplace / 'checkpoint-5' / 'args.json').write_text('{"no_save_optim": true}', encoding='utf-8')
    assert 'without optimizer state' in plan_of('--resume_from_checkpoint checkpoint-5').errors[0]
    (workplace / 'checkpoint-5' / 'args.json').write_text('{"no_save_optim": false}', encoding='utf-8')
    values = values_of(plan_of('--resume_from_checkpoint checkpoint-5'))
    assert (values['mcore_adapter'], values['finetune']) == ('checkpoint-5', 'false')
    values = values_of(plan_of('--resume_from_checkpoint checkpoint-5 --tuner_type full --resume_only_model true'))
    assert (values['mcore_model'], values['finetune'], values['no_load_optim']) == ('checkpoint-5', 'true', 'true')
    (workplace / 'checkpoint-5' / 'latest_checkpointed_iteration.txt').unlink()
    (workplace / 'checkpoint-5' / 'trainer_state.json').write_text('{}', encoding='utf-8')
    assert 'transformers trainer' in plan_of('--resume_from_checkpoint checkpoint-5').errors[0]


def test_evaluation_follows_saving_and_needs_data(workplace):
    assert values_of(plan_of(''))['eval_strategy'] == 'no'
    values = values_of(plan_of('--split_dataset_ratio 0.1 --save_steps 20'))
    assert (values['eval_strategy'], values['eval_steps']) == ('steps', '20')
    values = values_of(plan_of('--val_dataset data.jsonl --eval_strategy no'))
    assert (values['eval_strategy'], values['eval_iters']) == ('no', '0')


def test_every_value_of_the_worker_reads_back_as_it_was(workplace):
    plan = plan_of(['--system', 'one "two" three', '--lr_scheduler_kwargs', '{"num_cycles": 0.5}', '--model_kwargs', '{"A": 1}'])
    values = values_of(plan)
    assert values['system'] == 'one "two" three'
    assert values['lr_scheduler_kwargs'] == '{"num_cycles": 0.5}'
    assert plan.worker_argv.count('--system') == 1


def test_a_yaml_file_gives_the_same_plan_as_its_words(workplace):
    (workplace / 'run.yaml').write_text(
        'ENV:\n  NPROC_PER_NODE: 4\nrlhf_type: grpo\nbackend: megatron\nmodel: tiny\ndataset: [data.jsonl]\nreward_funcs: [accuracy]\n'
        'learning_rate: 1.0e-6\nnum_generations: 4\nbatch_check: exact\nlr_scheduler_type: '
        'cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 1.0e-7}\n',
        encoding='utf-8',
    )
    plan = resolve(['run.yaml', '--beta', '0'], {})
    assert other_errors(plan) == []
    assert plan.batch_plan.world_size == 4
    assert values_of(plan)['lr'] == '1e-06'
    assert values_of(plan)['beta'] == '0.0'
    assert resolve(['run.yaml'], {'NPROC_PER_NODE': '2'}).batch_plan.world_size == 2, 'the environment wins over ENV'


def test_words_that_yaml_reads_as_truth_values_keep_their_meaning(workplace):
    (workplace / 'run.yaml').write_text('save_strategy: no\nverify_weight_sync: off\ndry_run: true\n', encoding='utf-8')
    plan = resolve(['run.yaml', *BASE.split()], {'NPROC_PER_NODE': '8'})
    assert other_errors(plan) == []
    assert (values_of(plan)['save_strategy'], values_of(plan)['verify_weight_sync'], plan.dry_run) == ('no', 'off', 'true')
    assert plan_of('--dry_run').dry_run == 'true'


def test_another_backend_is_left_alone_or_refused(workplace):
    assert not resolve(['--rlhf_type', 'grpo', '--backend', 'transformers'], {}).is_megatron
    assert not resolve(['--rlhf_type', 'grpo'], {}).is_megatron
    plan = resolve(['--rlhf_type', 'grpo', '--backend', 'megatorn', '--ignore_args_error', 'true'], {})
    assert plan.is_megatron
    assert any("--backend is 'megatorn'" in error and 'Did you mean megatron?' in error for error in plan.errors)


def test_files_missing_here_are_warnings_for_a_command_that_runs_elsewhere(workplace):
    argv = [*BASE.split(), '--external_plugins', 'plugins/mine.py', '--reward_funcs', 'mine']
    assert any('plugins/mine.py does not exist' in error for error in resolve(argv, {'NPROC_PER_NODE': '8'}).errors)
    plan = resolve(argv, {'NPROC_PER_NODE': '8'}, elsewhere=True)
    assert other_errors(plan) == []
    assert any('plugins/mine.py does not exist here' in warning for warning in plan.warnings)


def test_an_unfinished_part_is_refused_before_the_start_with_the_workers_own_list(workplace, monkeypatch):
    from swift_megatron_grpo.args import pending

    for name, harmless, instead in pending.not_yet():
        assert name in all_fields()
        assert len(harmless) >= 1
        assert instead
    monkeypatch.setattr(pending, 'not_yet', lambda: (('num_iterations', (1,), 'use 1'),))
    plan = plan_of('--num_iterations 3')
    assert plan.errors == ['--num_iterations 3: not available with --backend megatron in this version; use 1.']
    assert plan_of('--num_iterations 1').errors == []


@pytest.mark.parametrize(
    ('text', 'words'),
    [
        ('--kl_cov_coef 0.5', '--kl_cov_coef acts with --kl_cov_ratio only'),
        ('--tau_pos 2.0', '--tau_pos acts with --loss_type sapo only'),
        ('--tuner_type full --lora_rank 4 --use_rslora true', '--lora_rank, --use_rslora acts with --tuner_type lora only'),
        ('--max_staleness 2', '--max_staleness acts with --async_generate only'),
        ('--csa_dense_mode true', '--csa_dense_mode has no effect with Megatron-Core 0.16'),
        ('--cosine_max_len 9', '--cosine_max_len acts with --reward_funcs cosine only'),
        (
            '--recompute_granularity selective --recompute_num_layers 2',
            '--recompute_num_layers acts with --recompute_granularity full only',
        ),
    ],
)
def test_an_argument_away_from_what_it_belongs_to_is_said_to_be_without_effect(text, words, workplace, monkeypatch):
    monkeypatch.setattr('swift_megatron_grpo.args.checks.installed_version', lambda name: '0.16.1')
    plan = plan_of(text)
    assert other_errors(plan) == []
    assert any(words in warning for warning in plan.warnings), plan.warnings


def test_an_argument_beside_what_it_belongs_to_is_not_warned_of(workplace):
    plan = plan_of('--lora_rank 4 --loss_type sapo --tau_pos 2.0 --kl_cov_ratio 0.01 --kl_cov_coef 0.5')
    assert not any('acts with' in warning for warning in plan.warnings), plan.warnings


def test_every_name_of_that_list_exists():
    from swift_megatron_grpo.args.belongs import BELONGS

    assert [name for names, parent, _ in BELONGS for name in [*names.split(), parent] if name not in all_fields()] == []


@pytest.mark.parametrize(
    ('text', 'words'),
    [
        ('--tensor_model_parallel_size 2 --expert_model_parallel_size 4', 'needs --sequence_parallel true'),
        ('--tensor_model_parallel_size 2 --expert_model_parallel_size 4 --sequence_parallel true', ''),
        ('--expert_model_parallel_size 8', ''),
        ('--tensor_model_parallel_size 2 --expert_tensor_parallel_size 2 --sequence_parallel true', 'no adapters on experts that are split'),
        ('--tensor_model_parallel_size 2 --expert_tensor_parallel_size 2 --sequence_parallel true --target_modules q_proj', ''),
        ('--tensor_model_parallel_size 2 --expert_tensor_parallel_size 2 --sequence_parallel true --tuner_type full', ''),
        ('--expert_model_parallel_size 3', 'do not divide'),
        ('--pipeline_model_parallel_size 8', ''),
        ('--pipeline_model_parallel_size 8 --virtual_pipeline_model_parallel_size 4', 'do not divide by pipeline_model_parallel_size 8 x'),
    ],
)
def test_layouts_of_a_mixture_of_experts(text, words, workplace):
    argv = BASE.replace('--model tiny', '--model Qwen/Qwen3-30B-A3B').split()
    plan = resolve([*argv, *text.split(), '--gradient_accumulation_steps', '8'], {'NPROC_PER_NODE': '8'})
    errors = other_errors(plan)
    if words:
        assert any(words in error for error in errors), errors
    else:
        assert errors == []


def test_key_value_heads_and_tensor_parallel_must_fit(workplace):
    argv = BASE.replace('--model tiny', '--model Qwen/Qwen2.5-14B').split()
    plan = resolve([*argv, '--tensor_model_parallel_size', '5', '--gradient_accumulation_steps', '8'], {'NPROC_PER_NODE': '5'})
    assert any('8 key/value heads' in error for error in plan.errors), plan.errors


@pytest.mark.parametrize(
    ('text', 'error', 'warning'),
    [
        ('', 'its attention has learned sinks', 'adapters of experts are written one an expert'),
        ('--attention_backend fused', '', 'adapters of experts are written one an expert'),
        ('--attention_backend fused --merge_lora true', '', ''),
        ('--attention_backend fused --target_modules linear_qkv', '', ''),
        ('--attention_backend fused --tuner_type full', '', ''),
    ],
)
def test_what_a_config_json_says_of_a_family(text, error, warning, workplace):
    sizes = {'hidden_size': 64, 'num_hidden_layers': 4, 'num_attention_heads': 4, 'num_key_value_heads': 2, 'vocab_size': 320,
             'num_local_experts': 4, 'sliding_window': 128, 'layer_types': ['sliding_attention', 'full_attention'] * 2}
    folder = workplace / 'oss'
    folder.mkdir()
    (folder / 'config.json').write_text(json.dumps({'model_type': 'gpt_oss', **sizes}))
    argv = BASE.replace('--model tiny', f'--model {folder}').split()
    plan = resolve([*argv, '--gradient_accumulation_steps', '8', '--tuner_type', 'lora', *text.split()], {'NPROC_PER_NODE': '1'})
    errors = other_errors(plan)
    assert any(error in message for message in errors) if error else errors == []
    assert any(warning in message for message in plan.warnings) if warning else not any('adapters of experts' in message for message in plan.warnings)


def test_a_checkpoint_of_another_layout_or_tuner_cannot_be_gone_on_from(workplace):
    folder = workplace / 'checkpoint-2'
    folder.mkdir()
    (folder / 'latest_checkpointed_iteration.txt').write_text('2')
    (folder / 'args.json').write_text(json.dumps({'tensor_model_parallel_size': 2, 'pipeline_model_parallel_size': 1, 'tuner_type': 'full'}))
    resume = f'--resume_from_checkpoint {folder} --tuner_type full'
    assert any('with TP 2 and PP 1, and this run has TP 1 and PP 1' in error for error in plan_of(resume).errors)
    assert not any('with TP 2' in error for error in plan_of(f'{resume} --resume_only_model true').errors)
    assert not any('with TP 2' in error for error in plan_of(f'{resume} --use_distributed_optimizer false').errors)
    assert any('is of --tuner_type full, and this run has --tuner_type lora' in error for error in plan_of(resume.replace(' full', ' lora')).errors)


@pytest.mark.parametrize(
    ('saved', 'text', 'words'),
    [
        ({'tensor_model_parallel_size': 2, 'dist_ckpt_optim_fully_reshardable': True}, '', None),
        ({'tensor_model_parallel_size': 2, 'tuner_type': 'lora'}, '--resume_only_model true', 'version 0.1.0 wrote with TP 2.*--adapters checkpoint-2'),
        ({'tensor_model_parallel_size': 1, 'tuner_type': 'lora'}, '--resume_only_model true', None),
        ({'tensor_model_parallel_size': 2, 'tuner_type': 'lora', 'format': 2}, '--resume_only_model true', None),
    ],
)
def test_which_layouts_go_on_from_a_checkpoint(workplace, saved, text, words):
    folder = workplace / 'checkpoint-2'
    folder.mkdir()
    (folder / 'latest_checkpointed_iteration.txt').write_text('2')
    (folder / 'trainer_state.json').write_text(json.dumps({'iteration': 2, **({'format': 2} if saved.pop('format', None) else {})}))
    layout = {'tensor_model_parallel_size': 1, 'pipeline_model_parallel_size': 1, 'tuner_type': 'full', **saved}
    (folder / 'args.json').write_text(json.dumps(layout))
    plan = plan_of(f'--resume_from_checkpoint checkpoint-2 --tuner_type {layout["tuner_type"]} {text}', world_size=4)
    found = [error for error in plan.errors if 'checkpoint-2' in error]
    assert (len(found) == 1 and re.search(words, found[0])) if words else found == []


@pytest.mark.parametrize(
    ('saved', 'text', 'refused'),
    [
        ((1, 2, 1), '', True),  # TP, EP, ETP
        ((1, 2, 1), '--expert_model_parallel_size 4', False),
        ((1, 2, 1), '--tensor_model_parallel_size 2', False),
        ((1, 1, 1), '--expert_model_parallel_size 2', True),
        ((1, 1, 1), '--tensor_model_parallel_size 2', True),
        ((1, 1, 1), '--tensor_model_parallel_size 2 --expert_tensor_parallel_size 2', False),
        ((1, 1, 1), '--tensor_model_parallel_size 2 --resume_only_model true', False),
        ((1, 1, 1), '--pipeline_model_parallel_size 2', False),
    ],
)
def test_which_layouts_of_experts_go_on_from_a_checkpoint(workplace, saved, text, refused):
    config = {**TINY, 'model_type': 'qwen3_moe', 'num_experts': 4, 'num_experts_per_tok': 2, 'moe_intermediate_size': 32}
    (workplace / 'tiny' / 'config.json').write_text(json.dumps(config))
    folder = workplace / 'checkpoint-2'
    folder.mkdir()
    (folder / 'latest_checkpointed_iteration.txt').write_text('2')
    names = ('tensor_model_parallel_size', 'expert_model_parallel_size', 'expert_tensor_parallel_size')
    layout = {**dict(zip(names, saved)), 'tuner_type': 'full', 'dist_ckpt_optim_fully_reshardable': True}
    (folder / 'args.json').write_text(json.dumps(layout))
    plan = plan_of(f'--resume_from_checkpoint checkpoint-2 --tuner_type full {text}', world_size=4)
    found = [error for error in plan.errors if 'checkpoint-2' in error]
    assert (len(found) == 1 and 'EP x ETP is not TP' in found[0]) if refused else found == [], found


def test_an_output_folder_that_cannot_be_made_is_refused(workplace):
    (workplace / 'afile').write_text('')
    assert any('afile is not a folder' in error for error in plan_of('--output_dir afile/out').errors)
    assert not any('--output_dir' in error for error in plan_of('--output_dir new/er/out').errors)


def test_an_output_folder_that_cannot_be_written_is_refused_and_said_by_a_dry_run(workplace, monkeypatch):
    monkeypatch.setattr('os.access', lambda path, mode: False)
    assert any('--output_dir out cannot be written here' in error for error in plan_of('--output_dir out').errors)
    plan = plan_of('--output_dir out --dry_run true')
    assert not any('--output_dir' in error for error in plan.errors)
    assert any('--output_dir out cannot be written here' in warning for warning in plan.warnings)


def test_a_model_that_is_not_here_is_held_against_its_model_type(workplace):
    argv = BASE.replace('--model tiny', '--model mistralai/Mistral-7B-v0.3').split()
    plan = resolve([*argv, '--model_type', 'mistral', '--dry_run', 'true'], {})
    assert any('does not know the family mistral' in error for error in plan.errors)
    assert any('no check of family' in warning for warning in plan.warnings)
    assert any('--eval_on_start is given, and there is no validation data' in warning for warning in plan_of('--eval_on_start true').warnings)


@pytest.mark.parametrize(
    ('text', 'words'),
    [
        ('--model_type qwen99', "--model_type 'qwen99' is not one that ms-swift knows. Did you mean qwen"),
        ('--template qwen2_5x', "--template 'qwen2_5x' is not one that ms-swift knows. Did you mean qwen2_5"),
        ('--template qwen2_5 --model_type qwen2', ''),
        ('', '--model_type is needed: ./tiny-model can be qwen2, qwen2_gte by the architecture in its config.json'),
        ('--model_type qwen99 --external_plugins models.py', ''),
        ('--model_type mistral', 'does not know the family mistral'),
    ],
)
def test_names_of_model_types_and_templates(text, words, workplace):
    (workplace / 'models.py').write_text('from swift.model import register_model\nregister_model(make())\n')
    (workplace / 'tiny-model').mkdir()
    (workplace / 'tiny-model' / 'config.json').write_text(json.dumps({'model_type': 'qwen2', 'architectures': ['Qwen2ForCausalLM']}))
    argv = BASE.replace('--model tiny', '--model ./tiny-model').split()
    errors = other_errors(resolve([*argv, '--gradient_accumulation_steps', '8', *text.split()], {'NPROC_PER_NODE': '1'}))
    assert any(words in error for error in errors) if words else errors == []


def test_every_own_argument_is_read_by_the_code_of_the_trainer():
    import re
    from pathlib import Path

    from swift_megatron_grpo.args.own import OWN_FIELDS

    package = Path(__file__).resolve().parents[2] / 'swift_megatron_grpo'
    files = [path for path in package.rglob('*.py') if path.parts[-2] not in ('args', 'table')]
    code = '\n'.join(path.read_text(encoding='utf-8') for path in files if path.name != 'config.py')
    checked_at_start = (package / 'config.py').read_text(encoding='utf-8').partition('def __post_init__')[2]
    # read by ms-swift's trainer or by its arguments, or decided before the workers start
    by_others = {
        'backend',
        'batch_check',
        'allow_uncorrected_async',
        'vllm_data_parallel_size',
        'reward_model_type',
        'reward_model_revision',
    }
    for field in OWN_FIELDS:
        if not field.door_only and field.name not in by_others:
            assert re.search(rf'\b{field.name}\b', code + checked_at_start), f'--{field.name} is accepted, and nothing reads it'


def test_a_configuration_that_cannot_be_read_is_one_error(workplace, monkeypatch):
    def error_of(name, text):
        (workplace / name).write_text(text, encoding='utf-8')
        return resolve([name, '--backend', 'megatron'], {}).errors[0]

    assert 'is not valid JSON' in error_of('run.json', '{"a": ')
    assert 'holds list; a mapping' in error_of('list.yaml', '- a\n')
    assert 'missing.yaml cannot be read' in resolve(['missing.yaml', '--backend', 'megatron'], {}).errors[0]
    monkeypatch.setitem(__import__('sys').modules, 'yaml', None)
    assert 'needs PyYAML (pip install pyyaml)' in error_of('run.yaml', 'a: 1\n')
    (workplace / 'run.json').write_text('{"rlhf_type": "grpo", "model": "tiny", "dataset": ["data.jsonl"], "reward_funcs": "accuracy"}')
    plan = resolve(['run.json', '--backend', 'megatron', '--batch_check', 'exact'], {'NPROC_PER_NODE': '8'})
    assert other_errors(plan) == []


@pytest.mark.parametrize(
    ('text', 'words'),
    [
        ('--tensor_parallel_size 4', 'did you mean --tensor_model_parallel_size or --vllm_tensor_parallel_size?'),
        ('--gc_collect_after_offload true', 'Memory is given back after each offload by itself; leave it out.'),
        ('--load_safetensors true', 'Safetensors are read by themselves; leave it out.'),
        ('--num_infer_workers 8', '--vllm_mode colocate'),
        ('--colocate_groups a', 'It belongs to the Ray trainer of ms-swift'),
        ('--use_vllm true --vllm_server_host 10.0.0.1', '--vllm_server_host is given, so: --vllm_mode server.'),
        ('--load_best_model_at_end true', 'nothing is evaluated: give --val_dataset'),
        ('--early_stop_interval 3', '--early_stop_interval 3 goes by evaluations, and nothing is evaluated: give --val_dataset'),
        (
            '--load_best_model_at_end true --val_dataset data.jsonl --eval_strategy epoch',
            '--save_strategy (steps) and --eval_strategy (epoch)',
        ),
        (
            '--load_best_model_at_end true --val_dataset data.jsonl --eval_steps 4 --save_steps 6',
            '--save_steps (6) to be a multiple of --eval_steps (4)',
        ),
    ],
)
def test_a_refusal_says_what_to_write_instead(text, words, workplace):
    plan = plan_of(text)
    assert any(words in error for error in plan.errors), plan.errors
    assert not any('has no effect here' in warning for warning in plan.warnings), 'what is refused is not also called without effect'


@pytest.mark.parametrize(
    ('text', 'words'),
    [
        ('--vllm_mode colocate --vllm_max_model_len 400', 'every answer is cut to what its prompt leaves of 400'),
        ('--vllm_mode server --vllm_server_host a --vllm_tensor_parallel_size 3', 'give it to `swift rollout`'),
        ('--vllm_mode server --vllm_server_host a --vllm_data_parallel_size 2', 'give it to `swift rollout`'),
        ('--vllm_mode server --vllm_server_host a --max_turns 3', 'The rollout server has its own.'),
        ('--ref_model tiny --beta 0', '--ref_model tiny has no effect with --beta 0'),
        (
            '--multi_turn_scheduler gym_scheduler --vllm_mode server --vllm_server_host a --completion_length_limit_scope total',
            'each round has the limit, as in swift rlhf',
        ),
    ],
)
def test_what_swift_rlhf_accepts_and_does_not_use_is_a_warning(text, words, workplace):
    plan = plan_of(text)
    assert other_errors(plan) == []
    assert any(words in warning for warning in plan.warnings), plan.warnings


@pytest.mark.parametrize(
    'text',
    [
        '--vllm_mode server --vllm_server_host a --vllm_server_pass_dataset true',
        '--load_best_model_at_end true --val_dataset data.jsonl --eval_steps 2 --save_steps 6 --metric_for_best_model eval_reward',
        '--early_stop_interval 3 --val_dataset data.jsonl --eval_steps 2 --save_steps 2 --eval_delay 4 --eval_on_start true',
        '--multi_turn_scheduler gym_scheduler --vllm_mode colocate --completion_length_limit_scope total',
        '--vllm_mode colocate --vllm_disable_custom_all_reduce false',
    ],
)
def test_what_works_is_neither_refused_nor_warned_about(text, workplace):
    plan = plan_of(text + ' --fp16 false --bf16 false')
    assert (plan.errors, plan.warnings) == ([], [])


def test_one_process_is_said_where_a_script_shows_more_devices(workplace):
    argv = [*BASE.split(), '--dry_run', 'true', '--fp16', 'false']
    assert [text for text in resolve(argv, {'CUDA_VISIBLE_DEVICES': '0'}).warnings if 'process' in text] == []
    several = resolve(argv, {'CUDA_VISIBLE_DEVICES': '0,1,2,3'}).warnings
    assert any('CUDA_VISIBLE_DEVICES names 4 devices, and NPROC_PER_NODE is not set' in text for text in several)
    assert any('NPROC_PER_NODE is not set: one process is planned' in text for text in resolve(argv, {}).warnings)


def test_an_empty_number_of_machines_is_refused_unless_the_dry_run_has_one(workplace):
    argv = [*BASE.split(), '--dry_run', 'true']
    environment = {'NNODES': '', 'NPROC_PER_NODE': '8'}
    assert any('NNODES is set and empty' in text and 'give --world_size N' in text for text in resolve(argv, environment).errors)
    plan = resolve([*argv, '--world_size', '16'], environment)
    assert (plan.errors, plan.batch_plan.world_size) == ([], 16)


def test_layers_of_multi_token_prediction_are_refused_since_nothing_would_train_them() -> None:
    plan = plan_of(['--mtp_num_layers', '1'])
    assert any('mtp_num_layers' in error and 'not trained' in error for error in plan.errors), plan.errors


def test_a_model_type_of_another_family_is_a_warning_and_one_that_the_checkpoint_names_is_none(workplace):
    (workplace / 'tiny' / 'config.json').write_text(json.dumps({'model_type': 'qwen2', 'architectures': ['Qwen2ForCausalLM']}))
    assert any('--model_type qwen3 is none of the types of Qwen2ForCausalLM' in warning for warning in plan_of('--model_type qwen3').warnings)
    assert not any('none of the types' in warning for warning in plan_of('--model_type qwen2').warnings)
    (workplace / 'tiny' / 'args.json').write_text(json.dumps({'model_type': 'qwen2'}))
    assert not any('--model_type is needed' in error for error in plan_of('').errors)


@pytest.mark.parametrize(
    ('text', 'warned'),
    [
        ('--output_dir out --add_version false', True),
        ('--output_dir out', False),
        ('--output_dir out --add_version false --resume_from_checkpoint out/checkpoint-20', False),
        ('--output_dir other --add_version false', False),
    ],
)
def test_a_folder_that_an_earlier_run_has_written_is_told(text, warned, workplace):
    for step in (4, 20):
        (workplace / 'out' / f'checkpoint-{step}').mkdir(parents=True)
    warnings = [warning for warning in plan_of(text).warnings if 'is of an earlier run' in warning]
    assert [warning.split()[0] for warning in warnings] == (['out/checkpoint-20'] if warned else [])


@pytest.mark.parametrize('name', ['dataset', 'val_dataset', 'chord_sft_dataset'])
def test_a_row_that_is_no_json_is_named(name, workplace):
    (workplace / 'broken.jsonl').write_text('{"query": "1+1"}\n{"query": "1+1"\n')
    assert any(f'--{name}: broken.jsonl, line 2: no JSON' in error for error in plan_of(f'--{name} broken.jsonl#1').errors)


@pytest.mark.parametrize(
    ('files', 'text', 'words'),
    [
        ({'plug.py': 'def f(:\n    pass\n'}, '--external_plugins plug.py', r'--external_plugins plug.py, line 1: .*: def f\(:'),
        ({'plug.py': 'x = 1\n'}, '--external_plugins plug.py', None),
        ({'ad/config.json': '{}'}, '--adapters ad', 'ad is no adapter: it has no adapter_config.json. It holds a whole model'),
        ({'ad/adapter_config.json': '{}'}, '--adapters ad', 'ad has adapter_config.json and no weights'),
        ({'ad/adapter_config.json': '{}', 'ad/adapter_model.safetensors': ''}, '--adapters ad', None),
        ({'tiny/model.safetensors': '', 'tiny/tokenizer_config.json': '{}'}, '', 'tiny has weights and no tokenizer'),
        ({'tiny/model.safetensors': '', 'tiny/tokenizer.json': '{}'}, '', None),
        ({'tiny/model.safetensors': '', 'tiny/qwen.tiktoken': ''}, '', None),
    ],
)
def test_files_that_cannot_be_used_are_named(workplace, files, text, words):
    for name, content in files.items():
        (workplace / name).parent.mkdir(exist_ok=True)
        (workplace / name).write_text(content)
    found = other_errors(plan_of(f'--tuner_type lora {text}'))
    assert (len(found) == 1 and re.search(words, found[0])) if words else found == [], found


def test_a_logger_that_is_not_installed_is_said(workplace, monkeypatch):
    monkeypatch.setattr('swift_megatron_grpo.args.convert.installed_version', lambda name: None if name in ('wandb', 'swanlab') else '4.6')
    assert any('--report_to wandb needs the package wandb' in error for error in plan_of('--report_to wandb').errors)
    assert any('--report_to wandb needs the package wandb' in warning for warning in plan_of('--report_to wandb --dry_run true').warnings)
    assert not any('needs the package' in error for error in plan_of('--report_to tensorboard').errors)


@pytest.mark.parametrize(
    ('plugin', 'refused'),
    [('x = 1\n', True), ('from my_losses import *\n', False), ("losses['dapoo'] = f\n", False)],
)
def test_a_loss_that_no_plugin_can_register_is_refused(workplace, plugin, refused):
    (workplace / 'plug.py').write_text(plugin)
    errors = plan_of('--external_plugins plug.py --loss_type dapoo').errors
    assert any("--loss_type is 'dapoo'" in error and 'Did you mean dapo?' in error for error in errors) is refused
