"""`--use_vllm false`: an answer is what the policy sampled, whichever tokens these are, and its log-probabilities are those it was sampled with."""
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.rollouts.running import trainer_of
from tests.step.training import arguments

pytestmark = pytest.mark.heavy

PAD, END, LIMIT, REQUESTS = 0, 2, 24, 24


def sampled(argv: list[str]) -> list[dict[str, Any]]:
    from swift.infer_engine.protocol import RolloutInferRequest
    from swift_megatron_grpo.engines import Sampling
    trainer = trainer_of(argv)
    trainer.sync_weights()
    # neighbours of different lengths: a batch is padded on the left
    requests = [RolloutInferRequest(messages=[{'role': 'user', 'content': 'what is 3 + 4?' if i % 2 else 'hello'}]) for i in range(REQUESTS)]
    outputs = trainer.engine.generate(requests, Sampling(temperature=1.0, max_tokens=LIMIT, seed=3))
    answers = []
    for output in outputs:
        choice, = output.response.choices
        prompt, ids = list(output.response.prompt_token_ids), list(choice.token_ids)
        with torch.no_grad():
            logits = trainer.engine.engine.model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1:-1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
        own = torch.tensor([entry['logprob'] for entry in choice.logprobs['content']])
        answers.append({'ids': ids, 'prompt': prompt, 'reason': choice.finish_reason, 'difference': float((own - expected).abs().max())})
    return answers


