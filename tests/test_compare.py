"""`swift-megatron-grpo compare`: two runs that should have made the same steps."""
import json
from pathlib import Path
from typing import Any

import pytest

from swift_megatron_grpo.args.cli import main


def run_of(folder: Path, *rows: dict[str, Any]) -> str:
    folder.mkdir(parents=True)
    (folder / 'logging.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return str(folder)


def row(step: int, **numbers: Any) -> dict[str, Any]:
    return {'loss': 1e-9, 'grad_norm': 0.002, 'kl': 0.5, 'memory(GiB)': 1.0 * step, 'elapsed_time': '3s', 'iteration': f'{step}/4', **numbers}


def test_equal_runs_agree_whatever_the_machine_was(tmp_path: Path, capsys: Any) -> None:
    a = run_of(tmp_path / 'a', row(1), row(2), {'eval_reward': 1.0, 'iteration': '2/4'})
    b = run_of(tmp_path / 'b', row(1, **{'memory(GiB)': 9.0}), row(2, elapsed_time='9s', loss=-1e-9))
    assert main(['compare', a, b]) == 0
    assert '2 optimizer steps: all 3 metrics agree within 1e-05.' in capsys.readouterr().out


@pytest.mark.parametrize('change, metric, step', [({'grad_norm': 0.0020001}, 'grad_norm', 2), ({'kl': 0.5001}, 'kl', 2), ({'loss': float('nan')}, 'loss', 2)])
def test_a_difference_is_told_with_its_step(tmp_path: Path, capsys: Any, change: dict[str, float], metric: str, step: int) -> None:
    a, b = run_of(tmp_path / 'a', row(1), row(2)), run_of(tmp_path / 'b' / 'v0', row(1), row(2, **change))
    assert main(['compare', a, str(tmp_path / 'b')]) == 1
    out = capsys.readouterr().out
    first = out.splitlines()[1].split()
    assert first[0] == metric and int(first[2]) == step and '1 of 3 metrics differ by more than 1e-05' in out
    assert main(['compare', a, b, '--tolerance', '0.001']) == (1 if metric == 'loss' else 0)


def test_what_one_run_alone_has_is_said(tmp_path: Path, capsys: Any) -> None:
    a, b = run_of(tmp_path / 'a', row(1), row(2), row(3)), run_of(tmp_path / 'b', row(2, entropy=1.0), row(3))
    assert main(['compare', a, b]) == 0
    out = capsys.readouterr().out
    c = run_of(tmp_path / 'c', row(2), row(3, grad_norm=None))
    assert main(['compare', a, c]) == 0 and f'{c} made no update in step 3' in capsys.readouterr().out
    assert 'steps of one run alone, left out: 1' in out and 'metrics of one run alone, left out: entropy' in out


def test_what_cannot_be_compared_is_an_error(tmp_path: Path, capsys: Any) -> None:
    a, b = run_of(tmp_path / 'a', row(1)), run_of(tmp_path / 'b', row(2))
    assert main(['compare', a, b]) == 2 and 'none in common' in capsys.readouterr().err
    assert main(['compare', a, str(tmp_path / 'nowhere')]) == 2 and 'holds no logging.jsonl' in capsys.readouterr().err
    (tmp_path / 'b' / 'logging.jsonl').write_text('{"loss": 1')
    assert main(['compare', a, b]) == 2 and 'line 1: not JSON' in capsys.readouterr().err
    run_of(tmp_path / 'many' / 'v0', row(1))
    run_of(tmp_path / 'many' / 'v1', row(1))
    assert main(['compare', a, str(tmp_path / 'many')]) == 2 and 'holds 2 runs' in capsys.readouterr().err


@pytest.mark.parametrize('content, said', [
    (b'5\nnull\n"grad_norm iteration"\n["grad_norm", "iteration"]\n', 'holds no optimizer step'),
    (b'{"grad_norm": 1, "iteration": null}\n', "line 1: not a line of the log of a run (invalid literal for int() with base 10: 'None')"),
    (b'\n{"grad_norm": 1' + b'0' * 400 + b', "iteration": "1/4"}\n', 'line 2: not a line of the log of a run (int too large'),
    (b'[' * 100_000, 'line 1: not JSON'),
    (b'\xff\xfe\x00', 'cannot be read'),
])
def test_what_is_no_log_is_an_error(tmp_path: Path, capsys: Any, content: bytes, said: str) -> None:
    a, other = run_of(tmp_path / 'a', row(1)), tmp_path / 'other.jsonl'
    other.write_bytes(content)
    assert main(['compare', a, str(other)]) == 2 and said in capsys.readouterr().err


def test_what_editors_and_other_writers_leave_in_a_log_is_read(tmp_path: Path, capsys: Any) -> None:
    a, other = run_of(tmp_path / 'a', row(1), row(2)), tmp_path / 'other.jsonl'
    lines = [json.dumps({**row(1), 'note': 'a\u2028b'}, ensure_ascii=False), '', json.dumps({**row(2), 'iteration': 2}), '', '']
    other.write_text('\ufeff' + '\r\n'.join(lines), encoding='utf-8')
    assert main(['compare', a, str(other)]) == 0 and 'all 3 metrics agree' in capsys.readouterr().out


def train(argv: list[str]) -> None:
    from tests.rollouts.running import trainer_and_data
    trainer, datasets = trainer_and_data(argv)
    trainer.train(*datasets)


@pytest.mark.heavy
def test_a_run_that_was_recorded_and_replayed_in_another_layout_agrees(ranks: Any, tiny_model: Any, tmp_path: Path, capsys: Any) -> None:
    from tests.step.training import arguments
    # not Adam: it would make a full step of the rounding noise of a gradient that is 0
    common: dict[str, Any] = {'train_iters': 2, 'generation_batch_size': 16, 'max_completion_length': 8, 'beta': 0.04, 'optimizer': 'sgd', 'lr': 0.1,
                              'use_distributed_optimizer': 'false', 'ref_model': tiny_model('qwen3', seed=1)}
    model = tiny_model('qwen3')
    ranks.run(train, arguments(tmp_path, model, output_dir=tmp_path / 'one', save_rollouts=tmp_path / 'rollouts', **common), world_size=1)
    layout = {'tensor_model_parallel_size': 2, 'sequence_parallel': 'true'}
    ranks.run(train, arguments(tmp_path, model, tmp_path / 'rollouts', output_dir=tmp_path / 'two', **layout, **common), world_size=2)
    assert main(['compare', str(tmp_path / 'one'), str(tmp_path / 'two')]) == 0, capsys.readouterr().out
    assert '2 optimizer steps' in capsys.readouterr().out
    ranks.run(train, arguments(tmp_path, model, tmp_path / 'rollouts', output_dir=tmp_path / 'other', **{**common, 'beta': 0.05}), world_size=1)
    assert main(['compare', str(tmp_path / 'one'), str(tmp_path / 'other')]) == 1


@pytest.mark.parametrize('tolerance', ['nan', '-1', 'inf', 'much'])
def test_a_tolerance_that_would_accept_or_refuse_everything_is_refused(tolerance, capsys):
    with pytest.raises(SystemExit) as ended:
        main(['compare', 'a', 'b', f'--tolerance={tolerance}'])
    assert ended.value.code == 2
    assert '--tolerance' in capsys.readouterr().err
