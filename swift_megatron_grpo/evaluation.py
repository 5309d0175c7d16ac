"""Validation prompts, sampled and scored with the weights of now (import tier 2)."""
from __future__ import annotations

from collections.abc import Callable
from swift.utils import get_logger
from typing import Any

from .step.completions import completion_metrics
from .step.learn import Learner
from .step.prompts import PromptSource
from .step.rollout import RolloutStage, ScoredRollouts, generation_seed

logger = get_logger()


class Evaluation:
    """Changes no training state: prompts, seeds and metrics are its own."""

    def __init__(self, args: Any, rollouts: RolloutStage, learner: Learner):
        self.args = args
        self.rollouts = rollouts
        self.learner = learner
        self._misses_best_metric = False  # said once

    def run(self, val_dataset: Any, *, version: int, after_batch: Callable[[], None]) -> dict[str, float]:
        """Metrics of all completions, by ms-swift's names without `eval_`. Every rank, collective.

        Each metric is one mean over the pass: a last batch that is smaller than the others counts by its completions.

        Args:
            val_dataset: rows; args.eval_iters batches of generation_batch_size completions hold them all.
            version: of the weights that the engine has.
            after_batch: called when a batch is scored, for progress.
        """
        args = self.args
        num_generations = args.num_generations_eval or args.num_generations
        size = max(args.generation_batch_size // num_generations, 1)
        source = PromptSource(val_dataset, 1, shuffle=False, seed=args.seed)
        batches = []
        for batch in range(args.eval_iters):
            last = min((batch + 1) * size, len(val_dataset))
            prompts = [prompt for index in range(batch * size, last) for prompt in source.take(index)]
            batches.append(self.rollouts.run(prompts, num_generations=num_generations, seed=generation_seed(args.seed + 1, batch), version=version))
            after_batch()
        scored = ScoredRollouts.joined(batches)
        metrics = {**self.learner.reward_metrics(scored), **completion_metrics(scored.rollouts)}
        self._ask_for_best_metric(metrics)
        return metrics

    def _ask_for_best_metric(self, metrics: dict[str, float]) -> None:
        """A warning where nothing can be the best, said once: ms-swift passes over an evaluation without the metric in silence."""
        args, name = self.args, self.args.metric_for_best_model
        if name not in metrics and not self._misses_best_metric and (args.early_stop_interval is not None or args.load_best_model_at_end):
            self._misses_best_metric = True
            logger.warning(f'--metric_for_best_model {name}: this evaluation has no such metric, so that no checkpoint of it counts as better or as no '
                           f'better. The evaluation has: {", ".join(sorted(metrics))}.')
