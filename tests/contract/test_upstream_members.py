"""What we lean on in other packages is there and looks as it did: an upgrade fails here by name, and not somewhere else by accident."""

import ast
from pathlib import Path

import pytest

from tests.contract.upstream import absolute, binds, signature, source_file

PACKAGE = Path(__file__).resolve().parents[2] / 'swift_megatron_grpo'
UPSTREAM = ('swift', 'mcore_bridge', 'megatron', 'transformers', 'accelerate', 'peft', 'vllm')

# Parameters as their source has them, without annotations: of what we call, and of what we override. ms-swift 4.6.0, mcore-bridge 1.6.5,
# megatron-core 0.16.1, transformers 5.19.
SIGNATURES = {
    ('swift.cli.main', 'cli_main'): 'route_mapping=None, is_megatron=False',
    ('swift.cli.main', 'parse_yaml_args'): 'argv',
    ('swift.cli.main', 'get_torchrun_args'): '',
    ('swift.pipelines.train.rlhf', 'rlhf_main'): 'args=None',
    ('swift.pipelines.base', 'SwiftPipeline._parse_args'): 'self, args=None',
    ('swift.utils.utils', 'import_external_file'): 'file_path',
    ('swift.arguments.base_args.base_args', 'BaseArguments._import_external_plugins'): 'self',
    ('swift.arguments.base_args.data_args', 'DataArguments.get_dataset_kwargs'): 'self',
    ('swift.trainers.trainer_factory', 'TrainerFactory.get_cls'): 'args, mapping',
    ('swift.megatron.pipelines.train.rlhf', 'MegatronRLHF.prepare_trainer'): 'self',
    ('swift.megatron.pipelines.train.sft', 'MegatronSft.run'): 'self',
    ('swift.megatron.trainers.base', 'BaseMegatronTrainer.__init__'): 'self, args, template',
    ('swift.megatron.trainers.base', 'BaseMegatronTrainer.prepare_model'): 'self',
    ('swift.megatron.trainers.base', 'BaseMegatronTrainer.get_optimizer_and_scheduler'): 'self',
    ('swift.megatron.trainers.base', 'BaseMegatronTrainer.setup_model_training'): 'self',
    ('swift.megatron.trainers.base', 'BaseMegatronTrainer.run_train_step'): 'self, train_data_iterator, val_data_iterator',
    ('swift.megatron.trainers.base', 'BaseMegatronTrainer.train_step'): 'self, train_data_iterator',
    ('swift.megatron.trainers.base', 'BaseMegatronTrainer.forward_step'): 'self, data_iterator, model',
    ('swift.megatron.trainers.base', 'BaseMegatronTrainer.evaluate'): 'self, val_data_iterator',
    ('swift.megatron.trainers.base', 'BaseMegatronTrainer.train'): 'self, train_dataset, val_dataset',
    ('swift.megatron.trainers.base', 'BaseMegatronTrainer.finalize_training'): 'self',
    ('swift.megatron.trainers.base', 'BaseMegatronTrainer.save_checkpoint'): 'self',
    ('swift.megatron.trainers.base', 'BaseMegatronTrainer.on_log'): "self, logs, prefix=''",
    ('swift.megatron.trainers.base', 'BaseMegatronTrainer.call_event'): 'self, event, **kwargs',
    ('swift.megatron.trainers.base', 'BaseMegatronTrainer.copy_path'): 'src_path, tgt_path',
    ('swift.megatron.trainers.base', 'BaseMegatronTrainer._get_data_collator'): 'self',
    ('swift.megatron.trainers.base', 'BaseMegatronTrainer._aggregated_metrics'): 'self, metrics, total_metrics',
    ('swift.megatron.trainers.base', 'BaseMegatronTrainer._rotate_checkpoints'): 'self, output_dir',
    ('swift.megatron.callbacks.print', 'PrintCallback.on_log'): 'self, logs',
    ('swift.megatron.callbacks.tensorboard', 'TensorboardCallback.on_log'): 'self, logs',
    ('swift.megatron.model.utils', 'get_mcore_model'): 'args, hf_config',
    ('swift.megatron.utils.megatron_lm_utils', 'load_mcore_checkpoint'): (
        "args, ddp_models, optimizer=None, opt_param_scheduler=None, load_arg='mcore_model', "
        "adapter_name='default'"
    ),
    ('swift.megatron.utils.megatron_lm_utils', 'save_mcore_checkpoint'): (
        'args, models, optimizer=None, opt_param_scheduler=None, iteration=1, output_dir=None, '
        'peft_format=False, async_finalize_fn=None'
    ),
    ('swift.rl_core.advantage', 'compute_advantages'): (
        "rewards_per_func, reward_weights, num_generations, advantage_estimator='grpo', scale_rewards='group', "
        'kl_in_reward=False, beta=0.0, kl_values=None'
    ),
    ('swift.rl_core.advantage', 'compute_advantages_dynamic'): (
        "rewards_per_func, reward_weights, prompt_ids, request_ids, advantage_estimator='grpo', "
        "scale_rewards='group', kl_in_reward=False, beta=0.0, kl_values=None"
    ),
    ('swift.rl_core.advantage', 'compute_reward_metrics'): 'rewards, rewards_per_func, reward_func_names, num_generations, scale_rewards',
    ('swift.rlhf_trainers.utils', 'encode_sample'): 'sample, template, *, encode_prompt_only=False',
    ('swift.rlhf_trainers.utils', 'identity_data_collator'): 'features, **kwargs',
    ('swift.rlhf_trainers.utils', 'resolve_reward_funcs'): 'reward_funcs_cfg, args=None',
    ('swift.rlhf_trainers.utils', 'finish_vllm_weight_reload'): 'vllm_model, model_config, target_device, *, strict=False',
    ('swift.rlhf_trainers.utils', 'patch_vllm_moe_model_weight_loader'): 'model, *, load_preprocessed_weight=False',
    ('swift.rlhf_trainers.utils', 'sleep_vllm_engine'): 'engine, sleep_level, suppress_errors=False',
    ('swift.rlhf_trainers.utils', 'vllm_sleep'): 'engine, sleep_level',
    ('swift.rlhf_trainers.vllm_client', 'VLLMClient.__init__'): (
        "self, base_urls=None, hosts=['0.0.0.0'], server_ports=[8000], group_ports=None, "
        'connection_timeout=240.0'
    ),
    ('swift.rlhf_trainers.vllm_client', 'VLLMClient.init_communicator'): 'self, device=0',
    ('swift.rlhf_trainers.vllm_client', 'VLLMClient.update_flattened_params'): 'self, metadatas, flattened_tensor',
    ('swift.rlhf_trainers.vllm_client', 'VLLMClient.reset_prefix_cache'): 'self',
    ('swift.infer_engine.infer_engine', 'InferEngine._batch_encode'): 'self, infer_requests, strict',
    ('swift.infer_engine.grpo_vllm_engine', 'GRPOVllmEngine.infer'): (
        'self, infer_requests, request_config=None, metrics=None, *, use_tqdm=None, adapter_request=None'
    ),
    ('swift.infer_engine.infer_engine', 'InferEngine.set_default_max_tokens'): 'self, request_config, inputs',
    ('swift.rollout.multi_turn', 'RolloutScheduler.on_turn_end'): 'self, infer_request, response_choice, current_turn',
    ('swift.infer_engine.vllm_engine', 'VllmEngine.__init__'): (
        'self, model_id_or_path, *, template=None, torch_dtype=None, adapters=None, use_async_engine=False, '
        'model_type=None, template_type=None, use_hf=None, hub_token=None, revision=None, '
        'gpu_memory_utilization=0.9, tensor_parallel_size=1, pipeline_parallel_size=1, '
        'enable_expert_parallel=False, max_model_len=None, max_num_seqs=256, disable_custom_all_reduce=True, '
        'enforce_eager=False, limit_mm_per_prompt=None, seed=None, task_type=None, disable_cascade_attn=False, '
        "load_format='auto', mm_processor_cache_gb=None, logprobs_mode=None, speculative_config=None, "
        'enable_lora=False, max_loras=1, max_lora_rank=16, enable_prefix_caching=None, '
        'enable_sleep_mode=False, distributed_executor_backend=None, quantization=None, reasoning_parser=None, '
        'engine_kwargs=None, num_labels=None, reranker_use_activation=True'
    ),
    ('swift.infer_engine.transformers_engine', 'TransformersEngine.__init__'): (
        'self, model, *, template=None, adapters=None, adapter_names=None, max_batch_size=1, '
        'reranker_use_activation=True, torch_dtype=None, model_type=None, attn_impl=None, experts_impl=None, '
        'device_map=None, task_type=None, quantization_config=None, model_kwargs=None, template_type=None, '
        'use_hf=None, revision=None, hub_token=None, **kwargs'
    ),
    ('swift.infer_engine.transformers_engine', 'TransformersEngine.infer'): (
        'self, infer_requests, request_config=None, metrics=None, *, use_tqdm=None, adapter_request=None'
    ),
    ('swift.infer_engine.transformers_engine', 'TransformersEngine._infer_full'): (
        'self, inputs, *, generation_config, adapter_request, request_config, template_inputs'
    ),
    ('mcore_bridge.bridge.gpt_bridge', 'GPTBridge.load_weights'): (
        "self, mg_models, hf_model_dir, peft_format=False, adapter_name='default', converter=None"
    ),
    ('mcore_bridge.bridge.gpt_bridge', 'GPTBridge.export_weights'): (
        'self, mg_models, target_device=None, only_master_rank=False, peft_format=False, '
        "adapter_name='default', converter=None, tqdm_desc='Exporting: ', disable_tqdm=True, _is_saving=False, "
        'skip_unsupported_export=False'
    ),
    ('mcore_bridge.bridge.gpt_bridge', 'GPTBridge.save_weights'): (
        "self, mg_models, output_dir, peft_format=False, adapter_name='default', converter=None, "
        "max_shard_size='5GB', save_missing_weights=False"
    ),
    ('megatron.core.pipeline_parallel.schedules', 'get_forward_backward_func'): 'pp_size=None, vp_size=None',
    ('megatron.core.tensor_parallel.mappings', 'gather_from_sequence_parallel_region'): (
        'input_, tensor_parallel_output_grad=True, group=None, output_split_sizes=None, '
        'use_global_buffer=False'
    ),
    ('megatron.core.tensor_parallel.layers', 'set_tensor_model_parallel_attributes'): 'tensor, is_parallel, dim, stride',
    ('megatron.core.utils', 'unwrap_model'): 'model, module_instances=None',
    ('swift.pipelines.train.rlhf', 'SwiftRLHF._get_model_task_type'): 'model_dir',
    ('swift.pipelines.utils', 'prepare_adapter'): 'args, model, adapters=None',
    ('swift.rewards.rm_plugin', 'DefaultRMPlugin.__init__'): 'self, model, template',
    ('swift.rewards.rm_plugin', 'DefaultRMPlugin.__call__'): 'self, inputs, **kwargs',
    ('swift.rlhf_trainers.gkd_helpers', 'build_teacher_requests'): 'samples, template=None',
    ('swift.rlhf_trainers.gkd_helpers', 'parse_teacher_model_server'): 'val',
    ('swift.rlhf_trainers.gkd_helpers', 'route_samples_to_teachers'): "samples, teacher_configs, tag_key='dataset'",
    ('swift.rlhf_trainers.utils', 'parse_prompt_logprobs'): 'response, topk',
    ('megatron.core.transformer.moe.router_replay', 'RouterReplay.set_target_indices'): 'self, topk_indices',
    ('megatron.core.transformer.moe.router_replay', 'RouterReplay.set_router_replay_action'): 'self, router_replay_action',
    ('megatron.core.optimizer.optimizer', 'MegatronOptimizer.prepare_grads'): 'self',
    ('megatron.core.optimizer.optimizer', 'MegatronOptimizer.get_grad_norm'): 'self',
    ('megatron.core.optimizer.optimizer', 'ChainedOptimizer.step'): 'self',
    ('swift.megatron.trainers.base', 'BaseMegatronTrainer._prepare_batch'): 'self, data, vp_stage=None',
    ('swift.rlhf_trainers.vllm_client', 'VLLMInferClient.infer'): (
        'self, infer_requests, request_config=None, metrics=None, *, use_tqdm=None, adapter_request=None'
    ),
    ('transformers.optimization', 'get_scheduler'): (
        'name, optimizer, num_warmup_steps=None, num_training_steps=None, scheduler_specific_kwargs=None'
    ),
}


