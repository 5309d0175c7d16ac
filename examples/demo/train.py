"""The one command of the demonstration, and its progress while it runs."""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from swift_megatron_grpo.ports import free_port

# 16 prompts x 8 completions an optimizer step: 112 steps see each of the 1,800 prompts once, 140 see a quarter of them again.
NUM_GENERATIONS = 8
PROMPTS_PER_STEP = 16
MAX_STEPS = 140
NUM_PROCESSES = 2
DEADLINE_S = 3600
SILENCE_S = 30  # seconds without a line after which one says that the run is alive


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What one training run reads and writes; `engine` is 'vllm' or 'transformers'."""

    model: Path
    dataset: Path
    output: Path
    engine: str
    seed: int


def arguments(job: Job) -> list[str]:
    """The `swift rlhf` arguments: an ordinary GRPO script, and `--backend megatron` with its layout."""
    size = PROMPTS_PER_STEP * NUM_GENERATIONS
    given: dict[str, object] = {
        'rlhf_type': 'grpo',
        'backend': 'megatron',
        'tensor_model_parallel_size': NUM_PROCESSES,
        'model': job.model,
        'model_type': 'qwen3',
        'template': 'chatml',
        'use_hf': 'true',
        'check_model': 'false',
        'dataset': job.dataset,
        'external_plugins': 'plugins/arithmetic_reward.py',
        'reward_funcs': 'arithmetic_answer',
        'tuner_type': 'full',
        'torch_dtype': 'float32',
        'fp16': 'false',
        'bf16': 'false',
        'num_generations': NUM_GENERATIONS,
        'per_device_train_batch_size': PROMPTS_PER_STEP,
        'gradient_accumulation_steps': size // PROMPTS_PER_STEP,
        'max_steps': MAX_STEPS,
        'learning_rate': '5e-4',
        'lr_scheduler_type': 'cosine_with_min_lr',
        'lr_scheduler_kwargs': '{"min_lr_rate": 0.2}',
        'warmup_steps': 5,
        'weight_decay': 0,
        'adam_beta2': 0.999,
        'max_grad_norm': 1.0,
        'beta': 0,
        'temperature': 1.0,
        'top_p': 1.0,
        'top_k': -1,
        'max_length': 32,
        'max_completion_length': 4,
        'logging_steps': 1,
        'save_steps': MAX_STEPS,
        'save_only_model': 'true',
        'log_completions': 'true',
        'dataset_num_proc': 1,
        'dataloader_num_workers': 0,
        'seed': 42 + job.seed,
        'output_dir': job.output,
        'add_version': 'false',
    }
    if job.engine == 'vllm':
        given |= {'use_vllm': 'true', 'vllm_mode': 'colocate', 'vllm_max_model_len': 64, 'vllm_enforce_eager': 'true'}
    else:
        given |= {'use_vllm': 'false'}
    return [token for name, value in given.items() for token in (f'--{name}', str(value))]


def shell_text(job: Job) -> str:
    """The command as a person would type it, one argument a line."""
    given = arguments(job)
    lines = [f'NPROC_PER_NODE={NUM_PROCESSES} swift rlhf'] + [f'    {n} {shlex.quote(v)}' for n, v in zip(given[::2], given[1::2], strict=True)]
    return ' \\\n'.join(lines)


def run(job: Job, *, say: Callable[[str], None]) -> float:
    """Run the command to its end and return its seconds. Its output goes to train.log; reward is shown as it comes.

    Raises RuntimeError with the end of the log when the command fails, or is still running after DEADLINE_S seconds.
    """
    environ = {**os.environ, 'NPROC_PER_NODE': str(NUM_PROCESSES), 'MASTER_PORT': str(free_port()), 'OMP_NUM_THREADS': '1'}
    # The console script beside this interpreter: the environment need not be activated.
    swift = Path(sys.executable).with_name('swift')
    log = job.output.with_suffix('.log')
    begun = time.perf_counter()
    with log.open('w', encoding='utf-8') as file:
        process = subprocess.Popen([str(swift), 'rlhf', *arguments(job)], env=environ, stdout=file, stderr=subprocess.STDOUT)
        try:
            shown, said = 0, begun
            while process.poll() is None:
                time.sleep(1.0)
                before, shown = shown, _show_progress(job.output / 'logging.jsonl', shown, begun, say)
                if shown > before:
                    said = time.perf_counter()
                elif time.perf_counter() - said > SILENCE_S:
                    said = time.perf_counter()
                    steps = len(rewards(job.output))
                    say(f'step {steps:3d}/{MAX_STEPS}' if steps else f'the processes load Megatron, the model and the engine; their output: {log}')
                if time.perf_counter() - begun > DEADLINE_S:
                    raise RuntimeError(f'training was not done after {DEADLINE_S} s and was stopped; its output is in {log}')
        except BaseException:  # Ctrl-C and SIGTERM too: no worker is left behind
            process.terminate()
            process.wait(timeout=60)
            raise
    seconds = time.perf_counter() - begun
    if process.returncode:
        tail = ''.join(log.read_text(encoding='utf-8', errors='replace').splitlines(keepends=True)[-40:])
        raise RuntimeError(f'training ended with exit code {process.returncode}; the end of {log}:\n{tail}')
    return seconds


def rewards(output: Path) -> list[float]:
    """Mean reward of each optimizer step, from the run's logging.jsonl."""
    path = output / 'logging.jsonl'
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding='utf-8').splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:  # the last line while it is being written
            continue
        if 'reward' in row:
            rows.append(float(row['reward']))
    return rows


def last_checkpoint(output: Path) -> Path:
    """The checkpoint of the last step; its safetensors are what transformers loads."""
    found = sorted(output.glob('checkpoint-*'), key=lambda path: int(path.name.split('-')[1]))
    if not found:
        raise RuntimeError(f'no checkpoint in {output}')
    return found[-1]


def _show_progress(path: Path, shown: int, begun: float, say: Callable[[str], None]) -> int:
    values = rewards(path.parent)
    while len(values) >= shown + 8 or (len(values) == MAX_STEPS and shown < MAX_STEPS):
        window = values[shown : shown + 8]
        shown += len(window)
        mean = sum(window) / len(window)
        say(f'step {shown:3d}/{MAX_STEPS}  reward {mean:.3f}  {"#" * round(40 * mean):40s}  {time.perf_counter() - begun:.0f} s')
    return shown
