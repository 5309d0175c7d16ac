"""The task: sums of two-digit numbers that stay below 100, their data set, and a tokenizer that keeps digits apart."""

import json
import random
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

NUM_HELD_OUT = 200
NUM_TRAIN = 1800
SPLIT_SEED = 1234  # the split is the same for every training seed
MAX_NEW_TOKENS = 4  # two digits, the end token, and one to spare

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    '{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}'
)


@dataclass(frozen=True, slots=True)
class Problem:
    """A question with its only right answer, for example Problem('What is 12 + 34?', '46')."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Split:
    """`held_out` is what accuracy is measured on, `train` is GRPO's data set, `warm_up` (a superset of `train`) is for the teacher."""

    held_out: list[Problem]
    train: list[Problem]
    warm_up: list[Problem]


def split_problems() -> Split:
    """All 3,240 sums, shuffled and cut: 200 held out, 1,800 for GRPO, 3,040 for the warm-up."""
    problems = [Problem(f'What is {a} + {b}?', str(a + b)) for a in range(10, 100) for b in range(10, 100) if a + b < 100]
    random.Random(SPLIT_SEED).shuffle(problems)
    rest = problems[NUM_HELD_OUT:]
    return Split(held_out=problems[:NUM_HELD_OUT], train=rest[:NUM_TRAIN], warm_up=rest)


def careless_drafts(problems: list[Problem], *, wrong_share: float, drafts: int, seed: int) -> list[Problem]:
    """What a careless teacher writes: several drafts of each problem, a share of them off by 1, 2 or 10.

    It teaches the form of an answer and most of the arithmetic, and leaves the model unsure: something for GRPO to find.
    """
    rng = random.Random(seed)
    written = []
    for problem in problems * drafts:
        slip = rng.choice([-10, -2, -1, 1, 2, 10]) if rng.random() < wrong_share else 0
        written.append(Problem(problem.question, str(int(problem.answer) + slip)))
    return written


def write_dataset(problems: list[Problem], path: Path) -> None:
    """JSON lines as ms-swift reads them: `messages` with the question, and the column `solution` that the reward sees."""
    rows = [{'messages': [{'role': 'user', 'content': p.question}], 'solution': p.answer} for p in problems]
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows), encoding='utf-8')


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE whose words never hold a digit: every digit is a token of its own. The same on every machine."""
    tokenizer = Tokenizer(models.BPE())
    pieces = Regex(r'\d| ?[A-Za-z]+| ?[^\sA-Za-z\d]|\s')
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pieces, 'isolated'), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    texts = [f'system\nuser\n{p.question}\nassistant\n{p.answer}\n' for p in split_problems().train[:500]]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=['<|endoftext|>', '<|im_start|>', '<|im_end|>'],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token='<|im_end|>',
        pad_token='<|endoftext|>',
        additional_special_tokens=['<|im_start|>'],
        padding_side='left',
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def prompt_text(problem: Problem) -> str:
    """The prompt as the chat template renders it, up to where the answer begins."""
    return f'<|im_start|>user\n{problem.question}<|im_end|>\n<|im_start|>assistant\n'
