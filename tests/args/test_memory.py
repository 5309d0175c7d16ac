"""Parameter counts and bytes a device, from config.json alone."""

import json
from pathlib import Path

import pytest

from swift_megatron_grpo.args import memory, resolve
from swift_megatron_grpo.args.known_models import known_config
from swift_megatron_grpo.args.parameters import count

from .conftest import other_errors

CONFIGS = Path(__file__).parent / 'configs'


def config_of(name):
    return json.loads((CONFIGS / f'{name}.json').read_text(encoding='utf-8'))


# published sizes: model cards of Qwen and DeepSeek (B parameters; active a token where the model has experts)
PUBLISHED = [
    ('qwen3-30b-a3b', 30.5e9, 3.3e9),
    ('qwen3-235b-a22b', 235e9, 22e9),
    ('deepseek-v3', 671e9, 37e9),
    ('qwen2.5-72b', 72.7e9, None),
    ('qwen2.5-vl-72b', 73.4e9, None),
    ('qwen3-8b', 8.2e9, None),
    ('qwen2.5-0.5b', 0.494e9, None),
]


@pytest.mark.parametrize(('name', 'total', 'active'), PUBLISHED)
def test_parameter_counts_are_within_one_per_cent_of_the_published_ones(name, total, active):
    model = count(config_of(name))
    assert model.total == pytest.approx(total, rel=0.01)
    if active is not None:
        assert model.active == pytest.approx(active, rel=0.02)


def test_exact_counts_of_released_checkpoints():
    counts = {name: count(config_of(name)).total for name, *_ in PUBLISHED}
    assert counts['qwen3-30b-a3b'] == 30_532_122_624
    assert counts['qwen3-235b-a22b'] == 235_093_634_560
    assert counts['deepseek-v3'] == 671_026_419_200
    assert counts['qwen2.5-72b'] == 72_706_203_648
    assert counts['qwen2.5-vl-72b'] == 73_410_777_344
    assert counts['qwen3-8b'] == 8_190_735_360
    assert counts['qwen2.5-0.5b'] == 494_032_768


# parameters of the released checkpoints, by their hub names
KNOWN = [
    ('Qwen/Qwen2.5-0.5B-Instruct', 494_032_768),
    ('Qwen/Qwen2.5-1.5B', 1_543_714_304),
    ('Qwen/Qwen2.5-3B-Instruct', 3_085_938_688),
    ('Qwen/Qwen2.5-Math-7B', 7_615_616_512),
    ('Qwen/Qwen2.5-14B', 14_770_033_664),
    ('Qwen/Qwen2.5-32B-Instruct', 32_763_876_352),
    ('Qwen/Qwen2.5-72B-Instruct', 72_706_203_648),
    ('Qwen/Qwen3-0.6B', 596_049_920),
    ('Qwen/Qwen3-1.7B', 1_720_574_976),
    ('Qwen/Qwen3-4B-Instruct-2507', 4_022_468_096),
    ('Qwen/Qwen3-8B', 8_190_735_360),
    ('Qwen/Qwen3-14B', 14_768_307_200),
    ('Qwen/Qwen3-32B', 32_762_123_264),
    ('Qwen/Qwen3-30B-A3B-Instruct-2507', 30_532_122_624),
    ('Qwen/Qwen3-235B-A22B', 235_093_634_560),
    ('Qwen/Qwen2.5-VL-3B-Instruct', 3_754_622_976),
    ('Qwen/Qwen2.5-VL-7B-Instruct', 8_292_166_656),
    ('Qwen/Qwen2.5-VL-72B-Instruct', 73_410_777_344),
    ('meta-llama/Llama-3.1-8B-Instruct', 8_030_261_248),
    ('meta-llama/Llama-3.3-70B-Instruct', 70_553_706_496),
    ('deepseek-ai/DeepSeek-R1', 671_026_419_200),
]


@pytest.mark.parametrize(('name', 'parameters'), KNOWN)
def test_a_model_that_is_not_here_is_known_by_its_published_sizes(name, parameters):
    assert count(known_config(name)).total == parameters


def test_other_names_are_not_taken_for_known_ones():
    assert [
        name for name in ('my/qwen3-8b-merged-v2', 'Qwen/Qwen3-9B', 'Qwen/Qwen2.5-Omni-7B', 'Qwen/Qwen3-VL-8B') if known_config(name)
    ] == []


