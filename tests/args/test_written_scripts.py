"""`--write` changes one place of a script and nothing else, whatever the script looks like. Scripts are drawn at random."""

import random

import pytest

from swift_megatron_grpo.args import resolve, scripts
from swift_megatron_grpo.errors import UserError

WORDS = ('a b', "it's", 'say "hi"', '\\boxed{}', '$HOME', '{"x": 1}', '#5', 'two\nlines', '*', 'a;b|c&d', 'tab\there', '(x)', '', '中文')


def quoted(rng, word):
    """One of the ways in which a shell reads ``word``."""
    single = "'" + word.replace("'", "'\\''") + "'"
    double = '"' + ''.join('\\' + char if char in '$`"\\' else char for char in word) + '"'
    bare = ''.join('\\' + char if not (char.isalnum() or char in '_/.-') and char != '\n' else char for char in word)
    return rng.choice([single, double] + ([bare] if word and '\n' not in word else []))


def drawn(rng):
    """(text, words of each training command)."""
    lines, expected = ['#!/bin/bash', ''], []
    for _ in range(rng.randint(1, 3)):
        lines += rng.choice([[], ['# swift rlhf --not this'], ['', '   '], ['export A=1  # note'], ["cat > f <<'X'", 'swift rlhf --no', 'X'],
                             ['swift rollout --model m > log 2>&1 &', 'sleep 5'], ['if true; then', '  echo "swift rlhf"', 'fi']])  # fmt: skip
        words = ['--rlhf_type', 'grpo']
        for number in range(rng.randint(0, 5)):
            words += [f'--name{number}', *(rng.choice(WORDS) for _ in range(rng.randint(1, 2)))]
        head = ''.join(rng.choice(['', 'NPROC_PER_NODE=4 ', "A='x y' \\\n", 'CUDA_VISIBLE_DEVICES=0,1 \\\n']) for _ in range(2))
        text = head + rng.choice(['swift rlhf', 'swift  rlhf', 'swift \\\n    rlhf', 'nohup swift rlhf', '"swift" rlhf'])
        for word in words:
            text += rng.choice([' ', '  ', ' \\\n    ', ' \\\n\t']) + (
                word if word.startswith('--') or word == 'grpo' else quoted(rng, word)
            )
        text += rng.choice(['', '  # swift rlhf', ' > log.txt 2>&1 &', ' |& tee log', ' && echo done', ' \\\n'])
        lines.append(text)
        expected.append(words)
    return '\n'.join(lines) + rng.choice(['', '\n', '\n\n']), expected


@pytest.mark.parametrize('seed', range(40))
def test_a_written_script_differs_by_the_backend_alone(seed):
    rng = random.Random(seed)
    for _ in range(25):
        text, expected = drawn(rng)
        script = scripts.read_script(text, {})
        assert [item.argv for item in script.found] == expected, text
        written = scripts.write_script(script)
        assert written.replace(' --backend megatron', '') == text
        assert written.count(' --backend megatron') == len(expected)
        again = scripts.read_script(written, {})
        assert [item.argv for item in again.found] == [['--backend', 'megatron', *words] for words in expected], written
        assert [item.environment for item in again.found] == [item.environment for item in script.found]
        assert scripts.write_script(again) == written


def test_a_written_script_plans_without_errors(workplace):
    (workplace / 'run.sh').write_text(
        'ARGS=(--rlhf_type grpo --model tiny --dataset data.jsonl)  # common\n'
        'launch() {\n  NPROC_PER_NODE=2 swift rlhf "${ARGS[@]}" "$@"\n}\n'
        'launch --reward_funcs accuracy --per_device_train_batch_size 4 --beta 0\n'
        'launch --reward_funcs accuracy --per_device_train_batch_size 4 --beta 0.1\n',
        encoding='utf-8',
    )
    script = scripts.read_script((workplace / 'run.sh').read_text(encoding='utf-8'), {}, 'run.sh')
    written = scripts.write_script(script)
    assert written == script.text.replace('swift rlhf', 'swift rlhf --backend megatron')
    found = scripts.read_script(written, {}, 'run.sh').found
    assert [item.argv[-1] for item in found] == ['0', '0.1']
    for item in found:
        plan = resolve(item.argv, item.environment, elsewhere=True)
        assert (plan.is_megatron, plan.errors) == (True, [])


