"""A whole training run on a rank of the pool, on frozen rollouts, and what it left behind. Used by the tests beside it."""
from __future__ import annotations

import contextlib
import json
import random
import torch
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PLUGIN = '''
from swift.rewards import ORM, orms


class Digits(ORM):

    def __call__(self, completions, **kwargs):
        return [float(sum(c.isdigit() for c in completion)) for completion in completions]


orms['digits'] = Digits
'''


@dataclass(kw_only=True)
class Outcome:
    """logs: one dictionary an optimizer step. weights: by Hugging Face name, as exported. forwards, positions: of the policy."""
    logs: list[dict[str, float]]
    weights: dict[str, torch.Tensor]
    forwards: int
    positions: int
    reference_forwards: int
    log_ratios: list[float] = field(default_factory=list)  # largest |new - old log-probability| of each optimizer step on this rank

    def column(self, name: str) -> list[float]:
        return [row[name] for row in self.logs]


def write_rollouts(folder: Path, *, generations: int, prompts: int, num_generations: int, vocab_size: int = 300, seed: int = 0) -> Path:
    """Frozen generations: very different lengths, one empty completion, one truncated, one group of equal rewards."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    lengths = [2, 3, 5, 17, 1, 9, 30, 7, 12, 4, 6, 21, 2, 8, 3, 11]
    for generation in range(generations):
        count = prompts * num_generations
        rows = [{'format': 1, 'generation': generation, 'num_generations': num_generations, 'reward_names': ['Digits'], 'num_rollouts': count,
                 'seed': 42}]
        for index in range(count):
            prompt = index // num_generations
            length = 0 if index == 1 else lengths[(index * 5 + generation) % len(lengths)]
            tokens = [rng.randrange(3, vocab_size) for _ in range(length)]
            rows.append({
                'index': index, 'prompt_index': prompt, 'dataset_index': prompt,
                'response_token_ids': [tokens] if tokens else [], 'response_loss_mask': [],
                'rollout_logprobs': [[-5.5 - rng.random() for _ in tokens]] if tokens else [],
                'finish_reason': 'length' if index == 2 else 'stop',
                'messages': [{'role': 'user', 'content': f'what is {prompt} + {"1" * (1 + 3 * prompt)}?'}, {'role': 'assistant', 'content': ''}],
                'num_prompt_tokens': 20, 'rollout_infos': {}, 'media': {}, 'policy_version': 0,
                'rewards': [1.0 if prompt == 1 else rng.random()], 'columns': {},
            })
        path = folder / f'generation-{generation:06d}.jsonl'
        path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return folder


def arguments(work: Path, model: Path, rollouts: Path | None = None, **changes: Any) -> list[str]:
    """The worker's command line; `changes` replace or add arguments (None takes one out, lists become several values)."""
    work.mkdir(parents=True, exist_ok=True)
    data = work / 'prompts.jsonl'
    if not data.exists():
        data.write_text(''.join(json.dumps({'messages': [{'role': 'user', 'content': f'what is {i} + 1?'}], 'solution': str(i + 1)}) + '\n'
                                for i in range(32)))
    plugin = work / 'digits_reward.py'
    if not plugin.exists():
        plugin.write_text(PLUGIN)
    values: dict[str, Any] = {
        'rlhf_type': 'grpo', 'backend': 'megatron', 'model': model, 'model_type': 'qwen3', 'template': 'chatml', 'dataset': data,
        'external_plugins': plugin, 'reward_funcs': 'digits', 'torch_dtype': 'float32', 'fp16': 'false', 'bf16': 'false',
        'micro_batch_size': 4, 'global_batch_size': 8, 'num_generations': 4, 'train_iters': 2, 'lr': 1e-3, 'min_lr': 1e-4,
        'lr_decay_style': 'linear', 'logging_steps': 1, 'save_strategy': 'no', 'output_dir': work / 'out', 'add_version': 'false',
        'max_length': 256, 'max_completion_length': 32, 'dataset_num_proc': 1, 'dataloader_num_workers': 0, 'load_from_cache_file': 'false',
        'tuner_type': 'full', 'attention_backend': 'flash', 'use_hf': 'true', 'check_model': 'false', 'temperature': 0.9,
        'batch_check': 'exact', 'use_vllm': 'false', 'beta': 0.0, 'report_to': 'none', 'lora_dropout': 0.0, 'weight_decay': 0.1,
        'clip_grad': 1.0,
    }
    if rollouts is not None:
        values['replay_rollouts'] = rollouts
    values.update(changes)
    argv: list[str] = []
    for name, value in values.items():
        if value is None:
            continue
        argv.append(f'--{name}')
        argv += [str(item) for item in (value if isinstance(value, (list, tuple)) else [value])]
    return argv


