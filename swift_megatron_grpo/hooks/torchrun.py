"""Torchrun with the same arguments, whose exit code is the failed worker's and whose last words are the worker's own.

Torchrun ends with code 1 and a page about itself when a worker exits with an error; the worker has said already what is wrong, on one
rank. Set TORCHELASTIC_LOG=1 to get that page back. Runs as a file: `python torchrun.py --nproc_per_node 2 worker.py ...`.
"""

import contextlib
import logging
import os
import signal
import sys


def pass_on(number, frame) -> None:
    """SIGUSR1 asks a run to save and end; torchrun itself would die of it and leave the workers behind. Linux tells a process its children."""
    try:
        with open(f'/proc/{os.getpid()}/task/{os.getpid()}/children', encoding='ascii') as file:
            children = [int(word) for word in file.read().split()]
    except OSError:
        return
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)


def main() -> None:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    signal.signal(signal.SIGUSR1, pass_on)
    verbose = os.environ.get('TORCHELASTIC_LOG') == '1'
    if not verbose:
        logging.disable(logging.ERROR)  # torchrun's loggers set levels of their own; the workers are other processes
    try:
        run.main(sys.argv[1:])
    except ChildFailedError as error:
        if verbose:
            raise
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            print(f'error: rank {rank} was ended by signal {-failure.exitcode} ({failure.signal_name()})', file=sys.stderr)
        sys.exit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode)
    except SignalException as error:
        print(f'stopped by signal {int(error.sigval)}; each checkpoint in output_dir is whole, and --resume_from_checkpoint goes on from one', file=sys.stderr)
        sys.exit(128 + int(error.sigval))


if __name__ == '__main__':
    # The folder of this file is sys.path[0] here and holds modules with everyday names: take it away before torch is imported.
    if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
        del sys.path[0]
    main()
