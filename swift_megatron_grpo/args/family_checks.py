"""What a family or a model cannot be trained with (import tier 0). Each check gives complete messages.

Limits of attention and experts are those of Transformer Engine (2.9) and Megatron-Core (0.16), which show them while the model is built or at the
first forward pass; docs/models.md lists them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import model_checks, model_files
from .families import Families, known_families, types_to_choose, unknown_family
from .model_checks import WITH_SINKS
from .resume_checks import experts_can_be_resumed
from .translation import Translation


def against_family(t: Translation, config: Mapping[str, Any]) -> None:
    """What a family cannot be trained with; `config`: config.json, or as much of it as is known."""
    length = t.effective('max_length')
    t.errors += model_checks.problems(
        config,
        longest=None if length is None else length + t.effective('max_completion_length'),
        attention_backend=str(t.effective('attention_backend')),
    )
    families = known_families()
    family = families and unknown_family(families, config, t.effective('model_type'))
    if families and family:
        t.errors.append(str(model_checks.unknown_model(t.effective('model'), family, sorted(families.convertible))))
    if families and t.effective('model'):
        _model_type(t, config, families)
    if t.effective('tuner_type') == 'lora' and not t.effective('merge_lora'):
        note = model_checks.adapter_warning(config, t.effective('target_modules') or ['all-linear'])
        t.warnings += [note] if note else []
    family_limits(t, model_files.text_config(dict(config)))


def _model_type(t: Translation, config: Mapping[str, Any], families: Families) -> None:
    """What ms-swift cannot decide, and a type that is not of this model. A model type registered by a plugin is nobody's business here."""
    model, given = t.effective('model'), t.effective('model_type')
    types = types_to_choose(families, config, model)
    saved = Path(model).expanduser() / 'args.json'
    if given is None and types and not saved.exists() and not t.effective('external_plugins'):
        likely = [name for name in types if name in families.convertible] or types
        t.errors.append(
            f'--model_type is needed: {model} can be {", ".join(types)} by the architecture in its config.json '
            f'({config["architectures"][0]}), and ms-swift does not choose. For example --model_type {likely[0]}.'
        )
    fitting = set().union(*(families.architectures.get(str(name), set()) for name in config.get('architectures') or []))
    if given is not None and fitting and given not in fitting and given in set().union(*families.architectures.values()):
        t.warnings.append(
            f'--model_type {given} is none of the types of {config["architectures"][0]}, which {model} is by its config.json: '
            f'{", ".join(sorted(fitting))}. It is loaded and converted as {given}.'
        )


