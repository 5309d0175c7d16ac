"""The demonstration's parts: its data, its command, its numbers. `make demo` is the whole."""

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from examples.demo import problems, report, train
from swift_megatron_grpo.args import resolve

REPOSITORY = Path(__file__).resolve().parents[1]


def test_the_split_is_200_held_out_and_1800_to_train_on_of_3240_sums():
    split = problems.split_problems()
    assert [len(split.held_out), len(split.train), len(split.warm_up)] == [200, 1800, 3040]
    held_out = set(split.held_out)
    assert len(held_out) == 200 and not held_out & set(split.warm_up)
    assert set(split.train) <= set(split.warm_up)
    assert all(eval(p.question.removeprefix('What is ').removesuffix('?')) == int(p.answer) for p in split.held_out)


def test_a_careless_teacher_is_wrong_as_often_as_asked():
    split = problems.split_problems()
    drafts = problems.careless_drafts(split.warm_up, wrong_share=0.4, drafts=4, seed=0)
    right = {p.question: p.answer for p in split.warm_up}
    wrong = [int(d.answer) - int(right[d.question]) for d in drafts if d.answer != right[d.question]]
    assert len(drafts) == 12160
    assert abs(len(wrong) / len(drafts) - 0.4) < 0.02
    assert set(wrong) == {-10, -2, -1, 1, 2, 10}


def test_the_data_set_has_messages_and_a_solution(tmp_path):
    problems.write_dataset(problems.split_problems().train, tmp_path / 'sums.jsonl')
    rows = [json.loads(line) for line in (tmp_path / 'sums.jsonl').read_text().splitlines()]
    assert len(rows) == 1800
    first = problems.split_problems().train[0]
    assert rows[0] == {'messages': [{'role': 'user', 'content': first.question}], 'solution': first.answer}


def test_a_prompt_is_18_tokens_and_an_answer_3():
    tokenizer, problem = problems.build_tokenizer(), problems.split_problems().train[0]
    messages = [{'role': 'user', 'content': problem.question}]
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == problems.prompt_text(problem)
    assert len(tokenizer(problems.prompt_text(problem))['input_ids']) == 18
    assert len(tokenizer(problem.answer + '<|im_end|>')['input_ids']) == 3
    assert (tokenizer.eos_token, tokenizer.pad_token) == ('<|im_end|>', '<|endoftext|>')


@pytest.mark.parametrize('engine', ['vllm', 'transformers'])
def test_the_command_is_accepted_and_trains_16_prompts_a_step(tmp_path, engine, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    model = tmp_path / 'model'
    model.mkdir()
    (model / 'config.json').write_text(
        '{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 128, "intermediate_size": 384, "vocab_size": 320,'
        ' "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "tie_word_embeddings": true}'
    )
    problems.write_dataset(problems.split_problems().train, tmp_path / 'sums.jsonl')
    job = train.Job(model=model, dataset=tmp_path / 'sums.jsonl', output=tmp_path / 'run', engine=engine, seed=0)
    plan = resolve(train.arguments(job), {'NPROC_PER_NODE': '2'})
    assert plan.errors == []
    assert plan.is_megatron
    batch = plan.batch_plan
    assert (batch.dp_size, batch.global_batch_size, batch.num_train_prompts) == (1, 128, 16)
    assert batch.generation_batch_size == 128  # one optimizer step a generation
    assert train.MAX_STEPS * 16 == 2240  # prompts: each of the 1,800 once, a quarter of them twice
    text = train.shell_text(job)
    assert text.startswith('NPROC_PER_NODE=2 swift rlhf \\\n    --rlhf_type grpo \\\n    --backend megatron \\\n')
    assert ('--vllm_mode colocate' in text) is (engine == 'vllm')


@pytest.mark.slow
def test_the_reward_is_an_exact_match():
    spec = importlib.util.spec_from_file_location('arithmetic_reward', REPOSITORY / 'plugins' / 'arithmetic_reward.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    from swift.rewards import orms

    reward = orms['arithmetic_answer'](None)
    assert reward(['46', '46 ', '64', '', '4610'], solution=['46'] * 5) == [1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.slow
def test_expected_accuracy_is_the_mean_probability_of_the_right_answers():
    torch = pytest.importorskip('torch')
    from examples.demo import model as models

    tokenizer = problems.build_tokenizer()
    torch.manual_seed(0)
    model = models.build_model(tokenizer)
    assert sum(p.numel() for p in model.parameters()) == 467_712
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # all logits 0: each of the three answer tokens has probability 1/320
    data = models.encode(tokenizer, problems.split_problems().held_out)
    assert models.expected_accuracy(model, data) == pytest.approx(320.0**-3, rel=1e-4)


def test_rewards_are_read_while_the_last_line_is_being_written(tmp_path):
    (tmp_path / 'logging.jsonl').write_text('{"reward": 0.25, "loss": 0.0}\n{"eval_reward": 1.0}\n{"reward": 0.5}\n{"rewa')
    assert train.rewards(tmp_path) == [0.25, 0.5]
    assert train.rewards(tmp_path / 'nowhere') == []


def test_the_report_shows_answers_side_by_side_and_draws_a_png(tmp_path):
    rows = report.compare([problems.Problem('What is 12 + 34?', '46')], ['45'], ['46']).splitlines()
    assert rows[1].split() == ['What', 'is', '12', '+', '34?', '46', "'45'", "'46'"]
    path = report.draw_curve([0.2, 0.4, 0.6], tmp_path / 'reward.png', before=0.3, after=0.7)
    assert path.read_bytes()[:8] == b'\x89PNG\r\n\x1a\n'


def test_a_demo_that_is_ended_ends_its_training(tmp_path):
    # stands in for the `swift` beside the interpreter: says its process id, and waits
    (tmp_path / 'bin').mkdir()
    swift = tmp_path / 'bin' / 'swift'
    swift.write_text(f'#!{sys.executable}\nimport os, pathlib, time\npathlib.Path({str(tmp_path / "pid")!r}).write_text(str(os.getpid()))\ntime.sleep(60)\n')
    swift.chmod(0o755)
    program = textwrap.dedent(f"""
        import signal, sys
        from pathlib import Path
        from examples.demo import train
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        sys.executable = {str(swift.with_name('python'))!r}
        here = Path({str(tmp_path)!r})
        train.run(train.Job(model=here, dataset=here, output=here / 'run', engine='vllm', seed=0), say=print)
    """)
    demo = subprocess.Popen([sys.executable, '-c', program], cwd=REPOSITORY)
    wait_for(lambda: (tmp_path / 'pid').exists() and (tmp_path / 'pid').read_text())
    demo.terminate()
    assert demo.wait(timeout=30) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / 'pid').read_text()), 0)


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