def imports_of_ours() -> list[tuple[str, str, str]]:
    """(file, module, name) of each `from <upstream module> import <name>` in the package, at any depth."""
    found = []
    for path in sorted(PACKAGE.rglob('*.py')):
        for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
            if isinstance(node, ast.ImportFrom) and not node.level and (node.module or '').split('.')[0] in UPSTREAM:
                found += [(path.relative_to(PACKAGE).as_posix(), node.module or '', alias.name) for alias in node.names]
    return found


def test_every_name_that_we_import_is_bound_where_we_import_it_from():
    imports = imports_of_ours()
    assert len(imports) > 30
    missing = [
        f'{file}: from {module} import {name}'
        for file, module, name in imports
        if source_file(module) is None or (source_file(f'{module}.{name}') is None and not binds(module, name))
    ]
    assert missing == []


@pytest.mark.parametrize(('module', 'name'), SIGNATURES, ids=lambda value: value)
def test_signature(module, name):
    assert signature(module, name) == SIGNATURES[module, name]


def test_rlhf_arguments_still_import_plugins_while_parsing():
    """The explicit door depends on it."""
    source = source_file('swift.arguments.base_args.base_args').read_text(encoding='utf-8')
    body = source[source.index('def __post_init__'):]
    assert 'self._import_external_plugins()' in body[: body.index('ModelArguments.__post_init__')]


