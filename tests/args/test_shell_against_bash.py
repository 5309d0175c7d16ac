"""What is read of a script is what bash itself would pass to `swift`: both are asked."""

import os
import random
import shutil
import subprocess

import pytest

from swift_megatron_grpo.args import scripts

from . import random_scripts

# `swift` prints its words; what would reach out of the test does nothing
PRELUDE = r"""
swift() { printf 'BEGIN\0'; printf '%s\0' "$@"; printf 'END\0'; }
nohup() { "$@"; }; timeout() { shift; "$@"; }; exec() { "$@"; }; curl() { return 1; }
env() { while [[ "$1" == *=* ]]; do shift; done; "$@"; }
"""

SCRIPTS = {
    'a function with arguments': """\
train() {
  local lr=$1
  swift rlhf --rlhf_type grpo --learning_rate $lr --beta ${2:-0.1}
}
train 1e-6 0
""",
    'a function called twice': """\
function train {
  swift rlhf --rlhf_type grpo --output_dir "$1"
}
train out/a
train out/b
""",
    'ifelse': """\
MODE=full
if [ "$MODE" = "full" ]; then
  LR=1e-6
else
  LR=1e-4
fi
swift rlhf --learning_rate $LR
""",
    'ifelse2': """\
MODE=lora
if [[ "$MODE" == "full" ]]; then LR=1e-6; elif [[ $MODE == lora ]]; then LR=1e-4; else LR=5; fi
swift rlhf --learning_rate $LR
""",
    'ifz': """\
if [ -z "$MODEL" ]; then
  MODEL=Qwen/Qwen3-8B
fi
swift rlhf --model $MODEL
""",
    'case': """\
SIZE=7b
case "$SIZE" in
  3b) M=Qwen/Qwen2.5-3B; TP=1 ;;
  7b|8b) M=Qwen/Qwen2.5-7B; TP=2 ;;
  *) M=x; TP=9 ;;
esac
swift rlhf --model $M --vllm_tensor_parallel_size $TP
""",
    'andor': """\
[ -n "$FOO" ] && X=1 || X=2
swift rlhf --beta $X
""",
    'testdefault': """\
: ${MODEL:=Qwen/Qwen3-8B}
: "${LR:=1e-6}"
swift rlhf --model "$MODEL" --learning_rate $LR
""",
    'args array multiline': """\
ARGS=(
  --rlhf_type grpo
  # comment
  --model Qwen/Qwen3-8B   # trailing
  --system "You are
two lines"
)
EXTRA=()
if true; then EXTRA+=(--beta 0.0); fi
swift rlhf "${ARGS[@]}" "${EXTRA[@]}"
""",
    'string opts': """\
OPTS="--rlhf_type grpo \\
  --model Qwen/Qwen3-8B \\
  --beta 0"
OPTS="$OPTS --num_generations 8"
OPTS+=" --temperature 1.0"
swift rlhf $OPTS
""",
    'eval': """\
CMD="swift rlhf --rlhf_type grpo --system 'a b'"
eval $CMD
""",
    'eval2': """\
CMD="swift rlhf --rlhf_type grpo --system 'a b'"
eval "$CMD"
""",
    'heredoc': """\
cat > sys.txt <<'EOF'
swift rlhf --not this
EOF
cat <<-EOF > b
	swift rlhf --nor this
	EOF
swift rlhf --system sys.txt
""",
    'heredoc quoted': """\
cat << "EOF" > ds.json
{"zero": 3}
EOF
swift rlhf --deepspeed ds.json
""",
    'subst': """\
GPUS=0,1,2,3
N=$(echo $GPUS | tr ',' '\\n' | wc -l)
NPROC_PER_NODE=$N swift rlhf --beta 0
""",
    'ansi': """\
swift rlhf --system $'line\\nnext\\ttab' --stop_words $'\\n'
""",
    'quotes mix': """\
swift rlhf --system 'It'"'"'s' --x a"b c"d --y "\\$HOME" --z "a\\\\b" --w \\"q\\"
""",
    'brace': """\
swift rlhf --reward_funcs {accuracy,format} --dataset data/{a,b}.jsonl
""",
    'brace q': """\
swift rlhf --lr_scheduler_kwargs '{"min_lr": 1e-7}' --x "{a,b}" --y {a}
""",
    'tilde': """\
export HOME=/home/u
swift rlhf --model ~/models/q --dataset ~/d.jsonl --out a~b
""",
    'semi comment': """\
export A=1;export B=2 # note
swift rlhf --x $A --y $B # tail
""",
    'cont comment end': """\
swift rlhf \\
  --a 1 \\
  --b 2 # done
""",
    'glob': """\
swift rlhf --dataset nothere/*.jsonl
""",
    'for c': """\
for ((i=0; i<2; i++)); do
  echo hi
done
swift rlhf --beta 0
""",
    'while': """\
while ! false; do break; done
swift rlhf --beta 0
""",
    'sub': """\
(cd /tmp && swift rlhf --beta 0)
""",
    'group': """\
{ swift rlhf --beta 0; } 2>&1 | tee log
""",
    'timeout': """\
timeout 3600 swift rlhf --beta 0
""",
    'indirect': """\
V=abc
N=V
swift rlhf --x ${!N}
""",
    'substring': """\
V=abcdef
swift rlhf --x ${V:0:3} --y ${V:2} --z ${V: -2}
""",
    'upper': """\
V=abC
swift rlhf --x ${V^^} --y ${V,,} --z ${V^}
""",
    'nested default': """\
swift rlhf --x ${A:-${B:-c}} --y "${A:-"d e"}"
""",
    'assoc': """\
declare -A M=([a]=1 [b]=2)
swift rlhf --x ${M[b]}
""",
    'arr idx': """\
G=(0 1 2)
G[1]=7
IDX=2
swift rlhf --x ${G[1]} --y ${G[$IDX]} --z ${#G[@]} --w "${G[*]}" --v ${G[-1]}
""",
    'arr slice': """\
G=(a b c d)
swift rlhf --x ${G[@]:1:2}
""",
    'arith': """\
A=8; B=4
let C=A*B
((D = A + B))
swift rlhf --c $C --d $D --e $((A > B ? A : B)) --f $((A % 3)) --g $((2**3)) --h $(( (A+B) / 2 ))
""",
    'test op': """\
N=8
if (( N > 4 )); then B=2; else B=1; fi
if [ $N -ge 8 ]; then C=1; else C=0; fi
swift rlhf --b $B --c $C
""",
    'replace': """\
P=Qwen/Qwen3-8B
swift rlhf --x ${P//\\//_} --y ${P##*/} --z ${P%/*} --w ${P/Qwen3/Q}
""",
    'basename': """\
MODEL=/a/b/Qwen
swift rlhf --output_dir out/$(basename $MODEL)
""",
    'dirname': """\
DIR=$(cd "$(dirname "$0")" && pwd)
swift rlhf --beta 0
""",
    'export multi': """\
export NCCL_DEBUG=INFO NPROC_PER_NODE=8 \\
  CUDA_VISIBLE_DEVICES=0,1
swift rlhf --beta 0
""",
    'empty var unquoted': """\
X=
swift rlhf --a $X --b "$X" --c ${X}
""",
    'bslash mid': """\
swift rlhf --a 1 \\
--b 2\\
 --c 3 \\

echo x
""",
    'tab indent': """\
swift rlhf \\
	--a 1 \\
	--b 2
""",
    'bs space': """\
swift rlhf --a 1 \\\x20
  --b 2
""",
    'envcmd': """\
env A=1 B=2 swift rlhf --beta 0
""",
    'herestring': """\
cat <<< "swift rlhf --no"
swift rlhf --beta 0
""",
    'dollar q': """\
swift rlhf --a "$" --b $ --c "a$" --d 5$
""",
    'hash in word': """\
swift rlhf --dataset a/b#500 c#10 --x '#' --y "#z" --z ${#}
""",
    'json quoted': """\
swift rlhf --a "{\\"x\\": 1}" --b {\\"y\\":2}
""",
    'comment bslash': """\
# comment with backslash \\
swift rlhf --beta 0
""",
    'exec': """\
exec swift rlhf --beta 0
""",
    'unset': """\
A=1; unset A
swift rlhf --a "${A-none}"
""",
    'local fn env': """\
launch() {
  NPROC_PER_NODE=$1 swift rlhf "${@:2}"
}
launch 4 --beta 0 --model x
""",
    'source': """\
source ./nothere.sh 2>/dev/null || true
swift rlhf --beta 0
""",
    'read more': """\
swift rlhf --beta 0; swift rlhf --beta 1 && swift rlhf --beta 2
""",
    'cond cmd': """\
if ! swift rlhf --beta 0; then
  echo failed; exit 1
fi
""",
    'exit early': """\
swift rlhf --beta 0
exit 0
swift rlhf --beta 1
""",
    'false if': """\
if false; then
swift rlhf --beta 1
fi
swift rlhf --beta 0
""",
    'param def space': """\
swift rlhf --system "${SYS:-You are a helpful assistant.}" --x ${Y:=1 2} --z "$Y"
""",
    'double bracket regex': """\
if [[ "abc" =~ ^a ]]; then X=1; fi
swift rlhf --x ${X:-0}
""",
    'trap': """\
trap 'kill 0' EXIT
swift rlhf --beta 0
trap - EXIT
""",
    'getopts': """\
while [[ $# -gt 0 ]]; do
  case $1 in
    --model) MODEL=$2; shift 2 ;;
    *) shift ;;
  esac
done
swift rlhf --model ${MODEL:-q}
""",
    'printf v': """\
printf -v X "%s-%d" a 3
swift rlhf --x ${X:-u}
""",
    'mapfile str': """\
read -r -d '' SYS <<'EOF'
You are "good".
Think.
EOF
swift rlhf --system "$SYS"
""",
    'catsub': """\
SYS=$(cat <<'EOF'
You are good (really).
It's fine.
EOF
)
swift rlhf --system "$SYS" --beta 0
""",
}


