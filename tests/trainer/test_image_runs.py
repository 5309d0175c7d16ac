"""GRPO on images: what engine, trainer and rewards see of them, and images that cannot be read."""
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from swift_megatron_grpo.errors import UserError
from tests import tiny_vision
from tests.step.images import image_arguments

pytestmark = [pytest.mark.heavy, pytest.mark.skipif(importlib.util.find_spec('qwen_vl_utils') is None, reason='qwen_vl_utils is not installed')]

REWARDS = '''

class Pictures(ORM):

    def __call__(self, completions, images=None, **kwargs):
        rows = images or [None] * len(completions)
        assert all(row is None or all('path' in image for image in row) for row in rows), rows
        return [float(len(row or ())) + 0.001 * len(completion) for row, completion in zip(rows, completions)]


orms['pictures'] = Pictures
'''


@pytest.fixture(scope='module')
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision.build('qwen2_5_vl', tmp_path_factory.mktemp('vision') / 'qwen2_5_vl')


@pytest.fixture(scope='module')
def internvl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision.build('internvl_hf', tmp_path_factory.mktemp('vision') / 'internvl_hf')


def dataset(folder: Path, sizes: list[tuple[int, int]], broken: int | None = None) -> Path:
    """8 rows: every fourth without an image, every fourth with two; the image of row `broken` is not one."""
    images = tiny_vision.write_images(folder / 'images', sizes)
    rows = []
    for i in range(8):
        mine = [] if i % 4 == 3 else [images[i % len(images)]] + ([images[(i + 1) % len(images)]] if i % 4 == 2 else [])
        if i == broken:
            mine = [str(folder / 'images' / 'broken.png')]
            Path(mine[0]).write_bytes(b'not a picture')
        rows.append({'messages': [{'role': 'user', 'content': '<image>' * len(mine) + f'what is {i} + 1?'}], **({'images': mine} if mine else {})})
    path = folder / 'images.jsonl'
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return path


def arguments_of(folder: Path, model: Path, **changes: Any) -> list[str]:
    argv = image_arguments(folder, model, model.name, None, **{'reward_funcs': 'pictures', 'max_completion_length': 12, 'num_generations': 4,
                                                                'global_batch_size': 16, 'steps_per_generation': 2, 'generation_batch_size': 32,
                                                                'train_iters': 2, 'train_dataloader_shuffle': 'false', 'dataset_shuffle': 'false', **changes})
    plugin = folder / 'tiny_image_tokens.py'
    plugin.write_text(plugin.read_text() + REWARDS)
    return argv


def train_and_watch(argv: list[str]) -> dict[str, Any]:
    """Trains; what was seen on the way, on every rank."""
    import qwen_vl_utils

    from swift_megatron_grpo.step.forward import collect_logprobs
    from tests.rollouts.running import trainer_and_data
    trainer, datasets = trainer_and_data(argv)
    seen: dict[str, Any] = {'fetched': 0, 'encoded': 0, 'pixels': []}
    fetch, encode, collect = qwen_vl_utils.fetch_image, trainer.batches.encode, trainer.collect

    def watched_fetch(*args: Any, **kwargs: Any) -> Any:
        image = fetch(*args, **kwargs)
        seen['fetched'] += 1
        seen['pixels'].append(image.size[0] * image.size[1])
        return image

    def watched_encode(*args: Any, **kwargs: Any) -> Any:
        seen['encoded'] += 1
        return encode(*args, **kwargs)

    def watched_collect(index: int) -> Any:
        generation = collect(index)
        rollouts, steps = generation.scored.rollouts, generation.steps
        seen['rewards'] = generation.scored.rewards_NF[:, 0].tolist()
        seen['prompt_tokens'] = [rollout.num_prompt_tokens for rollout in rollouts]
        seen['images_of_rows'] = [len(generation.scored.samples_P[rollout.prompt_index].images or ()) for rollout in rollouts]
        engine = [step.table.rollout_logprobs_K for step in steps]
        own = [trainer.learner._whole(logprobs_K) for logprobs_K, _ in collect_logprobs(trainer.policy, steps, trainer.device)]
        seen['engine_against_trainer'] = max(float((a - b).abs().max()) for a, b in zip(engine, own))
        positions = [(m.inputs['input_ids'].reshape(-1)[m.logit_positions_C + 1], m.target_ids_C) for step in steps for m in step.micro_batches]
        seen['targets_are_the_next_tokens'] = all(bool((a == b).all()) for a, b in positions)
        seen['image_inputs'] = sum(runs_of_placeholders(m.inputs['mm_token_type_ids']) for step in steps for m in step.micro_batches)
        return generation

    qwen_vl_utils.fetch_image, trainer.batches.encode, trainer.collect = watched_fetch, watched_encode, watched_collect
    try:
        trainer.train(*datasets)
    finally:
        qwen_vl_utils.fetch_image = fetch
    return seen


