"""The worker process of one rank: `python worker.py <translated arguments>`, alone or under torchrun.

The CPU platform, where it is needed, comes before anything that imports Megatron. Errors end here: a UserError is one message on rank 0
and exit code 2, a RunError one message on the rank that raised it and exit code 1, anything else its traceback and exit code 1. The
process then ends at once: a peer that waits in a collective is ended by the launcher, and nothing here waits for it.
"""

import atexit
import gc
import os
import sys
import time
import traceback


def main() -> None:
    from swift_megatron_grpo import cpu
    from swift_megatron_grpo.errors import RunError, UserError
    from swift_megatron_grpo.hooks.launch import leave

    rank = int(os.environ.get('RANK', '0'))
    done: list[bool] = []
    atexit.register(_end_quietly, done)  # first registered, last called
    try:
        if cpu.is_needed():
            cpu.activate()
        from swift_megatron_grpo.pipeline import main as train

        train()
        # The interpreter's last collection would walk a heap of millions of objects, for seconds, only to free what the system frees.
        gc.freeze()
        done.append(True)
    except UserError as error:
        _say_once(rank, f'\nerror: {error}')  # a progress bar of another rank may stand on this line
        leave(2)
    except RunError as error:
        print(f'\nerror: rank {rank}: {error}', file=sys.stderr, flush=True)
        leave(1)
    except KeyboardInterrupt:
        leave(130)
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        leave(1)


def _end_quietly(done: list[bool]) -> None:
    """After a run that went well nothing more is to be said; triton's bindings would list, for pages, what they have not freed."""
    if done:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _say_once(rank: int, text: str) -> None:
    """Rank 0 prints. The others wait a moment, so that the launcher does not end rank 0 before it has."""
    if rank == 0:
        print(text, file=sys.stderr, flush=True)
    else:
        from swift_megatron_grpo.hooks.doors import SILENT_RANK_GRACE_S

        time.sleep(SILENT_RANK_GRACE_S)


if __name__ == '__main__':
    # The folder of this file is sys.path[0] here and holds modules named like others' (torchrun.py): take it away.
    if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
        del sys.path[0]
    main()
