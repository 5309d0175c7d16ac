"""GRPO on Megatron-Core (import tier 2).

    prompts -> rollout -> reward -> batch -> logprobs (old, ref) -> advantage -> loss -> optimizer -> weight sync

One generation is `collect()`ed and then trained on in steps_per_generation x num_iterations optimizer steps, each an `update()`. Model,
optimizer, scheduler, logging and the save/evaluate rhythm are ms-swift's `BaseMegatronTrainer`.
"""
from __future__ import annotations

import os
import torch
import torch.distributed as dist
from contextlib import AbstractContextManager
from dataclasses import dataclass
from swift.megatron.trainers.base import BaseMegatronTrainer
from swift.megatron.utils import should_disable_forward_pre_hook
from swift.rlhf_trainers.utils import identity_data_collator
from swift.utils import get_current_device, get_logger
from typing import Any

from . import checkpoint
from .adapter_start import draw_adapters
from .args import model_checks
from .callbacks import CompletionsWriter
from .checkpoint import Progress
from .deadlines import deadline
from .engines import EngineLost, RolloutEngine, build_engine, shares_devices
from .errors import RunError, UserError
from .evaluation import Evaluation
from .interruption import StopRequest
from .lr_schedule import TransformersSchedule
from .metrics import Window
from .parallel import agree, build_topology, max_over
from .parallel_attributes import mark_tensor_parallel
from .reference import Reference
from .residency import MegatronMovers, Residency, Stage
from .reward_models import load_reward_models
from .step import frozen
from .step.ahead import Ahead
from .step.batch import BatchBuilder, StepBatch
from .step.completions import completion_metrics
from .step.expert import Experts
from .step.forward import PolicyForward, collect_logprobs
from .step.learn import Learner
from .step.nonfinite import FiniteGate, RouterBiases, leave_it_to_the_gate, report
from .step.prompts import PromptSource, StreamingPromptSource
from .step.resample import Sampler
from .step.reward import Rewarder, refuse_unknown_rewards
from .step.rollout import Phase, RolloutStage, ScoredRollouts, generation_seed
from .step.routing import RouteBook
from .sync import WeightSync
from .teacher import build_teacher
from .types import Sums

logger = get_logger()


@dataclass(kw_only=True, slots=True)
class Generation:
    """What `collect()` brings: the optimizer steps of one generation, ready to be trained on."""
    index: int
    scored: ScoredRollouts
    steps: list[StepBatch]


