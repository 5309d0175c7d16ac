"""vLLM holds the weights that were trained: after three optimizer steps its greedy answers are those of transformers on the checkpoint."""
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rank_pool import RankPool
from tests.step.training import arguments

pytestmark = pytest.mark.heavy

QUESTIONS = ('what is 3 + 4?', 'hello', 'compute 17 - 9', 'a')
NUM_TOKENS = 12


def train_and_ask(argv: list[str], questions: tuple[str, ...]) -> list[tuple[list[int], list[int], list[float]]]:
    """On every rank: train, then ask the engine greedily before it closes. (prompt ids, answer ids, log-probabilities) a question."""
    from accelerate import PartialState
    PartialState(cpu=True)
    from swift.infer_engine.protocol import RolloutInferRequest
    from swift_megatron_grpo.engines import Sampling
    from swift_megatron_grpo.pipeline import MegatronGRPO
    pipeline = MegatronGRPO(argv)
    train_dataset, val_dataset = pipeline._prepare_dataset()
    pipeline.args.init_iters(train_dataset, val_dataset)
    trainer = pipeline.prepare_trainer()
    close, answers = trainer.engine.close, []

    def ask_then_close() -> None:
        trainer.sync_weights()
        requests = [RolloutInferRequest(messages=[{'role': 'user', 'content': question}]) for question in questions]
        for output in trainer.engine.generate(requests, Sampling(temperature=0.0, max_tokens=NUM_TOKENS)):
            choice = output.response.choices[0]
            answers.append((list(output.response.prompt_token_ids), list(choice.token_ids),
                            [item['logprob'] for item in choice.logprobs['content']]))
        close()

    trainer.engine.close = ask_then_close
    trainer.train(train_dataset, val_dataset)
    return answers


@pytest.mark.parametrize('size', [1, 2])
def test_greedy_answers_after_three_steps_are_those_of_transformers_on_the_checkpoint(tiny_model: Any, tmp_path: Path, size: int) -> None:
    from transformers import AutoModelForCausalLM
    argv = arguments(
        tmp_path, tiny_model('qwen3'), None, train_iters=3, save_strategy='steps', save_steps=3, use_vllm='true', vllm_mode='colocate',
        vllm_enforce_eager='true', vllm_max_model_len=256, max_completion_length=16, tensor_model_parallel_size=size,
        vllm_tensor_parallel_size=size)
    with RankPool(max_world=size) as pool:  # vLLM leaves global state in a process: ranks of its own
        answers = pool.run(train_and_ask, argv, QUESTIONS, world_size=size, deadline=400.)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / 'out' / 'checkpoint-3', dtype=torch.float32).eval()
    start = AutoModelForCausalLM.from_pretrained(tiny_model('qwen3'), dtype=torch.float32)
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), start.parameters()))
    for rank in range(size):
        for prompt, answer, logprobs in answers[rank]:
            with torch.no_grad():
                greedy = model.generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False)[0, len(prompt):].tolist()
                logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1:-1]
            assert answer == greedy
            expected = logits.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])[:, 0]
            assert torch.tensor(logprobs) == pytest.approx(expected, abs=1e-4)