def test_the_route_of_rlhf_is_the_file_that_the_doors_know():
    source = source_file('swift.cli.main').read_text(encoding='utf-8')
    assert "'rlhf': 'swift.cli.rlhf'" in source
    rlhf = ast.parse(source_file('swift.cli.rlhf').read_text(encoding='utf-8'))
    imported = {(absolute('swift.cli.rlhf', n), a.name) for n in ast.walk(rlhf) if isinstance(n, ast.ImportFrom) for a in n.names}
    assert imported == {('swift.cli.utils', 'try_use_single_device_mode'), ('swift.pipelines', 'rlhf_main')}
    text = source_file('swift.cli').read_text(encoding='utf-8')
    assert text.replace('# Copyright (c) ModelScope Contributors. All rights reserved.', '').strip() == ''


def test_megatrons_optimizers_ask_prepare_grads_first_and_take_no_step_where_it_says_so():
    """The gate before an update that is not finite stands there."""
    tree = ast.parse(source_file('megatron.core.optimizer.optimizer').read_text(encoding='utf-8'))
    checked = []
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name == 'step' and len(method.body) > 2:
                text = ast.unparse(method)
                ask, update = text.index('= self.prepare_grads()'), text.index('self.step_with_ready_grads()')
                assert ask < text.index('return (False, None, None)') < update, node.name
                checked.append(node.name)
    assert checked == ['MixedPrecisionOptimizer', 'FP32Optimizer', 'ChainedOptimizer']


def test_a_changed_signature_would_be_noticed():
    assert signature('swift.rl_core.advantage', 'compute_advantages').startswith('rewards_per_func, reward_weights, num_generations')
    with pytest.raises(AssertionError, match='is gone'):
        signature('swift.rl_core.advantage', 'compute_nothing')
