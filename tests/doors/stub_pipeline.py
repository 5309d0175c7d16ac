"""Put in the place of swift_megatron_grpo/pipeline.py in an installed copy: writes down how a worker was started, then does as told."""

import json
import os
import sys
import time
from pathlib import Path

from swift_megatron_grpo.errors import RunError, UserError


def main() -> None:
    rank = os.environ.get('RANK', '0')
    report = {
        'argv': sys.argv,
        'path': sys.path,
        'pid': os.getpid(),
        'world_size': os.environ.get('WORLD_SIZE', ''),
        'config_file': os.environ.get('SWIFT_CONFIG_FILE', ''),
        'extra': os.environ.get('FROM_YAML', ''),
        'torch': 'torch' in sys.modules,
    }
    folder = Path(os.environ['STUB_OUT'])
    folder.joinpath(f'rank{rank}.partial').write_text(json.dumps(report))
    folder.joinpath(f'rank{rank}.partial').rename(folder / f'rank{rank}.json')
    what = os.environ.get('STUB_DO', 'finish')
    if what == 'user error':
        raise UserError('the dataset has 3 prompts and a step needs 4')
    if what == 'run error on rank 1' and rank == '1':
        raise RunError('reward: the function digits raised on prompt 7')
    if what == 'crash on rank 1' and rank == '1':
        raise ZeroDivisionError('rank 1 divides by zero')
    if what == 'killed' and rank == '0':
        os.kill(os.getpid(), 9)
    if what != 'finish':
        time.sleep(600)
