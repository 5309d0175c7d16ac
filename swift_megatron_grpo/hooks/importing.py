"""What the finder does once one of ms-swift's modules is asked for (import tier 0: standard library only)."""

import importlib.util
import sys
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from swift_megatron_grpo.hooks import command_line

STAND_IN_FILE = Path(__file__).with_name('swift_cli.py')


class _EmptyPackageLoader(Loader):
    """Creates a package and runs nothing: its submodules are found in the real folder."""

    def create_module(self, spec):
        return None

    def exec_module(self, module) -> None:
        pass


class _CallbackLoader(Loader):
    """The real loader, and one call after the module has run. It takes itself out of the module's attributes again."""

    def __init__(self, loader, callback) -> None:
        self._loader = loader
        self._callback = callback

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module) -> None:
        self._loader.exec_module(module)
        module.__loader__ = module.__spec__.loader = self._loader
        try:
            self._callback(module)
        except Exception as error:
            print(f'swift-megatron-grpo: {module.__name__} is used unchanged: {type(error).__name__}: {error}', file=sys.stderr)

    def __getattr__(self, name):
        return getattr(self._loader, name)


def _real_spec(name: str, path=None, target=None) -> ModuleSpec | None:
    """The specification that the other finders give (editable installs bring their own)."""
    for finder in sys.meta_path:
        find = getattr(finder, 'find_spec', None)  # third-party objects; very old finders have no find_spec
        if find is None or type(finder).__module__ == 'swift_megatron_grpo.hooks.autoload':
            continue
        spec = find(name, path, target)
        if spec is not None:
            return spec
    return PathFinder.find_spec(name, path, target)


def light_swift() -> ModuleSpec | None:
    """The specification of `swift` without its `__init__`, when this process is `swift rlhf` and asks for our backend; else None.

    A `swift` that is not ms-swift (another package has the name) is left alone: it has no cli/rlhf.py.
    """
    found = command_line.rlhf_arguments(sys.argv if hasattr(sys, 'argv') else [], sys.orig_argv)
    if found is None or command_line.asked_backend(found[1]) in ('', 'transformers'):
        return None
    real = _real_spec('swift')
    if real is None or real.origin is None or not Path(real.origin).with_name('cli').joinpath('rlhf.py').is_file():
        return None
    return importlib.util.spec_from_file_location(
        'swift', real.origin, loader=_EmptyPackageLoader(), submodule_search_locations=list(real.submodule_search_locations or [])
    )


def stand_in(name: str) -> ModuleSpec | None:
    """`swift.cli.main` or `swift.pipelines`, served from swift_cli.py. An ordinary source file, so that `python -m` can run it."""
    return importlib.util.spec_from_file_location(name, STAND_IN_FILE)


def with_callback(name: str, path, target, callback: str) -> ModuleSpec | None:
    """The real module `name`, followed by `patches.<callback>(module)`."""
    spec = _real_spec(name, path, target)
    if spec is None or spec.loader is None:
        return None

    def after(module) -> None:
        from swift_megatron_grpo.hooks import patches

        getattr(patches, callback)(module)

    spec.loader = _CallbackLoader(spec.loader, after)
    return spec


def say_what_the_page_needs() -> None:
    """`swift web-ui` is about to import gradio: where it is missing or does not fit, how to get the one that does."""
    from swift_megatron_grpo.args import doctor

    line = doctor.web_ui(doctor.installed_version)
    if not line.startswith('  ok'):
        print(f'swift-megatron-grpo: {" ".join(line.split()[1:])}', file=sys.stderr)
