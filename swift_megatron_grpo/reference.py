"""The reference model: none at beta 0, the policy without its adapter under LoRA, a frozen copy otherwise (import tier 2).

With `--sync_ref_model true` the reference follows the policy (TR-DPO, arXiv 2404.09656): after every ref_model_sync_steps optimizer steps

    reference = ref_model_mixup_alpha * policy + (1 - ref_model_mixup_alpha) * reference

over all parameters, as TRL's SyncRefModelCallback does. Under LoRA the reference is then an adapter of its own, `ref_adapter`, which starts
without effect (B = 0) and is mixed with the policy's adapter, matrix by matrix. Log-probabilities of a generation that is being trained on stay
those of the reference that it began with.
"""
from __future__ import annotations

import contextlib
import os
import torch
import torch.distributed as dist
from collections.abc import Iterator, Sequence
from safetensors.torch import save_file
from swift.megatron.model import get_mcore_model
from swift.megatron.utils import load_mcore_checkpoint
from swift.utils import is_master, safe_snapshot_download
from typing import Any

from .errors import UserError
from .parallel import Topology
from .step.batch import StepBatch
from .step.forward import PolicyForward, collect_logprobs


FOLDER = 'reference'  # inside a checkpoint, where the reference moves
_ADAPTER = 'ref_adapter'


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
        if self.args.sync_ref_model and self.args.tuner_type == 'lora_llm':
            raise UserError('--sync_ref_model true with --tuner_type lora_llm: the parts that are trained in full have no copy to mix into. '
                            'Use --tuner_type lora or full, or leave it out.')
        self.has_adapter = bool(self.args.mcore_ref_adapter or self.args.ref_adapters)
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
        saved = self._saved()
        if saved is not None:
            self.trainer.bridge.load_weights(models, saved)
        elif args.mcore_ref_model is not None:
            load_mcore_checkpoint(args, models, load_arg='mcore_ref_model')
        else:
            folder = safe_snapshot_download(args.ref_model or args.model, use_hf=args.use_hf, hub_token=args.hub_token)
            self.trainer.bridge.load_weights(models, folder)
        return models

    def _load_adapter(self) -> None:
        args, trainer = self.args, self.trainer
        saved = self._saved()
        if args.sync_ref_model and not self.has_adapter:
            for model in trainer.peft_models:
                _add_reference_adapter(model)
            self.has_adapter = True
        if saved is not None:
            trainer.bridge.load_weights(trainer.unwrapped_models, saved, peft_format=True, adapter_name=_ADAPTER)
        elif args.mcore_ref_adapter is not None:
            load_mcore_checkpoint(args, trainer.wrapped_models, load_arg='mcore_ref_adapter', adapter_name=_ADAPTER)
        elif args.ref_adapters:
            trainer.bridge.load_weights(trainer.unwrapped_models, args.ref_adapters[0], peft_format=True, adapter_name=_ADAPTER)

    def _saved(self) -> str | None:
        """The moving reference in the checkpoint that the run goes on from."""
        args = self.args
        if not args.sync_ref_model or args.resume_from_checkpoint is None or args.resume_only_model:
            return None
        folder = os.path.join(args.resume_from_checkpoint, FOLDER)
        if not os.path.isdir(folder):
            raise UserError(f'--sync_ref_model true: {args.resume_from_checkpoint} has no folder {FOLDER!r}, so the reference as it was cannot be '
                            'restored. It was written without --sync_ref_model; go on without it, or start anew with --resume_only_model true.')
        return folder

    # -- the moving reference ----------------------------------------------------------------------------------------------------------------

    def after_update(self, iteration: int) -> None:
        """Moves the reference where it is time. All ranks, each its own share of the parameters; collective with overlap_param_gather.

        Args:
            iteration: optimizer steps done in the run, this one included.
        """
        args = self.args
        if not args.sync_ref_model or iteration % args.ref_model_sync_steps != 0:
            return
        self.trainer.gather_parameters()
        with torch.no_grad():
            for policy, reference in self._pairs():
                reference.copy_(torch.lerp(reference.float(), policy.float(), args.ref_model_mixup_alpha))

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(parameter of the policy, the reference's) of this rank."""
        trainer = self.trainer
        if self.args.tuner_type == 'full':
            for policy, reference in zip(trainer.unwrapped_models, self.models):
                yield from zip(policy.parameters(), reference.parameters(), strict=True)
            return
        for model in trainer.peft_models:
            yield from _adapter_pairs(model)

    def save(self, folder: str) -> None:
        """Writes a moving reference into a checkpoint: Hugging Face safetensors or a PEFT adapter. All ranks, collective."""
        if not self.args.sync_ref_model:
            return
        folder = os.path.join(folder, FOLDER)
        bridge = self.trainer.bridge
        if self.args.tuner_type == 'full':
            bridge.save_weights(self.models, folder)
            return
        # ms-swift's save_weights knows one adapter only.
        weights = dict(bridge.export_weights(self.trainer.unwrapped_models, target_device='cpu', only_master_rank=True, peft_format=True,
                                             adapter_name=_ADAPTER))
        if is_master():
            os.makedirs(folder, exist_ok=True)
            save_file({name: tensor.contiguous() for name, tensor in weights.items()}, os.path.join(folder, 'adapter_model.safetensors'))
        dist.barrier()

    # -- log-probabilities -------------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _reference_weights(self) -> Iterator[None]:
        if self.args.tuner_type == 'full':
            yield
            return
        peft_models = self.trainer.peft_models
        if self.has_adapter:
            trainable = [[p for p in model.parameters() if p.requires_grad] for model in peft_models]
            for model in peft_models:
                model.set_adapter(_ADAPTER)
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
        with self._reference_weights(), self.forward.free_routing():
            return [logprobs for logprobs, _ in collect_logprobs(self.forward, steps, self.device)]


def _add_reference_adapter(model: Any) -> None:
    """A second adapter of the same shape as the policy's, frozen: A as in the policy's, B = 0, so that it changes nothing yet."""
    model.add_adapter(_ADAPTER, model.peft_config['default'])
    model.base_model._cast_adapter_dtype(adapter_name=_ADAPTER, autocast_adapter_dtype=True)
    for name, parameter in model.named_parameters():
        if f'.{_ADAPTER}.' in name:
            parameter.requires_grad_(False)
    with torch.no_grad():
        for name, policy, reference in _named_adapter_pairs(model):
            if 'lora_B' in name or 'lora_embedding_B' in name:
                reference.zero_()
            elif 'modules_to_save' not in name:  # those are copies of the base model's modules already
                reference.copy_(policy)


def _adapter_pairs(model: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return ((policy, reference) for _, policy, reference in _named_adapter_pairs(model))


def _named_adapter_pairs(model: Any) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    parameters = dict(model.named_parameters())
    for name, reference in parameters.items():
        if f'.{_ADAPTER}' in name:
            yield name, parameters[name.replace(f'.{_ADAPTER}', '.default')], reference
