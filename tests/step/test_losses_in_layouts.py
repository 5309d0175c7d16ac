"""Every loss and every switch of the loss has the same value, gradient norm, update and metrics in every layout, away from the old policy."""
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.step.training import arguments, write_rollouts

# name -> (fields of the loss configuration, arguments that shape weights and advantages)
LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    'grpo': ({'beta': 0.04, 'log_entropy': True}, {}),
    'grpo-sequence': ({'importance_sampling_level': 'sequence'}, {}),
    'grpo-sequence_token': ({'importance_sampling_level': 'sequence_token', 'epsilon': 0.001}, {}),
    'grpo-delta': ({'delta': 1.001}, {}),
    'grpo-overlong': ({'beta': 0.04}, {'overlong_filter': True}),
    'grpo-truncate': ({'rollout_importance_sampling_mode': 'token_truncate', 'rollout_importance_sampling_threshold': 1.5}, {}),
    'grpo-sequence_mask': ({'rollout_importance_sampling_mode': 'sequence_mask', 'rollout_importance_sampling_threshold': 1.2,
                            'log_rollout_offpolicy_metrics': True}, {}),
    'grpo-entropy': ({'top_entropy_quantile': 0.4}, {}),
    'grpo-off_policy': ({'off_policy_sequence_mask_delta': 0.01}, {}),
    'bnpo': ({'loss_type': 'bnpo', 'off_policy_sequence_mask_delta': 0.01, 'beta': 0.04}, {'overlong_filter': True}),
    'dr_grpo': ({'loss_type': 'dr_grpo', 'dual_clip': 1.001}, {}),
    'dapo': ({'loss_type': 'dapo', 'epsilon': 0.001, 'epsilon_high': 0.002}, {'overlong_filter': True}),
    'cispo': ({'loss_type': 'cispo', 'epsilon_high': 1.001}, {}),
    'sapo': ({'loss_type': 'sapo'}, {}),
    'real': ({'loss_type': 'real', 'beta': 0.04}, {'scale_rewards': 'none'}),
    'fipo': ({'loss_type': 'fipo'}, {}),
    'luspo': ({'loss_type': 'luspo', 'importance_sampling_level': 'sequence'}, {}),
    'gmpo': ({'loss_type': 'gmpo', 'epsilon': 0.001}, {}),
    'kl_cov': ({'kl_cov_ratio': 0.1}, {}),
    'clip_cov': ({'clip_cov_ratio': 0.2, 'clip_cov_low': 0.0, 'clip_cov_high': 5.0}, {}),
    'rloo': ({}, {'advantage_estimator': 'rloo', 'kl_in_reward': True, 'scale_rewards': 'none'}),
    'reinforce_plus_plus': ({}, {'advantage_estimator': 'reinforce_plus_plus', 'scale_rewards': 'batch'}),
}
LAYOUTS = {
    'tp2-cp2': {'tensor_model_parallel_size': 2, 'context_parallel_size': 2},
    'pp2-dp2': {'pipeline_model_parallel_size': 2, 'micro_batch_size': 2},
    'tp2-sp-dp2': {'tensor_model_parallel_size': 2, 'sequence_parallel': 'true', 'micro_batch_size': 1},
    'tp2-pp2': {'tensor_model_parallel_size': 2, 'pipeline_model_parallel_size': 2},
    'ep2-tp2-sp': {'expert_model_parallel_size': 2, 'expert_tensor_parallel_size': 1, 'tensor_model_parallel_size': 2, 'sequence_parallel': 'true'},
}
# what is trained -> (model, arguments)
TRAINED: dict[str, tuple[str, dict[str, Any]]] = {
    'full': ('qwen3', {}),
    'lora': ('qwen3', {'tuner_type': 'lora', 'lora_rank': 4, 'lora_alpha': 16, 'target_modules': 'all-linear'}),
    'experts': ('qwen3_moe', {'moe_router_load_balancing_type': 'none'}),
}
RUNS = [('full', 'tp2-cp2'), ('full', 'pp2-dp2'), ('full', 'tp2-sp-dp2'), ('lora', 'tp2-pp2'), ('experts', 'ep2-tp2-sp')]