@pytest.fixture(scope='module')
def model(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four tokens get nearly all of the probability: pad, end, and two words."""
    folder = tmp_path_factory.mktemp('likes-pad') / 'model'
    shutil.copytree(tiny_model('qwen3'), folder)
    weights = load_file(folder / 'model.safetensors')
    head = weights['lm_head.weight']
    head *= 0.01
    for token in (PAD, END, 100, 101):  # pad and end are alike in each place; and so are the words
        head[token] += torch.randn(head.shape[1], generator=torch.Generator().manual_seed(token // 100))
    save_file(weights, folder / 'model.safetensors', metadata={'format': 'pt'})
    return folder


def test_pad_tokens_that_were_sampled_stay_in_the_answer(ranks: Any, model: Path, tmp_path: Path) -> None:
    argv = arguments(tmp_path, model, None, max_completion_length=LIMIT)
    answers = ranks.run(sampled, argv, world_size=1)[0]
    assert max(answer['difference'] for answer in answers) < 2e-5
    for answer in answers:
        ended = answer['ids'][-1] == END
        assert END not in answer['ids'][:-1]
        assert ended or len(answer['ids']) == LIMIT
        assert answer['reason'] == ('stop' if ended else 'length')
        assert PAD not in answer['prompt']
    within = [answer for answer in answers if PAD in answer['ids'][:-1]]
    ends_early = [answer for answer in answers if len(answer['ids']) < LIMIT]
    assert len(within) > 4 and len(ends_early) > 4, 'the model samples both, or this proves nothing'
    assert any(answer['ids'][-2:] == [PAD, END] for answer in answers) or any(answer['ids'][-1] == PAD for answer in answers)


ENDS = [END, *range(100, 130)]
KINDS: dict[str, dict[str, Any]] = {
    'plain': {},
    'warm': {'temperature': 0.7, 'stop_words': ('e', 'o')},
    'top_k': {'top_k': 5},
    'top_p': {'temperature': 1.3, 'top_p': 0.4},
    'repetition': {'repetition_penalty': 1.7},
    'greedy': {'temperature': 0.0},
    'greedy-repetition': {'temperature': 0.0, 'repetition_penalty': 1.7},
}


def sampled_in_each_way(argv: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Answers of each of KINDS, with a distribution for each token that is worked out from a plain forward pass."""
    from swift.infer_engine.protocol import RolloutInferRequest
    from swift_megatron_grpo.engines import Sampling
    trainer = trainer_of(argv)
    trainer.sync_weights()
    requests = [RolloutInferRequest(messages=[{'role': 'user', 'content': 'what is 3 + 4?' if i % 2 else 'hello'}]) for i in range(REQUESTS)]
    kinds = {name: Sampling(**{'temperature': 1.0, 'max_tokens': LIMIT, 'seed': 3, **fields}) for name, fields in KINDS.items()}
    results: dict[str, list[dict[str, Any]]] = {}
    for name, sampling in kinds.items():
        results[name] = [answer_of(trainer, output, sampling) for output in trainer.engine.generate(requests, sampling)]
    # again, where answers of 'plain' end with exactly the last token they may have; and where one holds a word that two tokens make
    plain = [answer['ids'] for answer in results['plain']]
    length = sorted(len(ids) for ids in plain)[REQUESTS // 2]
    decode = trainer.template.tokenizer.decode
    word = next(decode([a, b]) for ids in plain for a, b in itertools.pairwise(ids[1:-1]) if decode([a]).isalnum() and decode([b]).isalnum())
    again = {'exact': Sampling(temperature=1.0, max_tokens=length, seed=3), 'word': Sampling(temperature=1.0, max_tokens=LIMIT, seed=3, stop_words=(word, ))}
    for name, sampling in again.items():
        results[name] = [answer_of(trainer, output, sampling) for output in trainer.engine.generate(requests, sampling)]
    return results


def answer_of(trainer: Any, output: Any, sampling: Any) -> dict[str, Any]:
    choice, = output.response.choices
    prompt, ids = list(output.response.prompt_token_ids), list(choice.token_ids)
    with torch.no_grad():
        logits = trainer.engine.engine.model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1:-1]
    expected, ranks, best = [], [], []
    for step, row in enumerate(logits):
        ranks.append(int((row > row[ids[step]]).sum()))
        row = distribution(row, prompt + ids[:step], sampling)
        expected.append(float(row[ids[step]]))
        best.append(int(row.argmax()))
    own = torch.tensor([entry['logprob'] for entry in choice.logprobs['content']])
    decode = trainer.template.tokenizer.decode
    return {'ids': ids, 'reason': choice.finish_reason, 'difference': float((own - torch.tensor(expected)).abs().max()), 'ranks': ranks, 'best': best,
            'text': decode(ids), 'text_before': decode(ids[:-1])}


def distribution(logits_V: torch.Tensor, so_far: list[int], sampling: Any) -> torch.Tensor:
    """Log-probabilities of the next token: penalty of what was there, temperature, the k likeliest, the fewest that hold top_p."""
    seen = torch.tensor(sorted(set(so_far)))
    logits_V = logits_V.clone()
    logits_V[seen] = torch.where(logits_V[seen] > 0, logits_V[seen] / sampling.repetition_penalty, logits_V[seen] * sampling.repetition_penalty)
    logits_V = logits_V / (sampling.temperature or 1.0)
    if sampling.top_k > 0:
        logits_V[logits_V < logits_V.topk(sampling.top_k).values[-1]] = float('-inf')
    if sampling.top_p < 1.0:
        values, order = logits_V.softmax(-1).sort(descending=True)
        logits_V[order[values.cumsum(-1) - values >= sampling.top_p]] = float('-inf')
    return logits_V.log_softmax(-1)


@pytest.fixture(scope='module')
def answers_of(ranks: Any, tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Of a model with a flat distribution, many end tokens, and a generation_config.json that would cut and bend what is sampled."""
    folder = tmp_path_factory.mktemp('many-ends') / 'model'
    shutil.copytree(tiny_model('qwen3'), folder)
    path = folder / 'generation_config.json'
    bent = {'eos_token_id': ENDS, 'do_sample': True, 'top_k': 3, 'top_p': 0.5, 'temperature': 0.3, 'repetition_penalty': 2.0, 'min_new_tokens': 6,
            'no_repeat_ngram_size': 1, 'suppress_tokens': [200, 201]}
    path.write_text(json.dumps({**json.loads(path.read_text()), **bent}))
    argv = arguments(tmp_path_factory.mktemp('ways'), folder, None, max_completion_length=LIMIT, generation_batch_size=REQUESTS)  # one batch
    return ranks.run(sampled_in_each_way, argv, world_size=1)[0]


@pytest.mark.parametrize('kind', [*KINDS, 'exact'])
def test_log_probabilities_are_those_of_the_distribution_that_was_asked_for(answers_of: Any, kind: str) -> None:
    assert max(answer['difference'] for answer in answers_of[kind]) < 2e-5


@pytest.mark.parametrize('kind', [*KINDS, 'exact'])
def test_an_answer_ends_at_the_first_end_token_or_stop_word_or_at_the_limit(answers_of: Any, kind: str) -> None:
    words = KINDS.get(kind, {}).get('stop_words', ())
    limit = max(len(answer['ids']) for answer in answers_of[kind]) if kind == 'exact' else LIMIT
    for answer in answers_of[kind]:
        assert not set(ENDS) & set(answer['ids'][:-1]) and not any(word in answer['text_before'] for word in words)
        ended = answer['ids'][-1] in ENDS or any(word in answer['text'] for word in words)
        assert answer['reason'] == ('stop' if ended else 'length')
        assert ended or len(answer['ids']) == limit
    assert {word for answer in answers_of[kind] for word in words if word in answer['text']} == set(words)
    assert words or 'greedy' in kind or len({answer['ids'][-1] for answer in answers_of[kind] if answer['reason'] == 'stop'}) > 2


def test_an_answer_that_ends_with_the_last_token_it_may_have_has_ended(answers_of: Any) -> None:
    limit = max(len(answer['ids']) for answer in answers_of['exact'])
    assert {answer['reason'] for answer in answers_of['exact'] if len(answer['ids']) == limit} == {'stop', 'length'}
    for exact, longer in zip(answers_of['exact'], answers_of['plain'], strict=True):
        assert exact['ids'] == longer['ids'][:limit]


def test_a_stop_word_that_two_tokens_make_ends_an_answer_where_it_is_whole(answers_of: Any) -> None:
    shorter = [(cut, whole) for cut, whole in zip(answers_of['word'], answers_of['plain'], strict=True) if cut['ids'] != whole['ids']]
    assert shorter
    for cut, whole in shorter:
        assert cut['ids'] == whole['ids'][:len(cut['ids'])] and cut['reason'] == 'stop' and cut['ids'][-1] not in ENDS


def test_nothing_but_the_arguments_decides_what_is_sampled(answers_of: Any) -> None:
    """Not a generation_config.json, nor transformers' own 50 likeliest tokens where none are asked for."""
    plain = answers_of['plain']
    assert max(rank for answer in plain for rank in answer['ranks']) > 100
    assert any(len(answer['ids']) < 6 for answer in plain) and any(len(set(answer['ids'])) < len(answer['ids']) for answer in plain)
    assert max(rank for answer in answers_of['top_k'] for rank in answer['ranks']) == 4
    for kind in ('greedy', 'greedy-repetition'):
        assert all(answer['ids'] == answer['best'] for answer in answers_of[kind])
    assert [a['ids'] for a in answers_of['greedy']] != [a['ids'] for a in answers_of['greedy-repetition']]
