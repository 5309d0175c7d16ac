"""A data file that `datasets` reads is not refused, and one that it cannot read is named with its line."""
import json
import re
import warnings

import pytest

from swift_megatron_grpo.args.data_files import broken_row

ROW = '{"messages": [{"role": "user", "content": "1+1"}], "solution": "2"}\n'
MANY = ROW * 3
READABLE = {
    'lines': MANY,
    'blank lines at the end': MANY + '\n\n',
    'no newline at the end': MANY.rstrip('\n'),
    'one row': ROW,
    'an array in a line': f'[{ROW}, {ROW}]',
    'an array over lines': json.dumps([json.loads(ROW)] * 2, indent=2),
    'windows': MANY.replace('\n', '\r\n'),
    'a mark of byte order': '\ufeff' + MANY,
    'beyond ascii': ROW.replace('1+1', '一加一') * 2,
    'a missing column': ROW + '{"messages": [{"role": "user", "content": "2"}]}\n',
}
BROKEN = {
    'cut off': (ROW + ROW[:30] + '\n' + ROW, 'line 2: no JSON \\('),
    'cut off at the end': (MANY + ROW[:30], 'line 4: no JSON \\('),
    'single quotes': (ROW + "{'messages': []}\n", "line 2: no JSON .*{'messages'"),
    'a list for a row': (ROW + '["1+1"]\n', 'line 2: a row is an object {...}, and this is \\["1\\+1"\\]'),
    'text': ('What is 1+1?\n', 'line 1: no JSON'),
    'first line': (ROW[:-10] + '\n' + MANY, 'line 1: no JSON'),
    'a comma behind': (ROW + ROW.strip() + ',\n' + ROW, 'line 2: no JSON'),
    'an array cut off': ('[' + ROW + ',\n' + ROW, 'line 1: no JSON'),
}


def read_by_datasets(path, tmp_path):
    from datasets import load_dataset
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return load_dataset('json', data_files=str(path), split='train', cache_dir=str(tmp_path / 'cache'))


@pytest.mark.parametrize('ending', ['jsonl', 'json'])
@pytest.mark.parametrize('kind', READABLE)
def test_what_datasets_reads_is_not_refused(kind, ending, tmp_path):
    path = tmp_path / f'data.{ending}'
    path.write_bytes(READABLE[kind].encode())
    assert len(read_by_datasets(path, tmp_path)) >= 1
    assert broken_row(str(path)) is None


@pytest.mark.parametrize('ending', ['jsonl', 'json'])
@pytest.mark.parametrize('kind', BROKEN)
def test_what_it_cannot_read_is_named_with_its_line(kind, ending, tmp_path):
    content, words = BROKEN[kind]
    path = tmp_path / f'data.{ending}'
    path.write_bytes(content.encode())
    with pytest.raises(Exception):  # noqa: B017 (whatever pyarrow or pandas raise)
        read_by_datasets(path, tmp_path)
    found = broken_row(str(path))
    assert found is not None
    assert found.startswith(str(path))
    assert re.search(words, found), found


def test_what_is_not_utf_8(tmp_path):
    path = tmp_path / 'data.jsonl'
    path.write_bytes(ROW.encode() + ROW.replace('1+1', 'é').encode('latin-1'))
    assert 'line 2: not UTF-8 (byte 44 is 0xe9)' in broken_row(str(path))
