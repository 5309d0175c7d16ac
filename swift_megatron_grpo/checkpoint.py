"""Complete checkpoints or none, and where a run stands (import tier 2).

A checkpoint is written into a folder beside its place and moved there by one rename when everything is on disk: a folder `checkpoint-N` is
whole. It holds Megatron's state (weights, optimizer, random states; what `--resume_from_checkpoint` reads), Hugging Face safetensors or a
PEFT adapter (what transformers and vLLM read), args.json, and trainer_state.json. LoRA runs with merge_lora also get `checkpoint-N-merged`.
"""
from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import torch
import torch.distributed as dist
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from safetensors.torch import load_file, save_file
from swift.megatron.utils import save_mcore_checkpoint
from swift.utils import gc_collect, get_logger, is_master, update_last_checkpoint_symlink
from torch.distributed.checkpoint.api import CheckpointException
from typing import Any

from .args.resume_checks import CHECKPOINT_FORMAT, STATE_FILE, unreadable_adapter
from .errors import UserError
from .step import frozen
from .step.rollout import ScoredRollouts
from .sync import merged_for_export

logger = get_logger()

PENDING = 'pending_generation'


@dataclass(kw_only=True, slots=True)
class Progress:
    """Where a run stands; together with the seed it decides everything that follows.

    Example: 4 optimizer steps a generation, stopped after 6: generation = 1, updates_in_generation = 2.
    """
    iteration: int = 0  # optimizer steps done
    generation: int = 0  # the generation that the next optimizer step trains on
    updates_in_generation: int = 0  # optimizer steps of it that are done
    policy_version: int = 0
    skipped_updates: int = 0  # left out because their gradient was not finite
    best_metric: float | None = None
    best_global_step: int | None = None
    saves_without_gain: int = 0  # checkpoints in a row whose evaluation was not the best
    num_prompts_per_generation: int = 0
    stream_position: int = 0  # streaming data: rows read before those of the generation that is sampled next
    seed: int = 0

    def note_best(self, metric: float | None, step: int | None) -> None:
        """The best evaluation so far, when a checkpoint is written. As ms-swift's early stop counts: by checkpoint, and an equal value is no gain."""
        if metric is not None:
            self.saves_without_gain = 0 if metric != self.best_metric else self.saves_without_gain + 1
        self.best_metric, self.best_global_step = metric, step


def read_progress(folder: str) -> Progress:
    path = os.path.join(folder, STATE_FILE)
    if not os.path.exists(path):
        raise UserError(f'{folder} has no {STATE_FILE}: it was not written by this trainer, so the order of prompts cannot be continued. '
                        'To take its weights only, give --resume_only_model true.')
    with open(path, encoding='utf-8') as file:
        state = json.load(file)
    state.pop('format', None)
    return Progress(**state)


def refuse_unreadable(args: Any) -> None:
    """Raises UserError for an adapter whose rows another version has written in another order. Every rank, before a model is built."""
    for folder in (args.resume_from_checkpoint, args.mcore_adapter):
        problem = folder and unreadable_adapter(folder)
        if problem:
            raise UserError(problem)


@contextlib.contextmanager
def readable() -> Iterator[None]:
    """While Megatron reads a checkpoint: what it cannot read is named, with what to do."""
    try:
        yield
    except (FileNotFoundError, CheckpointException, CheckpointingException) as error:
        reason = str(error).strip().splitlines()[-1]  # torch's error holds the tracebacks of all ranks, the reason last
        raise UserError(f'The checkpoint to go on from cannot be read: {reason}. Where files were lost or copied in part, take a checkpoint of an earlier '
                        'step, or start from the weights in its safetensors (--model, or --adapters).') from error


@contextlib.contextmanager
def adapters_that_fit(bridge: Any, args: Any) -> Iterator[None]:
    """While the bridge reads weights: an adapter that is of another model, or of other modules, is named."""
    load = bridge.load_weights

    def load_weights(models: Any, folder: str, *rest: Any, **kwargs: Any) -> Any:
        if not kwargs.get('peft_format'):
            return load(models, folder, *rest, **kwargs)
        try:
            return load(models, folder, *rest, **kwargs)
        except (RuntimeError, KeyError, ValueError) as error:
            raise UserError(f'--adapters {folder} does not fit {args.model} with --target_modules {" ".join(args.target_modules)} and --lora_rank '
                            f'{args.lora_rank} ({type(error).__name__}: {error}). It was trained on {_base_model(folder)}.') from error

    bridge.load_weights = load_weights
    try:
        yield
    finally:
        del bridge.load_weights


