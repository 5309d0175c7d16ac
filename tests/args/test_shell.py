"""Scripts are read as a shell would read them, and never run."""

import pytest

from swift_megatron_grpo.args import scripts
from swift_megatron_grpo.args.shell import ScriptReader


def commands(text, **environ):
    reader = ScriptReader(text, environ)
    return [command.words for command in reader.read()]


@pytest.mark.parametrize(
    ('text', 'words'),
    [
        ('a b  c', ['a', 'b', 'c']),
        ('a \\\n  b \\\n  c', ['a', 'b', 'c']),
        ('a \'b c\' "d e"', ['a', 'b c', 'd e']),
        ('a "b\\"c" d\\ e', ['a', 'b"c', 'd e']),
        ('a \'{"x": 1}\'', ['a', '{"x": 1}']),
        ('a # a comment', ['a']),
        ('a b#5', ['a', 'b#5']),
        ('X=1\na $X ${X}2 "$X 3" \'$X\'', ['a', '1', '12', '1 3', '$X']),
        ('X="1 2"\na $X "$X"', ['a', '1', '2', '1 2']),
        ('X=run_$(date +%m%d)\na out/$X $X.log', ['a', 'out/run_$(date +%m%d)', 'run_$(date +%m%d).log']),
        ('a ${X:-d} ${Y:-} "${Y:-}"', ['a', 'd', '']),
        ('Y=v\na ${X:-$Y} ${X:-"p q"} ${Y:+z} ${Y-w}', ['a', 'v', 'p', 'q', 'z', 'v']),
        ('A=(x "y z"  # note\n  w)\na "${A[@]}" ${A[0]} ${#A[@]}', ['a', 'x', 'y z', 'w', 'x', '3']),
        ('A=(x)\nA+=(y)\na ${A[@]}', ['a', 'x', 'y']),
        ('A=()\na "${A[@]}" "$@" b"${A[@]}"', ['a', 'b']),
        ('N=4\na $((N * 2 + 1)) $(( $N / 2 ))', ['a', '9', '2']),
        ('P=/x/y.json\na ${P##*/} ${P%.json} ${P/x/z}', ['a', 'y.json', '/x/y', '/z/y.json']),
        ('a > log 2>&1', ['a']),
        ('a 2>> err < in b', ['a', 'b']),
        ('export X=1 Y=2\na $X$Y', ['a', '12']),
        ('X=1; Y=$X\na $Y', ['a', '1']),
        ('X=p\nX+=q\na $X', ['a', 'pq']),
        ('if [ -z "$X" ]; then X=1; fi\na $X', ['a', '1']),
        ('a \\\r\n  b\r\n', ['a', 'b']),
    ],
)
def test_words_are_those_of_a_shell(text, words):
    assert [command for command in commands(text) if command[0] == 'a'] == [words]


def test_variables_of_the_environment_are_known_and_prefixes_stay_with_their_command():
    reader = ScriptReader('export A=1\nB=2 run $A $C\nnext $B', {'C': '3'})
    first, second = reader.read()
    assert first.words == ['run', '1', '3']
    assert first.environment == {'A': '1', 'B': '2', 'C': '3'}
    assert second.words == ['next']
    assert second.environment == {'A': '1', 'C': '3'}
    assert reader.notes == ['$B is not set anywhere in the script or the environment; it counts as empty.']


def test_pipes_background_and_here_documents_separate_commands():
    text = 'a 1 | tee log & b 2 && c 3\ncat <<EOF\na not this\nEOF\nd 4'
    assert commands(text) == [['a', '1'], ['tee', 'log'], ['b', '2'], ['c', '3'], ['cat'], ['d', '4']]


def test_a_command_substitution_is_not_run_and_is_reported(tmp_path):
    marker = tmp_path / 'marker'
    reader = ScriptReader(f'a $(touch {marker}) `touch {marker}`', {})
    assert reader.read()[0].words == ['a', f'$(touch {marker})', f'`touch {marker}`']
    assert len(reader.notes) == 2
    assert not marker.exists()


