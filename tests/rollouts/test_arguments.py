"""What an engine would refuse after the model was loaded is refused before, by name."""
from types import SimpleNamespace
from typing import Any

import pytest

from swift_megatron_grpo import engines
from swift_megatron_grpo.errors import UserError


def arguments(**changes: Any) -> SimpleNamespace:
    values = {'use_vllm': True, 'vllm_mode': 'colocate', 'sleep_level': 0, 'async_generate': False, 'max_staleness': 1,
              'rollout_importance_sampling_mode': None, 'allow_uncorrected_async': False, 'verify_weight_sync': 'first',
              'weight_sync_bucket_mb': 512, 'min_p': 0.0, 'structured_outputs_regex': None, 'multi_turn_scheduler': None, 'use_gym_env': None,
              'vllm_server_base_url': None, 'vllm_server_host': None, 'vllm_server_port': [8000], 'vllm_server_group_port': None, **changes}
    return SimpleNamespace(**values)


SERVED = {'vllm_mode': 'server', 'vllm_server_host': ['127.0.0.1']}


@pytest.mark.parametrize('changes, words', [
    ({'sleep_level': 3}, '--sleep_level 3'),
    ({'async_generate': True}, 'needs --vllm_mode server'),
    ({**SERVED, 'async_generate': True}, 'rollout_importance_sampling_mode'),
    ({**SERVED, 'max_staleness': -1}, '--max_staleness -1'),
    ({'verify_weight_sync': 'sometimes'}, '--verify_weight_sync sometimes: first, off, or a number'),
    ({'verify_weight_sync': '0'}, '--verify_weight_sync 0'),
    ({'weight_sync_bucket_mb': 0}, '--weight_sync_bucket_mb 0'),
    ({'use_vllm': False, 'min_p': 0.1}, '--min_p 0.1: the transformers engine'),
    ({'use_vllm': False, 'structured_outputs_regex': 'a+'}, r'--structured_outputs_regex a\+'),
    ({'vllm_mode': 'server'}, 'needs --vllm_server_host'),
    ({**SERVED, 'vllm_server_host': ['a', 'b', 'c'], 'vllm_server_port': [1, 2]}, 'names 3 hosts and --vllm_server_port 2 ports'),
    ({**SERVED, 'vllm_server_group_port': [1, 2]}, '2 ports for 1 servers'),
    ({'use_gym_env': True}, '--multi_turn_scheduler gym_scheduler'),
    ({'multi_turn_scheduler': 'gym_schedular'}, "unknown scheduler 'gym_schedular'. Did you mean gym_scheduler"),
])
def test_what_cannot_work_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        engines.check_arguments(arguments(**changes))


@pytest.mark.parametrize('changes', [
    {},
    {**SERVED, 'async_generate': True, 'rollout_importance_sampling_mode': 'token_mask'},
    {**SERVED, 'async_generate': True, 'allow_uncorrected_async': True},
    {'verify_weight_sync': '10'},
    {'multi_turn_scheduler': 'gym_scheduler', 'use_gym_env': True},
    {**SERVED, 'use_gym_env': True},
])
def test_what_works_is_not(changes: dict[str, Any]) -> None:
    engines.check_arguments(arguments(**changes))


def test_addresses_of_servers() -> None:
    from swift_megatron_grpo.engines.vllm_server import addresses
    assert addresses(arguments(vllm_server_host=['a', 'b'], vllm_server_port=[7, 8])) == [('http://a:7', 51216), ('http://b:8', 51217)]
    assert addresses(arguments(vllm_server_host=['a', 'b'], vllm_server_port=[7], vllm_server_group_port=[100])) == [
        ('http://a:7', 100), ('http://b:7', 101)]
    assert addresses(arguments(vllm_server_base_url=['http://c:9/'])) == [('http://c:9', 51216)]
