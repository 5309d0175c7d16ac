"""The reference model: none at beta 0, the policy without its adapter under LoRA, a frozen copy otherwise (import tier 2)."""
from __future__ import annotations

import contextlib
import torch
from collections.abc import Iterator, Sequence
from swift.megatron.model import get_mcore_model
from swift.megatron.utils import load_mcore_checkpoint
from swift.utils import safe_snapshot_download
from typing import Any

from .parallel import Topology
from .step.batch import StepBatch
from .step.forward import PolicyForward, collect_logprobs


class Reference:
    """Log-probabilities of the reference policy.

    Args:
        trainer: for arguments, template and the policy's models.
        topology: this rank's place.
        policy: the policy's forward, used under LoRA.
        device: the rank's device.
    """

    def __init__(self, trainer: Any, topology: Topology, policy: PolicyForward, device: torch.device):
        self.args = trainer.args
        self.trainer = trainer
        self.models: list[Any] = []
        self.device = device
        if self.args.tuner_type == 'full':
            self.models = self._load()
            self.forward = PolicyForward(trainer, self.models, topology, self.args.temperature)
        else:
            self._load_adapter()
            self.forward = policy

    def _load(self) -> list[Any]:
        args = self.args
        models = get_mcore_model(args, self.trainer.template.config)
        for model in models:
            if not args.use_cpu_initialization:
                model.to(self.device)
            model.requires_grad_(False)
            model.eval()
        if args.mcore_ref_model is not None:
            load_mcore_checkpoint(args, models, load_arg='mcore_ref_model')
        else:
            folder = safe_snapshot_download(args.ref_model or args.model, use_hf=args.use_hf, hub_token=args.hub_token)
            self.trainer.bridge.load_weights(models, folder)
        return models

    def _load_adapter(self) -> None:
        args = self.args
        if args.mcore_ref_adapter is not None:
            load_mcore_checkpoint(args, self.trainer.wrapped_models, load_arg='mcore_ref_adapter', adapter_name='ref_adapter')
        elif args.ref_adapters:
            self.trainer.bridge.load_weights(self.trainer.unwrapped_models, args.ref_adapters[0], peft_format=True, adapter_name='ref_adapter')

    @contextlib.contextmanager
    def _reference_weights(self) -> Iterator[None]:
        if self.args.tuner_type == 'full':
            yield
            return
        peft_models = self.trainer.peft_models
        if self.args.mcore_ref_adapter or self.args.ref_adapters:
            trainable = [[p for p in model.parameters() if p.requires_grad] for model in peft_models]
            for model in peft_models:
                model.set_adapter('ref_adapter')
            try:
                yield
            finally:
                for model, parameters in zip(peft_models, trainable):
                    model.set_adapter('default')
                    for parameter in parameters:  # set_adapter decides requires_grad anew
                        parameter.requires_grad_(True)
            return
        with contextlib.ExitStack() as stack:
            for model in peft_models:
                stack.enter_context(model.disable_adapter())
            yield

    def logprobs(self, steps: Sequence[StepBatch]) -> list[torch.Tensor]:
        """ref_logprobs_K of each step, own tokens filled in. All ranks, collective: one forward-only run of the schedule."""
        with self._reference_weights():
            return [logprobs for logprobs, _ in collect_logprobs(self.forward, steps, self.device)]
