"""Trains with ms-swift's own GRPOTrainer (transformers, no Megatron) on frozen rollouts, in a process of its own: no CPU platform, no patches.

    python -m tests.trainer.ms_swift_run INPUT.json

INPUT.json: {"argv": [...], "rollouts": folder, "runs": {name: [more arguments]}, "output": file}. The output is a torch file: name -> {'losses': of
each update, 'grad_norms', 'weights': after the last}.
"""
import json
import sys
from pathlib import Path
from typing import Any

import torch


def run(argv: list[str], rollouts: Path) -> dict[str, Any]:
    from swift.pipelines.train.rlhf import SwiftRLHF
    from swift.rlhf_trainers import grpo_trainer

    from swift_megatron_grpo.step import frozen
    scored, _ = frozen.read_generation(frozen.generation_path(str(rollouts), 0))
    losses: list[float] = []

    class Frozen(grpo_trainer.GRPOTrainer):
        """Ms-swift's trainer with its two sources of chance replaced: what was sampled, and what it was worth."""

        def _generate_completions(self, samples: Any) -> Any:
            assert len(samples) == len(scored.rollouts)
            return [scored.sample(rollout) for rollout in scored.rollouts]

        def _compute_rewards_per_func(self, samples: Any) -> torch.Tensor:
            return scored.rewards_NF.clone()

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            losses.append(float(loss))
            return loss

    from swift.trainers import trainer_factory
    path = f'{__name__}.Frozen'
    sys.modules[__name__].Frozen = Frozen  # type: ignore[attr-defined]
    known = trainer_factory.TrainerFactory.TRAINER_MAPPING['grpo']
    trainer_factory.TrainerFactory.TRAINER_MAPPING['grpo'] = path
    try:
        pipeline = SwiftRLHF(argv)
        kept: dict[str, Any] = {}
        train = SwiftRLHF.train

        def train_and_keep(self: Any, trainer: Any) -> Any:
            kept['trainer'] = trainer
            return train(self, trainer)

        SwiftRLHF.train = train_and_keep  # type: ignore[method-assign]
        try:
            pipeline.run()
        finally:
            SwiftRLHF.train = train  # type: ignore[method-assign]
    finally:
        trainer_factory.TrainerFactory.TRAINER_MAPPING['grpo'] = known
    trainer = kept['trainer']
    norms = [row['grad_norm'] for row in trainer.state.log_history if 'grad_norm' in row]
    return {'losses': losses, 'grad_norms': norms, 'weights': {name: p.detach().clone() for name, p in trainer.model.named_parameters()}}


def main(path: str) -> None:
    task = json.loads(Path(path).read_text())
    results = {name: run([*task['argv'], *more], Path(task['rollouts'])) for name, more in task['runs'].items()}
    torch.save(results, task['output'])


if __name__ == '__main__':
    main(sys.argv[1])
