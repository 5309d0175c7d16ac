"""On-policy distillation: what the teacher says is what transformers says, and it reaches the gradient token by token."""
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import json
import math

import pytest

from swift_megatron_grpo.errors import RunError, UserError
from tests.step.training import Outcome, arguments, train, write_rollouts

SGD = {'optimizer': 'sgd', 'sgd_momentum': 0.5, 'lr': 0.1, 'min_lr': 0.05, 'use_distributed_optimizer': 'false', 'clip_grad': 0.0}


@pytest.fixture(scope='module')
def run(ranks: Any, tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    work = tmp_path_factory.mktemp('teacher')

    def run_it(name: str, world_size: int = 1, rollouts: Path | None = None, function: Any = train, model: str = 'qwen3', **changes: Any) -> Outcome:
        argv = arguments(work, tiny_model(model), rollouts, **{'output_dir': work / name, 'train_iters': 1, **SGD, **changes})
        return ranks.run(function, argv, world_size=world_size, deadline=300.)[-1]

    return run_it


@pytest.fixture(scope='module')
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rollouts(tmp_path_factory.mktemp('rollouts'), generations=1, prompts=2, num_generations=4)


@pytest.fixture(scope='module')
def teacher(tiny_model: Any) -> Path:
    """Another width, another depth, other weights; the same tokenizer."""
    return tiny_model('qwen3', seed=3, num_hidden_layers=2, hidden_size=32)


def transformers_logprobs(model: Path, rows: list[dict[str, Any]], temperature: float) -> list[list[float]]:
    """log p of the sampled tokens of each rollout, by transformers alone."""
    import torch
    import transformers

    from tests import tiny_models
    tokenizer = tiny_models.tokenizer()
    network = transformers.AutoModelForCausalLM.from_pretrained(model).eval()
    results = []
    for row in rows:
        answer = row['response_token_ids'][0] if row['response_token_ids'] else []
        prompt = tokenizer.encode(f'<|im_start|>user\n{row["messages"][0]["content"]}<|im_end|>\n<|im_start|>assistant\n')
        with torch.no_grad():
            logits = network(input_ids=torch.tensor([prompt + answer])).logits[0] / temperature
        picked = torch.log_softmax(logits, -1)[len(prompt) - 1:-1].gather(-1, torch.tensor(answer, dtype=torch.int64)[:, None])
        results.append(picked[:, 0].tolist())
    return results


def _rows(rollouts: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (rollouts / 'generation-000000.jsonl').read_text().splitlines()[1:]]


def test_a_teacher_of_another_size_is_as_far_away_as_transformers_says(run: Any, rollouts: Path, teacher: Path, tiny_model: Any) -> None:
    got = run('other', rollouts=rollouts, teacher_model=teacher, teacher_model_type='qwen3', teacher_kl_coef=0.5)
    rows = _rows(rollouts)
    differences = [t - s for theirs, ours in zip(transformers_logprobs(teacher, rows, 0.9), transformers_logprobs(tiny_model('qwen3'), rows, 0.9))
                   for t, s in zip(theirs, ours, strict=True)]
    assert len(differences) == 44
    expected = sum(math.exp(d) - d - 1 for d in differences) / len(differences)
    assert expected > 0.1 and got.column('teacher_kl')[0] == pytest.approx(expected, rel=1e-4)
    without = run('without', rollouts=rollouts)
    assert got.column('reward') == without.column('reward') and got.column('grad_norm')[0] != pytest.approx(without.column('grad_norm')[0], rel=1e-3)
    # Every token's advantage moved by coef * d; on-policy the loss is minus the mean over sequences of their mean advantage.
    lengths = [len(row['response_token_ids'][0]) if row['response_token_ids'] else 0 for row in rows]
    shift, start = 0.0, 0
    for length in lengths:
        shift -= 0.5 * sum(differences[start:start + length]) / max(length, 1) / len(rows)
        start += length
    assert got.column('loss')[0] - without.column('loss')[0] == pytest.approx(shift, rel=1e-4)
    split = run('other-dp2', 2, rollouts=rollouts, teacher_model=teacher, teacher_model_type='qwen3', teacher_kl_coef=0.5, micro_batch_size=2)
    for name in ('teacher_kl', 'loss', 'grad_norm'):
        assert split.column(name)[0] == pytest.approx(got.column(name)[0], rel=1e-5), name


def test_a_teacher_equal_to_the_policy_changes_nothing(run: Any, rollouts: Path, tiny_model: Any) -> None:
    same = run('same', rollouts=rollouts, teacher_model=tiny_model('qwen3'), teacher_model_type='qwen3', offload_teacher_model='true')
    without = run('without', rollouts=rollouts)
    assert same.column('teacher_kl') == [0.0] and same.column('grad_norm') == pytest.approx(without.column('grad_norm'), rel=1e-6)


def serve_and_train(argv: list[str], model: str, shift: int = 0) -> Outcome | None:
    """Trains with ms-swift's client replaced by one that answers as a vLLM server would; `shift` moves its token ids."""
    from swift_megatron_grpo import teacher

    class Client:

        def __init__(self, url: str) -> None:
            assert url == 'http://localhost:1'

        def infer(self, requests: list[Any], request_config: Any, use_tqdm: bool) -> list[Any]:
            assert request_config.prompt_logprobs == 0 and request_config.max_tokens == 1
            rows = [{'messages': request.messages, 'response_token_ids': [_ids(request.messages[-1]['content'])]} for request in requests]
            answers = []
            for row, logprobs in zip(rows, transformers_logprobs(Path(model), rows, 1.0)):
                entries = [{str(token + shift): {'logprob': value}} for token, value in zip(row['response_token_ids'][0], logprobs)]
                # position 0 has none; then the prompt, the answer, and the end of the turn
                prompt = [{'7': {'logprob': -1.0}}, {'8': {'logprob': -2.0}}]
                answers.append(SimpleNamespace(prompt_logprobs=[None, *prompt, *entries, {'2': {'logprob': -9.0}}]))
            return answers

    original, teacher._client = teacher._client, Client
    try:
        return train(argv)
    finally:
        teacher._client = original


def _ids(content: Any) -> list[int]:
    """Token ids in a message, whichever way ms-swift puts them there."""
    if isinstance(content, dict):
        return list(content['token_ids'])
    return list(content)


def test_a_server_says_what_a_local_teacher_says(ranks: Any, run: Any, rollouts: Path, teacher: Path, tiny_model: Any, tmp_path: Path) -> None:
    common = {'temperature': 1.0, 'train_iters': 1, **SGD}
    local = run('local', rollouts=rollouts, teacher_model=teacher, teacher_model_type='qwen3', **common)
    argv = arguments(tmp_path, tiny_model('qwen3'), rollouts, teacher_model_server='http://localhost:1', **common)
    served = ranks.run(serve_and_train, argv, str(teacher), world_size=1, deadline=300.)[-1]
    for name in ('teacher_kl', 'loss', 'grad_norm'):
        assert served.column(name)[0] == pytest.approx(local.column(name)[0], rel=1e-4), name
    with pytest.raises(RunError, match='sampled ones are not at their end. It must use the tokenizer of the policy'):
        ranks.run(serve_and_train, argv, str(teacher), 1, world_size=1, deadline=300.)


def test_under_lora_the_policys_own_model_teaches_without_the_adapter_and_without_rewards(run: Any, rollouts: Path, tiny_model: Any,
                                                                                         tmp_path_factory: Any) -> None:
    lora = {'tuner_type': 'lora', 'lora_rank': 4, 'lora_alpha': 16}
    work = tmp_path_factory.mktemp('lora')
    run('lora', rollouts=rollouts, **lora, output_dir=work, save_strategy='steps', save_steps=1)
    model = tiny_model('qwen3')
    pure = {**lora, 'adapters': work / 'checkpoint-1', 'reward_funcs': None, 'max_completion_length': 4, 'teacher_model_type': 'qwen3'}
    own = run('own', **pure, teacher_model=model)
    assert own.column('teacher_kl')[0] > 1e-6 and own.column('grad_norm')[0] > 1e-6 and own.reference_forwards == 0
    assert 'rewards/Digits/mean' not in own.logs[0]
    fresh = run('fresh', **{**pure, 'adapters': None}, teacher_model=model)
    assert fresh.column('teacher_kl') == [0.0] and fresh.column('grad_norm') == [0.0]


@pytest.fixture(scope='module')
def privileged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows of the first prompt bring a prompt for the teacher; it is longer than the policy's."""
    folder = write_rollouts(tmp_path_factory.mktemp('privileged'), generations=1, prompts=2, num_generations=4)
    path = folder / 'generation-000000.jsonl'
    head, *rows = path.read_text().splitlines()
    path.write_text('\n'.join([head, *(json.dumps({**json.loads(row), 'columns': {'teacher_prompt': HINT} if json.loads(row)['prompt_index'] == 0
                                                   else {}}) for row in rows)]) + '\n')
    return folder


HINT = 'what is 5 + 7? the answer is 12, say so'


def test_the_policy_teaches_itself_where_a_row_brings_another_prompt(run: Any, privileged: Path, rollouts: Path, tiny_model: Any) -> None:
    got = run('self', rollouts=privileged, teacher_kl_coef=0.5)
    rows = _rows(privileged)
    shown = [{**row, 'messages': [{'role': 'user', 'content': HINT}]} if row['prompt_index'] == 0 else row for row in rows]
    taught, own = (transformers_logprobs(tiny_model('qwen3'), each, 0.9) for each in (shown, rows))
    differences = [[t - s for t, s in zip(theirs, ours, strict=True)] for theirs, ours in zip(taught, own)]
    flat = [d for row in differences for d in row]
    expected = sum(math.exp(d) - d - 1 for d in flat) / len(flat)
    assert expected > 1e-3 and got.column('teacher_kl')[0] == pytest.approx(expected, rel=1e-4)
    without = run('without', rollouts=rollouts)
    assert 'teacher_kl' not in without.logs[0]
    shift = -sum(0.5 * sum(row) / max(len(row), 1) for row in differences) / len(rows)
    assert got.column('loss')[0] - without.column('loss')[0] == pytest.approx(shift, rel=1e-4)


# SDAR leaves the advantages alone, so a loss that needs one a sequence may stand beside it.
DISTILLED = {'self': {'teacher_kl_coef': 0.5}, 'rlsd': {'advantage_reweight': 'rlsd', 'rlsd_lambda': 0.8, 'rlsd_reweight_clip_range': 0.5},
             'sdar': {'sdar_loss_coef': 0.5, 'sdar_gate_beta': 2.0, 'loss_type': 'real', 'beta': 0.05}}
LAYOUTS = {'tp2-pp2': (4, {'tensor_model_parallel_size': 2, 'pipeline_model_parallel_size': 2}), 'dp2': (2, {'micro_batch_size': 2}),
           'cp2': (2, {'context_parallel_size': 2}),
           'vpp2-pp2': (2, {'pipeline_model_parallel_size': 2, 'virtual_pipeline_model_parallel_size': 2})}
MIXTURE = {'model': 'qwen3_moe', 'model_type': 'qwen3_moe', 'moe_router_load_balancing_type': 'none'}
OF_MIXTURES = {'self': {'expert_model_parallel_size': 2, 'micro_batch_size': 2},
               'sdar': {'expert_model_parallel_size': 2, 'expert_tensor_parallel_size': 1, 'tensor_model_parallel_size': 2, 'sequence_parallel': 'true'}}


@pytest.mark.parametrize('kind', DISTILLED)
def test_self_distillation_trains_alike_in_every_layout(run: Any, privileged: Path, rollouts: Path, kind: str) -> None:
    changes = DISTILLED[kind]
    expected = run(f'{kind}-1', rollouts=privileged, **changes)
    plain = run(f'{kind}-plain', rollouts=rollouts, **{**changes, 'advantage_reweight': None})
    assert expected.column('grad_norm')[0] != pytest.approx(plain.column('grad_norm')[0], rel=1e-3)
    for layout, (world_size, sizes) in LAYOUTS.items():
        assert_taught_alike(kind, run(f'{kind}-{layout}', world_size, rollouts=privileged, **changes, **sizes), expected, layout)


@pytest.mark.parametrize('kind', OF_MIXTURES)
def test_self_distillation_of_a_mixture_of_experts_trains_alike_with_expert_parallelism(run: Any, privileged: Path, kind: str) -> None:
    changes = {**DISTILLED[kind], **MIXTURE}
    expected = run(f'{kind}-mixture', rollouts=privileged, **changes)
    assert expected.column('grad_norm')[0] > 1e-3
    assert_taught_alike(kind, run(f'{kind}-mixture-ep2', 2, rollouts=privileged, **changes, **OF_MIXTURES[kind]), expected, 'ep2')


def assert_taught_alike(kind: str, got: Outcome, expected: Outcome, layout: str) -> None:
    names = {'self': ['teacher_kl'], 'rlsd': ['teacher_kl', 'rlsd_lambda'], 'sdar': ['sdar/gate_mean', 'sdar/loss', 'sdar/coef']}[kind]
    for name in ('loss', 'grad_norm', *names):
        assert got.column(name)[0] == pytest.approx(expected.column(name)[0], rel=1e-5, abs=1e-7), (layout, name)


def test_a_prompt_of_the_teachers_own_is_refused_by_its_row_where_advantages_are_one_a_sequence(ranks: Any) -> None:
    with pytest.raises(UserError, match="row 4 has the column 'teacher_prompt'"):
        ranks.run(refuse, world_size=1)


def refuse() -> None:
    from swift_megatron_grpo.teacher import refuse_own_prompts
    rows = [(3, {'teacher_prompt': ''}), (4, {'teacher_prompt': 'the answer is 3'})]
    args = SimpleNamespace(loss_type='grpo', off_policy_sequence_mask_delta=None, sdar_loss_coef=0.0)
    refuse_own_prompts(args, rows)
    refuse_own_prompts(SimpleNamespace(**{**vars(args), 'loss_type': 'fipo', 'sdar_loss_coef': 0.1}), rows)
    refuse_own_prompts(SimpleNamespace(**{**vars(args), 'loss_type': 'fipo'}), rows)
