"""The model: a Qwen3 of 467,712 parameters, warmed up by plain supervised training, and how often its samples are right."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.demo.problems import MAX_NEW_TOKENS, Problem, build_tokenizer, careless_drafts, prompt_text, split_problems

# The warm-up ends inside this range of expected accuracy: above the floor GRPO has successes to learn from, below the ceiling much to learn.
START_FLOOR, START_CEILING = 0.38, 0.46
CHECK_EVERY = 10
MAX_STEPS = 700
BATCH_SIZE = 64
LEARNING_RATE = 3e-3
RAMP_STEPS = 30


@dataclass(frozen=True, slots=True)
class Encoded:
    """Prompts left-padded to one length and answers right-padded: [N, prompt] and [N, MAX_NEW_TOKENS], masks 1 where a token is real."""

    prompt: torch.Tensor
    prompt_mask: torch.Tensor
    answer: torch.Tensor
    answer_mask: torch.Tensor


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Two layers with heads of 32 (vLLM's CPU attention needs 32 or more), fp32, random weights from torch's seed."""
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=512,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype='float32',
    )
    return Qwen3ForCausalLM(config).float()


def encode(tokenizer: PreTrainedTokenizerFast, problems: list[Problem]) -> Encoded:
    prompts = tokenizer([prompt_text(p) for p in problems], add_special_tokens=False, padding=True, return_tensors='pt')
    answers = [[*ids, tokenizer.eos_token_id] for ids in tokenizer([p.answer for p in problems], add_special_tokens=False)['input_ids']]
    answer = torch.full((len(problems), MAX_NEW_TOKENS), tokenizer.pad_token_id)
    mask = torch.zeros_like(answer)
    for row, ids in enumerate(answers):
        ids = ids[:MAX_NEW_TOKENS]
        answer[row, : len(ids)] = torch.tensor(ids)
        mask[row, : len(ids)] = 1
    return Encoded(prompts['input_ids'], prompts['attention_mask'], answer, mask)


def answer_logprobs(model: Qwen3ForCausalLM, data: Encoded, rows: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the rows' answer tokens, [rows, MAX_NEW_TOKENS]."""
    ids = torch.cat([data.prompt[rows], data.answer[rows]], 1)
    mask = torch.cat([data.prompt_mask[rows], data.answer_mask[rows]], 1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, logits_to_keep=MAX_NEW_TOKENS + 1).logits[:, :-1]
    return logits.log_softmax(-1).gather(2, data.answer[rows][..., None])[..., 0]


@torch.no_grad()
def expected_accuracy(model: Qwen3ForCausalLM, data: Encoded) -> float:
    """Mean probability that a sample at temperature 1 is the right answer and ends there: what sampled accuracy estimates, without noise."""
    model.eval()
    return (answer_logprobs(model, data, torch.arange(len(data.prompt))) * data.answer_mask).sum(1).exp().mean().item()


@torch.no_grad()
def sample_answers(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: list[Problem], seed: int) -> list[str]:
    """One completion of each problem at temperature 1, up to the end token (text that did not end is kept as it is)."""
    data = encode(tokenizer, problems)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.eval()
        out = model.generate(
            input_ids=data.prompt, attention_mask=data.prompt_mask, max_new_tokens=MAX_NEW_TOKENS, do_sample=True, temperature=1.0,
            top_k=0, top_p=1.0, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
    return tokenizer.batch_decode(out[:, data.prompt.shape[1] :], skip_special_tokens=True)


def sampled_accuracy(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: list[Problem], *, passes: int, seed: int = 0
) -> float:
    """Share of right samples over `passes` samples of each problem. With 200 problems and 4 passes the standard error is below 0.02."""
    right = 0
    for number in range(passes):
        answers = sample_answers(model, tokenizer, problems, seed=1000 * seed + number)
        right += sum(answer == problem.answer for answer, problem in zip(answers, problems, strict=True))
    return right / (passes * len(problems))


def warm_up(folder: Path, *, seed: int, say: Callable[[str], None]) -> None:
    """Train from random weights on a careless teacher's drafts until the start range is reached, and save model and tokenizer.

    The last weights below the ceiling are kept, so that a lucky jump does not take GRPO's work away. Raises RuntimeError when MAX_STEPS
    do not reach the floor.
    """
    torch.manual_seed(seed)
    split, tokenizer = split_problems(), build_tokenizer()
    model = build_model(tokenizer)
    data = encode(tokenizer, careless_drafts(split.warm_up, wrong_share=0.4, drafts=4, seed=seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / RAMP_STEPS))
    order = torch.Generator().manual_seed(seed)
    held_out = encode(tokenizer, split.held_out)
    kept, reached, begun = None, 0.0, time.perf_counter()
    for step in range(1, MAX_STEPS + 1):
        model.train()
        rows = torch.randint(len(data.prompt), (BATCH_SIZE,), generator=order)
        loss = -(answer_logprobs(model, data, rows) * data.answer_mask[rows]).sum() / data.answer_mask[rows].sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % CHECK_EVERY:
            continue
        accuracy = expected_accuracy(model, held_out)
        if step % (5 * CHECK_EVERY) == 0 or accuracy >= START_FLOOR:
            say(f'warm-up step {step}: loss {loss.item():.3f}, expected accuracy {accuracy:.3f} ({time.perf_counter() - begun:.0f} s)')
        if accuracy < START_CEILING:
            kept, reached = {name: value.clone() for name, value in model.state_dict().items()}, accuracy
        if accuracy >= START_FLOOR:
            break
    if kept is None or reached < 0.25:
        raise RuntimeError(f'the warm-up ended at expected accuracy {reached:.3f} after {step} steps; at least 0.25 is needed to learn from')
    model.load_state_dict(kept)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load(folder: Path) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32), PreTrainedTokenizerFast.from_pretrained(folder, padding_side='left')