def passed_by_bash(text, folder):
    """The words behind `swift rlhf` of each call, in order."""
    result = subprocess.run(
        ['bash', '-c', PRELUDE + text, 'script.sh'],
        capture_output=True,
        text=True,
        cwd=folder,
        env={'PATH': os.environ['PATH'], 'HOME': '/home/u'},
        timeout=20,
        check=False,
    )
    calls, words = [], None
    for word in result.stdout.split('\0'):
        if word.endswith('BEGIN') and words is None:
            words = []
        elif word == 'END' and words is not None:
            calls.append(words[1:])
            words = None
        elif words is not None:
            words.append(word)
    return calls


@pytest.mark.skipif(shutil.which('bash') is None, reason='bash is not here')
@pytest.mark.parametrize('name', SCRIPTS)
def test_the_words_are_those_that_bash_passes(name, tmp_path):
    expected = passed_by_bash(SCRIPTS[name], tmp_path)
    assert expected, 'otherwise nothing is compared'
    script = scripts.read_script(SCRIPTS[name], {'HOME': '/home/u'}, 'script.sh')
    assert [item.argv for item in script.found] == expected, script.notes


def test_a_branch_that_depends_on_the_machine_is_read_and_said():
    script = scripts.read_script('if [ -d /data ]; then\n  N=8\nelse\n  N=4\nfi\nNPROC_PER_NODE=$N swift rlhf --beta 0\n', {})
    assert script.found[0].environment['NPROC_PER_NODE'] == '4'
    assert script.notes == [
        'Line 1: the condition of this `if` depends on the machine; its branches are all read, and the last one counts.'
    ]
    quiet = scripts.read_script('if [ ! -f d.jsonl ]; then\n  python fetch.py\nfi\nswift rlhf --beta 0\n', {})
    assert (len(quiet.found), quiet.notes[:0]) == (1, [])


