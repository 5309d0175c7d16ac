"""The implicit door: what runs when an interpreter starts (import tier 0; nothing here may import more than `sys`).

`swift_megatron_grpo_autoload.pth` calls `install()` at every interpreter start of the environment, so this file only puts one finder at
the front of `sys.meta_path`. The finder answers `None` for every module but the few named below, and looks closer when one of those is
imported for the first time:

* `swift`, in a process that is `swift rlhf ...` (or the file that it starts) with `--backend megatron`: the package is served without
  running its `__init__`, which imports torch, and `swift.cli.main` and `swift.pipelines` are served from `swift_cli.py` beside this
  file. So the arguments are checked, and a dry run answers, before anything heavy is loaded.
* `swift.pipelines.train.rlhf` and `swift.trainers.trainer_factory`, in every other process: loaded as they are, then handed to
  `patches.py`, so that `rlhf_main([..., '--backend', 'megatron'])` in a program of the user's own finds us too.
* `swift.ui.llm_grpo.llm_grpo`, which is a tab of `swift web-ui`: the same, for the tab's Megatron section. Before, at `swift.ui`, a gradio that is
  missing is named with the way to get it.
* `swift.arguments.deploy_args` and `swift.pipelines.infer.rollout`: loaded as they are; where this machine needs the CPU platform, `swift
  rollout` is then told how vLLM's CPU build is used. Elsewhere nothing happens.

An error in here is reported once on stderr and the import goes on as if we were not installed.
"""

import sys

_STAND_INS = ('swift.cli.main', 'swift.pipelines')
_PAGE = 'swift.ui'
_AFTER_IMPORT = {
    'swift.pipelines.train.rlhf': 'after_rlhf',
    'swift.trainers.trainer_factory': 'after_trainer_factory',
    'swift.ui.llm_grpo.llm_grpo': 'after_llm_grpo',
    'swift.arguments.deploy_args': 'after_deploy_args',
    'swift.pipelines.infer.rollout': 'after_rollout',
}


class _Finder:
    """A meta-path finder; one instance a process. `light` says whether `swift` is served without its `__init__` here."""

    def __init__(self) -> None:
        self.light = False
        self.busy = False

    def find_spec(self, name, path=None, target=None):
        if not name.startswith('swift') or self.busy:
            return None
        if name not in ('swift', _PAGE) and name not in _AFTER_IMPORT and not (self.light and name in _STAND_INS):
            return None
        self.busy = True
        try:
            from swift_megatron_grpo.hooks import importing

            if name == _PAGE:
                importing.say_what_the_page_needs()
                return None
            if name == 'swift':
                spec = importing.light_swift()
                self.light = spec is not None
                return spec
            if self.light and name in _STAND_INS:
                return importing.stand_in(name)
            return importing.with_callback(name, path, target, _AFTER_IMPORT[name])
        except Exception as error:
            _report(error)
            return None
        finally:
            self.busy = False


def _report(error: Exception) -> None:
    """Say once, for this process and those it starts, that the hook failed. A command that names a backend stops here: going on would
    train on another one than was asked for."""
    import os

    given = [token for token in sys.argv[1:] if token.startswith('--backend')]
    if given or not os.environ.get('SWIFT_MEGATRON_GRPO_AUTOLOAD_FAILED'):
        os.environ['SWIFT_MEGATRON_GRPO_AUTOLOAD_FAILED'] = '1'
        print(f'swift-megatron-grpo: the autoload hook failed: {type(error).__name__}: {error}', file=sys.stderr)
    if given:
        print(f'error: {given[0]} cannot be honoured without it; nothing was started', file=sys.stderr)
        sys.exit(1)


def install() -> None:
    """Put the finder in place. Safe to call again."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
