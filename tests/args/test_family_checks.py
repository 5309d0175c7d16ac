"""What a family's attention or experts cannot be divided into is refused by the plan."""

import json
import re

import pytest

from .conftest import TINY, other_errors
from .test_translation import plan_of

SINKS = {**TINY, 'model_type': 'gpt_oss', 'num_local_experts': 4, 'num_attention_heads': 4}
LATENT = {**TINY, 'model_type': 'deepseek_v3', 'n_routed_experts': 4, 'q_lora_rank': 24, 'kv_lora_rank': 32, 'qk_nope_head_dim': 16, 'qk_rope_head_dim': 16,
          'v_head_dim': 24, 'moe_intermediate_size': 48, 'num_experts_per_tok': 2, 'num_attention_heads': 4}


def errors(workplace, config, text):
    (workplace / 'tiny' / 'config.json').write_text(json.dumps(config), encoding='utf-8')
    return other_errors(plan_of(f'--keep_global_batch true --attention_backend fused --merge_lora true {text}'))


@pytest.mark.parametrize(('config', 'text', 'words'), [
    (SINKS, '--context_parallel_size 2', '--cp_comm_type a2a: .* with p2p'),
    (SINKS, '--context_parallel_size 2 --cp_comm_type all_gather', '--cp_comm_type a2a: .* with all_gather'),
    (SINKS, '--tensor_model_parallel_size 2 --sequence_parallel true --expert_tensor_parallel_size 2 --tuner_type full', 'experts with biases'),
    (LATENT, '--context_parallel_size 2 --cp_comm_type a2a', 'latent attention of tiny.* p2p only'),
    (LATENT, '--context_parallel_size 2 --cp_comm_type all_gather', 'latent attention of tiny.* p2p only'),
    (LATENT, '--moe_grouped_gemm false', '--moe_grouped_gemm false with the experts of tiny'),
])
def test_refused_by_name(workplace, config, text, words):
    found = errors(workplace, config, text)
    assert len(found) == 1, found
    assert re.search(words, found[0]), found


@pytest.mark.parametrize(('config', 'text'), [
    (SINKS, '--context_parallel_size 2 --cp_comm_type a2a'),
    (SINKS, '--tensor_model_parallel_size 2 --sequence_parallel true --expert_model_parallel_size 2'),
    (SINKS, '--cp_comm_type p2p'),
    (LATENT, '--context_parallel_size 2'),
    (LATENT, '--context_parallel_size 2 --cp_comm_type p2p'),
    (LATENT, '--tensor_model_parallel_size 2 --sequence_parallel true --expert_tensor_parallel_size 2 --tuner_type full'),
    (TINY, '--context_parallel_size 2 --cp_comm_type all_gather'),
    (TINY, '--moe_grouped_gemm false'),
    (LATENT, '--moe_grouped_gemm true'),
])
def test_what_goes_stands(workplace, config, text):
    assert errors(workplace, config, text) == []
