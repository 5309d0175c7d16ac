"""`make benchmark`: what the batch and the passes cost, as ratios within one run on this machine. Nothing here is a test.

The same frozen rollouts (many short answers, a few long ones) are trained on in one process, each time with one thing changed. Seconds are those of
the optimizer steps alone, the smallest of REPEATS runs that take turns, so that a busy machine disturbs all of them alike.
"""
import json
import random
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests import tiny_models
from tests.rank_pool import RankPool
from tests.step.training import arguments

REPEATS = 3
STEPS = 4
CASES: dict[str, dict[str, Any]] = {
    'rows padded to the longest': {'padding_free': 'false'},
    'packed (default)': {},
    'packed, budget of 4 micro-batches': {'max_tokens_per_micro_batch': 2400},
    'packed, 4 steps a generation': {'steps_per_generation': 4},
}


def measure(argv: list[str]) -> tuple[float, int, int]:
    """(seconds of the steps, model forwards, positions that went through the model). On the rank of a case."""
    from swift_megatron_grpo.pipeline import MegatronGRPOTrainer

    from tests.step import training
    seconds = []
    collect, step = MegatronGRPOTrainer.collect, MegatronGRPOTrainer.train_step

    def timed(method: Any) -> Any:

        def run(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            result = method(*args, **kwargs)
            seconds.append(time.perf_counter() - begun)
            return result

        return run

    MegatronGRPOTrainer.collect, MegatronGRPOTrainer.train_step = timed(collect), timed(step)
    try:
        outcome = training.train(argv)
    finally:
        MegatronGRPOTrainer.collect, MegatronGRPOTrainer.train_step = collect, step
    assert outcome is not None
    return sum(seconds), outcome.forwards, outcome.positions


def write_skewed_rollouts(folder: Path, prompts: int = 4, num_generations: int = 8) -> Path:
    """One answer in eight is ten times as long as the others."""
    rng = random.Random(0)
    folder.mkdir(parents=True)
    for generation in range(STEPS):
        head = {'format': 1, 'generation': generation, 'num_generations': num_generations, 'reward_names': ['Digits'],
                'num_rollouts': prompts * num_generations, 'seed': 42}
        rows = []
        for index in range(prompts * num_generations):
            length = 150 if index % 8 == 3 else rng.randint(5, 15)
            answer = [rng.randrange(3, 300) for _ in range(length)]
            message = {'role': 'user', 'content': f'what is {index // num_generations} + 1?'}
            rows.append({'index': index, 'prompt_index': index // num_generations, 'dataset_index': index // num_generations,
                         'messages': [message, {'role': 'assistant', 'content': 'x'}], 'response_token_ids': [answer], 'response_loss_mask': [],
                         'rollout_logprobs': [[-5.0] * length], 'finish_reason': 'stop', 'num_prompt_tokens': 20, 'rollout_infos': {}, 'media': {},
                         'policy_version': 0, 'rewards': [rng.random()], 'columns': {}})
        (folder / f'generation-{generation:06d}.jsonl').write_text('\n'.join(map(json.dumps, [head, *rows])) + '\n')
    return folder


def main() -> None:
    with TemporaryDirectory() as name, RankPool(max_world=1) as pool:
        work = Path(name)
        model = tiny_models.build('qwen3', work / 'model', hidden_size=256, intermediate_size=512, num_hidden_layers=4)
        rollouts = write_skewed_rollouts(work / 'rollouts')
        results: dict[str, tuple[float, int, int]] = {}
        for repeat in range(REPEATS):
            for number, (case, changes) in enumerate(CASES.items()):
                print(f'\rrun {repeat * len(CASES) + number + 1} of {REPEATS * len(CASES)}', end='', flush=True)
                # a generation of four steps uses the first file alone; all cases train on as many completions
                size = {'global_batch_size': 8, 'micro_batch_size': 4} if 'steps_per_generation' in changes else {'global_batch_size': 32}
                steps = STEPS * 4 if 'steps_per_generation' in changes else STEPS
                argv = arguments(work / f'{repeat}-{number}', model, rollouts, **{
                    'num_generations': 8, 'micro_batch_size': 4, 'train_iters': steps, 'max_completion_length': 160, 'optimizer': 'sgd',
                    'output_dir': work / 'out', **size, **changes})
                got, = pool.run(measure, argv, world_size=1, deadline=600.)
                best = results.get(case)
                results[case] = got if best is None or got[0] < best[0] else best
    print('\r' + ' ' * 20)
    seconds, forwards, positions = results['packed (default)']
    print(f'{"":36s}{"time":>8s}{"forwards":>10s}{"positions":>11s}   against packed (default)')
    for case, (s, f, p) in results.items():
        print(f'{case:36s}{s / seconds:8.2f}{f / forwards:10.2f}{p / positions:11.2f}')


if __name__ == '__main__':
    from tests.benchmark import main as run  # ranks find `measure` by the module's name

    run()
