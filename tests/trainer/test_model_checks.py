"""Models that would be trained as something else are refused by name."""
import re
import subprocess
import sys
from typing import Any

import pytest

from swift_megatron_grpo.args import model_checks
from swift_megatron_grpo.errors import UserError
from tests import families, tiny_models  # noqa: F401 (families adds kinds)
from tests.rank_pool import REPOSITORY
from tests.step.training import arguments


def test_a_sliding_window_that_would_be_lost_is_refused_unless_it_is_never_left() -> None:
    sliding = tiny_models.config('qwen2', use_sliding_window=True, sliding_window=64, max_window_layers=0)
    assert re.search(r'qwen2: .* the last 64 tokens.* up to 100 tokens', problem_of(sliding, 100))
    assert 'up to any number of tokens' in problem_of(sliding, None)
    assert problem_of(sliding, 64) == ''
    assert problem_of(tiny_models.config('qwen2', use_sliding_window=False, sliding_window=64), 100) == ''
    assert problem_of(tiny_models.config('qwen3'), 100) == ''


@pytest.mark.parametrize('config, slides', [
    ({'model_type': 'qwen2', 'use_sliding_window': True, 'sliding_window': 64, 'num_hidden_layers': 4, 'max_window_layers': 4}, False),
    ({'model_type': 'qwen2', 'use_sliding_window': True, 'sliding_window': 64, 'num_hidden_layers': 4, 'max_window_layers': 3}, True),
    ({'model_type': 'qwen2', 'use_sliding_window': False, 'sliding_window': 64}, False),
    ({'model_type': 'ministral', 'sliding_window': 64}, True),
    ({'model_type': 'ministral', 'sliding_window': None}, False),
    ({'model_type': 'a_vl', 'text_config': {'sliding_window': 64, 'layer_types': ['full_attention', 'sliding_attention']}}, True),
])
def test_windows_are_read_from_a_config_json_of_any_age(config: dict[str, Any], slides: bool) -> None:
    """Older files have no layer_types, which transformers works out when it reads them."""
    assert bool(model_checks.problems(config, longest=100, attention_backend='flash')) is slides


def problem_of(config: Any, longest: int | None) -> str:
    return ' '.join(model_checks.problems(config.to_dict(), longest=longest, attention_backend='flash'))


@pytest.mark.heavy
@pytest.mark.parametrize('kind, model_type, changes, given, words', [
    ('qwen3_moe', 'qwen3_moe', {}, {'router_replay_mode': 'R3', 'use_vllm': 'true', 'vllm_mode': 'colocate'}, 'R3: vLLM returns .* Use R2'),
    ('mistral', 'mistral', {}, {}, r'does not know the family mistral.*gpt.*without --backend megatron'),
    ('gpt_oss', 'gpt_oss', {}, {'attention_backend': 'flash'}, '--attention_backend flash knows none. Give --attention_backend fused'),
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