def against_model(t: Translation, config: Mapping[str, Any]) -> None:
    """What this model cannot be trained with, and sizes that must divide its own."""
    against_family(t, config)
    text = model_files.text_config(dict(config))
    heads, layers = text.get('num_attention_heads'), text.get('num_hidden_layers')
    _tp, pp, ep = (t.effective(f'{name}_parallel_size') for name in ('tensor_model', 'pipeline_model', 'expert_model'))
    vpp = t.effective('virtual_pipeline_model_parallel_size') or 1
    if isinstance(heads, int):
        for name in ('tensor_model_parallel_size', 'vllm_tensor_parallel_size'):
            size = t.effective(name)
            if size > 0 and heads % size and (name != 'vllm_tensor_parallel_size' or t.effective('vllm_mode') == 'colocate'):
                fitting = [d for d in range(1, heads + 1) if heads % d == 0]
                near = sorted(sorted(fitting, key=lambda d: abs(d - size))[:2])
                t.errors.append(
                    f'--{name} {size} does not divide the {heads} attention heads of {t.effective("model")}. The nearest valid values are '
                    f'{" or ".join(str(d) for d in near)}.'
                )
    uneven = any(
        t.effective(name)
        for name in (
            'decoder_first_pipeline_num_layers',
            'decoder_last_pipeline_num_layers',
            'account_for_embedding_in_pipeline_split',
            'account_for_loss_in_pipeline_split',
            'pipeline_model_parallel_layout',
        )
    )
    if isinstance(layers, int) and pp > 0 and vpp > 0 and not uneven and layers % (pp * vpp):
        # the other stages share the rest evenly; the last one takes as near to its share as that leaves
        fitting = [n for n in range(1, layers) if pp > 1 and (layers - n) % (pp - 1) == 0 and vpp == 1]
        last = min(fitting, key=lambda n: abs(n - layers / pp), default=0)
        t.errors.append(
            f'The {layers} layers of {t.effective("model")} do not divide by pipeline_model_parallel_size {pp}'
            + (f' x virtual_pipeline_model_parallel_size {vpp}' if vpp > 1 else '')
            + (f'. Give --decoder_last_pipeline_num_layers {last}, or a size' if last else '. Give a size')
            + f' that divides {layers}.'
        )
    groups = text.get('num_key_value_heads')
    tp = t.effective('tensor_model_parallel_size')
    if isinstance(groups, int) and groups > 0 and tp > 0 and groups % tp and tp % groups and not text.get('kv_lora_rank'):
        t.errors.append(
            f'--tensor_model_parallel_size {tp} is neither a multiple nor a divisor of the {groups} key/value heads of '
            f'{t.effective("model")}, which Megatron-Core asks for.'
        )
    experts = next((text[key] for key in ('num_experts', 'n_routed_experts', 'num_local_experts') if isinstance(text.get(key), int)), 0)
    if experts and tp > 1 and not t.effective('sequence_parallel'):
        t.errors.append(
            f'--tensor_model_parallel_size {tp} with the experts of {t.effective("model")} needs --sequence_parallel true: Megatron-Core '
            'refuses to train them without.'
        )
    etp = t.effective('expert_tensor_parallel_size')
    if experts and etp > 1 and t.effective('tuner_type') != 'full' and model_checks.adapts_experts(t.effective('target_modules') or ['all-linear']):
        t.errors.append(
            f'--expert_tensor_parallel_size {etp}: mcore-bridge has no adapters on experts that are split. Leave it out (1), or choose '
            '--target_modules without experts, such as q_proj k_proj v_proj o_proj.'
        )
    resume = t.effective('resume_from_checkpoint')
    if experts and isinstance(resume, str):
        experts_can_be_resumed(t, resume)
    if experts and not t.effective('moe_grouped_gemm'):
        t.errors.append(
            f'--moe_grouped_gemm false with the experts of {t.effective("model")}: mcore-bridge converts the weights of experts that are '
            'multiplied together only. Leave it out.'
        )
    if ep > 1 and not experts:
        t.errors.append(f'--expert_model_parallel_size {ep} is given, and {t.effective("model")} has no experts. Leave it out.')
    elif ep > 0 and experts and experts % ep:
        t.errors.append(f'--expert_model_parallel_size {ep} does not divide the {experts} experts of {t.effective("model")}.')


def family_limits(t: Translation, text: Mapping[str, Any]) -> None:
    """`text`: the language model's part of config.json."""
    if text.get('model_type') in WITH_SINKS:
        _sinks(t)
    if text.get('kv_lora_rank'):
        _latent_attention(t)


def _sinks(t: Translation) -> None:
    model = t.effective('model')
    cp, exchange = t.effective('context_parallel_size'), t.effective('cp_comm_type')
    if cp > 1 and exchange != 'a2a':
        t.errors.append(f'--context_parallel_size {cp} with the attention sinks and sliding windows of {model} needs --cp_comm_type a2a: Transformer Engine '
                        f'has no attention for them with {exchange or "p2p"}.')
    etp = t.effective('expert_tensor_parallel_size')
    if etp > 1:
        t.errors.append(f'--expert_tensor_parallel_size {etp} would split each expert of {model}, and Megatron-Core refuses that for experts with biases. '
                        'Use --expert_model_parallel_size, and leave it out.')


def _latent_attention(t: Translation) -> None:
    cp, exchange = t.effective('context_parallel_size'), t.effective('cp_comm_type')
    if cp > 1 and exchange in ('a2a', 'all_gather'):
        t.errors.append(f'--cp_comm_type {exchange} does not go with the latent attention of {t.effective("model")}, whose keys and values differ in '
                        'width: Transformer Engine divides it over context-parallel ranks with p2p only. Leave --cp_comm_type out.')
