"""Names of modules and parameters: those of transformers to those of Megatron (import tier 0)."""

from __future__ import annotations

import re

from .argv import Given
from .fields import Field
from .translation import Translation, refuse

# Linear layers by the names that transformers uses, and where Megatron keeps the same weights.
MODULE_NAMES = {
    'q_proj': 'linear_qkv',
    'k_proj': 'linear_qkv',
    'v_proj': 'linear_qkv',
    'qkv_proj': 'linear_qkv',
    'query_key_value': 'linear_qkv',
    'wqkv': 'linear_qkv',
    'o_proj': 'linear_proj',
    'out_proj': 'linear_proj',
    'gate_proj': 'linear_fc1',
    'up_proj': 'linear_fc1',
    'gate_up_proj': 'linear_fc1',
    'down_proj': 'linear_fc2',
    'q_a_proj': 'linear_q_down_proj',
    'q_b_proj': 'linear_q_up_proj',
    'kv_a_proj_with_mqa': 'linear_kv_down_proj',
    'kv_b_proj': 'linear_kv_up_proj',
    'lm_head': 'output_layer',
    'embed_tokens': 'word_embeddings',
    'wte': 'word_embeddings',
}
PREFIXES = (
    ('model.language_model.layers.', 'decoder.layers.'),
    ('model.layers.', 'decoder.layers.'),
    ('model.embed_tokens', 'embedding.word_embeddings'),
    ('model.language_model.embed_tokens', 'embedding.word_embeddings'),
    ('model.norm', 'decoder.final_layernorm'),
    ('lm_head', 'output_layer'),
    ('model.layers', 'decoder.layers'),
)


def _modules(names: list[str]) -> list[str]:
    """Module names of transformers to Megatron's, each once, in order."""
    result: list[str] = []
    for name in names:
        target = MODULE_NAMES.get(name.rsplit('.', 1)[-1], name)
        if target not in result:
            result.append(target)
    return result


def module_names(t: Translation, item: Given, field: Field) -> None:
    """target_modules, modules_to_save."""
    names = item.value or []
    if len(names) == 1 and re.search(r'[*^$()|\\]', names[0]):
        t.keep(item, field)
        return
    converted = _modules(names)
    if not names:
        t.row(item, 'no_effect', reason='no value')
    elif converted == names:
        t.keep(item, field)
    elif t.set(item.name, converted, item.name):
        t.row(item, 'converted', value=converted, reason=field.reason)
        given = {name.rsplit('.', 1)[-1] for name in names}
        if item.name == 'target_modules':
            for together, megatron in ((('q_proj', 'k_proj', 'v_proj'), 'linear_qkv'), (('gate_proj', 'up_proj'), 'linear_fc1')):
                part = [name for name in together if name in given]
                if part and len(part) < len(together):
                    t.warnings.append(
                        f'Megatron keeps {", ".join(together)} in one matrix ({megatron}): the adapter of {", ".join(part)} '
                        f'covers them all.'
                    )


def parameter_prefixes(t: Translation, item: Given, field: Field) -> None:
    """freeze_parameters, trainable_parameters: prefixes of parameter names."""
    converted = []
    for name in item.value:
        for old, new in PREFIXES:
            if name.startswith(old):
                name = new + name[len(old) :]
                break
        converted.append(name)
    if converted == item.value:
        t.keep(item, field)
    elif t.set(item.name, converted, item.name):
        t.row(item, 'converted', value=converted, reason=field.reason)


def target_parameters(t: Translation, item: Given, field: Field) -> None:
    if not item.value:
        t.row(item, 'no_effect', reason='no value')
        return
    experts = all(re.search(r'experts\.(gate_up_proj|down_proj|w1|w2|w3)$', name) for name in item.value)
    modules = t.asked('target_modules') or ['all-linear']
    if experts and 'all-linear' in modules:
        t.row(item, 'converted', name='target_modules', value=modules, reason=field.reason)
    else:
        refuse(
            t,
            item,
            'LoRA acts on modules here; expert weights are the modules linear_fc1 and linear_fc2, and --target_modules '
            'all-linear covers them',
        )