def _base_model(folder: str) -> str:
    try:
        with open(os.path.join(folder, 'adapter_config.json'), encoding='utf-8') as file:
            return str(json.load(file).get('base_model_name_or_path') or 'a model that it does not name')
    except (OSError, ValueError, AttributeError):
        return 'a model that it does not name'


def write_json(path: str, value: Any) -> None:
    """Never half a file: written beside and renamed."""
    with open(path + '.part', 'w', encoding='utf-8') as file:
        json.dump(value, file, indent=1)
    os.replace(path + '.part', path)


def save(trainer: Any, progress: Progress) -> str:
    """All ranks, collective. Returns the checkpoint's folder."""
    args, state = trainer.args, trainer.state
    final = os.path.join(args.output_dir, f'checkpoint-{state.iteration}')
    staging = os.path.join(args.output_dir, f'.saving-checkpoint-{state.iteration}')
    merged, merged_staging = final + '-merged', staging + '-merged'
    if is_master():
        for leftover in (staging, merged_staging):
            shutil.rmtree(leftover, ignore_errors=True)
        os.makedirs(staging)
    dist.barrier()
    args.consumed_train_samples = state.consumed_train_samples
    trainer.copy_path(os.path.join(args.output_dir, 'args.json'), os.path.join(staging, 'args.json'))
    gc_collect()
    weights_only = args.save_safetensors and args.no_save_optim
    with _results_kept_here():
        save_mcore_checkpoint(
            args,
            [] if weights_only else trainer.wrapped_models,
            trainer.optimizer,
            trainer.opt_param_scheduler,
            iteration=state.iteration,
            peft_format=args.tuner_type == 'lora',
            output_dir=staging)
    is_merged = args.tuner_type != 'full' and args.merge_lora and args.save_safetensors
    if args.save_safetensors:
        if args.tuner_type != 'lora_llm':
            _save_weights(trainer, staging, peft_format=args.tuner_type == 'lora')
        if is_merged:
            if is_master():
                os.makedirs(merged_staging)
                shutil.copy(os.path.join(staging, 'args.json'), merged_staging)
            dist.barrier()
            with merged_for_export(trainer.unwrapped_models):
                _save_weights(trainer, merged_staging, peft_format=False)
    if trainer.reference is not None:
        trainer.reference.save(staging)
    if progress.updates_in_generation > 0 and trainer.generation is not None:
        _write_pending(trainer, staging)
    dist.barrier()
    if is_master():
        write_json(os.path.join(staging, STATE_FILE), {**asdict(progress), 'format': CHECKPOINT_FORMAT})
        if is_merged:
            shutil.rmtree(merged, ignore_errors=True)
            os.replace(merged_staging, merged)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(staging, final)
        update_last_checkpoint_symlink(final)
    dist.barrier()
    state.last_model_checkpoint = final
    find_best(args, state)
    if is_master():
        trainer._rotate_checkpoints(args.output_dir)
    return final


def find_best(args: Any, state: Any) -> None:
    """The checkpoint of the best evaluation, in this run's folder or in that of the run which this one goes on from."""
    folders = [args.output_dir] + ([os.path.dirname(os.path.abspath(args.resume_from_checkpoint))] if args.resume_from_checkpoint else [])
    for folder in folders if state.best_global_step is not None else []:
        best = os.path.join(folder, f'checkpoint-{state.best_global_step}')
        if os.path.exists(best):
            state.best_model_checkpoint = best
            return


