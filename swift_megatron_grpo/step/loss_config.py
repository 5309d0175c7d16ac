"""What switches the policy loss: one frozen dataclass that checks itself (import tier 1 only through the registry of loss.py)."""
from __future__ import annotations

from dataclasses import dataclass, fields

from swift_megatron_grpo.errors import UserError

LEVELS = ('token', 'sequence', 'sequence_token')
ROLLOUT_IS_MODES = ('token_truncate', 'token_mask', 'sequence_truncate', 'sequence_mask')
CLIPPED_LOSSES = ('grpo', 'bnpo', 'dr_grpo', 'dapo', 'fipo', 'luspo')
# Losses on which the covariance switches are defined: one ratio a token and one advantage a token.
COVARIANCE_LOSSES = ('grpo', 'bnpo', 'dr_grpo', 'dapo')


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The arguments that shape the policy loss, named and meant as ms-swift names and means them; our own come last.

    Raises UserError for values outside their range and for pairs that contradict each other. An argument that is legal but cannot act
    together with the chosen loss (ms-swift accepts several of those) is listed by `without_effect()`, for the report at start-up.

    Example: `LossConfig(loss_type='dapo', epsilon_high=0.28)` clips the ratio to [0.8, 1.28].
    """
    loss_type: str = 'grpo'  # a registered name, or 'package.module:function'
    importance_sampling_level: str = 'token'  # token | sequence (GSPO, arXiv 2507.18071) | sequence_token
    epsilon: float = 0.2  # ratio below 1 - epsilon is clipped
    epsilon_high: float | None = None  # ratio above 1 + epsilon_high is clipped; None: epsilon. cispo: the ratio's upper bound itself
    delta: float | None = None  # two-sided clip of INTELLECT-2 (arXiv 2505.07291): the unclipped branch's ratio is at most this
    beta: float = 0.0  # weight of the KL term against the reference policy
    kl_in_reward: bool = False  # the KL was taken from the rewards; no KL term in the loss
    tau_pos: float = 1.0  # sapo: temperature for positive advantages
    tau_neg: float = 1.05  # sapo: for the others
    real_tau: float = 0.5  # real: temperature of the scores
    fipo_decay_rate: float = 32.0  # fipo: half-life, in tokens
    fipo_clip_range: float | None = 0.2  # fipo: influence in [1 - range, 1 + range]; None or 0: not clipped
    fipo_clip_high_only: bool = True  # fipo: influence at least 1
    fipo_safety_threshold: float | None = 4.0  # fipo: ratio above which negative tokens are not amplified
    log_entropy: bool = False
    top_entropy_quantile: float = 1.0  # share of tokens, by entropy from the top, that carry policy loss (arXiv 2506.01939)
    rollout_importance_sampling_mode: str | None = None
    rollout_importance_sampling_threshold: float = 2.0
    log_rollout_offpolicy_metrics: bool = False
    off_policy_sequence_mask_delta: float | None = None  # DeepSeek-V3.2, arXiv 2512.02556
    has_teacher: bool = False  # advantages carry a teacher's log-ratio and differ from token to token
    advantage_reweight: str | None = None  # rlsd: a teacher's log-ratio scales the advantage of each token (arXiv 2604.03128)
    rlsd_lambda: float = 0.5  # rlsd: 0 is the plain advantage, 1 the scaled one
    rlsd_reweight_clip_range: float = 0.2  # rlsd: the scale lies in [1 - range, 1 + range]
    rlsd_lambda_warmup_steps: int = 0  # rlsd: optimizer steps in which rlsd_lambda grows from 0
    rlsd_lambda_decay_steps: int = 0  # rlsd: optimizer steps after that in which it falls to 0; 0: it does not
    rlsd_negative_only: bool = False  # rlsd: only sequences with a negative advantage
    sdar_loss_coef: float = 0.0  # weight of the distillation term of SDAR (arXiv 2605.15155)
    sdar_gate_beta: float = 5.0  # sdar: sharpness of its gate
    # beyond ms-swift
    dual_clip: float | None = None  # for negative advantages the gain is at least dual_clip * advantage (arXiv 1912.09729)
    kl_cov_ratio: float | None = None  # share of tokens, by covariance from the top, that get a KL penalty (arXiv 2505.22617)
    kl_cov_coef: float = 1.0  # weight of that penalty
    clip_cov_ratio: float | None = None  # share of tokens whose gradient is cut, drawn from a covariance band (arXiv 2505.22617)
    clip_cov_low: float = 1.0  # the band's lower end
    clip_cov_high: float = 5.0  # the band's upper end

    def __post_init__(self):
        from .loss import resolve_loss
        resolve_loss(self.loss_type)
        self._check_ranges()
        self._check_pairs()

    @property
    def upper_epsilon(self) -> float:
        """epsilon_high, or epsilon where that is not set."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def fipo_discount(self) -> float:
        """2 ** (-1 / fipo_decay_rate): the influence of a future token halves every fipo_decay_rate tokens."""
        return 2.0**(-1.0 / self.fipo_decay_rate)

    @property
    def needs_kl(self) -> bool:
        return self.beta != 0.0 and not self.kl_in_reward

    @property
    def needs_entropy(self) -> bool:
        return self.log_entropy or self.top_entropy_quantile < 1.0

    def rlsd_lambda_at(self, update: int) -> float:
        """rlsd_lambda for a generation that is sampled after `update` optimizer steps."""
        if update < self.rlsd_lambda_warmup_steps:
            return self.rlsd_lambda * update / self.rlsd_lambda_warmup_steps
        if self.rlsd_lambda_decay_steps > 0:
            return self.rlsd_lambda * max(1.0 - (update - self.rlsd_lambda_warmup_steps) / self.rlsd_lambda_decay_steps, 0.0)
        return self.rlsd_lambda

    def without_effect(self) -> list[str]:
        """Names of fields that differ from their default and cannot act with this loss. Empty for a user's own loss."""
        inert = {
            'cispo': ('epsilon', 'delta'),
            'sapo': ('epsilon', 'epsilon_high', 'delta'),
            'real': ('epsilon', 'epsilon_high', 'delta', 'importance_sampling_level', 'rollout_importance_sampling_mode',
                     'top_entropy_quantile'),
        }.get(self.loss_type, ())
        if self.kl_cov_ratio is not None:  # KL-Cov replaces the clip
            inert = ('epsilon', 'epsilon_high')
        default = {f.name: f.default for f in fields(self)}
        return [name for name in inert if self.__dict__[name] != default[name]]

    def _check_ranges(self):
        for name, allowed in (('importance_sampling_level', LEVELS), ('rollout_importance_sampling_mode', (None, *ROLLOUT_IS_MODES))):
            value = self.__dict__[name]
            if value not in allowed:
                raise UserError(f'{name} is {value!r}; it must be one of {", ".join(str(a) for a in allowed)}.')
        for name in ('epsilon', 'epsilon_high', 'delta', 'fipo_clip_range', 'clip_cov_low', 'clip_cov_high', 'kl_cov_coef',
                     'rlsd_reweight_clip_range', 'rlsd_lambda_warmup_steps', 'rlsd_lambda_decay_steps', 'sdar_loss_coef'):
            value = self.__dict__[name]
            if value is not None and value < 0:
                raise UserError(f'{name} is {value}; it must not be negative.')
        if self.advantage_reweight not in (None, 'rlsd'):
            raise UserError(f'advantage_reweight is {self.advantage_reweight!r}; it must be rlsd, or left out.')
        if not 0 <= self.rlsd_lambda <= 1:
            raise UserError(f'rlsd_lambda is {self.rlsd_lambda}; it mixes two advantages and lies from 0 to 1.')
        for name in ('tau_pos', 'tau_neg', 'real_tau', 'fipo_decay_rate', 'rollout_importance_sampling_threshold', 'sdar_gate_beta'):
            if self.__dict__[name] <= 0:
                raise UserError(f'{name} is {self.__dict__[name]}; it must be above 0.')
        for name in ('kl_cov_ratio', 'clip_cov_ratio'):
            value = self.__dict__[name]
            if value is not None and not 0 < value <= 1:
                raise UserError(f'{name} is {value}; it is a share of tokens, above 0 and at most 1 (the paper: 0.0002 to 0.02). '
                                'Leave it out to switch it off.')
        if not 0 <= self.top_entropy_quantile <= 1:
            raise UserError(f'top_entropy_quantile is {self.top_entropy_quantile}; it is a share of tokens, from 0 to 1 (1: no filter).')
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise UserError(f'dual_clip is {self.dual_clip}; the bound on the ratio must be above 1 (the paper: 3).')
        if self.clip_cov_low >= self.clip_cov_high:
            raise UserError(f'clip_cov_low ({self.clip_cov_low}) must be below clip_cov_high ({self.clip_cov_high}).')

    @property
    def needs_one_advantage_a_sequence(self) -> bool:
        return self.loss_type in ('real', 'fipo') or self.off_policy_sequence_mask_delta is not None

    def _check_pairs(self):
        if self.has_teacher and self.needs_one_advantage_a_sequence:
            raise UserError(f'A teacher makes the advantage differ from token to token; loss_type {self.loss_type!r} with '
                            f'off_policy_sequence_mask_delta {self.off_policy_sequence_mask_delta} needs one advantage a sequence. '
                            'Use loss_type grpo, bnpo, dr_grpo, dapo, cispo or sapo without that mask, or leave the teacher out.')
        if self.advantage_reweight is not None and self.needs_one_advantage_a_sequence:
            raise UserError(f'advantage_reweight {self.advantage_reweight} makes the advantage differ from token to token; loss_type '
                            f'{self.loss_type!r} with off_policy_sequence_mask_delta {self.off_policy_sequence_mask_delta} needs one a sequence.')
        if self.advantage_reweight is not None and self.sdar_loss_coef > 0:
            raise UserError(f'advantage_reweight {self.advantage_reweight} and sdar_loss_coef {self.sdar_loss_coef} are two uses of one teacher. '
                            'Give one of them.')
        if self.loss_type == 'luspo' and self.importance_sampling_level == 'token':
            raise UserError('luspo weighs a sequence-level ratio by the length: it needs --importance_sampling_level sequence '
                            '(or sequence_token), and got token, the default.')
        if self.loss_type == 'gmpo' and self.importance_sampling_level != 'token':
            raise UserError(f'gmpo builds its own ratio, the geometric mean of clipped token ratios: importance_sampling_level '
                            f'{self.importance_sampling_level!r} has no place in it. Leave it out, or use loss_type grpo for GSPO.')
        if self.loss_type == 'gmpo' and self.delta is not None:
            raise UserError('delta bounds the ratio of one token; gmpo has none. Leave delta out; epsilon and epsilon_high bound the '
                            'log-ratio of each token there.')
        if self.dual_clip is not None:
            if self.loss_type not in CLIPPED_LOSSES:
                raise UserError(f'dual_clip bounds a clipped loss ({", ".join(CLIPPED_LOSSES)}); loss_type is {self.loss_type!r}.')
            if self.delta is not None:
                raise UserError(f'dual_clip ({self.dual_clip}) and delta ({self.delta}) bound the same thing, the ratio of tokens with a '
                                'negative advantage. Give one of them.')
        self._check_covariance()

    def _check_covariance(self):
        if self.kl_cov_ratio is None and self.clip_cov_ratio is None:
            return
        if self.kl_cov_ratio is not None and self.clip_cov_ratio is not None:
            raise UserError('kl_cov_ratio and clip_cov_ratio are two treatments of the same tokens. Give one of them.')
        name = 'kl_cov_ratio' if self.kl_cov_ratio is not None else 'clip_cov_ratio'
        if self.loss_type not in COVARIANCE_LOSSES or self.importance_sampling_level != 'token':
            raise UserError(f'{name} works on the token ratios of loss_type {", ".join(COVARIANCE_LOSSES)}; loss_type is '
                            f'{self.loss_type!r} with importance_sampling_level {self.importance_sampling_level!r}.')
        if self.kl_cov_ratio is not None and (self.delta is not None or self.dual_clip is not None):
            raise UserError('KL-Cov (kl_cov_ratio) does not clip the ratio; delta and dual_clip have no place in it. Leave them out, or '
                            'use clip_cov_ratio.')
