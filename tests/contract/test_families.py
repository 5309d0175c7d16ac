"""What the plan reads off source texts about families is what ms-swift and mcore-bridge say when they are imported."""
import json
import subprocess
import sys

import pytest

from swift_megatron_grpo.args.families import _model_name, known_families, types_to_choose, unknown_family

PROGRAM = '''
import json
from swift_megatron_grpo import cpu
cpu.activate()
from mcore_bridge.model import get_mcore_model_type
from swift.model import MODEL_MAPPING
architectures, convertible = {}, []
for name, meta in MODEL_MAPPING.items():
    for architecture in meta.architectures:
        architectures.setdefault(architecture, []).append(name)
    if meta.mcore_model_type or get_mcore_model_type(name):
        convertible.append(name)
from swift.model import ModelType
from swift.template import TEMPLATE_MAPPING
names = [value.rsplit('/', 1)[-1].lower() for meta in MODEL_MAPPING.values() for group in meta.model_groups for model in group.models
         for value in (model.ms_model_id, model.hf_model_id, model.model_path) if value]
print(json.dumps([architectures, convertible, list(MODEL_MAPPING), list(TEMPLATE_MAPPING), names]))
'''


@pytest.fixture(scope='module')
def live():
    done = subprocess.run([sys.executable, '-c', PROGRAM], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_families_read_from_text_are_those_of_the_registries(live):
    families = known_families()
    assert families.architectures == {name: set(types) for name, types in live[0].items()}
    assert set(live[1]) <= families.convertible, 'a family that converts must not be refused'
    assert families.convertible & set(live[2]) - set(live[1]) <= {'deepseek_v41', 'nemotron_h'}, 'these need newer Megatron-Core'


def test_names_of_models_are_those_of_the_registry(live):
    """One that is missed is a plan refused; one too many a refusal that comes from ms-swift."""
    assert known_families().models == set(live[4])


PATHS = ['Qwen/Qwen3-0.6B', 'models/my-qwen3/', '/x/hub/models--Qwen--Qwen3-0.6B/snapshots/12ab', 'c/Qwen/Qwen2___5-0___5B',
         'x/models/Qwen--Qwen3-1.7B/snapshots/master']


def test_a_models_name_is_read_as_ms_swift_reads_it():
    program = f'from swift.model.model_meta import get_model_name\nprint(*[get_model_name(path).lower() for path in {PATHS!r}])'
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1].split() == [_model_name(path) for path in PATHS], done.stderr


@pytest.mark.parametrize('config, model, types', [
    ({'architectures': ['Qwen3ForCausalLM']}, 'my/own', ['qwen3', 'qwen3_emb', 'qwen3_reranker']),
    ({'architectures': ['Qwen3ForCausalLM']}, '/models/Qwen3-0.6B/', []),
    ({'architectures': ['Qwen3MoeForCausalLM']}, 'my/own', []),
    ({'architectures': ['OfMyOwnForCausalLM']}, 'my/own', []),
    ({'architectures': [None]}, 'my/own', []),
    ({}, 'my/own', []),
])
def test_what_ms_swift_cannot_decide(config, model, types):
    assert types_to_choose(known_families(), config, model) == types


def test_names_of_model_types_and_templates_are_those_of_the_registries(live):
    from swift_megatron_grpo.args.registries import constants
    assert set(live[2]) <= constants('model_type') and set(live[3]) <= constants('template')


@pytest.mark.parametrize('config, given, unknown', [
    ({'architectures': ['MistralForCausalLM'], 'model_type': 'mistral'}, None, 'mistral'),
    ({'architectures': ['Qwen2ForCausalLM'], 'model_type': 'qwen2'}, None, None),
    ({'architectures': ['OfMyOwnForCausalLM'], 'model_type': 'own'}, None, None),  # a plugin can register it
    ({'architectures': ['OfMyOwnForCausalLM'], 'model_type': 'own'}, 'gemma2', 'gemma2'),
    ({}, 'qwen3', None),
    ({}, None, None),
    ({'architectures': 5}, None, None),
    ({'architectures': [['Qwen2ForCausalLM'], None]}, None, None),
])
def test_a_family_without_conversion_is_told_from_config_json(config, given, unknown):
    assert unknown_family(known_families(), config, given) == unknown
