"""Reward models: classifiers and a plug-in of one's own, several at once, beside functions, with weights and adapters."""
import json
from pathlib import Path
from typing import Any

import pytest

from swift_megatron_grpo.errors import UserError
from tests.step.training import PLUGIN, arguments, train

RM_PLUGIN = PLUGIN + '''
from swift.rewards import rm_plugins


class CountTurns:
    """A generative plug-in in miniature: it has the model and its template, and returns None where it does not apply."""

    def __init__(self, model, template):
        assert not any(p.requires_grad for p in model.parameters()) and not model.training
        self.template = template

    def __call__(self, inputs, **kwargs):
        assert len(kwargs['solution']) == len(inputs)
        return [None if len(row['messages'][-1]['content']) % 2 else float(len(row['messages'])) for row in inputs]


rm_plugins['count_turns'] = CountTurns
'''


@pytest.fixture(scope='module')
def classifiers(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two tiny classifiers with one output, different weights."""
    from tests import tiny_models
    import torch
    import transformers
    folders = []
    for seed, name in enumerate(('short', 'other')):
        folder = tmp_path_factory.mktemp('rm') / name
        config = tiny_models.config('qwen3', num_hidden_layers=1, num_labels=1)
        torch.manual_seed(seed)
        transformers.Qwen3ForSequenceClassification(config).float().save_pretrained(folder)
        tiny_models.tokenizer().save_pretrained(folder)
        folders.append(folder)
    return folders


def _direct(folder: Path, conversations: list[list[dict[str, str]]]) -> list[float]:
    """The classifier's output on each conversation by transformers alone, one at a time."""
    import torch
    import transformers
    from tests import tiny_models
    tokenizer = tiny_models.tokenizer()
    model = transformers.Qwen3ForSequenceClassification.from_pretrained(folder).eval()
    scores = []
    for messages in conversations:
        text = ''.join(f'<|im_start|>{message["role"]}\n{message["content"]}<|im_end|>\n' for message in messages)
        with torch.no_grad():
            scores.append(model(input_ids=torch.tensor([tokenizer.encode(text)])).logits[0, 0].item())
    return scores


def test_several_models_beside_a_function_score_what_transformers_scores_and_are_weighted(ranks: Any, tiny_model: Any, tmp_path: Path,
                                                                                         classifiers: list[Path]) -> None:
    short, other = classifiers
    (tmp_path / 'digits_reward.py').write_text(RM_PLUGIN)
    argv = arguments(tmp_path, tiny_model('qwen3'), train_iters=1, max_completion_length=6, log_completions='true',
                     reward_model=[short, other, short], reward_model_plugin=['default', 'default', 'count_turns'],
                     reward_model_type=['qwen3'] * 3, reward_template=['chatml'] * 3, reward_weights=[1.0, 0.5, 2.0, 0.25])
    logs, = ranks.run(train, argv, world_size=1, deadline=300.)[-1].logs
    rows = [json.loads(line) for line in (tmp_path / 'out' / 'completions.jsonl').read_text().splitlines()]
    assert len(rows) == 8
    conversations = [[*row['prompt'], {'role': 'assistant', 'content': row['completion']}] for row in rows]
    for folder, name in ((short, 'short'), (other, 'other')):
        assert [row[name] for row in rows] == pytest.approx(_direct(folder, conversations), abs=1e-5)
        assert logs[f'rewards/{name}/mean'] == pytest.approx(sum(row[name] for row in rows) / 8, abs=1e-6)
    assert rows[0]['short'] != rows[0]['other']
    turns = len(conversations[0])
    assert all(row['short_2'] == turns for row in rows if len(row['completion']) % 2 == 0), 'another model of one name, another plug-in'
    expected = [row['Digits'] + 0.5 * row['short'] + 2.0 * row['other'] + 0.25 * (turns if len(row['completion']) % 2 == 0 else 0.0)
                for row in rows]
    assert logs['reward'] == pytest.approx(sum(expected) / 8, abs=1e-5)
    assert logs['profiling/Time taken: reward/short_2'] >= 0.0


@pytest.mark.parametrize('changes, message', [
    ({'reward_model_plugin': ['default', 'genrmm']}, "unknown plug-in 'genrmm'. Did you mean genrm"),
    ({'reward_model_plugin': ['default']}, '--reward_model_plugin has 1 values .* there are 2 reward models'),
    ({'reward_weights': [1.0, 1.0]}, '--reward_weights has 2 values, but there are 3'),
])
def test_a_wrong_list_is_refused_before_anything_is_loaded(ranks: Any, tiny_model: Any, tmp_path: Path, classifiers: list[Path],
                                                           changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ranks.run(names_only, [str(path) for path in classifiers], changes, world_size=1)


def names_only(paths: list[str], changes: dict[str, Any]) -> list[str]:
    """The rewarder's names as a run that replays rollouts knows them."""
    from types import SimpleNamespace

    from swift_megatron_grpo.reward_models import load_reward_models
    from swift_megatron_grpo.step.reward import Rewarder
    args = SimpleNamespace(**{'reward_model': paths, 'reward_model_plugin': None, 'reward_model_type': None, 'reward_template': None,
                              'reward_model_revision': None, 'replay_rollouts': 'somewhere', 'reward_funcs': ['format'], 'reward_weights': None,
                              'use_gym_env': False, **changes})
    return Rewarder(args, None, load_reward_models(args, None)).names  # type: ignore[arg-type]


def test_replayed_rollouts_need_the_names_only(ranks: Any, classifiers: list[Path]) -> None:
    assert ranks.run(names_only, ['/x/rm/', str(classifiers[0]), '/y/rm'], {}, world_size=1) == [['Format', 'rm', 'short', 'rm_2']]