def runs_of_placeholders(types: Any) -> int:
    """How many images a micro-batch holds, by its placeholders."""
    is_image = types.reshape(-1) == 1
    return int(is_image.sum() - (is_image[1:] & is_image[:-1]).sum())


SIZES = [(56, 56), (112, 64), (64, 96)]


# With vLLM: test_vllm_families.py.
ENGINES: dict[str, tuple[str, int, dict[str, Any]]] = {
    'transformers': ('model', 1, {}),
    'transformers-tp2': ('model', 2, {'tensor_model_parallel_size': 2}),
    'transformers-internvl': ('internvl', 1, {}),
}


@pytest.mark.parametrize('engine', ENGINES)
def test_engine_trainer_and_rewards_see_the_same_images(ranks: Any, request: pytest.FixtureRequest, tmp_path: Path, engine: str) -> None:
    fixture, world_size, layout = ENGINES[engine]
    argv = arguments_of(tmp_path, request.getfixturevalue(fixture), dataset=dataset(tmp_path, SIZES), **layout)
    results = ranks.run(train_and_watch, argv, world_size=world_size, deadline=300.)
    for seen in results:
        assert seen['engine_against_trainer'] < 2e-5
        assert seen['targets_are_the_next_tokens']
        assert [int(reward) for reward in seen['rewards']] == seen['images_of_rows']
        assert seen['images_of_rows'] == [n for n in (1, 1, 2, 0) * 2 for _ in range(4)]
        assert seen['image_inputs'] == sum(seen['images_of_rows'])
    assert sum(seen['encoded'] for seen in results) == 32, 'each rollout once, over all ranks'


def test_max_pixels_bounds_what_engine_and_trainer_encode(ranks: Any, model: Path, tmp_path: Path) -> None:
    data = dataset(tmp_path, [(336, 336), (448, 280), (280, 364)])
    seen = ranks.run(train_and_watch, arguments_of(tmp_path, model, dataset=data, max_pixels=56 * 56 * 4), world_size=1, deadline=300.)[0]
    # Afterwards sides are rounded to the grid of 28 pixels.
    assert seen['fetched'] > 32 and max(seen['pixels']) <= (2 * 56 + 14)**2
    assert seen['engine_against_trainer'] < 2e-5
    assert max(seen['prompt_tokens']) < 100


def test_an_image_that_cannot_be_read_is_named_with_its_row(ranks: Any, model: Path, tmp_path: Path) -> None:
    argv = arguments_of(tmp_path, model, dataset=dataset(tmp_path, SIZES, broken=5))
    with pytest.raises(UserError, match=r'Data set row 5 .*broken\.png'):
        ranks.run(train_and_watch, argv, world_size=1, deadline=300.)


def test_truncation_strategy_delete_replaces_a_prompt_whose_image_cannot_be_read(ranks: Any, model: Path, tmp_path: Path) -> None:
    data = dataset(tmp_path, SIZES, broken=1)
    argv = arguments_of(tmp_path, model, dataset=data, truncation_strategy='delete', generation_batch_size=16, steps_per_generation=1)
    seen = ranks.run(train_and_watch, argv, world_size=1, deadline=300.)[0]
    assert seen['images_of_rows'][:8] != seen['images_of_rows'][8:] and len(seen['rewards']) == 16
