"""What the plan reads off source texts about families is what ms-swift and mcore-bridge say when they are imported."""
import json
import subprocess
import sys

import pytest

from swift_megatron_grpo.args.families import known_families, unknown_family

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
print(json.dumps([architectures, convertible, list(MODEL_MAPPING), list(TEMPLATE_MAPPING)]))
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
