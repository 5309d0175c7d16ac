"""`--use_vllm false`: an answer is what the policy sampled, whichever tokens these are."""
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
