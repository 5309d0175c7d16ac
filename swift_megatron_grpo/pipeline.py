"""The run in a worker process: arguments, data set, trainer (import tier 2)."""
from __future__ import annotations

import os
from swift.dataset import load_dataset
from swift.megatron.pipelines.train.rlhf import MegatronRLHF
from collections.abc import Callable
from typing import Any

from . import callbacks
from .args.data_files import broken_rows
from .config import MegatronGRPOArguments
from .errors import UserError
from .patches import PATCHES
from .ports import free_port
from .trainer import MegatronGRPOTrainer


class MegatronGRPO(MegatronRLHF):
    """ms-swift's Megatron pipeline with this package's arguments and trainer."""
    args_class = MegatronGRPOArguments
    args: MegatronGRPOArguments

    def __init__(self, args: Any = None) -> None:
        callbacks.register()
        PATCHES.apply()
        super().__init__(args)

    def prepare_trainer(self) -> MegatronGRPOTrainer:
        return MegatronGRPOTrainer(self.args, self.template, self._expert_dataset())

    def _get_dataset(self) -> tuple[Any, Any]:
        args = self.args
        return _loaded(super()._get_dataset, [*args.dataset, *args.val_dataset])

    def _expert_dataset(self) -> Any:
        """The rows of --chord_sft_dataset, or None."""
        args = self.args
        if not args.chord_sft_dataset:
            return None
        return _loaded(lambda: load_dataset(args.chord_sft_dataset, split_dataset_ratio=0.0, shuffle=args.dataset_shuffle,
                                            **args.get_dataset_kwargs()), args.chord_sft_dataset)[0]


def _loaded(load: Callable[[], tuple[Any, Any]], specs: list[str]) -> tuple[Any, Any]:
    """What `load` returns. Where it fails, the local files are read for the row that is to blame: pyarrow names neither file nor line."""
    try:
        return load()
    except Exception as error:
        broken = broken_rows(specs, whole=True)
        if broken:
            raise UserError('\n'.join(broken)) from error
        if isinstance(error, ZeroDivisionError):  # ms-swift samples from the rows that it has kept
            raise UserError(f'{" ".join(specs)}: no row can be used. A row needs `messages` with at least one message, or `query`; other names of columns '
                            'are given with --columns.') from error
        raise


def _describe_single_process() -> None:
    """Without a launcher this process is the whole world; torch.distributed wants to be told so."""
    if 'RANK' in os.environ:
        return
    os.environ.update(RANK='0', LOCAL_RANK='0', WORLD_SIZE='1', LOCAL_WORLD_SIZE='1', MASTER_ADDR='127.0.0.1', MASTER_PORT=str(free_port()))


def main(args: Any = None) -> Any:
    """Runs the training that the (translated) command line describes. Called in every worker process."""
    _describe_single_process()
    return MegatronGRPO(args).main()
