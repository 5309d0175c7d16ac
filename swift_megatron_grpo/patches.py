"""Patches of other packages that the trainer needs on every platform (import tier 2). Applied once, when the pipeline starts."""
from __future__ import annotations

from typing import Any

from .passport import Passport, PatchRegistry

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
