"""What of a log entry becomes a point of a curve."""
from swift_megatron_grpo.metrics import curve_names


def test_a_step_that_float16_left_out_has_no_gradient_norm_and_no_point() -> None:
    assert curve_names({'loss': 0.5, 'grad_norm': None, 'memory': '1GiB', 'eval_reward': 1.0}) == {'train/loss': 0.5, 'eval/reward': 1.0}
