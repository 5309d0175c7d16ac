"""What a schedule of transformers writes into the parameter groups of Megatron's optimizer."""
from types import SimpleNamespace
from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from swift_megatron_grpo.lr_schedule import TransformersSchedule


def _schedule(groups: list[dict[str, Any]], *, start_wd: float = 0.1, end_wd: float = 0.1, style: str = 'constant') -> TransformersSchedule:
    """Four optimizer steps of eight samples, linear, lr 1e-3."""
    megatron = OptimizerParamScheduler(
        SimpleNamespace(param_groups=groups), init_lr=0.0, max_lr=1e-3, min_lr=0.0, lr_warmup_steps=0, lr_decay_steps=32, lr_decay_style='linear',
        start_wd=start_wd, end_wd=end_wd, wd_incr_steps=32, wd_incr_style=style)
    return TransformersSchedule(megatron, max_lr=1e-3, name='linear', kwargs=None, warmup_steps=0, warmup_ratio=0.0, num_steps=4, samples_per_step=8)


def test_norms_and_biases_are_not_decayed() -> None:
    # As Megatron builds its optimizers: every group begins with the optimizer's default, and only a scheduler takes wd_mult into account.
    matrices, vectors = {'wd_mult': 1.0, 'weight_decay': 0.1}, {'wd_mult': 0.0, 'weight_decay': 0.1}
    schedule = _schedule([matrices, vectors])
    for _ in range(2):
        assert (matrices['weight_decay'], vectors['weight_decay']) == (0.1, 0.0)
        schedule.step(8)
    assert matrices['lr'] == vectors['lr'] == 5e-4


def test_weight_decay_grows_as_asked_and_after_a_resume_too() -> None:
    group: dict[str, Any] = {'wd_mult': 1.0}
    schedule = _schedule([group], start_wd=0.0, end_wd=0.4, style='linear')
    seen = []
    for _ in range(4):
        seen.append(group['weight_decay'])
        schedule.step(8)
    assert [round(value, 12) for value in seen] == [0.0, 0.1, 0.2, 0.3]
    resumed: dict[str, Any] = {'wd_mult': 1.0}
    other = _schedule([resumed], start_wd=0.0, end_wd=0.4, style='linear')
    other.load_state_dict({'num_steps_done': 2})
    assert resumed['weight_decay'] == seen[2]


def test_a_group_with_a_learning_rate_of_zero_stays_where_it_is() -> None:
    frozen: dict[str, Any] = {'max_lr': 0.0}
    rest: dict[str, Any] = {}
    _schedule([frozen, rest])
    assert (frozen['lr'], rest['lr']) == (0.0, 1e-3)
