"""What patterns, $((arithmetic)) and tests of a shell come to (import tier 0; pure)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence

_TOKEN = re.compile(
    r'\s*(\d+#\w+|0[xX][\da-fA-F]+|\d+|[A-Za-z_]\w*|\*\*|<<|>>|<=|>=|==|!=|&&|\|\||\+\+|--|[-+*/%&|^]=|[-+*/%<>=!~&|^?:(),])'
)
_LEVELS = (('||',), ('&&',), ('|',), ('^',), ('&',), ('==', '!='), ('<', '>', '<=', '>='), ('<<', '>>'), ('+', '-'), ('*', '/', '%'))


def _one_of(text: str, greedy: bool) -> str:
    if text == '*':
        return '.*' if greedy else '.*?'
    if len(text) == 1:
        return '.' if text == '?' else re.escape(text)
    body = re.sub(r'([\[\\&|~])', r'\\\1', text[1:-1]).replace('--', r'\--')
    return f'[^{body[1:]}]' if body[0] in '!^' and len(body) > 1 else f'[{body}]'


def regex_of(pattern: Sequence[tuple[str, bool]], *, greedy: bool = True) -> str:
    """A shell pattern as a regular expression. ``pattern`` holds (text, quoted) pieces; quoted characters are literal."""
    result = ''
    for quoted, pieces in itertools.groupby(pattern, key=lambda piece: piece[1]):
        text = ''.join(piece for piece, _ in pieces)
        if quoted:
            result += re.escape(text)
            continue
        result += re.sub(r'\*|\?|\[[^\]]+\]|.', lambda match: _one_of(match.group(), greedy), text, flags=re.DOTALL)
    try:
        re.compile(result)
    except re.error:  # [z-a]: such a pattern stands for itself
        return re.escape(''.join(text for text, _ in pattern))
    return result


def matches(value: str, pattern: Sequence[tuple[str, bool]]) -> bool:
    return re.fullmatch(regex_of(pattern), value, flags=re.DOTALL) is not None


def trim(value: str, op: str, pattern: Sequence[tuple[str, bool]]) -> str:
    """${VAR#pattern} and its relatives."""
    sizes = range(len(value) + 1)
    fitting = [size for size in sizes if matches(value[:size] if op[0] == '#' else value[len(value) - size :], pattern)]
    if not fitting:
        return value
    size = fitting[-1] if len(op) == 2 else fitting[0]
    return value[size:] if op[0] == '#' else value[: len(value) - size]


def replace(value: str, pattern: Sequence[tuple[str, bool]], new: str, *, everywhere: bool) -> str:
    """${VAR/pattern/new} and ${VAR//pattern/new}."""
    expression = regex_of(pattern)
    return re.sub(expression, lambda _: new, value, count=0 if everywhere else 1, flags=re.DOTALL) if expression else value


class Arithmetic:
    """Whole-number arithmetic with variables. ``lookup`` gives a variable's text, ``assign`` takes a new value.

    Raises ValueError for what is no arithmetic.
    """

    def __init__(self, text: str, lookup: Callable[[str], str], assign: Callable[[str, str], None]) -> None:
        self.tokens: list[str] = []
        position = 0
        text = text.strip()
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                raise ValueError(f'not arithmetic: {text}')
            self.tokens.append(match.group(1))
            position = match.end()
        self.lookup, self.assign = lookup, assign
        self.at = 0

    def value(self) -> int:
        result = 0
        while self.at < len(self.tokens):
            result = self._assignment()
            if self.at < len(self.tokens) and self._next() != ',':
                raise ValueError('not arithmetic')
        return result

    def _peek(self, ahead: int = 0) -> str:
        return self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else ''

    def _next(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1] if self.at <= len(self.tokens) else ''

    def _assignment(self) -> int:
        name, op = self._peek(), self._peek(1)
        if re.match(r'[A-Za-z_]', name) and (op == '=' or (len(op) == 2 and op[1] == '=' and op[0] in '+-*/%&|^')):
            self.at += 2
            value = self._assignment()
            if op != '=':
                value = _apply(op[0], self._number(name), value)
            self.assign(name, str(value))
            return value
        condition = self._binary(0)
        if self._peek() != '?':
            return condition
        self.at += 1
        yes = self._assignment()
        if self._next() != ':':
            raise ValueError('? without :')
        no = self._assignment()
        return yes if condition else no

    def _binary(self, level: int) -> int:
        if level == len(_LEVELS):
            return self._power()
        left = self._binary(level + 1)
        while self._peek() in _LEVELS[level]:
            left = _apply(self._next(), left, self._binary(level + 1))
        return left

    def _power(self) -> int:
        base = self._unary()
        if self._peek() != '**':
            return base
        self.at += 1
        exponent = self._power()
        if not 0 <= exponent <= 64:
            raise ValueError('an exponent outside 0 to 64')
        return int(base**exponent)

    def _unary(self) -> int:
        token = self._next()
        if token in ('++', '--'):
            name = self._next()
            value = self._number(name) + (1 if token == '++' else -1)
            self.assign(name, str(value))
            return value
        if token in ('-', '+', '!', '~'):
            value = self._unary()
            return {'-': -value, '+': value, '!': int(not value), '~': ~value}[token]
        if token == '(':
            value = self._assignment()
            if self._next() != ')':
                raise ValueError('a bracket is not closed')
            return value
        value = self._number(token)
        if self._peek() in ('++', '--') and re.match(r'[A-Za-z_]', token):
            self.assign(token, str(value + (1 if self._next() == '++' else -1)))
        return value

    def _number(self, token: str, depth: int = 0) -> int:
        if re.match(r'[A-Za-z_]', token):
            text = self.lookup(token).strip()
            if depth > 8:
                raise ValueError(f'{token} stands for itself')
            return self._number(text, depth + 1) if text else 0
        if '#' in token:
            base, _, digits = token.partition('#')
            return int(digits, int(base))
        return int(token, 8 if re.fullmatch(r'0\d+', token) else 0)


def _apply(op: str, left: int, right: int) -> int:
    if op in ('/', '%'):
        if right == 0:
            raise ValueError('division by zero')
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
        return quotient if op == '/' else left - quotient * right
    if op in ('<<', '>>') and not 0 <= right <= 64:
        raise ValueError('a shift outside 0 to 64')
    return int(_OPERATIONS[op](left, right))


_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    '+': lambda a, b: a + b,
    '-': lambda a, b: a - b,
    '*': lambda a, b: a * b,
    '<<': lambda a, b: a << b,
    '>>': lambda a, b: a >> b,
    '==': lambda a, b: a == b,
    '!=': lambda a, b: a != b,
    '<': lambda a, b: a < b,
    '>': lambda a, b: a > b,
    '<=': lambda a, b: a <= b,
    '>=': lambda a, b: a >= b,
    '&': lambda a, b: a & b,
    '|': lambda a, b: a | b,
    '^': lambda a, b: a ^ b,
    '&&': lambda a, b: bool(a) and bool(b),
    '||': lambda a, b: bool(a) or bool(b),
}
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    '-eq': lambda a, b: a == b,
    '-ne': lambda a, b: a != b,
    '-gt': lambda a, b: a > b,
    '-ge': lambda a, b: a >= b,
    '-lt': lambda a, b: a < b,
    '-le': lambda a, b: a <= b,
}
# None: it cannot be known without looking at a machine
Verdict = bool | None
# of a test: (text, whether it is known, its pieces as a pattern)
Operand = tuple[str, bool, list[tuple[str, bool]]]


