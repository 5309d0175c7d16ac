"""Tiny random models of the families that mcore-bridge knows: what sets each apart (import tier 1, and transformers when called).

`name -> (kind of tests.tiny_models.KINDS, ms-swift's model_type, changes to the configuration)`. docs/models.md is held against these tables.
"""
from typing import Any

from tests.tiny_models import KINDS

_YARN = {'rope_type': 'yarn', 'rope_theta': 10000., 'factor': 4.0, 'original_max_position_embeddings': 16, 'beta_fast': 32.0, 'beta_slow': 1.0}
_LLAMA3 = {'rope_type': 'llama3', 'rope_theta': 10000., 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
           'original_max_position_embeddings': 16}
_SHARED: dict[str, Any] = {'num_experts': 4, 'num_experts_per_tok': 2, 'moe_intermediate_size': 48, 'norm_topk_prob': False,
                           'decoder_sparse_step': 1, 'mlp_only_layers': []}

KINDS.update({
    'glm4': ('Glm4Config', 'Glm4ForCausalLM', {'attention_bias': True, 'partial_rotary_factor': 0.5}, ()),
    'ernie4_5': ('Ernie4_5Config', 'Ernie4_5ForCausalLM', {'tie_word_embeddings': True}, ()),
    'qwen2_moe': ('Qwen2MoeConfig', 'Qwen2MoeForCausalLM', {**_SHARED, 'shared_expert_intermediate_size': 64, 'num_attention_heads': 2,
                                                            'num_key_value_heads': 2}, ('head_dim', )),
    'olmoe': ('OlmoeConfig', 'OlmoeForCausalLM', {'num_experts': 4, 'num_experts_per_tok': 2, 'norm_topk_prob': False, 'num_attention_heads': 2,
                                                  'num_key_value_heads': 2}, ('head_dim', )),
    'glm4_moe': ('Glm4MoeConfig', 'Glm4MoeForCausalLM', {
        'n_routed_experts': 4, 'n_shared_experts': 1, 'num_experts_per_tok': 2, 'n_group': 2, 'topk_group': 1, 'moe_intermediate_size': 48,
        'first_k_dense_replace': 1, 'norm_topk_prob': True, 'routed_scaling_factor': 1.5, 'use_qk_norm': True, 'attention_bias': True,
        'partial_rotary_factor': 0.5}, ()),
    'dots1': ('Dots1Config', 'Dots1ForCausalLM', {
        'n_routed_experts': 4, 'n_shared_experts': 1, 'num_experts_per_tok': 2, 'n_group': 1, 'topk_group': 1, 'moe_intermediate_size': 48,
        'first_k_dense_replace': 1, 'norm_topk_prob': True, 'routed_scaling_factor': 1.5, 'scoring_func': 'sigmoid', 'topk_method': 'noaux_tc'}, ()),
    'minimax_m2': ('MiniMaxM2Config', 'MiniMaxM2ForCausalLM', {
        'num_local_experts': 4, 'num_experts_per_tok': 2, 'rotary_dim': 16, 'scoring_func': 'sigmoid', 'use_qk_norm': True, 'use_routing_bias': True}, ()),
    'gpt_oss': ('GptOssConfig', 'GptOssForCausalLM', {
        'num_local_experts': 4, 'num_experts_per_tok': 2, 'sliding_window': 8,
        'layer_types': ['sliding_attention', 'full_attention'] * 2, 'rope_parameters': {'rope_type': 'default', 'rope_theta': 10000.}},
        ('rope_theta', )),
})

DENSE: dict[str, tuple[str, str, dict[str, Any]]] = {
    'qwen2': ('qwen2', 'qwen2', {}),  # biases on q, k, v
    'qwen2-tied': ('qwen2', 'qwen2', {'tie_word_embeddings': True}),
    'qwen3': ('qwen3', 'qwen3', {}),  # norms on q and k
    'llama': ('llama', 'llama', {}),
    'llama-rope-llama3': ('llama', 'llama', {'rope_parameters': _LLAMA3}),
    'llama-rope-linear': ('llama', 'llama', {'rope_parameters': {'rope_type': 'linear', 'rope_theta': 10000., 'factor': 4.0}}),
    'qwen3-rope-yarn': ('qwen3', 'qwen3', {'rope_parameters': _YARN}),
    'glm4': ('glm4', 'glm4', {}),  # norms after attention and MLP, half of each head rotated
    'ernie4_5': ('ernie4_5', 'ernie4_5', {}),
}
EXPERTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    'qwen3_moe': ('qwen3_moe', 'qwen3_moe', {}),
    'qwen2_moe': ('qwen2_moe', 'qwen2_moe', {}),  # a shared expert behind a gate
    'deepseek_v3': ('deepseek_v3', 'deepseek_v3', {}),
    'deepseek_v3-groups': ('deepseek_v3', 'deepseek_v3', {'n_group': 2, 'topk_group': 1}),
    'glm4_moe': ('glm4_moe', 'glm4_moe', {}),
    'dots1': ('dots1', 'dots1', {}),
    'olmoe': ('olmoe', 'olmoe', {}),
    'minimax_m2': ('minimax_m2', 'minimax_m2', {}),
    'gpt_oss': ('gpt_oss', 'gpt_oss', {}),  # sliding windows, sinks, biases in experts
}
FAMILIES = {**DENSE, **EXPERTS}
