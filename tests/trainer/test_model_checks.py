"""Models that would be trained as something else are refused by name."""
import subprocess
import sys
from typing import Any

import pytest

from swift_megatron_grpo.errors import UserError
from swift_megatron_grpo.model_checks import refuse_lost_windows
from tests import tiny_models
from tests.rank_pool import REPOSITORY
from tests.step.training import arguments


def test_a_sliding_window_that_would_be_lost_is_refused_unless_it_is_never_left() -> None:
    sliding = tiny_models.config('qwen2', use_sliding_window=True, sliding_window=64, max_window_layers=0)
    with pytest.raises(UserError, match=r'qwen2: .* the last 64 tokens.* up to 100 tokens'):
        refuse_lost_windows(sliding, 100)
    with pytest.raises(UserError, match='up to any number of tokens'):
        refuse_lost_windows(sliding, None)
    refuse_lost_windows(sliding, 64)
    refuse_lost_windows(tiny_models.config('qwen2', use_sliding_window=False, sliding_window=64), 100)
    refuse_lost_windows(tiny_models.config('qwen3'), 100)


@pytest.mark.heavy
@pytest.mark.parametrize('kind, model_type, changes, given, words', [
    ('qwen3_moe', 'qwen3_moe', {}, {'router_replay_mode': 'R3', 'use_vllm': 'true', 'vllm_mode': 'colocate'}, 'R3: vLLM returns .* Use R2'),
    ('mistral', 'mistral', {}, {}, r'does not know the family mistral.*gpt.*without --backend megatron'),
    ('qwen2', 'qwen2', {'use_sliding_window': True, 'sliding_window': 64, 'max_window_layers': 0}, {}, 'the last 64 tokens'),
])
def test_before_a_model_is_built(ranks: Any, tiny_model: Any, tmp_path: Any, kind: str, model_type: str, changes: dict[str, Any],
                                 given: dict[str, Any], words: str) -> None:
    tiny_models.KINDS.setdefault('mistral', ('MistralConfig', 'MistralForCausalLM', {'sliding_window': 64}, ()))
    argv = arguments(tmp_path, tiny_model(kind, **changes), model_type=model_type, **given)
    with pytest.raises(UserError, match=words):
        ranks.run(build, argv, world_size=1)


def build(argv: list[str]) -> None:
    from accelerate import PartialState
    PartialState(cpu=True)
    from swift_megatron_grpo.pipeline import MegatronGRPO
    MegatronGRPO(argv).prepare_trainer()


def test_arguments_are_read_whatever_was_imported_first() -> None:
    program = ('from swift_megatron_grpo import cpu; cpu.activate(); import swift_megatron_grpo.trainer; from swift_megatron_grpo.patches import PATCHES; '
               'PATCHES.apply(); from swift_megatron_grpo.config import MegatronGRPOArguments; from transformers import HfArgumentParser; '
               'print(HfArgumentParser([MegatronGRPOArguments])._option_string_actions["--cp_comm_type"].type.__name__)')
    done = subprocess.run([sys.executable, '-c', program], cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.stdout.split()[-1:] == ['str'], done.stderr