def losses_at_moved_weights(argv: list[str]) -> dict[str, dict[str, Any]] | None:
    """One generation at the first weights, one update by plain GRPO, then each loss once from there; the last rank answers.

    Of each loss: 'values' (loss, grad_norm, metrics) and 'moved', the weights after a step of it.
    """
    import torch.distributed as dist
    from accelerate import PartialState
    PartialState(cpu=True)
    from swift_megatron_grpo.metrics import to_logs
    from swift_megatron_grpo.pipeline import MegatronGRPO
    from swift_megatron_grpo.step.loss_config import LossConfig
    from swift_megatron_grpo.sync import merged_for_export
    pipeline = MegatronGRPO(argv)
    train_dataset, val_dataset = pipeline._prepare_dataset()
    pipeline.args.init_iters(train_dataset, val_dataset)
    trainer = pipeline.prepare_trainer()
    trainer.callbacks = []
    trainer.setup_model_training()
    trainer.generation = trainer.collect(0)
    first, second = trainer.generation.steps
    trainer.train_step(first)
    parameters = [p for model in trainer.unwrapped_models for p in model.parameters()]
    start = [p.data.clone() for p in parameters]
    results = {}
    for name, (fields, changes) in LOSSES.items():
        before = {key: getattr(trainer.args, key) for key in changes}
        for key, value in changes.items():
            setattr(trainer.args, key, value)
        config = {'beta': 0.0, 'kl_in_reward': changes.get('kl_in_reward', False), **fields}
        if config['kl_in_reward']:
            config['beta'] = 0.04
        trainer.learner.config = dataclasses.replace(LossConfig(), **config)
        metrics = trainer.learner.add_advantages([first, second], trainer.generation.scored, update=0)
        trainer.state.iteration = 7  # seeds the random choice of Clip-Cov
        trainer.progress.updates_in_generation = 1
        sums, grad_norm, updated = trainer.train_step(second)
        assert updated
        with merged_for_export(trainer.unwrapped_models):
            moved = {key: tensor.clone() for key, tensor in trainer.bridge.export_weights(trainer.unwrapped_models)
                     if 'layers.1.' in key or 'layers.' not in key}
        results[name] = {'values': {'grad_norm': float(grad_norm), **to_logs(sums), **metrics}, 'moved': moved}
        for key, value in before.items():
            setattr(trainer.args, key, value)
        with torch.no_grad():
            for parameter, value in zip(parameters, start):
                parameter.data.copy_(value)
    return results if dist.get_rank() == dist.get_world_size() - 1 else None


def _bring_the_odd_ones_into_the_second_step(path: Path) -> None:
    """One empty completion, one truncated, one group of equal rewards among rollouts 8 to 15."""
    head, *lines = path.read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    rows[9].update(response_token_ids=[], rollout_logprobs=[])
    rows[10]['finish_reason'] = 'length'
    for row in rows[12:]:
        row['rewards'] = [1.0]
    path.write_text('\n'.join([head, *map(json.dumps, rows)]) + '\n')


@pytest.fixture(scope='module')
def measure(ranks: Any, tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    work = tmp_path_factory.mktemp('losses')
    rollouts = write_rollouts(work / 'rollouts', generations=1, prompts=4, num_generations=4)
    _bring_the_odd_ones_into_the_second_step(rollouts / 'generation-000000.jsonl')
    sgd = {'optimizer': 'sgd', 'sgd_momentum': 0.0, 'lr': 0.1, 'min_lr': 0.1, 'lr_decay_style': 'constant', 'use_distributed_optimizer': 'false',
           'clip_grad': 0.5, 'weight_decay': 0.0}
    known: dict[Any, Any] = {}

    def measured(trained: str, layout: str | None) -> Any:
        key = (trained, layout)
        if key not in known:
            model, changes = TRAINED[trained]
            changes = {**changes, **(LAYOUTS[layout] if layout else {})}
            if trained != 'lora':  # there the base model is the reference
                changes['ref_model'] = tiny_model(model, seed=1)
            argv = arguments(work, tiny_model(model), rollouts, **{
                'model_type': model, 'generation_batch_size': 16, 'train_iters': 2, 'beta': 0.04, **sgd, **changes})
            known[key] = ranks.run(losses_at_moved_weights, argv, world_size=4 if layout else 1, deadline=400.)[-1]
        return known[key]

    return measured


@pytest.mark.parametrize('trained, layout', RUNS)
def test_every_loss_is_the_same_in(measure: Any, trained: str, layout: str) -> None:
    expected, got = measure(trained, None), measure(trained, layout)
    wrong = []
    for name in LOSSES:
        values = expected[name]['values']
        if got[name]['values'].keys() != values.keys():
            wrong.append(f'{name}: metrics {got[name]["values"].keys() ^ values.keys()}')
        wrong += [f'{name}: {metric} {got[name]["values"][metric]} for {value}' for metric, value in values.items()
                  if got[name]['values'].get(metric) != pytest.approx(value, rel=1e-5, abs=1e-5)]
        for weight, tensor in expected[name]['moved'].items():
            error = float((got[name]['moved'][weight] - tensor).abs().max() / tensor.abs().max())
            if error > 1e-5:
                wrong.append(f'{name}: {weight} by {error:.1e}')
    assert not wrong, '\n'.join(wrong)


def test_the_losses_differ_from_one_another_where_they_were_measured(measure: Any) -> None:
    """Else the comparison above would compare the same thing many times."""
    norms = {name: result['values']['grad_norm'] for name, result in measure('full', None).items()}
    assert all(norm > 1e-3 for norm in norms.values()), norms
    twins = [(a, b) for a in norms for b in norms if a < b and norms[a] == pytest.approx(norms[b], rel=1e-6)]
    assert not twins, twins