def test_bytes_of_a_small_dense_model_by_hand():
    # hidden 64, 2 layers, 2 heads of 32, MLP 128, vocabulary 100, untied, no bias, QK norm:
    # attention 64 x 192 + 64 x 64 = 16384, norms 2 x 64 + 2 x 32 = 192, MLP 3 x 64 x 128 = 24576: 41152 a layer; 2 x 6400 embedding
    # and output; 64 of the last norm
    config = {
        'model_type': 'qwen3', 'hidden_size': 64, 'intermediate_size': 128, 'num_hidden_layers': 2, 'num_attention_heads': 2,
        'num_key_value_heads': 2, 'head_dim': 32, 'vocab_size': 100, 'tie_word_embeddings': False,
    }  # fmt: skip
    model = count(config)
    assert model.total == 2 * 41152 + 2 * 6400 + 64 == 95168
    one = memory.estimate(model, memory.Settings(bytes_per_value=4, tokens=10, has_reference=True))
    assert one['weights'] == 4 * 95168
    assert one['gradients'] == 4 * 95168
    assert one['optimizer'] == 8 * 95168
    assert one['reference'] == 4 * 95168
    # a layer: 10 tokens x (4 x 64 + q 64 + kv 128 + attention 64 + 3 x 128) x 4 bytes; kept: 10 x 64 x 4 x 2 layers; embedding 10 x 64 x 4
    assert one['activations'] == 4 * 10 * (256 + 256 + 384) + 4 * 10 * 64 * 2 + 4 * 10 * 64
    assert one['logits'] == 10 * 100 * 12
    assert one['total_bytes'] == sum(one[part] for part in memory.PARTS)


def test_each_part_is_divided_by_what_shards_it():
    model = count(config_of('qwen2.5-72b'))
    whole = memory.estimate(model, memory.Settings(tokens=8192))
    sharded = memory.estimate(model, memory.Settings(tp=8, dp=4, sequence_parallel=True, tokens=8192))
    assert sharded['weights'] == pytest.approx(whole['weights'] / 8, rel=0.01)
    assert sharded['gradients'] == pytest.approx(whole['gradients'] / 8, rel=0.01)
    assert sharded['optimizer'] == pytest.approx(whole['optimizer'] / 8 / 4, rel=0.01)
    assert sharded['activations'] == pytest.approx(whole['activations'] / 8, rel=0.01)
    without = memory.estimate(model, memory.Settings(tp=8, dp=4, distributed_optimizer=False, tokens=8192))
    assert without['optimizer'] == pytest.approx(whole['optimizer'] / 8, rel=0.01)


def test_the_first_pipeline_stage_holds_the_micro_batches_of_the_stages_behind_it():
    model = count(config_of('qwen2.5-72b'))
    kept = 2 * 4096 * 8192 * 20  # bf16, tokens, hidden, layers of one of four stages
    layer_and_embedding = 2 * 4096 * (4 * 8192 + 8192 + 2048 + 8192 + 3 * 29568) + 2 * 4096 * 8192
    for micro_batches, in_flight in ((1, 1), (3, 3), (8, 4)):
        first = memory._stage(model, memory.Settings(pp=4, tokens=4096, num_micro_batches=micro_batches), 0, memory.DEVICE_BYTES)
        assert first['activations'] == kept * in_flight + layer_and_embedding


def test_lora_trains_its_adapter_only():
    model = count(config_of('qwen2.5-72b'))
    lora = memory.estimate(model, memory.Settings(full=False, lora_rank=8, has_reference=True, tokens=4096))
    assert lora['parameters_trainable'] == 8 * 80 * (8192 + 10240 + 8192 + 8192 + 8192 + 2 * 29568 + 29568 + 8192)
    assert lora['gradients'] == 4 * lora['parameters_trainable']
    assert lora['reference'] == 0


# name, layout, and the parameters on the fullest device: dense ones, those of experts, and frozen ones among the dense (a vision tower).
# Counted layer by layer from the published sizes: qwen3-30b-a3b at TP 4, EP 8 has 48 x (18874368 / 4 of attention + 266496 of norms and
# routers) + 2 x 151936 x 2048 / 4 + 2048 dense parameters, and 48 x 128 x 3 x 2048 x 768 / 8 of experts.
LAYOUTS = [
    ('qwen3-30b-a3b', {'tp': 4, 'ep': 8, 'dp': 2}, 394868736, 3623878656, 0),
    ('qwen3-30b-a3b', {'tp': 2, 'ep': 4, 'dp': 4}, 776943616, 7247757312, 0),
    ('qwen3-30b-a3b', {'pp': 2, 'ep': 4, 'dp': 4}, 770547712, 3623878656, 0),
    ('qwen3-235b-a22b', {'tp': 4, 'pp': 2, 'ep': 8, 'dp': 8}, 1018437376, 14193524736, 0),
    ('qwen3-235b-a22b', {'tp': 8, 'ep': 32, 'dp': 8}, 1043475968, 7096762368, 0),
    ('qwen3-235b-a22b', {'tp': 4, 'pp': 4, 'ep': 16, 'dp': 4}, 596191232, 3623878656, 0),
    ('deepseek-v3', {'tp': 8, 'ep': 64, 'dp': 32}, 3041760768, 10217324544, 0),
    ('deepseek-v3', {'tp': 8, 'pp': 4, 'ep': 32, 'dp': 8}, 819702784, 5637144576, 0),
    ('deepseek-v3', {'tp': 4, 'pp': 16, 'ep': 16, 'dp': 4}, 515645440, 2818572288, 0),
    ('qwen2.5-72b', {'tp': 8, 'dp': 4}, 9089429504, 0, 0),
    ('qwen2.5-72b', {'tp': 8, 'pp': 2, 'dp': 2}, 4544718848, 0, 0),
    ('qwen2.5-72b', {'tp': 4, 'pp': 4, 'dp': 2}, 4700104704, 0, 0),
    ('qwen2.5-vl-72b', {'tp': 8, 'dp': 4}, 9794003200, 0, 704573696),
    ('qwen2.5-vl-72b', {'tp': 8, 'pp': 2, 'dp': 2}, 5249284352, 0, 704573696),
    ('qwen2.5-vl-72b', {'tp': 4, 'pp': 4, 'dp': 2}, 5404670208, 0, 704573696),
]


