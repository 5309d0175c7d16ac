"""Progress bar, logging.jsonl, TensorBoard and completions.jsonl (import tier 2)."""
from __future__ import annotations

import json
import os
from swift.megatron.callbacks import megatron_callbacks_map
from swift.megatron.callbacks.print import PrintCallback
from swift.megatron.callbacks.tensorboard import TensorboardCallback
from typing import Any

from .metrics import curve_names


class GRPOPrintCallback(PrintCallback):
    """ms-swift's progress line, with the reward in the bar and with floats as they are (upstream rounds them to eight digits, which loses a
    learning rate of 1e-9 and makes runs look equal that are not)."""

    def on_log(self, logs: dict[str, Any]) -> None:
        exact = {name: value for name, value in logs.items() if isinstance(value, float)}
        if self.training_bar is not None and 'reward' in logs:
            self.training_bar.set_postfix_str(f'reward={logs["reward"]:.3f}', refresh=False)
        writer, self.jsonl_writer = self.jsonl_writer, _ExactWriter(self.jsonl_writer, exact)
        try:
            super().on_log(logs)
        finally:
            self.jsonl_writer = writer


class _ExactWriter:
    """Writes the unrounded floats of one log entry."""

    def __init__(self, writer: Any, exact: dict[str, float]):
        self.writer = writer
        self.exact = exact

    def append(self, logs: dict[str, Any]) -> None:
        self.writer.append({name: self.exact.get(name, value) for name, value in logs.items()})


class GRPOTensorboardCallback(TensorboardCallback):
    """Curves under the names of `swift rlhf`, which dashboards and `swift web-ui` know (upstream writes completions/mean_length as
    completions_mean_length), and on disk as soon as they are logged (upstream waits for two minutes or fifty values)."""

    def on_log(self, logs: dict[str, Any]) -> None:
        if self.writer is None:
            return
        for name, value in curve_names(logs).items():
            self.writer.add_scalar(name, value, self.state.iteration)
        self.writer.flush()


class CompletionsWriter:
    """completions.jsonl: one line a rollout, written when a generation was scored. The logging rank only."""

    def __init__(self, output_dir: str, enabled: bool):
        self.path = os.path.join(output_dir, 'completions.jsonl')
        self.enabled = enabled

    def write(self, rows: list[dict[str, Any]]) -> None:
        if not self.enabled:
            return
        text = ''.join(json.dumps(row, ensure_ascii=False) + '\n' for row in rows)
        with open(self.path, 'a', encoding='utf-8') as file:
            file.write(text)


def register() -> None:
    """Makes the callbacks known to ms-swift's registry, by the names that config.py puts in place of 'print' and 'tensorboard'."""
    megatron_callbacks_map['grpo_print'] = GRPOPrintCallback
    megatron_callbacks_map['grpo_tensorboard'] = GRPOTensorboardCallback