class _Recorder:
    """A callback of ms-swift's trainer that keeps what is logged."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, logs: dict[str, Any]) -> None:
        self.logs.append({name: value for name, value in logs.items() if isinstance(value, (int, float))})

    def __getattr__(self, name: str) -> Any:
        return lambda **kwargs: None


def train(argv: list[str]) -> Outcome | None:
    """Runs on every rank of a case. The last rank returns the outcome (it has the logs), the others None. Collective."""
    import torch.distributed as dist
    from accelerate import PartialState
    PartialState(cpu=True)
    from swift_megatron_grpo.pipeline import MegatronGRPO
    pipeline = MegatronGRPO(argv)
    train_dataset, val_dataset = pipeline._prepare_dataset()
    pipeline.args.init_iters(train_dataset, val_dataset)
    trainer = pipeline.prepare_trainer()
    recorder = _Recorder()
    trainer.callbacks = [callback for callback in trainer.callbacks if type(callback).__name__ == 'DefaultFlowCallback'] + [recorder]
    log_ratios: list[float] = []
    with _recording(trainer, log_ratios):
        trainer.train(train_dataset, val_dataset)
    from swift_megatron_grpo.sync import merged_for_export
    with merged_for_export(trainer.unwrapped_models):
        weights = {name: tensor.clone() for name, tensor in trainer.bridge.export_weights(trainer.unwrapped_models)}
    if dist.get_rank() != dist.get_world_size() - 1:
        return None
    reference = trainer.reference
    own_reference = reference is not None and reference.forward is not trainer.policy
    return Outcome(
        logs=recorder.logs,
        weights=weights,
        forwards=trainer.policy.counters.forwards,
        positions=trainer.policy.counters.positions,
        reference_forwards=reference.forward.counters.forwards if own_reference else 0,
        log_ratios=log_ratios)


@contextlib.contextmanager
def _recording(trainer: Any, log_ratios: list[float]) -> Iterator[None]:
    """Notes the largest log-ratio that each optimizer step's loss sees."""
    from swift_megatron_grpo.step import learn
    loss, gradients = learn.policy_loss, trainer.learner.gradients

    def watched_loss(config: Any, inputs: Any) -> Any:
        if inputs.new_logprobs_C.numel():
            difference = (inputs.new_logprobs_C.detach() - inputs.old_logprobs_C).abs().max().item()
            log_ratios[-1] = max(log_ratios[-1], difference)
        return loss(config, inputs)

    def watched_gradients(*args: Any, **kwargs: Any) -> Any:
        log_ratios.append(0.0)
        return gradients(*args, **kwargs)

    learn.policy_loss, trainer.learner.gradients = watched_loss, watched_gradients
    try:
        yield
    finally:
        learn.policy_loss = loss


def train_and_stop(argv: list[str], after: int, rank: int) -> Outcome | None:
    """`train`, where one rank gets the stop signal during optimizer step `after`. Runs on every rank of a case, collective."""
    import os
    import torch.distributed as dist
    from swift_megatron_grpo.interruption import STOP_SIGNAL
    from swift_megatron_grpo.pipeline import MegatronGRPOTrainer
    from unittest import mock
    train_step = MegatronGRPOTrainer.train_step

    def signalled(self: Any, step: Any) -> Any:
        result = train_step(self, step)
        if self.progress.iteration == after and dist.get_rank() == rank:
            os.kill(os.getpid(), STOP_SIGNAL)
        return result

    with mock.patch.object(MegatronGRPOTrainer, 'train_step', signalled):
        return train(argv)