@pytest.mark.parametrize(
    ('text', 'written'),
    [
        ('CMD="swift rlhf --beta 0"\neval "$CMD"\n', 'CMD="swift rlhf --beta 0"\neval "$CMD" --backend megatron\n'),
        ("bash -c 'swift rlhf --beta 0'\n", "bash -c 'swift rlhf --backend megatron --beta 0'\n"),
        ('B=0\nbash -c "swift rlhf --beta $B"\n', 'B=0\nbash -c "swift rlhf --backend megatron --beta $B"\n'),
        (
            'ssh n "cd $D && megatron rlhf --tuner_type full --use_vllm true --padding_free true --recompute_granularity none '
            '--dataloader_num_workers 1"',
            'ssh n "cd $D && swift rlhf --backend megatron --tuner_type full --use_vllm true --padding_free true '
            '--recompute_granularity none --dataloader_num_workers 1"',
        ),
        ('CMD=(swift rlhf --beta 0)\n"${CMD[@]}"\n', 'CMD=(swift rlhf --beta 0)\n"${CMD[@]}" --backend megatron\n'),
        ('for b in 0 1; do swift rlhf --beta $b; done\n', 'for b in 0 1; do swift rlhf --backend megatron --beta $b; done\n'),
        ('torchrun --nproc_per_node 2 swift/cli/rlhf.py --beta 0', 'torchrun --nproc_per_node 2 swift/cli/rlhf.py --backend megatron --beta 0'),
        ('swift rlhf --backend megatron --beta 0\n', 'swift rlhf --backend megatron --beta 0\n'),
    ],
)  # fmt: skip
def test_the_backend_stands_where_the_command_takes_it(text, written):
    assert scripts.write_script(scripts.read_script(text, {})) == written


@pytest.mark.parametrize(
    ('name', 'text', 'written'),
    [
        (
            'a.json',
            '{\n    "rlhf_type": "grpo",\n    "beta": 0\n}\n',
            '{\n    "backend": "megatron",\n    "rlhf_type": "grpo",\n    "beta": 0\n}\n',
        ),
        ('a.json', '{"rlhf_type": "grpo"}', '{"backend": "megatron","rlhf_type": "grpo"}'),
        ('a.yaml', '# note\n---\n{rlhf_type: grpo, beta: 0}\n', '# note\n---\n{backend: megatron,rlhf_type: grpo, beta: 0}\n'),
        ('a.yaml', '"rlhf_type": grpo # x\nbeta: 0\n', '"rlhf_type": grpo # x\nbackend: megatron\nbeta: 0\n'),
        ('a.yaml', 'rlhf_type: grpo\r\nbeta: 0\r\n', 'rlhf_type: grpo\r\nbackend: megatron\r\nbeta: 0\r\n'),
        ('a.yaml', 'beta: 0\nrlhf_type: grpo', 'beta: 0\nrlhf_type: grpo\nbackend: megatron'),
    ],
)
def test_a_written_configuration_differs_by_one_key(name, text, written):
    script = scripts.read_yaml_text(text, name, {})
    assert scripts.write_yaml(script, name) == written
    again = scripts.read_yaml_text(written, name, {})
    assert again.found[0].has_backend
    assert sorted(again.found[0].argv) == sorted(['--backend', 'megatron', *script.found[0].argv])


@pytest.mark.parametrize(
    ('text', 'written'),
    [
        ('swift rlhf --beta 0 > log 2>&1 &\n', "swift rlhf --backend megatron --beta 0 --tp 4 --system 'a b' > log 2>&1 &\n"),
        ('swift rlhf \\\n  --beta 0 \\\n\nwait\n', "swift rlhf --backend megatron \\\n  --beta 0 --tp 4 --system 'a b' \\\n\nwait\n"),
        ('swift rlhf "$@"\n', 'swift rlhf --backend megatron --tp 4 --system \'a b\' "$@"\n'),
        ('swift rlhf', "swift rlhf --backend megatron --tp 4 --system 'a b'"),
        ('swift rlhf --backend megatron', "swift rlhf --backend megatron --tp 4 --system 'a b'"),
        ('swift rlhf run.yaml', "swift rlhf run.yaml --backend megatron --tp 4 --system 'a b'"),
    ],
)  # fmt: skip
def test_added_arguments_are_written_at_the_end_of_the_command(text, written):
    more = ['--tp', '4', '--system', 'a b']
    assert scripts.write_script(scripts.read_script(text, {}), more) == written


def test_added_arguments_are_written_as_keys_of_a_configuration():
    more = [
        '--tensor_model_parallel_size',
        '4',
        '--reward_funcs',
        'a',
        'b',
        '--sequence-parallel',
        'true',
        '--system',
        'x: y',
        '--model',
        'a/b',
    ]
    script = scripts.read_yaml_text('rlhf_type: grpo\nbeta: 0\n', 'a.yaml', {})
    assert scripts.write_yaml(script, 'a.yaml', more) == (
        'rlhf_type: grpo\nbackend: megatron\ntensor_model_parallel_size: 4\nreward_funcs: ["a", "b"]\nsequence_parallel: true\n'
        'system: "x: y"\nmodel: a/b\nbeta: 0\n'
    )
    script = scripts.read_yaml_text('{"rlhf_type": "grpo"}', 'a.json', {})
    assert scripts.write_yaml(script, 'a.json', more[:2]) == '{"backend": "megatron","tensor_model_parallel_size": 4,"rlhf_type": "grpo"}'
    with pytest.raises(UserError, match='a.json has rlhf_type already; change it there'):
        scripts.write_yaml(script, 'a.json', ['--rlhf_type', 'grpo'])
