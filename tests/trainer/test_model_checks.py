"""Models that would be trained as something else are refused by name."""
from typing import Any

import pytest

from swift_megatron_grpo.errors import UserError
from swift_megatron_grpo.model_checks import refuse_lost_windows
from tests import tiny_models
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
