"""What ms-swift, transformers and Megatron-Core themselves say, asked once in a process of its own.

Run as a program: reads a JSON request from standard input and writes a JSON answer to the file named in its first argument. The imports
take many seconds and change their process, so the tests ask for everything at once.
"""

import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path

# One process is what is asked; the arguments' own checks must not reach for others.
for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'NPROC_PER_NODE', 'NNODES'):
    os.environ.pop(name, None)
os.environ.update(HF_HUB_OFFLINE='1', USE_HF='1', MODELSCOPE_OFFLINE='1', TRANSFORMERS_VERBOSITY='error')


def fields_of(cls) -> list[list]:
    """[name, default] for every field of a dataclass; a default that JSON does not know is written as text."""
    rows = []
    for field in dataclasses.fields(cls):
        default = field.default
        if default is dataclasses.MISSING:
            default = None if field.default_factory is dataclasses.MISSING else field.default_factory()
        rows.append([field.name, default])
    return json.loads(json.dumps(rows, default=str))


def swift_script(argv: list[str], world_size: int, num_prompts: int) -> dict:
    """The effective numbers of `swift rlhf ARGV` on ``world_size`` processes, by ms-swift's own argument class."""
    import math

    import torch
    import transformers
    from swift.arguments import RLHFArguments
    from swift.utils import parse_args
    from transformers import get_scheduler
    from trl.trainer.grpo_trainer import RepeatSampler

    # The processes are not here; everything that depends on their number reads this property.
    original = transformers.TrainingArguments.world_size
    transformers.TrainingArguments.world_size = property(lambda self: world_size)
    try:
        with tempfile.TemporaryDirectory() as folder:
            args, rest = parse_args(RLHFArguments, [*argv, '--output_dir', folder, '--report_to', 'none'])
            assert not rest, rest
            training = args.training_args
            ulysses = args.sequence_parallel_size
            accumulation = training.gradient_accumulation_steps * (ulysses if trainer_multiplies_accumulation() else 1)
            sampler = RepeatSampler(
                data_source=range(num_prompts),
                mini_repeat_count=args.num_generations,
                batch_size=training.generation_batch_size // args.num_generations,
                repeat_count=args.num_iterations * training.steps_per_generation * ulysses,
            )
            # trl's dataloader: per_device x steps_per_generation rows a process and batch, dropped where incomplete
            micro_steps = len(sampler) // (training.per_device_train_batch_size * training.steps_per_generation * world_size)
            steps_per_epoch = max(-(-micro_steps // accumulation), 1)
            total = training.max_steps if training.max_steps > 0 else math.ceil(training.num_train_epochs * steps_per_epoch)
            optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=training.learning_rate)
            scheduler = get_scheduler(
                training.lr_scheduler_type,
                optimizer,
                num_warmup_steps=training.get_warmup_steps(total),
                num_training_steps=total,
                scheduler_specific_kwargs=training.lr_scheduler_kwargs or {},
            )
            rates = [training.learning_rate * scheduler.lr_lambdas[0](step) for step in (0, 1, total // 2, total - 1)]
            return {
                'tuner_type': args.tuner_type,
                'beta': args.beta,
                'learning_rate': training.learning_rate,
                'max_grad_norm': training.max_grad_norm,
                'weight_decay': training.weight_decay,
                'optimizer_steps': total,
                'optimizer_steps_per_epoch': steps_per_epoch,
                'generation_batch_size': training.generation_batch_size,
                'global_batch_size': training.per_device_train_batch_size * (world_size // ulysses) * accumulation,
                'prompts_per_epoch': num_prompts // sampler.batch_size * sampler.batch_size,
                'rates': rates,
            }
    finally:
        transformers.TrainingArguments.world_size = original


def trainer_multiplies_accumulation() -> bool:
    """Whether ms-swift's trainer still multiplies gradient_accumulation_steps by sequence_parallel_size; a line of its constructor."""
    import importlib.util

    spec = importlib.util.find_spec('swift.rlhf_trainers')
    source = (Path(spec.submodule_search_locations[0]) / 'grpo_trainer.py').read_text(encoding='utf-8')
    return 'self.args.gradient_accumulation_steps * sequence_parallel.world_size' in source


def transformers_rates(kind: str, lr: float, warmup: int, total: int, kwargs: dict, steps: list[int]) -> list[float]:
    import torch
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = get_scheduler(kind, optimizer, num_warmup_steps=warmup, num_training_steps=total, scheduler_specific_kwargs=kwargs)
    return [lr * scheduler.lr_lambdas[0](step) for step in steps]


def megatron_rates(flags: dict, lr: float, total: int, steps: list[int], global_batch_size: int = 16) -> list[float] | None:
    """Megatron's rate at each step, built as swift.megatron.utils.get_optimizer_param_scheduler builds it; None where it refuses."""
    import torch
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    decay = flags.get('lr_decay_iters') or total
    warmup = flags['lr_warmup_fraction'] * decay if 'lr_warmup_fraction' in flags else flags.get('lr_warmup_iters', 0)
    if warmup >= decay:
        return None  # OptimizerParamScheduler asserts it
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=flags.get('lr_warmup_init', 0.0),
        max_lr=lr,
        min_lr=flags.get('min_lr', 0.0),
        lr_warmup_steps=warmup * global_batch_size,
        lr_decay_steps=decay * global_batch_size,
        lr_decay_style=flags.get('lr_decay_style', 'cosine'),
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=total * global_batch_size,
        wd_incr_style='constant',
        wsd_decay_steps=flags['lr_wsd_decay_iters'] * global_batch_size if 'lr_wsd_decay_iters' in flags else None,
        lr_wsd_decay_style=flags.get('lr_wsd_decay_style', 'exponential'),
    )
    rates = []
    for step in steps:
        scheduler.num_steps = step * global_batch_size
        rates.append(scheduler.get_lr(optimizer.param_groups[0]))
    return rates


def worker_reads(argv: list[str]) -> tuple[dict, list[str]]:
    """What the worker's own parser makes of its command line: (value by name for the names that stand in it, words left over)."""
    from swift.utils.utils import _patch_get_type_hints
    from transformers import HfArgumentParser

    from swift_megatron_grpo.config import MegatronGRPOArguments

    with _patch_get_type_hints():
        parser = HfArgumentParser([MegatronGRPOArguments])
    namespace, rest = parser.parse_known_args(argv)
    names = [word[2:] for word in argv if word.startswith('--')]
    return json.loads(json.dumps({name: getattr(namespace, name) for name in names}, default=str)), rest


def main() -> None:
    request = json.load(sys.stdin)
    # first: with a stand-in for Transformer Engine where there is none, before megatron is imported
    from swift_megatron_grpo import cpu

    cpu.activate()
    from swift.arguments import RLHFArguments
    from swift.megatron.arguments import MegatronRLHFArguments

    from swift_megatron_grpo.config import MegatronGRPOArguments

    answer = {
        'swift': fields_of(RLHFArguments),
        'megatron': fields_of(MegatronRLHFArguments),
        'worker': fields_of(MegatronGRPOArguments),
        'worker_reads': [worker_reads(argv) for argv in request['worker_argvs']],
        'scripts': [swift_script(*item) for item in request['scripts']],
        'transformers_rates': [transformers_rates(*item) for item in request['transformers_rates']],
        'megatron_rates': [megatron_rates(*item) for item in request['megatron_rates']],
    }
    Path(sys.argv[1]).write_text(json.dumps(answer), encoding='utf-8')


if __name__ == '__main__':
    main()