def test_a_loop_over_values_plans_the_first_and_says_so():
    script = scripts.read_script('for lr in 1e-6 2e-6; do\n  swift rlhf --learning_rate $lr\ndone\n', {})
    assert [item.argv for item in script.found] == [['--learning_rate', '1e-6']]
    assert script.notes == ['The loop over lr is read with 1e-6; its other values change the same command.']


def test_a_function_that_nobody_calls_is_read_all_the_same():
    script = scripts.read_script('run() {\n  swift rlhf --output_dir "$1"\n}\n', {})
    assert script.found[0].argv == ['--output_dir', '']
    assert 'The function run is not called' in script.notes[0]


def test_a_place_left_to_fill_in_is_named():
    script = scripts.read_script('swift rlhf --vllm_server_host <node1_ip> <node2_ip> --beta 0\n', {})
    assert script.found[0].argv == ['--vllm_server_host', '<node1_ip>', '<node2_ip>', '--beta', '0']
    assert script.notes[0] == '<node1_ip> is to be filled in; a shell would read it as a redirection.'


def test_a_script_that_never_ends_is_read_to_a_bound():
    script = scripts.read_script('while true; do\n  X=$X.\ndone\nswift rlhf --beta 0\n', {})
    assert len(script.found) == 1
    scripts.read_script('f() {\n  f\n  f\n}\nf\nswift rlhf --beta 0\n', {})


def test_text_that_is_no_script_is_read_without_an_error():
    for text in (
        'swift rlhf --a "open',
        "swift rlhf --a 'open",
        'swift rlhf ${',
        'swift rlhf $(',
        'if then fi',
        '((',
        'case',
        ') } ;; done',
        'a <<X',
        '[[',
    ):
        scripts.read_script(text, {})


def test_a_broken_script_is_read_without_an_error():
    rng = random.Random(0)
    for seed in range(300):
        text = list(random_scripts.draw(seed))
        for _ in range(rng.randint(1, 8)):
            place = rng.randrange(len(text) + 1)
            text[place : place + rng.choice([0, 0, 1, 9])] = rng.choice('$(){}[]"\'`\\\n;|&<># =!*')
        scripts.write_script(scripts.read_script(''.join(text), {'HOME': '/home/u'}), ['--beta', '0'])


@pytest.mark.skipif(shutil.which('bash') is None, reason='bash is not here')
@pytest.mark.parametrize('block', range(4))
def test_scripts_drawn_at_random_are_read_as_bash_reads_them(block, tmp_path):
    calls = 0
    for seed in range(25 * block, 25 * block + 25):
        text = random_scripts.draw(seed)
        expected = passed_by_bash(text, tmp_path)
        script = scripts.read_script(text, {'HOME': '/home/u'}, 'script.sh')
        assert [item.argv for item in script.found] == expected, (text, script.notes)
        calls += len(expected)
    assert calls >= 25, 'otherwise little is compared'
