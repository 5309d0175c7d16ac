"""`make demo`: build and warm up a small model, train it with one `swift rlhf --backend megatron` command, measure before and after."""

import argparse
import hashlib
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
from transformers.utils import logging

from examples.demo import model as models
from examples.demo import problems, report, train

PASSES = 5


def main() -> int:
    options = parse_options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the training it has started is ended with it
    torch.set_num_threads(1)  # tensors are tiny: a second thread mostly waits for the first
    logging.disable_progress_bar()
    begun = time.perf_counter()

    def say(text: str) -> None:
        print(f'demo [{time.perf_counter() - begun:5.0f} s] {text}', flush=True)

    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    split = problems.split_problems()
    start = warmed_up_model(folder, options.seed, say)
    dataset = folder / 'sums.jsonl'
    problems.write_dataset(split.train, dataset)
    say(f'{dataset}: {len(split.train)} problems; {len(split.held_out)} others are held out')

    before_model, tokenizer = models.load(start)
    before = models.sampled_accuracy(before_model, tokenizer, split.held_out, passes=PASSES, seed=1)
    before_answers = models.sample_answers(before_model, tokenizer, split.held_out, seed=7)
    say(f'sampled accuracy before: {before:.3f} (temperature 1, {len(split.held_out)} held-out problems, {PASSES} samples each)')

    job = train.Job(
        model=start, dataset=dataset, output=folder / f'run-{options.engine}-seed{options.seed}', engine=options.engine, seed=options.seed
    )
    shutil.rmtree(job.output, ignore_errors=True)
    print(f'\n{train.shell_text(job)}\n', flush=True)
    seconds = train.run(job, say=say)
    rewards = train.rewards(job.output)

    after_model, _ = models.load(train.last_checkpoint(job.output))
    after = models.sampled_accuracy(after_model, tokenizer, split.held_out, passes=PASSES, seed=1)
    after_answers = models.sample_answers(after_model, tokenizer, split.held_out, seed=7)
    say(f'sampled accuracy after: {after:.3f}')

    curve = report.draw_curve(rewards, job.output / 'reward.png', before=before, after=after)
    print(f'\n{report.compare(split.held_out[:8], before_answers, after_answers)}\n')
    print(f'reward curve: {curve}\ncompletions:  {job.output / "completions.jsonl"}\nmodel:        {train.last_checkpoint(job.output)}')
    print(f'demo accuracy before={before:.3f} after={after:.3f} seconds={seconds:.1f}', flush=True)
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog='python -m examples.demo', description=__doc__)
    parser.add_argument('--engine', choices=('vllm', 'transformers'), default='vllm', help='what samples the completions')
    parser.add_argument('--seed', type=int, default=0, help='of the warm-up and of the training')
    parser.add_argument('--output', default='demo_output', help='folder for the model, the run and the curve')
    return parser.parse_args()


def warmed_up_model(folder: Path, seed: int, say) -> Path:
    """The folder of the warmed-up model: made once for a seed and a recipe, then reused."""
    here = Path(__file__).parent
    recipe = hashlib.sha256(b''.join((here / name).read_bytes() for name in ('problems.py', 'model.py'))).hexdigest()[:8]
    target = folder / f'model-seed{seed}-{recipe}'
    if target.exists():
        say(f'{target}: warmed up earlier')
        return target
    say('building a Qwen3 of 467,712 parameters and warming it up with a careless teacher (about a minute)')
    unfinished = target.with_suffix('.part')
    shutil.rmtree(unfinished, ignore_errors=True)
    models.warm_up(unfinished, seed=seed, say=say)
    unfinished.rename(target)
    return target


if __name__ == '__main__':
    sys.exit(main())