@pytest.mark.parametrize(('name', 'layout', 'dense', 'experts', 'frozen'), LAYOUTS, ids=lambda value: str(value).replace(' ', ''))
def test_bytes_a_device_of_large_models_in_three_layouts_each(name, layout, dense, experts, frozen):
    settings = memory.Settings(**layout, sequence_parallel=True, tokens=16)
    result = memory.estimate(count(config_of(name)), settings)
    assert result['weights'] == 2 * (dense + experts)
    assert result['gradients'] == 4 * (dense - frozen + experts)
    replicas = settings.tp * settings.dp // settings.ep
    assert result['optimizer'] == 12 * ((dense - frozen) // settings.dp + experts // max(1, replicas))


# fewest devices of 80 GB, full parameters with a reference, 4096 tokens a micro-batch; and the same with LoRA
SMALLEST = [
    ('qwen3-30b-a3b', 8, 1),
    ('qwen3-235b-a22b', 64, 8),
    ('deepseek-v3', 256, 32),
    ('qwen2.5-72b', 32, 2),
    ('qwen2.5-vl-72b', 32, 2),
]


@pytest.mark.parametrize(('name', 'full', 'lora'), SMALLEST)
def test_the_smallest_layout_that_fits_80_gb_and_none_smaller(name, full, lora):
    config = config_of(name)
    for trains_all, devices in ((True, full), (False, lora)):
        best = memory.smallest_layout(config, full=trains_all, has_reference=True, tokens=4096)
        assert best['devices'] == devices
        assert best['train_bytes'] <= 80e9
        assert best['tp'] * best['pp'] * best['dp'] == devices
        assert memory.smallest_layout(config, full=trains_all, has_reference=True, tokens=4096, max_devices=devices // 2) is None


def test_the_plan_has_the_estimate_and_says_when_it_does_not_fit(workplace):
    (workplace / 'large').mkdir()
    (workplace / 'large' / 'config.json').write_text(json.dumps(config_of('qwen2.5-72b')), encoding='utf-8')
    argv = '--rlhf_type grpo --backend megatron --model large --model_type qwen2 --dataset data.jsonl --reward_funcs accuracy --tuner_type full --beta 0'
    plan = resolve([*argv.split(), '--tensor_model_parallel_size', '8', '--batch_check', 'exact', '--per_device_train_batch_size', '8'],
                   {'NPROC_PER_NODE': '8'})  # fmt: skip
    assert other_errors(plan) == []
    assert plan.memory['parameters_total'] == 72_706_203_648
    assert plan.memory['weights'] == pytest.approx(2 * 72.7e9 / 8, rel=0.01)
    assert plan.memory['reference'] == 0
    assert not plan.memory['fits']
    assert any('does not fit' in warning and '32 (TP 8, PP 2' in warning for warning in plan.warnings), plan.warnings


def test_the_precision_is_the_one_that_ms_swift_takes(workplace):
    text = '--rlhf_type grpo --backend megatron --model tiny --dataset data.jsonl --reward_funcs accuracy --tuner_type full'
    single = resolve([*text.split(), '--fp16', 'false', '--bf16', 'false'], {}).memory
    half = resolve([*text.split(), '--torch_dtype', 'bfloat16'], {}).memory
    mixed = resolve(text.split(), {})
    assert (single['weights'], half['weights'], mixed.memory['weights']) == (4 * 95168, 2 * 95168, 2 * 95168)
    assert (single['optimizer'], half['optimizer']) == (8 * 95168, 12 * 95168)
    assert any('fp16 mixed precision' in warning for warning in mixed.warnings)
