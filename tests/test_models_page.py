"""docs/models.md says what the tests run, no more and no less."""
from pathlib import Path

from tests import families, tiny_vision
from tests.platform.test_families import RUNS as FAMILY_RUNS
from tests.platform.test_families import WHOLE_RUNS
from tests.step.test_images import ADAPTED as IMAGES_ADAPTED
from tests.step.test_images import KINDS, LAYOUTS, RUNS
from tests.trainer.test_families import TRAINED
from tests.trainer.test_vllm_families import FAMILIES as TEXT_IN_ENGINE
from tests.trainer.test_vllm_families import IMAGES as IMAGES_IN_ENGINE

PAGE = Path(__file__).resolve().parents[1] / 'docs' / 'models.md'
COLUMNS = ('logits', 'step', 'LoRA', 'export', 'vLLM', 'TP', 'PP', 'CP', 'EP')


def table() -> dict[str, dict[str, str]]:
    lines = PAGE.read_text(encoding='utf-8').split('| family |')[1].split('\n\n')[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip('|').split('|')] for line in lines]
    return {row[0]: dict(zip(COLUMNS, row[1:], strict=True)) for row in cells}


def test_the_table_is_what_the_tests_run() -> None:
    def word(tested: bool, has: bool = True) -> str:
        return 'yes' if tested else 'path' if has else '-'

    expected = {}
    for name in families.FAMILIES:
        layouts, whole = [layout for family, layout in FAMILY_RUNS if family == name], name in WHOLE_RUNS
        expected[name] = {'logits': 'yes', 'step': word(name in TRAINED), 'LoRA': word(name in TRAINED), 'export': word(name in TRAINED),
                          'vLLM': word(name in TEXT_IN_ENGINE),
                          'TP': word(any(layout.tp > 1 for layout in layouts)), 'PP': word(whole or any(layout.pp > 1 for layout in layouts)),
                          'CP': word(whole or any(layout.cp > 1 for layout in layouts)),
                          'EP': word(any(layout.ep > 1 for layout in layouts), name in families.EXPERTS)}
    for name in KINDS:
        parallel = {key for kind, layout in RUNS if kind == name for key in LAYOUTS[layout][1]}
        expected[name] = {'logits': 'yes', 'step': 'yes', 'LoRA': word(name in IMAGES_ADAPTED), 'export': 'yes', 'vLLM': word(name in IMAGES_IN_ENGINE),
                          'TP': word('tensor_model_parallel_size' in parallel), 'PP': word('pipeline_model_parallel_size' in parallel),
                          'CP': word('context_parallel_size' in parallel), 'EP': '-'}
    assert set(KINDS) == set(tiny_vision.KINDS)
    assert table() == expected
