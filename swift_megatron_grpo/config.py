"""The worker's arguments: ms-swift's `MegatronRLHFArguments` and this package's own (import tier 2).

What each own argument means stands in `args/own.py`, the table that the translation and the documentation use; a contract test keeps the
two together. The command line has been translated and checked before a worker starts (`args/`).
"""
from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from mcore_bridge.model.register import MODEL_MAPPING
from swift.megatron.arguments import MegatronRLHFArguments
from typing import Any, List, Literal, Optional, Union

from . import cpu, engines
from .args.model_checks import unknown_model
from .errors import UserError

# Upstream's argument check refuses these for Megatron GRPO; this trainer implements them.
_IMPLEMENTED_HERE = {'async_generate': False, 'sync_ref_model': False, 'num_iterations': 1, 'use_vllm': True}

# Arguments whose part of the trainer is not finished: refused by name, never accepted and ignored. (name, values that ask for nothing, what
# to do instead)
NOT_YET: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ('async_save', (False, ), 'leave it out: checkpoints are moved into place when they are complete'),
    ('use_megatron_fsdp', (False, ), 'use the distributed optimizer'),
)


@dataclass
class MegatronGRPOArguments(MegatronRLHFArguments):
    rlhf_type: Literal['grpo'] = 'grpo'
    backend: Literal['megatron'] = 'megatron'

    # batch
    batch_check: Literal['auto', 'documented', 'exact'] = 'auto'
    max_tokens_per_micro_batch: Optional[int] = None
    max_tokens_per_forward_only_micro_batch: Optional[int] = None

    # weight sync
    verify_weight_sync: str = 'first'
    weight_sync_bucket_mb: int = 512

    # frozen rollouts
    save_rollouts: Optional[str] = None
    replay_rollouts: Optional[str] = None

    # asynchronous rollouts
    max_staleness: int = 1
    allow_uncorrected_async: bool = False

    # deadlines, seconds
    rollout_timeout: float = 3600.0
    sync_timeout: float = 900.0
    reward_timeout: float = 900.0
    step_timeout: float = 3600.0
    server_timeout: float = 600.0

    # losses
    loss_type: Optional[str] = 'grpo'
    dual_clip: Optional[float] = None
    kl_cov_ratio: Optional[float] = None
    kl_cov_coef: float = 1.0
    clip_cov_ratio: Optional[float] = None
    clip_cov_low: float = 1.0
    clip_cov_high: float = 5.0
    advantage_reweight: Optional[Literal['rlsd']] = None
    rlsd_lambda: float = 0.5
    rlsd_reweight_clip_range: float = 0.2
    rlsd_lambda_warmup_steps: int = 0
    rlsd_lambda_decay_steps: int = 0
    rlsd_negative_only: bool = False
    sdar_loss_coef: float = 0.0
    sdar_gate_beta: float = 5.0
    chord_sft_dataset: List[str] = field(default_factory=list)
    chord_sft_per_device_train_batch_size: Optional[int] = None
    chord_enable_phi_function: bool = False
    chord_mu_warmup_steps: Optional[int] = None
    chord_mu_decay_steps: Optional[int] = None
    chord_mu_peak: Optional[float] = None
    chord_mu_valley: Optional[float] = None
    nonfinite_update: Literal['skip', 'stop'] = 'skip'

    # training loop, with the meaning of `swift rlhf`
    num_train_epochs: Optional[float] = None
    lr_scheduler_type: Optional[str] = None
    lr_scheduler_kwargs: Optional[Union[dict, str]] = None
    warmup_steps: float = 0.0
    warmup_ratio: float = 0.0
    save_strategy: Literal['steps', 'epoch', 'no'] = 'steps'
    eval_strategy: Optional[Literal['no', 'steps', 'epoch']] = None
    load_best_model_at_end: bool = False
    eval_on_start: bool = False
    eval_delay: float = 0.0
    early_stop_interval: Optional[int] = None
    resume_from_checkpoint: Optional[str] = None
    resume_only_model: bool = False

    # rollouts, rewards
    reward_batch: Literal['generation', 'group'] = 'generation'
    min_p: float = 0.0
    vllm_data_parallel_size: int = 1
    vllm_enable_expert_parallel: bool = False
    vllm_max_lora_rank: int = 16
    vllm_disable_custom_all_reduce: bool = True
    reward_adapters: List[str] = field(default_factory=list)
    reward_model_type: Optional[List[str]] = None
    reward_model_revision: Optional[List[str]] = None
    reward_template: Optional[List[str]] = None

    def __post_init__(self) -> None:
        if cpu.is_active():
            # No NCCL, no fused kernels; everything else is as on an accelerator.
            self.ddp_backend = 'gloo'
            self.cross_entropy_loss_fusion = False
            self.vit_attn_impl = self.vit_attn_impl or 'sdpa'
            if str(self.torch_dtype) in ('float32', 'torch.float32') and self.fp16 is None and not self.bf16:
                # ms-swift makes fp16 mixed precision of this, which needs an accelerator.
                self.fp16 = self.bf16 = False
        if self.optimizer == 'sgd':
            self.use_distributed_optimizer = False  # it takes adam only
        if isinstance(self.lr_scheduler_kwargs, str):
            self.lr_scheduler_kwargs = json.loads(self.lr_scheduler_kwargs)
        self._refuse_unfinished()
        if self.resume_from_checkpoint is not None:
            self._init_resume(self.resume_from_checkpoint)
        # `swift rlhf` takes "none"; ms-swift's Megatron side looks every entry up.
        self.report_to = [name for name in ([self.report_to] if isinstance(self.report_to, str) else self.report_to) if name != 'none']
        try:
            super().__post_init__()
        except ValueError as error:
            if str(error) == f'Model: {self.model} is not supported.':
                raise unknown_model(self.model, self.model_type, sorted(MODEL_MAPPING)) from None
            raise
        if cpu.is_active():
            cpu.refuse_unsupported(self)
        engines.check_arguments(self)
        if self.metric_for_best_model is not None:  # as transformers reads it: with or without the prefix
            self.metric_for_best_model = self.metric_for_best_model.removeprefix('eval_')
        # The progress line, logging.jsonl (full float precision, reward in the bar) and curves (names of `swift rlhf`) are this package's.
        self.callbacks = [f'grpo_{name}' if name in ('print', 'tensorboard') else name for name in self.callbacks]

    def _refuse_unfinished(self) -> None:
        for name, harmless, instead in NOT_YET:
            value = getattr(self, name)
            if value not in harmless:
                raise UserError(f'--{name} {value}: not available with --backend megatron in this version; {instead}.')
        if self.router_replay_mode == 'R3' and not self.use_vllm and self.replay_rollouts is None:
            raise UserError('--router_replay_mode R3 replays the expert choices of vLLM, and --use_vllm is false. Use R2, or --use_vllm true.')
        if self.router_replay_mode == 'R3' and cpu.is_active() and self.vllm_mode == 'colocate' and self.replay_rollouts is None:
            raise UserError('--router_replay_mode R3: vLLM returns its expert choices from Model Runner V2 only, which needs Triton; the CPU build has '
                            'neither. Use R2, or saved rollouts with routes (--replay_rollouts).')
        if self.router_replay_mode == 'R2' and self.max_tokens_per_forward_only_micro_batch is not None:
            raise UserError(f'--router_replay_mode R2 records in passes without gradient what training replays, so both need the same micro-batches: '
                            f'leave out --max_tokens_per_forward_only_micro_batch {self.max_tokens_per_forward_only_micro_batch}.')

    def _init_resume(self, folder: str) -> None:
        if not os.path.exists(os.path.join(folder, 'latest_checkpointed_iteration.txt')):
            raise UserError(f'--resume_from_checkpoint {folder}: not a complete checkpoint of Megatron training (it has no '
                            'latest_checkpointed_iteration.txt). Give a folder checkpoint-N that a run with save_only_model false wrote.')
        with open(os.path.join(folder, 'args.json'), encoding='utf-8') as file:
            saved = json.load(file)
        if saved.get('no_save_optim') and not self.resume_only_model:
            raise UserError(f'--resume_from_checkpoint {folder}: it was saved without optimizer state (save_only_model true), so the run cannot '
                            'go on where it stopped. To start anew from its weights give --resume_only_model true.')
        if self.tuner_type == 'full':
            self.mcore_model = folder
        else:
            self.mcore_adapter = folder
        self.finetune = self.resume_only_model
        self.no_load_optim = self.no_load_rng = self.resume_only_model

    def _init_grpo(self) -> None:
        wanted: dict[str, Any] = {name: getattr(self, name) for name in _IMPLEMENTED_HERE}
        loss_type, self.loss_type = self.loss_type, 'grpo' if self.loss_type == 'real' else self.loss_type
        for name, neutral in _IMPLEMENTED_HERE.items():
            setattr(self, name, neutral)
        try:
            super()._init_grpo()
        finally:
            for name, value in wanted.items():
                setattr(self, name, value)
            self.loss_type = loss_type
        if self.loss_type == 'real':  # arXiv 2602.05630: rewards are not normalized
            self.scale_rewards = 'none'

    def get_dataset_kwargs(self) -> dict[str, Any]:
        """What data sets are loaded with. One process is this one: for num_proc 1 `datasets` starts a manager and a pool of one, on every rank."""
        kwargs = super().get_dataset_kwargs()
        if kwargs['num_proc'] == 1:
            kwargs['num_proc'] = None
        return kwargs

    @staticmethod
    def validate_batch_dp_alignment(generation_batch_size: int, num_generations: int, dp_size: int, micro_batch_size: int,
                                    world_size: int) -> None:
        """Upstream compares prompts with completions here. `args.batch_plan` has checked the batch before any worker started."""

    @property
    def num_prompts_per_generation(self) -> int:
        return self.generation_batch_size // self.num_generations

    def init_iters(self, train_dataset: Any, val_dataset: Any) -> None:
        """Optimizer steps of the run, and saving and evaluation intervals in steps.

        An epoch is len(dataset) // prompts-a-generation generations, each of which trains steps_per_generation x num_iterations optimizer
        steps; fractions of an epoch round up, as in transformers. train_iters (max_steps) wins.
        """
        steps_per_epoch = None
        if hasattr(train_dataset, '__len__'):
            generations = len(train_dataset) // self.num_prompts_per_generation
            steps_per_epoch = generations * self.steps_per_generation * self.num_iterations
        if self.train_iters is None:
            if steps_per_epoch is None:
                raise UserError('A streaming data set has no length: give --max_steps (train_iters).')
            epochs = 3.0 if self.num_train_epochs is None else self.num_train_epochs
            self.train_iters = max(-int(-steps_per_epoch * epochs // 1), 1) if steps_per_epoch else 1
        if self.save_strategy == 'epoch' or self.eval_strategy == 'epoch':
            if not steps_per_epoch:
                raise UserError('--save_strategy epoch and --eval_strategy epoch need a data set of known length.')
            if self.save_strategy == 'epoch':
                self.save_steps = steps_per_epoch
            if self.eval_strategy == 'epoch':
                self.eval_steps = steps_per_epoch
                self.eval_delay *= steps_per_epoch  # epochs, as in transformers
        if self.eval_strategy == 'no' or val_dataset is None or len(val_dataset) == 0:
            self.eval_iters = 0
        else:
            num_generations = self.num_generations_eval or self.num_generations
            prompts = max(self.generation_batch_size // num_generations, 1)
            batches = -(-len(val_dataset) // prompts)
            if self.replay_rollouts is not None:
                raise UserError('--replay_rollouts trains on saved rollouts and loads no engine, so there is nothing to evaluate with. '
                                'Give --eval_strategy no (or leave the validation data out).')
            self.eval_iters = batches if self.eval_iters < 0 else min(self.eval_iters, batches)
