"""What we change in ms-swift's own process, each change with its passport (import tier 0 until a function is called).

`after_*` is called by the finder once the module it names has been imported; `register_trainer` uses ms-swift's registry, which is an
official door and needs no passport.
"""

import sys
from types import ModuleType
from typing import Any

from swift_megatron_grpo.passport import Passport, PatchRegistry

REGISTRY = PatchRegistry('hooks')
TRAINER_NAME = 'megatron_grpo'
TRAINER_PATH = 'swift_megatron_grpo.trainer.MegatronGRPOTrainer'
ARGUMENTS_PATH = 'swift_megatron_grpo.config.MegatronGRPOArguments'


@REGISTRY.patch(
    Passport(
        name='rlhf-main-door',
        target='swift.pipelines.train.rlhf:rlhf_main',
        breaks='`--backend megatron` given to rlhf_main() by a program, or with --ignore_args_error, trains on transformers with a log line',
        reference='swift/pipelines/train/rlhf.py rlhf_main, swift/pipelines/base.py SwiftPipeline._parse_args (ms-swift 4.6.0)',
        versions='ms-swift>=4.6,<4.7',
        remove_when='ms-swift lets a plugin add a backend to `swift rlhf`',
    )
)
def _rlhf_main_door() -> None:
    import functools

    from swift_megatron_grpo.hooks import command_line

    module: Any = sys.modules['swift.pipelines.train.rlhf']
    original = module.rlhf_main

    @functools.wraps(original)
    def rlhf_main(args=None):
        if args is not None and not isinstance(args, list):
            return original(args)  # an RLHFArguments object: parsed already, and it has no backend
        argv = sys.argv[1:] if args is None else args
        backend = command_line.asked_backend(argv)
        if not backend:
            return original(args)
        if backend == 'transformers':
            return original(command_line.without(argv, 'backend'))
        from swift_megatron_grpo.hooks.doors import run_from_program

        return run_from_program(argv)

    module.rlhf_main = rlhf_main


def after_rlhf(module: ModuleType) -> None:
    """swift.pipelines.train.rlhf has been imported."""
    REGISTRY.apply('rlhf-main-door')


def after_trainer_factory(module: ModuleType) -> None:
    """swift.trainers.trainer_factory has been imported."""
    register_trainer(module.TrainerFactory)


def after_llm_grpo(module: ModuleType) -> None:
    """swift.ui.llm_grpo.llm_grpo has been imported, by `swift web-ui`: its page gets the Megatron section."""
    from swift_megatron_grpo.hooks.web_ui.patches import REGISTRY as PAGE

    PAGE.apply()


def after_deploy_args(module: ModuleType) -> None:
    """swift.arguments.deploy_args has been imported: `swift rollout` counts devices before vLLM loads plugins."""
    from swift_megatron_grpo import cpu

    if cpu.is_needed():
        from swift_megatron_grpo.cpu import vllm_plugin

        vllm_plugin.after_deploy_args(module)


def after_rollout(module: ModuleType) -> None:
    """swift.pipelines.infer.rollout has been imported: this process is a rollout server, or one of its engines."""
    from swift_megatron_grpo import cpu

    if cpu.is_needed():
        cpu.set_environment('VLLM_')


def register_trainer(factory) -> None:
    """Name our trainer and its arguments in ms-swift's TrainerFactory, by dotted path, so that nothing is imported."""
    factory.TRAINER_MAPPING.setdefault(TRAINER_NAME, TRAINER_PATH)
    factory.TRAINING_ARGS_MAPPING.setdefault(TRAINER_NAME, ARGUMENTS_PATH)
