"""Patches of other packages that the trainer needs on every platform (import tier 2). Applied once, when the pipeline starts."""
from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from .passport import Passport, PatchRegistry

if TYPE_CHECKING:
    import torch

PATCHES = PatchRegistry('trainer')


@PATCHES.patch(Passport(
    name='rope-theta-of-transformers-5',
    target='mcore_bridge.model.rope:EXTENDED_ROPE_INIT_FUNCTIONS',
    breaks='a transformers model that is built after a Megatron one (the engine of --use_vllm false) stops with '
           "'... object has no attribute rope_theta'",
    reference='mcore_bridge/model/rope.py, _compute_default_rope_parameters (mcore-bridge 1.6.5): it is written into transformers\' own table '
              'and reads config.rope_theta, which transformers 5 keeps in config.rope_parameters',
    versions='mcore-bridge>=1.6,<1.7',
    remove_when='the bridge reads rope_parameters, or no longer writes into the table of transformers',
))
def _rope_theta() -> None:
    from mcore_bridge.model import rope
    upstream = rope.EXTENDED_ROPE_INIT_FUNCTIONS.get('default')
    if upstream is None:
        return

    def compute(config: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(config, 'rope_theta'):
            config.rope_theta = config.rope_parameters['rope_theta']
        return upstream(config, *args, **kwargs)

    rope.EXTENDED_ROPE_INIT_FUNCTIONS['default'] = compute


@PATCHES.patch(Passport(
    name='lora-options-of-peft-0.19',
    target='mcore_bridge.tuners.lora:LoraParallelLinear.__init__',
    breaks='lora_dropout, use_rslora, lora_bias and init_lora_weights have no effect',
    reference='mcore_bridge/tuners/lora.py, LoraParallelLinear.__init__ (mcore-bridge 1.6.5): it reads them from keywords, which peft 0.19 and later '
              'replace by one `config`',
    versions='mcore-bridge>=1.6,<1.7, peft>=0.19',
    remove_when='the constructor reads `config` as its update_layer does',
))
def _lora_options() -> None:
    from mcore_bridge.tuners.lora import LoraParallelLinear
    upstream = LoraParallelLinear.__init__

    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        config = kwargs.get('config')
        if config is not None:
            for name in ('lora_dropout', 'use_rslora', 'lora_bias', 'init_lora_weights'):
                kwargs.setdefault(name, getattr(config, name))
        upstream(self, *args, **kwargs)

    LoraParallelLinear.__init__ = initialize


@PATCHES.patch(Passport(
    name='layer-numbers-of-pipeline-stages',
    target='swift.megatron.utils.utils:prepare_mcore_model',
    breaks='freeze_parameters and trainable_parameters that name a layer act on that layer of every pipeline stage',
    reference='swift/megatron/utils/utils.py, prepare_mcore_model (ms-swift 4.6.0): prefixes and patterns meet the names of one stage, whose '
              'layers begin at 0',
    versions='ms-swift>=4.6,<4.7',
    remove_when='the names are those of the whole model',
))
def _layer_numbers() -> None:
    from swift.megatron.utils import utils

    from .parallel_names import WholeModel
    freeze, activate = utils.freeze_parameters, utils.activate_parameters
    utils.freeze_parameters = lambda model, *args: freeze(WholeModel(model), *args)
    utils.activate_parameters = lambda model, *args: activate(WholeModel(model), *args)


@PATCHES.patch(Passport(
    name='image-features-of-qwen3-vl',
    target='mcore_bridge.model.mm_gpts.qwen3_vl:Qwen3VL_Vit._get_inputs_embeds',
    breaks='Qwen3-VL: (1) an answer that contains an image token by chance stops the run ("Number of elements of source < number of ones in mask"); '
           '(2) with rows instead of packing the features that enter the first layers go to the images of other rows; (3) with sequence '
           "parallelism the vision tower gets the gradient of one rank's share of them only",
    reference='mcore_bridge/model/mm_gpts/qwen3_vl.py, Qwen3VL_Vit._get_inputs_embeds (mcore-bridge 1.6.5): it takes every image token for a '
              'placeholder, where HuggingFaceVit._hf_get_inputs_embeds goes by mm_token_type_ids; its mask is position by position and its features '
              'row by row; its slice of the features has no reduction in backward',
    versions='mcore-bridge>=1.6,<1.7',
    remove_when='tests/step/test_images.py passes without it',
))
def _image_features() -> None:
    from mcore_bridge.model.mm_gpts.qwen3_vl import Qwen3VL_Vit
    upstream = Qwen3VL_Vit._get_inputs_embeds

    def get_inputs_embeds(self: Any, inputs_embeds: Any, inputs: dict[str, Any], visual: Any, hf_config: Any) -> dict[str, Any]:
        types = inputs.get('mm_token_type_ids')
        if types is not None:  # the ids serve to find placeholders only
            inputs = {**inputs, 'input_ids': inputs['input_ids'].masked_fill(types.to(inputs['input_ids'].device) == 0, -1)}
        one_rank = SimpleNamespace(config=SimpleNamespace(context_parallel_size=1, sequence_parallel=False))
        result = upstream(one_rank, inputs_embeds, inputs, visual, hf_config)
        if result['visual_pos_masks'] is not None:
            result['visual_pos_masks'], result['deepstack_visual_embeds'] = _features_here(
                self.config, result['visual_pos_masks'], result['deepstack_visual_embeds'], inputs.get('packed_seq_params'))
        return result

    Qwen3VL_Vit._get_inputs_embeds = get_inputs_embeds


def _features_here(config: Any, mask_sb: torch.Tensor, features: torch.Tensor | None, packed: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """This rank's part of features that are added at image positions. No communication; the backward pass sums over the tensor-parallel group.

    Args:
        mask_sb: bool [s, b], image positions of whole sequences.
        features: [layers, n, h], n image positions, row by row; None: the model has no such layers.
        packed: Megatron's description of packed sequences, or None.

    Returns:
        The same of this rank's positions; the features position by position, as a mask [s, b] selects them.
    """
    import torch
    from mcore_bridge.utils import split_cp_inputs
    from megatron.core import mpu
    from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
    mask_bs = mask_sb.transpose(0, 1)
    places_bs = torch.full(mask_bs.shape, -1, dtype=torch.int64, device=mask_bs.device)
    places_bs[mask_bs] = torch.arange(int(mask_bs.sum()), device=mask_bs.device)
    if config.context_parallel_size > 1:
        places_bs = split_cp_inputs(places_bs, getattr(packed, 'cu_seqlens_q', None), 1,
                                    cp_partition_mode=getattr(config, 'cp_partition_mode', 'zigzag'))  # megatron-core >= 0.17 has the field
    places_sb = places_bs.transpose(0, 1)
    size = mpu.get_tensor_model_parallel_world_size()
    if config.sequence_parallel and size > 1:
        places_sb = places_sb.chunk(size)[mpu.get_tensor_model_parallel_rank()]
        if features is not None:
            features = copy_to_tensor_model_parallel_region(features)
    mask_here = places_sb >= 0
    return mask_here, None if features is None else features[:, places_sb[mask_here]]


@PATCHES.patch(Passport(
    name='image-positions-of-internvl',
    target='mcore_bridge.model.mm_gpts.internvl:InternvlHfVit.get_inputs_embeds, swift.template.templates.internvl:InternvlhfTemplate._encode',
    breaks='InternVL: an answer that contains an image token by chance stops the run ("Number of elements of source < number of ones in mask")',
    reference='mcore_bridge/model/mm_gpts/internvl.py, InternvlHfVit.get_inputs_embeds (mcore-bridge 1.6.5): every image token is a placeholder',
    versions='mcore-bridge>=1.6,<1.7; ms-swift>=4.6,<4.7',
    remove_when="the template brings mm_token_type_ids, as Qwen-VL's does, and the bridge reads them",
))
def _image_positions() -> None:
    import torch
    from mcore_bridge.model.mm_gpts.internvl import InternvlHfVit
    from swift.template.templates.internvl import InternvlhfTemplate
    embed, encode = InternvlHfVit.get_inputs_embeds, InternvlhfTemplate._encode

    def encode_with_types(self: Any, inputs: Any) -> dict[str, Any]:
        encoded = encode(self, inputs)
        if self.is_training and encoded.get('labels') is not None:
            ids, labels = torch.tensor(encoded['input_ids']), torch.tensor(encoded['labels'])
            encoded['mm_token_type_ids'] = ((ids == self.processor.image_token_id) & (labels == -100)).long()  # what was sampled has a label
        return encoded

    def get_inputs_embeds(self: Any, inputs_embeds: Any, **inputs: Any) -> Any:
        types = inputs.get('mm_token_type_ids')
        if types is not None:  # the ids serve to find placeholders only
            ids = inputs['input_ids']
            inputs['input_ids'] = ids.masked_fill(types.to(ids.device) == 0, -1)
        return embed(self, inputs_embeds, **inputs)

    InternvlhfTemplate._encode, InternvlHfVit.get_inputs_embeds = encode_with_types, get_inputs_embeds


@PATCHES.patch(Passport(
    name='line-after-an-image-of-internvl',
    target='swift.template.templates.internvl:InternvlhfTemplate.replace_tag',
    breaks="InternVL with vLLM: the engine's prompt lacks the line break after each image that the trainer's has (log-probabilities off by 0.9)",
    reference="swift/template/templates/internvl.py, InternvlhfTemplate.replace_tag (ms-swift 4.6.0): '</img>' and a line break for training, "
              "'<IMG_CONTEXT>' for vLLM, which transformers' processor fills in without a break",
    versions='ms-swift>=4.6,<4.7',
    remove_when='both modes give one prompt',
))
def _line_after_an_image() -> None:
    from swift.template.templates.internvl import InternvlhfTemplate
    upstream = InternvlhfTemplate.replace_tag

    def replace_tag(self: Any, media_type: Any, index: int, inputs: Any) -> list[Any]:
        if media_type == 'image' and self.mode == 'vllm':
            return ['<IMG_CONTEXT>\n']
        return upstream(self, media_type, index, inputs)

    InternvlhfTemplate.replace_tag = replace_tag


@PATCHES.patch(Passport(
    name='glm4-keeps-gate-and-up-together',
    target='mcore_bridge.model.gpts.glm4:Glm4Bridge._set_mlp_state',
    breaks='a checkpoint or adapter of GLM-4 (dense) cannot be loaded by transformers: it has gate_proj and up_proj where the model has gate_up_proj',
    reference='mcore_bridge/bridge/gpt_bridge.py, GPTBridge._set_mlp_state (mcore-bridge 1.6.5): is_gate_up is found out on loading only',
    versions='mcore-bridge>=1.6,<1.7',
    remove_when='export writes what loading found',
))
def _gate_and_up() -> None:
    import torch
    from mcore_bridge.bridge import GPTBridge
    from mcore_bridge.model.gpts.glm4 import Glm4Bridge
    upstream = GPTBridge._set_mlp_state

    def set_mlp_state(self: Any, mg_mlp: Any, hf_state_dict: dict[str, Any], hf_prefix: str, layer_idx: int, to_mcore: bool, **kwargs: Any) -> Any:
        state = upstream(self, mg_mlp, hf_state_dict, hf_prefix, layer_idx, to_mcore, **kwargs)
        if to_mcore:
            return state
        for leaf in ('weight', 'lora_B.weight'):
            if f'{hf_prefix}up_proj.{leaf}' in state:
                halves = [state.pop(f'{hf_prefix}{half}_proj.{leaf}') for half in ('gate', 'up')]
                state[f'{hf_prefix}gate_up_proj.{leaf}'] = torch.cat(halves)
        if f'{hf_prefix}up_proj.lora_A.weight' in state:  # one factor for both
            del state[f'{hf_prefix}gate_proj.lora_A.weight']
            state[f'{hf_prefix}gate_up_proj.lora_A.weight'] = state.pop(f'{hf_prefix}up_proj.lora_A.weight')
            self._peft_target_modules = (self._peft_target_modules - {'gate_proj', 'up_proj'}) | {'gate_up_proj'}
        return state

    Glm4Bridge._set_mlp_state = set_mlp_state


@PATCHES.patch(Passport(
    name='type-of-cp-comm-type',
    target='swift.megatron.arguments.megatron_args:MegatronArguments.cp_comm_type',
    breaks='no argument can be read ("Subscripted generics cannot be used with class and instance checks") in a process that imported Megatron-Core '
           'before ms-swift',
    reference="transformers/hf_argparser.py, _parse_dataclass_field: isinstance(None, args[1]) of Optional[Union[str, List[str]]]; it works where Python's "
              'cache of unions holds Optional[Union[List[str], str]] from elsewhere, which is equal and is then taken instead',
    versions='ms-swift>=4.6,<4.7, transformers>=5',
    remove_when='the field is Optional[str], or the parser looks for NoneType in args',
))
def _type_of_cp_comm_type() -> None:
    from swift.megatron.arguments.megatron_args import MegatronArguments
    MegatronArguments.__annotations__['cp_comm_type'] = str | None


@PATCHES.patch(Passport(
    name='adapters-of-layers-that-every-rank-holds-whole',
    target='mcore_bridge.tuners.lora:_is_replicated_base',
    breaks="LoRA with tensor parallelism on the latent projections of DeepSeek-V3's attention (q_a_proj, kv_a_proj_with_mqa): with sequence parallelism "
           'lora_B gets the gradient of one rank\'s share of the tokens, the copies drift apart, and the gradient norm is wrong',
    reference='mcore_bridge/tuners/lora.py, _is_replicated_base (mcore-bridge 1.6.5): it looks for weight.tensor_model_parallel == False; Transformer '
              "Engine's Linear sets it to True on every weight, and TELinear of megatron-core 0.16 leaves it so for parallel_mode 'duplicated'",
    versions='mcore-bridge>=1.6,<1.7, megatron-core<0.17',
    remove_when='tests/platform/test_expert_adapters.py passes without it',
))
def _replicated_base() -> None:
    from mcore_bridge.tuners import lora
    upstream = lora._is_replicated_base

    def is_replicated_base(base_layer: Any) -> bool:
        if upstream(base_layer):
            return True
        # Column- and row-parallel layers have classes of their own, which say None too where shared experts overlap communication.
        split = (lora.TEColumnParallelLinear, lora.TERowParallelLinear)
        return isinstance(base_layer, lora.TELinear) and not isinstance(base_layer, split) and base_layer.parallel_mode is None

    lora._is_replicated_base = is_replicated_base


@PATCHES.patch(Passport(
    name='adapters-of-gated-layers-in-checkpoints',
    target='mcore_bridge.tuners.lora:LoraParallelLinear.sharded_state_dict',
    breaks='a LoRA run that goes on with another tensor-parallel size: lora_B of linear_fc1 is taken for one matrix, so that rows of gate and up change '
           'places without a word',
    reference='mcore_bridge/tuners/lora.py, sharded_state_dict (mcore-bridge 1.6.5) halves the base layer of a gated linear_fc1 and not its lora_B; '
              'megatron/core/transformer/mlp.py, apply_swiglu_sharded_factory, says why each half is sharded by itself',
    versions='mcore-bridge>=1.6,<1.7',
    remove_when='tests/trainer/test_resume_in_layouts.py passes without it',
))
def _gated_adapters() -> None:
    from mcore_bridge.tuners.lora import LoraParallelLinear
    from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
    upstream = LoraParallelLinear.sharded_state_dict

    def sharded_state_dict(self: Any, prefix: str = '', sharded_offsets: Any = (), metadata: Any = None) -> Any:
        found = upstream(self, prefix, sharded_offsets, metadata)
        if prefix.endswith('linear_fc1.') and self.config.gated_linear_unit and not self.is_grouped:
            for adapter in self.lora_B:
                key = f'{prefix}lora_B.{adapter}.weight'
                found[key] = apply_swiglu_sharded_factory(found[key], sharded_offsets)
        return found

    LoraParallelLinear.sharded_state_dict = sharded_state_dict


@PATCHES.patch(Passport(
    name='norm-of-glm4-in-checkpoints',
    target='mcore_bridge.model.gpts.glm4:Glm4MLP.sharded_state_dict',
    breaks='GLM-4 (dense) with tensor parallelism cannot save a checkpoint: "Invalid access pattern" for post_mlp_layernorm, which each rank takes for its own',
    reference='mcore_bridge/model/gpts/glm4.py, sharded_state_dict (mcore-bridge 1.6.5) gives no tp_group; megatron/core/transformer/utils.py, '
              'sharded_state_dict_default (0.16), numbers replicas by it',
    versions='mcore-bridge>=1.6,<1.7, megatron-core<0.17',
    remove_when='tests/trainer/test_resume_in_layouts.py passes without it',
))
def _norm_of_glm4() -> None:
    from mcore_bridge.model.gpts.glm4 import Glm4MLP
    from megatron.core import mpu
    from megatron.core.transformer.utils import sharded_state_dict_default
    upstream = Glm4MLP.sharded_state_dict

    def sharded_state_dict(self: Any, prefix: str = '', sharded_offsets: Any = (), metadata: Any = None) -> Any:
        found = upstream(self, prefix, sharded_offsets, metadata)
        found.update(sharded_state_dict_default(self.post_mlp_layernorm, f'{prefix}post_mlp_layernorm.', sharded_offsets, metadata,
                                                tp_group=mpu.get_tensor_model_parallel_group()))
        return found

    Glm4MLP.sharded_state_dict = sharded_state_dict