class MegatronGRPOTrainer(BaseMegatronTrainer):
    """See the module's docstring. Built on every rank; all public methods are collective."""

    def __init__(self, args: Any, template: Any, expert_dataset: Any = None):
        refuse_unknown_rewards(args)  # before a model is built
        model_checks.refuse(template.config.to_dict(), attention_backend=args.attention_backend.name,
                            longest=None if args.max_length is None else args.max_length + args.max_completion_length)
        checkpoint.refuse_unreadable(args)
        super().__init__(args, template)
        self.device = torch.device(get_current_device())
        self.topology = build_topology()
        self.rewarder = Rewarder(args, self.state, load_reward_models(args, self.device))
        routes = RouteBook(args.router_replay_mode, self.topology, cp_partition_mode=args.cp_partition_mode,
                           sequence_parallel=args.sequence_parallel) if self.enable_routing_replay else None
        self.policy = PolicyForward(self, self.wrapped_models, self.topology, args.temperature, routes)
        self.reference = Reference(self, self.topology, self.policy, self.device) if args.beta != 0.0 else None
        self.teacher = build_teacher(self, self.topology, self.policy, self.device)
        self.learner = Learner(args, self.policy, self.reference, self.teacher, self.topology, self.device, self.rewarder.names,
                               self.rewarder.weights)
        if args.sync_ref_model and self.reference is None:
            logger.warning('--sync_ref_model has no effect with --beta 0: there is no reference model.')
        for name in self.learner.config.without_effect():
            logger.warning(f'--{name} {getattr(args, name)} has no effect with --loss_type {args.loss_type}.')
        self.batches = BatchBuilder(args, template, self.topology, self.device)
        self.experts = Experts(args, expert_dataset, self.batches, self.topology.dp_size) if expert_dataset is not None else None
        self.engine: RolloutEngine | None = None
        self.residency = self._residency()
        if args.replay_rollouts is None:
            self.residency.to(Stage.BUILDING)
            self.engine = build_engine(args, template, self.topology, self.device)
            self.residency.attach(self.engine)
            self.sync = WeightSync(args, self.bridge, self.unwrapped_models, self.engine, self.residency, agree)
            self.rollouts = RolloutStage(args, template, self.engine, self.rewarder, self.topology, self.residency, self.device)
            self.sampler = Sampler(args, template, self.rollouts, self.rewarder.weights, self.topology)
            self.evaluation = Evaluation(args, self.rollouts, self.learner)
            self.ahead = Ahead(args, self.rollouts, self._begin)
            self.residency.to(Stage.TRAINING)
        self.completions = CompletionsWriter(args.output_dir, args.log_completions and self.topology.is_logging_rank)
        self.window = Window()
        self.num_micro_batches = 0  # trained on since the last log
        self.last_done = 'nothing'  # within the phase that a deadline watches
        self.progress = self._initial_progress()
        self.generation: Generation | None = None
        self.stop = StopRequest()

    # -- the page --------------------------------------------------------------------------------------------------------------------------

    def train(self, train_dataset: Any, val_dataset: Any) -> None:
        try:
            self._train(train_dataset, val_dataset)
        except EngineLost as error:  # on every rank
            raise self._saved(error) from error

    def _train(self, train_dataset: Any, val_dataset: Any) -> None:
        args = self.args
        self.prompts = self._prompt_source(train_dataset)
        self.val_dataset = val_dataset
        self.setup_model_training()
        self.sync_weights()  # a broken path to the engine fails here, before anything was trained
        if args.eval_on_start and args.eval_iters > 0:
            self._evaluate(val_dataset)
        self.generation = self._resume_generation()
        while not self._is_done and not self.stop.is_agreed:
            self.generation = self.generation or self.collect(self.progress.generation)
            for step in self._updates_left(self.generation):
                self.run_train_step(step, val_dataset)
                if self._is_done or self.stop.agree(self._on_any_rank):
                    break
            if not self.stop.is_agreed:
                self.generation = None
        self.finalize_training()
        if self.stop.is_agreed:
            logger.info(f'Stopped on request after {self.state.iteration} optimizer steps{self._keep()}.')
        elif self._has_stalled:
            logger.info(f'Early stop after {self.state.iteration} optimizer steps: {self.progress.saves_without_gain} checkpoints in a row have not '
                        f'brought a better {args.metric_for_best_model} than {self.state.best_metric:g}.')
        if args.load_best_model_at_end and not self.stop.is_agreed:
            checkpoint.make_best_the_last(self)
        if self.engine is not None:
            self.ahead.drain()
            self.engine.close()  # before the process group goes

    @property
    def _is_done(self) -> bool:
        return self.state.iteration >= self.args.train_iters or self._has_stalled

    @property
    def _has_stalled(self) -> bool:
        return self.args.early_stop_interval is not None and self.progress.saves_without_gain >= self.args.early_stop_interval

    def collect(self, index: int) -> Generation:
        """One generation: sampled, scored, batched, with old and reference log-probabilities and advantages."""
        args = self.args
        scored = self._replay(index) if self.engine is None else self._sample(index)
        samples = {rollout.index: scored.sample(rollout) for rollout in scored.rollouts}
        self.residency.to(Stage.TRAINING)
        with self._watched(f'Preparation of generation {index}', args.steps_per_generation * args.step_timeout):
            steps = self.batches.build(scored.rollouts, samples, args.steps_per_generation)
            self.last_done = 'batches'
            self._verify_engine(scored, steps)
            self.learner.add_logprobs(steps, scored)
            self.last_done = 'log-probabilities'
            self.window.add_values(self.learner.add_advantages(steps, scored, update=self._updates_before(index)))
        self.window.add_values({**completion_metrics(scored.rollouts), **scored.metrics})
        self.window.add_values({f'profiling/Time taken: {name}': seconds for name, seconds in scored.seconds.items()})
        self._write_completions(index, scored, steps)
        return Generation(index=index, scored=scored, steps=steps)

    def _sample(self, index: int) -> ScoredRollouts:
        args = self.args
        scored = self.sampler.complete(self.rollouts.complete(self.ahead.take(index)), index, self.engine.version)
        self.ahead.begin_next(index, num_steps_left=args.train_iters - self.state.iteration)
        self.window.add_values(self.rollouts.metrics(scored, self.progress.policy_version))
        if args.save_rollouts is not None and self.topology.is_logging_rank:
            frozen.write_generation(frozen.generation_path(args.save_rollouts, index), index, scored, self.rewarder.names, args.seed)
        return scored

    def _begin(self, index: int) -> Phase:
        """The phase of one generation, sampled by the weights of now."""
        prompts = self.sampler.prompts(self.prompts, index)
        self.sync_weights()
        return self.rollouts.begin(prompts, num_generations=self.args.num_generations, seed=generation_seed(self.args.seed, index),
                                   version=self.engine.version)

    def _replay(self, index: int) -> ScoredRollouts:
        path = frozen.generation_path(self.args.replay_rollouts, index)
        scored, _ = frozen.read_generation(path, self.rewarder.names)
        expected = self.args.generation_batch_size
        if len(scored.rollouts) != expected:
            raise UserError(f'{path} holds {len(scored.rollouts)} rollouts, but this run has generation_batch_size {expected}.')
        return scored

    def train_step(self, step: StepBatch) -> tuple[Sums, float | None, bool]:
        """One optimizer step: gradients of the whole step, clipped update, learning rate."""
        self.residency.to(Stage.TRAINING)
        with self._watched(f'Optimizer step {self.state.iteration + 1}', self.args.step_timeout):
            return self._train_step(step)

    def _train_step(self, step: StepBatch) -> tuple[Sums, float | None, bool]:
        for model in self.wrapped_models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        update, biases = self.state.iteration, RouterBiases(self.unwrapped_models)
        share = self.experts.share(update) if self.experts is not None else 0.0
        experts = self.experts.batch(update) if share > 0.0 else None
        sums = self.learner.gradients(step, update=update, on_policy=self.progress.updates_in_generation == 0, expert_share=share, experts=experts)
        self.num_micro_batches += len(step.micro_batches) + (len(experts.micro_batches) if experts is not None else 0)
        if self.experts is not None:
            self.window.add_values({'chord/mu': share})
        self.last_done = 'gradients'
        updated, grad_norm, _ = self.optimizer.step()
        self.last_done = 'optimizer'
        if updated:
            self.opt_param_scheduler.step(increment=self.args.global_batch_size)
        elif self.gate.norm_of_refused is not None:
            sums, grad_norm = Sums(), self.gate.norm_of_refused
            biases.restore()
            self._skip(grad_norm)
        self._advance()
        if self.reference is not None:
            self.reference.after_update(self.progress.iteration)
        return sums, grad_norm, updated

    def sync_weights(self) -> None:
        """The policy's weights to the engine, where they changed since the last time."""
        version = self.progress.policy_version
        if self.engine is None or version == self.engine.version:
            return
        self.ahead.drain()
        # Servers that do not take a step of a sync within the limit are dropped by the engine itself, and the sync goes on without them.
        factor = 3 if self.engine.keeps_deadlines else 1
        with deadline('Weight sync', factor * self.args.sync_timeout, rank=self.topology.rank):
            self.gather_parameters()
            self.sync.run(version)

    def gather_parameters(self) -> None:
        """Before weights are read outside of a forward pass. All ranks, collective.

        With overlap_param_gather the optimizer updates this rank's share of the parameters, and the next forward pass brings the others'.
        """
        if should_disable_forward_pre_hook(self.args):
            for model in self.wrapped_models:
                model.start_param_sync(force_sync=True)

    def _verify_engine(self, scored: ScoredRollouts, steps: list[StepBatch]) -> None:
        """After a sync to an engine whose weights cannot be read. Rollouts of the weights of now, sampled from the model's own distribution."""
        if self.engine is None or not self.sync.wants_comparison or not self.rollouts.sampling(0).is_plain:
            return
        if all(rollout.policy_version == self.progress.policy_version for rollout in scored.rollouts):
            self.sync.compare(steps, [logprobs for logprobs, _ in collect_logprobs(self.policy, steps, self.device)])

    def _skip(self, grad_norm: float) -> None:
        rollouts = self.generation.scored.rollouts
        text = report(self.learner.trace, rollouts, norm=grad_norm, step=self.state.iteration + 1, policy=self.args.nonfinite_update,
                      topology=self.topology)
        logger.warning(text)
        self.progress.skipped_updates += 1

    # -- rhythm ----------------------------------------------------------------------------------------------------------------------------

    def _updates_left(self, generation: Generation) -> list[StepBatch]:
        """steps_per_generation x num_iterations optimizer steps, in order; a resumed run skips those that are done."""
        updates = generation.steps * self.args.num_iterations
        return updates[self.progress.updates_in_generation:]

    def _advance(self) -> None:
        progress = self.progress
        progress.iteration += 1
        progress.policy_version += 1
        progress.updates_in_generation += 1
        if progress.updates_in_generation == self.args.steps_per_generation * self.args.num_iterations:
            progress.generation += 1
            progress.updates_in_generation = 0

    def _updates_before(self, generation: int) -> int:
        return generation * self.args.steps_per_generation * self.args.num_iterations

    @property
    def _next_to_sample(self) -> int:
        return self.progress.generation + (1 if self.progress.updates_in_generation > 0 else 0)

    def evaluate(self, val_dataset: Any) -> dict[str, float] | None:
        """Evaluation of the rhythm of eval_steps; None before eval_delay."""
        return None if self.state.iteration < self.args.eval_delay else self._evaluate(val_dataset)

    def _evaluate(self, val_dataset: Any) -> dict[str, float]:
        self.call_event('on_eval_begin')
        self.sync_weights()
        metrics = self.evaluation.run(val_dataset, version=self.engine.version, after_batch=lambda: self.call_event('on_eval_step'))
        self.residency.to(Stage.TRAINING)
        self.on_log(logs={'n_steps': 1, **metrics}, prefix='eval_')
        self.call_event('on_eval_end')
        return metrics

    # -- what the base class asks for --------------------------------------------------------------------------------------------------------

    def _prepare_peft_model(self, models: list[Any]) -> list[Any]:
        # After adapters are there, before DistributedDataParallel sorts the parameters and the optimizer copies what they say of themselves.
        with checkpoint.adapters_that_fit(self.bridge, self.args):
            peft_models = super()._prepare_peft_model(models)
        if not self.args.adapters and self.args.mcore_adapter is None:
            draw_adapters(models, self.args.seed)
        mark_tensor_parallel(models)
        return peft_models

    def prepare_model(self) -> None:
        super().prepare_model()
        leave_it_to_the_gate(self.wrapped_models)

    def get_optimizer_and_scheduler(self) -> tuple[Any, Any]:
        optimizer, scheduler = super().get_optimizer_and_scheduler()
        args = self.args
        self.gate = FiniteGate(optimizer)
        checkpoint.let_sgd_be_loaded(optimizer)
        if args.lr_scheduler_type is not None:
            scheduler = TransformersSchedule(
                scheduler,
                max_lr=args.lr,
                name=args.lr_scheduler_type,
                kwargs=args.lr_scheduler_kwargs,
                warmup_steps=args.warmup_steps,
                warmup_ratio=args.warmup_ratio,
                num_steps=args.train_iters,
                samples_per_step=args.global_batch_size)
        return optimizer, scheduler

    def _load_checkpoint(self) -> None:
        # In float32 the optimizer's shards are views of the parameters; copying a saved state into them must not be recorded by autograd.
        with torch.no_grad(), checkpoint.readable():
            super()._load_checkpoint()

    def _get_data_collator(self) -> Any:
        return identity_data_collator

    def _aggregated_metrics(self, metrics: Sums, total_metrics: dict[str, Any]) -> None:
        total_metrics['n_steps'] = total_metrics.get('n_steps', 0) + 1
        self.window.add(metrics)

    def on_log(self, logs: dict[str, Any], prefix: str = '') -> None:
        if not prefix:
            logs = {'n_steps': logs['n_steps'], **self.window.flush(), **{k: v for k, v in logs.items() if k != 'n_steps'}}
            logs['skipped_updates'] = self.progress.skipped_updates
            epoch = self.prompts.epoch_of(self.progress.generation)
            logs |= {} if epoch is None else {'epoch': round(epoch, 6)}
        super().on_log(logs, prefix)

    def _log_callback(self, logs: dict[str, Any], n_steps: int) -> None:
        # ms-swift divides what routers summed up by num_microbatches * n_steps; here packing decides how many micro-batches there are.
        count, self.num_micro_batches = self.num_micro_batches, 0
        super()._log_callback(logs, max(count, 1) / self.args.num_microbatches)

    def save_checkpoint(self) -> None:
        if self.args.save_strategy == 'no':
            return
        if self.engine is not None:
            self.ahead.drain()
        if isinstance(self.prompts, StreamingPromptSource):
            self.progress.stream_position = self.prompts.start_of(self._next_to_sample)
        self.progress.note_best(self.state.best_metric, self.state.best_global_step)
        checkpoint.save(self, self.progress)

    def forward_step(self, data_iterator: Any, model: Any) -> Any:
        raise NotImplementedError('the forward is step/forward.py')

    def _saved(self, error: EngineLost) -> RunError:
        """The error that ends the run, after a checkpoint. All ranks, collective."""
        state = self.state
        self.residency.to(Stage.TRAINING)
        self.ahead.abandon()
        self.finalize_training()
        return RunError(f'{error} The run stops after {state.iteration} optimizer steps{self._keep()}.')

    def _keep(self) -> str:
        """A checkpoint of now, where there is none yet, and how a message goes on about it. All ranks, collective; after the training."""
        folder = os.path.join(self.args.output_dir, f'checkpoint-{self.state.iteration}')
        if self.state.iteration > 0 and self.args.save_strategy != 'no' and not os.path.exists(folder):
            self.save_checkpoint()
        return f'; {folder} holds them, go on with --resume_from_checkpoint' if os.path.exists(folder) else ''

    def _on_any_rank(self, here: bool) -> bool:
        return bool(max_over([here], dist.group.WORLD, self.device)[0])

    def _watched(self, phase: str, seconds: float) -> AbstractContextManager[None]:
        """A deadline around collective work: a rank that hangs, or a collective that never ends, ends in a named error and not in silence."""
        self.last_done = 'nothing'
        begun = self.policy.counters.forwards
        return deadline(phase, seconds, rank=self.topology.rank, detail=lambda: (
            f'last done: {self.last_done}; {self.policy.counters.forwards - begun} forward passes of micro-batches were begun'))

    # -- small things ------------------------------------------------------------------------------------------------------------------------

    def _residency(self) -> Residency:
        args = self.args
        flags: dict[str, Any] = {'sleep_level': args.sleep_level, 'offload_model': args.offload_model,
                                 'offload_optimizer': args.offload_optimizer, 'offload_bridge': args.offload_bridge}
        if not shares_devices(args):
            asked = [f'--{name} {value}' for name, value in flags.items() if value and name != 'offload_bridge']
            if asked:
                logger.warning(f'{", ".join(asked)}: without effect in server mode, where the engine has devices of its own.')
            flags |= {'sleep_level': 0, 'offload_model': False, 'offload_optimizer': False}
        return Residency(MegatronMovers(self), **flags)

    def _initial_progress(self) -> Progress:
        args = self.args
        fresh = Progress(num_prompts_per_generation=args.num_prompts_per_generation, seed=args.seed)
        if args.resume_from_checkpoint is None or args.resume_only_model:
            return fresh
        progress = checkpoint.read_progress(args.resume_from_checkpoint)
        self.state.best_metric, self.state.best_global_step = progress.best_metric, progress.best_global_step
        checkpoint.find_best(args, self.state)
        return progress

    def _resume_generation(self) -> Generation | None:
        """The generation that a checkpoint was written inside of; its optimizer steps go on where they stopped."""
        if self.progress.updates_in_generation == 0:
            return None
        if self.policy.routes is not None and self.policy.routes.mode == 'R2':
            logger.warning('router_replay_mode R2: a checkpoint holds no expert choices; the rest of this generation is trained without replay.')
        scored, logprobs = checkpoint.read_pending(self.args.resume_from_checkpoint, self.rewarder.names)
        samples = {rollout.index: scored.sample(rollout) for rollout in scored.rollouts}
        steps = self.batches.build(scored.rollouts, samples, self.args.steps_per_generation)
        for step, values in zip(steps, logprobs, strict=True):
            step.table.set_logprobs({name: step.own_tokens(value.to(self.device)) for name, value in values.items()})
        self.learner.add_advantages(steps, scored, update=self._updates_before(self.progress.generation))
        return Generation(index=self.progress.generation, scored=scored, steps=steps)

    def _prompt_source(self, dataset: Any) -> PromptSource | StreamingPromptSource:
        args = self.args
        if args.streaming:
            stream = StreamingPromptSource(dataset, args.num_prompts_per_generation)
            stream.go_on(self._next_to_sample, self.progress.stream_position)
            return stream
        return PromptSource(dataset, args.num_prompts_per_generation, shuffle=args.train_dataloader_shuffle, seed=args.data_seed)

    def _write_completions(self, index: int, scored: ScoredRollouts, steps: list[StepBatch]) -> None:
        if not self.completions.enabled:
            return
        advantages = self.learner.last_advantages_N.tolist()
        self.completions.write([{
            'gen_step': self.state.iteration,
            'generation': index,
            'prompt': scored.samples_P[rollout.prompt_index].messages,
            'completion': rollout.messages[-1]['content'],
            **dict(zip(self.rewarder.names, rewards)),
            'advantages': advantage,
        } for rollout, rewards, advantage in zip(scored.rollouts, scored.rewards_NF.tolist(), advantages)])

