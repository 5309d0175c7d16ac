"""Small scripts drawn at random, of the constructs that training scripts use."""

import random

VALUES = ('a', 'b c', '7', '12', 'x/y.json', '1e-6', '', 'q"z', "it's", 'a,b,c', 'A_b')
REFERENCES = (
    '$V', '${V}', '"$V"', '"${V}"', '${V:-d}', '"${V:-d e}"', '${V:+yes}', '"${V##*/}"', '${V%.json}', '${V^^}', '${V,,}', '${V:0:1}',
    '"${V//a/Z}"', '${#V}', '${V/b/}', '"${V#*,}"', '${V%%,*}',
)  # fmt: skip
CONDITIONS = (
    '[ -z "$V" ]', '[ -n "$V" ]', '[ "$V" = "7" ]', '[[ $V == a* ]]', '[[ "$V" != "12" ]]', '[[ -z $V || $V == *json ]]',
    '[[ $V =~ ^[0-9]+$ ]]', '! [ "$V" == "a" ]', '[ "$V" != a -a "$V" != b ]', 'test "$V" = "7"',
)  # fmt: skip
WORDS = (
    '"${ARR[@]}"', '${ARR[0]}', '$N', '"$N"x', 'w$N', '"${ARR[*]}"', '${#ARR[@]}', '"${ARR[@]:1}"', "$(basename 'u/v.txt')", '`echo hi`',
    '{m,n}$N', 'z{1..3}',
)  # fmt: skip
NAMES = ('A', 'B', 'C')


def draw(seed: int) -> str:
    """One script. Its `swift` commands depend on what a shell makes of everything before them."""
    rng = random.Random(seed)
    lines = ['N=3', 'ARR=()', *(f'{name}={_quoted(rng)}' for name in NAMES)]
    function = rng.random() < 0.5
    if function:
        lines += ['launch() {', *_statements(rng, 1, function=False), '  swift rlhf --call "$1" "${2}" $# "$@"', '}']
    lines += _statements(rng, 0, function)
    return '\n'.join([*lines, *(['launch last 2'] if function else []), 'swift rlhf "$A" "$B" "$C" $N "${ARR[@]}"']) + '\n'


def _quoted(rng: random.Random) -> str:
    value = rng.choice(VALUES)
    double = '"' + ''.join('\\' + char if char in '$`"\\' else char for char in value) + '"'
    return rng.choice(["'" + value.replace("'", "'\\''") + "'", double])


def _reference(rng: random.Random) -> str:
    return rng.choice(REFERENCES).replace('V', rng.choice(NAMES))


def _condition(rng: random.Random) -> str:
    return rng.choice(CONDITIONS).replace('$V', '$' + rng.choice(NAMES))


def _statements(rng: random.Random, depth: int, function: bool) -> list[str]:
    return [line for _ in range(rng.randint(1, 4)) for line in _statement(rng, depth, function)]


def _statement(rng: random.Random, depth: int, function: bool) -> list[str]:
    name, other = rng.choice(NAMES), rng.choice(NAMES)
    simple = [
        [f'{name}={_quoted(rng)}'],
        [f'{name}={_reference(rng)}  # note'],
        [f'{name}+={_quoted(rng)}'],
        [f'N=$(( ${{#{name}}} * {rng.randint(1, 5)} + {rng.randint(0, 9)} ))'],
        [f'ARR=({_quoted(rng)} {_reference(rng)}  # note', f'  {_quoted(rng)})'],
        ['ARR+=("$N" {p,q})'],
        [f'{_condition(rng)} && {name}=and || {name}=or'],
        [f'for v in {_reference(rng)} k "${{ARR[@]}}"; do {name}="${name}$v"; done'],
        ['swift rlhf --words ' + ' '.join(rng.choice([*WORDS, _reference(rng), _quoted(rng)]) for _ in range(rng.randint(0, 4)))],
    ]
    if depth < 3 and rng.random() < 0.35:
        inside = [f'  {line}' for line in _statements(rng, depth + 1, function)]
        if rng.random() < 0.5:
            return [f'case "${name}" in', f'  a|b*) {other}=first ;;', '  [0-9]*)', *inside, '  ;;', '  *) : ;;', 'esac']
        otherwise = ['else', *_statements(rng, depth + 1, function)] if rng.random() < 0.5 else []
        between = [f'elif {_condition(rng)}', 'then', f'  {other}=second'] if rng.random() < 0.4 else []
        return [f'if {_condition(rng)}; then', *inside, *between, *otherwise, 'fi']
    if function and rng.random() < 0.1:
        return [f'launch {_reference(rng)} {_quoted(rng)}']
    return rng.choice(simple)
