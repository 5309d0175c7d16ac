"""Arguments of the rollout engines that contradict each other (import tier 0)."""

from __future__ import annotations

from .registries import unknown_name
from .translation import Translation

ENGINE_SHAPE = (
    'vllm_tensor_parallel_size',
    'vllm_data_parallel_size',
    'vllm_gpu_memory_utilization',
    'vllm_max_model_len',
    'vllm_max_num_seqs',
    'vllm_enforce_eager',
    'vllm_enable_prefix_caching',
    'vllm_disable_cascade_attn',
    'vllm_disable_custom_all_reduce',
    'vllm_enable_expert_parallel',
    'vllm_limit_mm_per_prompt',
    'vllm_mm_processor_cache_gb',
    'vllm_engine_kwargs',
)


def engine(t: Translation) -> None:
    """Engine arguments that contradict each other."""
    use_vllm, mode = t.effective('use_vllm'), t.effective('vllm_mode')
    hosts = [name for name in ('vllm_server_host', 'vllm_server_base_url') if t.effective(name)]
    if use_vllm and mode is None:
        t.errors.append(
            f'--use_vllm true needs --vllm_mode, in swift rlhf too; --{hosts[0]} is given, so: --vllm_mode server.'
            if hosts
            else '--use_vllm true needs --vllm_mode, in swift rlhf too: colocate (the engine shares these devices) or server (with '
            '--vllm_server_host).'
        )
    if mode is not None and not use_vllm:
        t.errors.append(f'--vllm_mode {mode} is given with --use_vllm false. Leave --use_vllm out, or leave --vllm_mode out.')
    if hosts and mode == 'colocate':
        t.errors.append(
            f'--vllm_mode colocate is given with --{hosts[0]} {" ".join(t.effective(hosts[0]))}: the engine is here or there. Write '
            f'--vllm_mode server, or leave --{hosts[0]} out.'
        )
    if len(hosts) == 2:
        t.errors.append('--vllm_server_host and --vllm_server_base_url are both given; one of them names the servers.')
    if hosts and not use_vllm:
        t.errors.append(f'--{hosts[0]} is given without --use_vllm true --vllm_mode server.')
    if mode == 'server' and not hosts:
        t.errors.append('--vllm_mode server needs --vllm_server_host (start one with `swift rollout`), or --vllm_mode colocate.')
    if mode == 'server' and t.effective('vllm_server_host'):
        num_hosts, num_ports = len(t.effective('vllm_server_host')), len(t.effective('vllm_server_port'))
        if num_ports not in (1, num_hosts):
            t.errors.append(f'--vllm_server_port has {num_ports} ports for {num_hosts} hosts; give one for all or one for each.')
    if t.effective('async_generate'):
        if mode != 'server':
            t.errors.append(
                '--async_generate true needs --vllm_mode server: a colocated engine cannot sample while the same devices train.'
            )
        if t.effective('multi_turn_scheduler') is not None:
            t.errors.append('--async_generate true does not go with --multi_turn_scheduler, in swift rlhf neither.')
        if t.effective('rollout_importance_sampling_mode') is None and not t.effective('allow_uncorrected_async'):
            t.errors.append(
                '--async_generate true trains on rollouts of older weights; name the correction (--rollout_importance_sampling_mode '
                'token_truncate), or --allow_uncorrected_async true.'
            )
    if not use_vllm:
        set_here = [
            name
            for name in t.given
            if name.startswith('vllm_') and name in t.values and name != 'vllm_mode' and not name.startswith('vllm_server')
        ]
        if set_here:
            t.warnings.append(f'{", ".join("--" + name for name in set_here)}: without effect, since --use_vllm is false.')
    if not use_vllm:
        for name, neutral in (('min_p', 0.0), ('structured_outputs_regex', None)):
            if t.effective(name) != neutral:
                t.errors.append(
                    f'--{name} {t.effective(name)}: the transformers engine (--use_vllm false) cannot do that. Leave it out, or give '
                    '--use_vllm true --vllm_mode colocate.'
                )
    if mode == 'server' and t.effective('vllm_server_group_port'):
        servers = len(t.effective('vllm_server_base_url') or t.effective('vllm_server_host') or [])
        ports = len(t.effective('vllm_server_group_port'))
        if ports not in (1, servers):
            t.errors.append(f'--vllm_server_group_port has {ports} ports for {servers} servers; give one for each, or one to count from.')
    _turns(t)
    limit, completion = t.effective('vllm_max_model_len'), t.effective('max_completion_length')
    if mode == 'server':
        _server_shapes_itself(t)
    elif use_vllm and limit is not None:
        if limit <= completion:
            t.warnings.append(
                f'vllm_max_model_len {limit} leaves no room for a prompt beside max_completion_length {completion}: every answer is cut to '
                f'what its prompt leaves of {limit}. For whole answers give at least {completion + (t.effective("max_length") or 512)}.'
            )
        elif t.effective('max_length') and limit < t.effective('max_length') + completion:
            t.warnings.append(
                f'vllm_max_model_len {limit} is less than max_length {t.effective("max_length")} + max_completion_length {completion}: the '
                'longest prompts get shorter answers.'
            )
    if mode == 'colocate' and t.effective('vllm_data_parallel_size') > 1:
        t.errors.append(
            f'--vllm_data_parallel_size {t.effective("vllm_data_parallel_size")}: colocated engines are world_size / '
            'vllm_tensor_parallel_size replicas by themselves. Leave it out here.'
        )
    if t.effective('vllm_enable_lora') and t.effective('tuner_type') == 'full':
        t.errors.append('--vllm_enable_lora true serves an adapter, and --tuner_type full trains none. Leave one of them out.')


def _server_shapes_itself(t: Translation) -> None:
    """Arguments that shape an engine are the rollout server's own; ms-swift ignores them in the trainer's command."""
    from .fields import all_fields

    given = [name for name in ENGINE_SHAPE if name in t.given and t.given[name].value != all_fields()[name].default]
    if given:
        t.warnings.append(
            f'{", ".join("--" + name for name in given)}: without effect with --vllm_mode server, in swift rlhf too; give it to '
            '`swift rollout`.'
        )


def _turns(t: Translation) -> None:
    """Conversations of several turns: the scheduler and the environment must exist. A server has its own."""
    scheduler = t.effective('multi_turn_scheduler')
    if scheduler is not None and t.effective('completion_length_limit_scope') == 'total' and t.effective('vllm_mode') == 'server':
        t.warnings.append(
            '--completion_length_limit_scope total has no effect with --vllm_mode server: each round has the limit, as in swift rlhf.'
        )
    if scheduler is not None:
        t.errors += unknown_name('multi_turn_scheduler', scheduler, 'multi_turns', t.effective('external_plugins'))
    if t.effective('gym_env') is not None:
        t.errors += unknown_name('gym_env', t.effective('gym_env'), 'envs', t.effective('external_plugins'))
    if t.effective('use_gym_env') and scheduler is None and t.effective('vllm_mode') != 'server':
        t.errors.append(
            '--use_gym_env true needs a scheduler that talks to the environment: --multi_turn_scheduler gym_scheduler --gym_env NAME.'
        )