@pytest.mark.parametrize(
    ('text', 'argv', 'processes'),
    [
        ('NPROC_PER_NODE=4 swift rlhf --beta 0', ['--beta', '0'], '4'),
        ('export NPROC_PER_NODE=2\nnohup swift rlhf run.yaml > log 2>&1 &', ['run.yaml'], '2'),
        ('torchrun --nproc_per_node=8 /opt/swift/cli/rlhf.py --beta 0', ['--beta', '0'], '8'),
        ('python -m torch.distributed.run --nproc-per-node 8 swift/cli/rlhf.py --beta 0', ['--beta', '0'], '8'),
        ('srun -N 1 NPROC_PER_NODE=1 swift rlhf --beta 0', ['--beta', '0'], None),
        ('python -m swift.cli.main rlhf --beta 0', ['--beta', '0'], None),
        ('CMD="swift rlhf"\n$CMD --beta 0', ['--beta', '0'], None),
        ('run() {\n  swift rlhf --beta 0\n}\nrun', ['--beta', '0'], None),
        ('for b in 0 0.1; do\n  swift rlhf --beta $b\ndone', ['--beta', '0'], None),
        ('swift rlhf --beta 0 "$@"', ['--beta', '0'], None),
        ('env NPROC_PER_NODE=3 swift rlhf --beta 0', ['--beta', '0'], '3'),
        ('accelerate launch --num_processes 16 --num_machines 2 swift/cli/rlhf.py --beta 0', ['--beta', '0'], '8'),
        ('declare -a A=(--beta 0)\nswift rlhf "${A[@]}"', ['--beta', '0'], None),
        ('ssh node1 "cd /work && NPROC_PER_NODE=8 swift rlhf --beta 0"', ['--beta', '0'], '8'),
        ("docker exec box bash -lc 'NPROC_PER_NODE=2 swift rlhf --beta 0'", ['--beta', '0'], '2'),
        ('torchrun --nproc_per_node 4 $(which swift) rlhf --beta 0', ['--beta', '0'], '4'),
        ('uv run swift rlhf --beta 0', ['--beta', '0'], None),
        ('GPUS=0,1,2\nNPROC_PER_NODE=$(echo $GPUS | tr "," "\\n" | wc -l) swift rlhf --beta 0', ['--beta', '0'], '3'),
        ("N=$(echo 0,1 | awk -F',' '{print NF}')\nNPROC_PER_NODE=$N swift rlhf --beta 0", ['--beta', '0'], '2'),
        ('swift rlhf --beta\\\r\n 0\r\n', ['--beta', '0'], None),
    ],
)
def test_the_training_command_is_found_behind_its_launcher(text, argv, processes):
    script = scripts.read_script(text, {})
    assert [item.argv for item in script.found] == [argv]
    assert script.found[0].environment.get('NPROC_PER_NODE') == processes


def test_a_script_knows_where_it_lies():
    text = 'cd "$(dirname "${BASH_SOURCE[0]}")/.."\nROOT=$(cd "$(dirname "$0")" && pwd)\nswift rlhf --run_name ${0##*/} --output_dir $ROOT/out\n'
    found = scripts.read_script(text, {}, 'jobs/grpo/run.sh').found[0]
    assert (found.folder, found.argv) == ('jobs', ['--run_name', 'run.sh', '--output_dir', 'jobs/jobs/grpo/out'])
    unnamed = scripts.read_script(text, {})
    assert unnamed.notes[0] == '$(dirname "${BASH_SOURCE[0]}") is a command; it is not run, and stands here as text.'


def test_a_server_and_a_trainer_in_one_file():
    text = 'CUDA_VISIBLE_DEVICES=7 swift rollout --model m --port 8001 &\nsleep 60\nNPROC_PER_NODE=4 swift rlhf --rlhf_type grpo\n'
    script = scripts.read_script(text, {})
    assert script.servers == ['swift rollout --model m --port 8001']
    assert [item.line for item in script.found] == [3]


def test_a_line_that_a_comment_cut_off_is_reported():
    script = scripts.read_script('swift rlhf --a 1 \\\n  # --b 2 \\\n  --c 3\n', {})
    assert script.found[0].argv == ['--a', '1']
    assert script.notes == ['Line 3 begins with --c: a comment, a blank line or a missing backslash before it ends the command above.']


def test_writing_changes_one_place():
    text = '#!/bin/bash\n# note\nNPROC_PER_NODE=4 \\\nswift rlhf \\\n    --rlhf_type grpo\n'
    script = scripts.read_script(text, {})
    assert scripts.write_script(script) == text.replace('swift rlhf \\', 'swift rlhf --backend megatron \\')
    again = scripts.read_script(scripts.write_script(script), {})
    assert scripts.write_script(again) == again.text, 'what has it already stays as it is'
    config = scripts.read_script('swift rlhf run.yaml --beta 0', {})
    assert scripts.write_script(config) == 'swift rlhf run.yaml --backend megatron --beta 0'


def test_a_megatron_command_keeps_what_it_means_by_saying_nothing():
    script = scripts.read_script('megatron rlhf --rlhf_type grpo --tuner_type lora', {})
    assert scripts.write_script(script) == (
        'swift rlhf --backend megatron --use_vllm true --padding_free true --recompute_granularity selective --dataloader_num_workers 4 '
        '--merge_lora true --rlhf_type grpo --tuner_type lora'
    )


def test_a_megatron_command_keeps_its_folder_its_projects_and_the_loss_of_its_turns():
    script = scripts.read_script(
        'megatron rlhf --rlhf_type grpo --model a/Qwen3-8B --report_to tensorboard wandb swanlab --swanlab_project own '
        '--multi_turn_scheduler gym_scheduler',
        {},
    )
    assert ' '.join(script.found[0].extra).endswith(
        '--dataloader_num_workers 4 --loss_scale last_round --wandb_project megatron-swift --output_dir megatron_output/Qwen3-8B'
    )


def test_a_value_that_doubles_without_end_ends_the_reading():
    script = scripts.read_script('A=xy\nf() { A="$A$A"; swift rlhf --words "$A"; f; f; }\nf\nswift rlhf', {})
    assert script.notes == ['A value grows beyond 131,072 characters, more than a command can be given; what follows is left out.']
    assert [len(call.argv[1]) for call in script.found] == [2**n for n in range(2, 18)]


def test_a_yaml_file_gets_one_line_more(tmp_path):
    path = tmp_path / 'run.yaml'
    path.write_text('# note\nrlhf_type: grpo\nmodel: m  # here\n', encoding='utf-8')
    script = scripts.read_yaml(str(path), {})
    assert scripts.write_yaml(script, str(path)) == '# note\nrlhf_type: grpo\nbackend: megatron\nmodel: m  # here\n'
