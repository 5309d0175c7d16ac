"""Tiny random models with a real tokenizer, saved as Hugging Face folders (import tier 1, and transformers when called).

fp32, head_dim 32 (vLLM's CPU attention takes no less), every embedding row with values (a row of zeros gives gradient norms of
hundreds in models of this size).
"""
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

SPECIAL_TOKENS = ('<|endoftext|>', '<|im_start|>', '<|im_end|>')
CHAT_TEMPLATE = ("{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
                 "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
CORPUS = ('what is 1 + 2? the answer is 3.', 'system user assistant', 'compute 17 - 9 and give the result')

_SIZE: dict[str, Any] = {
    'vocab_size': 320, 'hidden_size': 64, 'intermediate_size': 96, 'num_hidden_layers': 4, 'num_attention_heads': 4,
    'num_key_value_heads': 2, 'head_dim': 32, 'max_position_embeddings': 2048, 'rope_theta': 10000., 'tie_word_embeddings': False,
    'initializer_range': 0.1,
}
_EXPERTS: dict[str, Any] = {'num_experts': 4, 'num_experts_per_tok': 2, 'moe_intermediate_size': 48, 'norm_topk_prob': True,
                            'decoder_sparse_step': 1, 'mlp_only_layers': []}
# kind -> (config class, model class, what it has beyond _SIZE, what of _SIZE it lacks)
KINDS: dict[str, tuple[str, str, dict[str, Any], tuple[str, ...]]] = {
    'qwen3': ('Qwen3Config', 'Qwen3ForCausalLM', {}, ()),
    'qwen3_moe': ('Qwen3MoeConfig', 'Qwen3MoeForCausalLM', _EXPERTS, ()),
    'qwen2': ('Qwen2Config', 'Qwen2ForCausalLM', {'num_attention_heads': 2, 'num_key_value_heads': 2}, ('head_dim', )),
    'llama': ('LlamaConfig', 'LlamaForCausalLM', {}, ()),
    # Multi-head latent attention: keys of 16 + 16 channels, values of 24; the first layer dense, then routed and shared experts. The two
    # names of the routing stand in published configurations, where mcore-bridge looks for them; transformers itself does without.
    'deepseek_v3': ('DeepseekV3Config', 'DeepseekV3ForCausalLM', {
        'num_key_value_heads': 4, 'q_lora_rank': 24, 'kv_lora_rank': 32, 'qk_nope_head_dim': 16, 'qk_rope_head_dim': 16, 'v_head_dim': 24,
        'n_routed_experts': 4, 'n_shared_experts': 1, 'num_experts_per_tok': 2, 'n_group': 1, 'topk_group': 1, 'moe_intermediate_size': 48,
        'first_k_dense_replace': 1, 'norm_topk_prob': True, 'routed_scaling_factor': 1.5, 'scoring_func': 'sigmoid',
        'topk_method': 'noaux_tc',
    }, ('head_dim', )),
}


def tokenizer(vocab_size: int = 300, special_tokens: Iterable[str] = SPECIAL_TOKENS) -> Any:
    """A byte-level BPE tokenizer (transformers' PreTrainedTokenizerFast) with a ChatML template; it can encode any text.

    Special tokens come first: <|endoftext|> (pad) 0, <|im_start|> 1, <|im_end|> (end of sequence) 2.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    special_tokens = list(special_tokens)
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
                                  special_tokens=special_tokens, show_progress=False)
    core.train_from_iterator(list(CORPUS) * 10, trainer)
    out = PreTrainedTokenizerFast(tokenizer_object=core, eos_token='<|im_end|>', pad_token='<|endoftext|>',
                                  additional_special_tokens=[t for t in special_tokens if t not in ('<|im_end|>', '<|endoftext|>')])
    out.chat_template = CHAT_TEMPLATE
    return out


def config(kind: str, **changes: Any) -> Any:
    """The transformers configuration of a tiny model of `kind` (see KINDS); `changes` replace or add fields."""
    import transformers
    config_class, _, extra, lacking = KINDS[kind]
    fields = {**{name: value for name, value in _SIZE.items() if name not in lacking}, **extra, **changes}
    return getattr(transformers, config_class)(**fields, eos_token_id=2, pad_token_id=0, bos_token_id=None, dtype='float32')


def build(kind: str, directory: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write a random model of `kind` and its tokenizer into `directory`; returns it. The same seed gives the same bytes.

    Where `vocab_size` is below the tokenizer's 300 the tokenizer is saved all the same, for tests that feed token ids.
    """
    import transformers
    made = config(kind, **changes)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        torch.manual_seed(seed)
        model = getattr(transformers, KINDS[kind][1])(made).float()
        _spread(model, made.get_text_config().initializer_range)
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = 2, 0
        model.save_pretrained(directory)
        tokenizer().save_pretrained(directory)
    return Path(directory)


@torch.no_grad()
def _spread(model: torch.nn.Module, width: float) -> None:
    """Values everywhere: padding row, norm scales, biases. A parameter at zero or one would hide a fault in its gradient."""
    for _, parameter in sorted(model.named_parameters()):
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter) * 0.1)
        else:
            parameter.copy_(torch.randn_like(parameter) * width)