def make_best_the_last(trainer: Any) -> None:
    """load_best_model_at_end: the checkpoint with the best metric_for_best_model is what the run leaves as its last one.

    transformers loads it into the model that it gives back; here the process ends, so the link `last-checkpoint` and what is reported as
    last_model_checkpoint refer to it. All ranks, after the last checkpoint.
    """
    args, state = trainer.args, trainer.state
    find_best(args, state)
    if state.best_model_checkpoint is None:
        logger.warning(f'--load_best_model_at_end: no checkpoint of this run has an evaluation with {args.metric_for_best_model}; the last one '
                       'stays the last one.')
        return
    if is_master():
        if os.path.dirname(state.best_model_checkpoint) == args.output_dir:  # the folder of an earlier run is left as it is
            update_last_checkpoint_symlink(state.best_model_checkpoint)
        logger.info(f'The best checkpoint ({args.metric_for_best_model} {state.best_metric:g}) is {state.best_model_checkpoint}.')
    state.last_model_checkpoint = state.best_model_checkpoint


@contextlib.contextmanager
def _results_kept_here() -> Iterator[None]:
    """What Megatron's writer has written is told through a queue of this process.

    Megatron asks a helper process for the queue, which an asynchronous save needs: seconds for its imports, and it would outlive a rank that is
    ended hard. A save of this package (no --async_save) writes, and reads the queue, in the rank itself.
    """
    filesystem_async._results_queue = queue.Queue()
    try:
        yield
    finally:
        filesystem_async._results_queue = None


def let_sgd_be_loaded(optimizer: Any) -> None:
    """Megatron makes room for a saved state before it reads one, and has no function for that with sgd."""

    def make_room(sgd: torch.optim.Optimizer, config: Any = None) -> None:
        for group in sgd.param_groups:
            for parameter in group['params'] if group['momentum'] else ():
                sgd.state[parameter].setdefault('momentum_buffer', torch.zeros_like(parameter.data))

    for part in getattr(optimizer, 'chained_optimizers', [optimizer]):
        if isinstance(part.optimizer, torch.optim.SGD) and part.init_state_fn is None:
            part.init_state_fn = make_room


def _save_weights(trainer: Any, folder: str, *, peft_format: bool) -> None:
    args = trainer.args
    trainer.bridge.save_weights(
        trainer.unwrapped_models,
        folder,
        peft_format=peft_format,
        args=args,
        processor=trainer.template.processor,
        save_missing_weights=args.save_missing_weights and args.model_dir)
    adapter_config = os.path.join(folder, 'adapter_config.json')
    if peft_format and is_master() and os.path.exists(adapter_config):
        with open(adapter_config, encoding='utf-8') as file:
            config = json.load(file)
        config['base_model_name_or_path'] = args.model_dir  # what AutoPeftModel loads; mcore-bridge leaves it out
        write_json(adapter_config, config)


def _write_pending(trainer: Any, folder: str) -> None:
    """The generation that is being trained on: its rollouts, and the log-probabilities of weights that no longer exist.

    All ranks of the last pipeline stage, collective; the logging rank writes.
    """
    topology, generation = trainer.topology, trainer.generation
    if not topology.is_last_stage:
        return
    tensors: dict[str, torch.Tensor] = {}
    for number, step in enumerate(generation.steps):
        for name, values in step.table.logprobs().items():
            whole = values.clone()
            if topology.dp_size > 1:
                dist.all_reduce(whole, group=topology.dp_group)
            tensors[f'{name}/{number}'] = whole.cpu()
    if topology.is_logging_rank:
        frozen.write_generation(os.path.join(folder, PENDING + '.jsonl'), generation.index, generation.scored, trainer.rewarder.names,
                                trainer.args.seed, num_steps=len(generation.steps))
        save_file(tensors, os.path.join(folder, PENDING + '.safetensors'))


def read_pending(folder: str, reward_names: list[str]) -> tuple[ScoredRollouts, list[dict[str, torch.Tensor]]]:
    """(rollouts, log-probabilities of each optimizer step by name, see `TokenTable.logprobs`). Every rank reads."""
    scored, head = frozen.read_generation(os.path.join(folder, PENDING + '.jsonl'), reward_names)
    tensors = load_file(os.path.join(folder, PENDING + '.safetensors'))
    steps: list[dict[str, torch.Tensor]] = [{} for _ in range(head['num_steps'])]
    for key, values in tensors.items():
        name, number = key.split('/')
        steps[int(number)][name] = values
    return scored, steps