def test(words: Sequence[Operand], *, double: bool) -> Verdict:
    """What `[ ... ]` (``double`` false) or `[[ ... ]]` decides."""
    verdict, rest = _any_of(list(words), double)
    return verdict if not rest else None


def _any_of(words: list[Operand], double: bool) -> tuple[Verdict, list[Operand]]:
    verdict, words = _all_of(words, double)
    while words and words[0][0] in (('||',) if double else ('-o',)):
        right, words = _all_of(words[1:], double)
        verdict = True if True in (verdict, right) else None if None in (verdict, right) else False
    return verdict, words


def _all_of(words: list[Operand], double: bool) -> tuple[Verdict, list[Operand]]:
    verdict, words = _one(words, double)
    while words and words[0][0] in (('&&',) if double else ('-a',)):
        right, words = _one(words[1:], double)
        verdict = False if False in (verdict, right) else None if None in (verdict, right) else True
    return verdict, words


def _one(words: list[Operand], double: bool) -> tuple[Verdict, list[Operand]]:
    if not words:
        return False, []
    text, known, _ = words[0]
    if text == '!' and len(words) > 1:
        verdict, rest = _one(words[1:], double)
        return (None if verdict is None else not verdict), rest
    if text == '(' and len(words) > 2:
        verdict, rest = _any_of(words[1:], double)
        return verdict, rest[1:]
    if len(words) > 2 and words[1][0] in ('=', '==', '!=', '=~', '<', '>', '-nt', '-ot', '-ef', *_COMPARISONS):
        return _compare(words[0], words[1][0], words[2], double), words[3:]
    if len(words) > 1 and re.fullmatch(r'-[a-zA-Z]', text) and words[1][0] not in ('&&', '||', ')'):
        value, value_known, _ = words[1]
        if text in ('-z', '-n') and value_known:
            return (value == '') == (text == '-z'), words[2:]
        return None, words[2:]
    return (text != '' if known else None), words[1:]


def _compare(left: Operand, op: str, right: Operand, double: bool) -> Verdict:
    if not (left[1] and right[1]):
        return None
    if op in _COMPARISONS:
        if not all(re.fullmatch(r'\s*[-+]?\d+\s*', text) for text in (left[0], right[0])):
            return None
        return _COMPARISONS[op](int(left[0]), int(right[0]))
    if op in ('=', '==', '!='):
        equal = matches(left[0], right[2]) if double else left[0] == right[0]
        return equal == (op != '!=')
    if op == '=~':
        try:
            return re.search(right[0], left[0]) is not None
        except re.error:
            return None
    return left[0] < right[0] if op == '<' else left[0] > right[0] if op == '>' else None
