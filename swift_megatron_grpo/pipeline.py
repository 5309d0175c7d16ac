"""The run in a worker process: arguments, data set, trainer (import tier 2)."""
from __future__ import annotations

import os
import socket
from swift.dataset import load_dataset
from swift.megatron.pipelines.train.rlhf import MegatronRLHF
from typing import Any

from . import callbacks
from .config import MegatronGRPOArguments
from .patches import PATCHES
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

    def _expert_dataset(self) -> Any:
        """The rows of --chord_sft_dataset, or None."""
        args = self.args
        if not args.chord_sft_dataset:
            return None
        dataset, _ = load_dataset(args.chord_sft_dataset, split_dataset_ratio=0.0, shuffle=args.dataset_shuffle, **args.get_dataset_kwargs())
        return dataset


def _describe_single_process() -> None:
    """Without a launcher this process is the whole world; torch.distributed wants to be told so."""
    if 'RANK' in os.environ:
        return
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK='0', LOCAL_RANK='0', WORLD_SIZE='1', LOCAL_WORLD_SIZE='1', MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))


def main(args: Any = None) -> Any:
    """Runs the training that the (translated) command line describes. Called in every worker process."""
    _describe_single_process()
    return MegatronGRPO(args).main()
