"""The arguments that neither ``swift rlhf`` nor ``megatron rlhf`` has, or that the worker reads in another way.

One table, two readers: the translation (this package, standard library only) and the worker's dataclass
``MegatronGRPOArguments``. A contract test compares the two, so a row added here is a field there.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class OwnField:
    """One argument of this package.

    ``type`` is one of int, float, bool, str, json, list[str]; ``default`` None means optional. ``door_only`` rows are used before the
    workers start and never reach them. ``overrides`` rows replace a field that ms-swift's ``MegatronRLHFArguments`` also has.
    """

    name: str
    type: str
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    door_only: bool = False
    overrides: bool = False


OWN_FIELDS: tuple[OwnField, ...] = (
    # the door
    OwnField('backend', 'str', 'megatron', 'Train on Megatron-Core.', ('megatron',)),
    OwnField(
        'dry_run',
        'str',
        'false',
        'true: print the plan and stop; json: the same as one JSON object.',
        ('false', 'true', 'json'),
        door_only=True,
    ),
    OwnField(
        'world_size',
        'int',
        None,
        'Number of processes to plan for in a dry run; a real run takes it from NPROC_PER_NODE and NNODES.',
        door_only=True,
    ),
    OwnField(
        'keep_global_batch',
        'bool',
        False,
        'true: completions per optimizer step as under data parallel alone '
        '(per_device_train_batch_size x world_size x gradient_accumulation_steps), whatever TP, PP and CP are.',
        door_only=True,
    ),
    # batch
    OwnField(
        'batch_check',
        'str',
        'auto',
        'documented: the published condition on prompts and micro_batch_size; exact: only what the data path needs; auto: documented for a '
        "batch in Megatron's names (micro_batch_size, global_batch_size), exact for one in the names of `swift rlhf`.",
        ('auto', 'documented', 'exact'),
    ),
    OwnField(
        'max_tokens_per_micro_batch', 'int', None, 'Token budget of a packed micro-batch; default micro_batch_size sequences of any length.'
    ),
    OwnField('max_tokens_per_forward_only_micro_batch', 'int', None, 'Token budget of passes without gradient; default the same budget.'),
    # weight sync
    OwnField(
        'verify_weight_sync',
        'str',
        'first',
        'first: compare checksums of all weights after the first sync; off; or a number N: after every N-th sync.',
    ),
    OwnField('weight_sync_bucket_mb', 'int', 512, 'Size of one bucket of weights on the way to the engine, MiB.'),
    # frozen rollouts
    OwnField('save_rollouts', 'str', None, 'Folder to write each generation to.'),
    OwnField('replay_rollouts', 'str', None, 'Folder to read generations from instead of sampling; no engine is loaded.'),
    # asynchronous rollouts
    OwnField('max_staleness', 'int', 1, 'Largest age of a rollout in weight versions; async_generate only.'),
    OwnField('allow_uncorrected_async', 'bool', False, 'true: async_generate without rollout_importance_sampling_mode.'),
    # deadlines
    OwnField('rollout_timeout', 'float', 3600.0, 'Deadline of one generation, seconds.'),
    OwnField('sync_timeout', 'float', 900.0, 'Deadline of one weight sync, seconds.'),
    OwnField('reward_timeout', 'float', 900.0, 'Deadline of all reward functions on one generation, seconds.'),
    OwnField(
        'step_timeout',
        'float',
        3600.0,
        'Deadline of one optimizer step, seconds; the passes before the steps of a generation have as much for each of them.',
    ),
    OwnField('server_timeout', 'float', 600.0, 'How long a rollout server may stay away before it is dropped, seconds.'),
    # losses
    OwnField(
        'loss_type', 'str', 'grpo', 'grpo, bnpo, dr_grpo, dapo, cispo, sapo, real, fipo, luspo, gmpo, or module:function.', overrides=True
    ),
    OwnField('dual_clip', 'float', None, 'Lower-bound clip c > 1 for negative advantages (arXiv 1912.09729).'),
    OwnField('kl_cov_ratio', 'float', None, 'Share of tokens with the largest covariance that get a KL penalty (arXiv 2505.22617).'),
    OwnField('kl_cov_coef', 'float', 1.0, 'Weight of that penalty.'),
    OwnField('clip_cov_ratio', 'float', None, 'Share of tokens whose gradient is cut, drawn from a covariance band (arXiv 2505.22617).'),
    OwnField('clip_cov_low', 'float', 1.0, 'Lower end of that band.'),
    OwnField('clip_cov_high', 'float', 5.0, 'Upper end of that band.'),
    OwnField(
        'nonfinite_update',
        'str',
        'skip',
        'skip: leave out an update whose loss or gradient norm is not finite, and count it; stop.',
        ('skip', 'stop'),
    ),
    # training loop, with the meaning of swift rlhf
    OwnField('num_train_epochs', 'float', None, 'Epochs; fractions are kept; train_iters wins.', overrides=True),
    OwnField('lr_scheduler_type', 'str', None, 'Schedule of transformers; None: the schedule of Megatron (lr_decay_style).'),
    OwnField('lr_scheduler_kwargs', 'json', None, 'Its arguments, a JSON object.'),
    OwnField('warmup_steps', 'float', 0.0, 'Optimizer steps of warm-up; below 1 a share of all steps.'),
    OwnField('warmup_ratio', 'float', 0.0, 'Warm-up as a share of all steps (rounded up).'),
    OwnField(
        'save_strategy',
        'str',
        'steps',
        'steps, epoch, or no (no checkpoint at all, as in swift rlhf).',
        ('steps', 'epoch', 'no'),
        overrides=True,
    ),
    OwnField('eval_strategy', 'str', None, 'no, steps, epoch; None: as save_strategy.', ('no', 'steps', 'epoch')),
    OwnField(
        'load_best_model_at_end',
        'bool',
        False,
        'true: at the end `last-checkpoint` and last_model_checkpoint refer to the checkpoint with the best metric_for_best_model.',
    ),
    OwnField('eval_on_start', 'bool', False, 'true: also evaluate before the first optimizer step.'),
    OwnField('eval_delay', 'float', 0.0, 'No evaluation before this many optimizer steps (with eval_strategy epoch: epochs).'),
    OwnField(
        'early_stop_interval', 'int', None, 'End the run when this many checkpoints in a row have brought no better metric_for_best_model.'
    ),
    OwnField('resume_from_checkpoint', 'str', None, 'Checkpoint folder to go on from.'),
    OwnField('resume_only_model', 'bool', False, 'true: take the weights of resume_from_checkpoint and start everything else anew.'),
    # rollouts, rewards
    OwnField(
        'reward_batch',
        'str',
        'generation',
        'What one call of a reward function sees: generation, all rollouts of the process, as in ms-swift; group, the rollouts of one prompt, as '
        'soon as all of them are sampled (beside the generation, where several servers answer).',
        ('generation', 'group'),
    ),
    OwnField('min_p', 'float', 0.0, 'Smallest probability relative to the most likely token.'),
    OwnField('vllm_data_parallel_size', 'int', 1, 'Replicas inside one engine; a server has its own.'),
    OwnField('vllm_enable_expert_parallel', 'bool', False, 'Expert parallel inside the engine.'),
    OwnField('vllm_max_lora_rank', 'int', 16, 'Largest adapter rank the engine accepts (vllm_enable_lora).'),
    OwnField('vllm_disable_custom_all_reduce', 'bool', True, "Leave out vLLM's own all-reduce kernel."),
    # a teacher in the data
    OwnField('advantage_reweight', 'str', None, 'rlsd: a teacher scales the advantage of each token (arXiv 2604.03128).', ('rlsd',)),
    OwnField('rlsd_lambda', 'float', 0.5, '0: the plain advantage; 1: the scaled one.'),
    OwnField('rlsd_reweight_clip_range', 'float', 0.2, 'The scale lies in [1 - range, 1 + range].'),
    OwnField('rlsd_lambda_warmup_steps', 'int', 0, 'Optimizer steps in which rlsd_lambda grows from 0.'),
    OwnField('rlsd_lambda_decay_steps', 'int', 0, 'Optimizer steps after the warm-up in which rlsd_lambda falls to 0; 0: it stays.'),
    OwnField('rlsd_negative_only', 'bool', False, 'Scale only where the advantage is negative.'),
    OwnField('sdar_loss_coef', 'float', 0.0, 'Weight of a gated distillation term in the loss (arXiv 2605.15155); 0: none.'),
    OwnField('sdar_gate_beta', 'float', 5.0, 'Sharpness of its gate.'),
    # expert answers beside the rollouts
    OwnField('chord_sft_dataset', 'list[str]', [], 'Expert answers that are trained on in the same step (CHORD, arXiv 2508.11408).'),
    OwnField('chord_sft_per_device_train_batch_size', 'int', None, 'Expert rows a device and micro-step: x dp_size x gradient_accumulation_steps a step.'),
    OwnField('chord_enable_phi_function', 'bool', False, 'Weigh each expert token by p (1 - p).'),
    OwnField('chord_mu_warmup_steps', 'int', None, 'Optimizer steps in which the share mu of the experts grows from 0 to its peak.'),
    OwnField('chord_mu_decay_steps', 'int', None, 'Optimizer steps after that in which mu falls to its valley (cosine).'),
    OwnField('chord_mu_peak', 'float', None, 'Largest mu, from 0 to 1.'),
    OwnField('chord_mu_valley', 'float', None, 'Last mu, from 0 to 1.'),
    OwnField('reward_adapters', 'list[str]', [], 'Adapters of the reward models.'),
    OwnField('reward_model_type', 'list[str]', None, 'model_type of each reward model.'),
    OwnField('reward_model_revision', 'list[str]', None, 'Revision of each reward model.'),
    OwnField('reward_template', 'list[str]', None, 'Template of each reward model.'),
)
OWN_BY_NAME = {field.name: field for field in OWN_FIELDS}
