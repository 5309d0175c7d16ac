"""Names of parameters in the whole model, for a part of it that lies on one pipeline stage (import tier 2)."""
from __future__ import annotations

import re
from collections.abc import Iterator
from torch import nn
from typing import Any

LAYER = re.compile(r'(?:.*\.)?decoder\.layers\.\d+')


class WholeModel:
    """A model chunk whose layers are numbered from the first layer of the whole model.

    In Megatron each chunk (pipeline stage, or virtual stage) numbers its layers from 0, and a layer's ``layer_number`` counts from 1 through the
    whole model. All else is the chunk's own.
    """

    def __init__(self, chunk: nn.Module):
        self._chunk = chunk
        self._prefixes = {f'{name}.': f'{name.rpartition(".")[0]}.{module.layer_number - 1}.' for name, module in chunk.named_modules()
                          if LAYER.fullmatch(name) and hasattr(module, 'layer_number')}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self._chunk.named_parameters():
            own = next((prefix for prefix in self._prefixes if name.startswith(prefix)), '')
            yield self._prefixes.get(own, '') + name[len(own):], parameter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chunk, name)
