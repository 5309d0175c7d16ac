"""What Megatron-Core reads from every Transformer Engine module besides its weights (import tier 1)."""
from typing import Any

import torch
from torch import nn


def refuse_options(where: str, options: dict[str, Any]) -> None:
    """Raise NotImplementedError for constructor or call options that are set and that the stand-in does not have."""
    asked = {name: value for name, value in options.items() if value is not None and value is not False}
    if asked:
        raise NotImplementedError(f'CPU platform: {where} has no stand-in for {asked}')


def parameter_device(device: Any) -> torch.device:
    """'meta' stays 'meta' (Megatron's init_model_with_meta_device); anything else is the CPU."""
    return torch.device('meta' if str(device) == 'meta' else 'cpu')


class EngineModule(nn.Module):
    """Base of all stand-in modules: the FP8 bookkeeping that Megatron-Core asks for, all of it off."""

    def __init__(self) -> None:
        super().__init__()
        self.fp8_meta: dict[str, Any] = {'fp8_checkpoint': False, 'recipe': None}
        self.fp8 = self.fp8_calibration = self.fp8_initialized = False
        self.primary_weights_in_fp8 = False
        self.save_original_input = False  # inputs are always saved as they are
        self.tp_group: Any = None
        self.tp_group_initialized = False

    def get_extra_state(self) -> torch.Tensor:
        """Empty, as Transformer Engine writes it without FP8; it keeps the keys of checkpoints equal."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        if state is not None and state.numel() > 0:
            raise NotImplementedError('CPU platform: this checkpoint holds FP8 scaling state; load it on a GPU')

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        pass

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        self.tp_group = tp_group
        self.tp_group_initialized = True
