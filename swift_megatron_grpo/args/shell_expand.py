"""Words into fields: braces, variables, arrays, arithmetic (import tier 0; nothing is run)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from .shell_tree import Parser, Part, Word
from .shell_values import Arithmetic, replace, trim

Value = str | list[str] | dict[str, str]
MOST_CHARACTERS = 131_072  # of one value; Linux hands no longer word to a command
_RANGE = re.compile(r'(-?\d+)\.\.(-?\d+)')
_REFERENCE = re.compile(r'([A-Za-z_]\w*|\d+)(?:\[(.*?)\])?(.*)', re.DOTALL)


class Expander:
    """Variables, and what words become with them.

    ``notes`` collects what could not be known; ``unknown`` is set where such a thing stands in a value, until somebody resets it.
    ``capture`` says what a harmless command substitution prints, or None.
    """

    def __init__(self, environ: Mapping[str, str], notes: list[str], name: str, capture: Callable[[str], str | None]) -> None:
        self.exported: dict[str, str] = dict(environ)
        self.variables: dict[str, Value] = {}
        self.positional: list[str] | None = None  # None at the top of a script, where they are not known
        self.notes = notes
        self.name = name
        self.capture = capture
        self._not_run: set[str] = set()
        self.unknown = False
        self.overlong = False  # a value was longer than any command could take

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def lookup(self, name: str) -> Value | None:
        if name.isdigit() and name != '0' and self.positional is not None:
            return self.positional[int(name) - 1] if int(name) <= len(self.positional) else None
        if name == '0' and self.name:
            return self.name
        return self.variables.get(name, self.exported.get(name))

    def assign(self, name: str, value: str) -> None:
        self.overlong = self.overlong or len(value) > MOST_CHARACTERS
        self.variables[name] = value
        if name in self.exported:
            self.exported[name] = value

    # -- words

    def fields(self, word: Word) -> list[str]:
        """The fields that a word becomes: braces first, then variables; unquoted values are split at blanks."""
        return [field for parts in _braces(self._tilde(word.parts)) for field in self._fields(parts)]

    def text(self, word: Word) -> str:
        """A word as one text, as in an assignment: no splitting, no braces."""
        return ' '.join(self._fields([('', True, False), *((text, quoted or expands, expands) for text, quoted, expands in word.parts)]))

    def pattern(self, word: Word) -> list[tuple[str, bool]]:
        """(text, quoted) pieces, for a comparison with a pattern."""
        return [(' '.join(self._values(text, True)) if expands else text, quoted) for text, quoted, expands in word.parts]

    def _tilde(self, parts: list[Part]) -> list[Part]:
        home = self.exported.get('HOME')
        starts = parts and parts[0] == ('~', False, False) and (len(parts) == 1 or parts[1][0][:1] in ('/', ''))
        return [(home, True, False), *parts[1:]] if home and starts else parts

    def _fields(self, parts: list[Part]) -> list[str]:
        fields: list[tuple[str, bool]] = [('', False)]  # (text, whether it is a field even if it is empty)
        vanished = False

        def add(text: str, solid: bool) -> None:
            fields[-1] = (fields[-1][0] + text, fields[-1][1] or solid or bool(text))

        for text, quoted, expands in parts:
            if not expands:
                add(text, quoted)
                continue
            values = self._values(text, quoted)
            vanished = vanished or not values  # "$@" and "${empty[@]}" are no word at all, also inside quotes
            # what could not be worked out stands as one piece of text
            whole = quoted or values == [text]
            for number, value in enumerate(values):
                for place, piece in enumerate([value] if whole else self._split(value)):
                    if number or place:
                        fields.append(('', False))
                    add(piece, whole)
        words = [text for text, solid in fields if solid]
        return [] if vanished and words == [''] else words

    def _split(self, value: str) -> list[str]:
        """At blanks; a command that stands as text, also in a variable's value, stays in one piece."""
        for text in self._not_run:
            value = value.replace(text, re.sub(r'[ \t\n]', lambda blank: chr(0xE000 + ord(blank[0])), text))
        back = {0xE000 + ord(blank): blank for blank in ' \t\n'}
        return [piece.translate(back) for piece in re.split(r'[ \t\n]+', value)]

    # -- one expansion

    def _values(self, text: str, quoted: bool) -> list[str]:
        if text.startswith('$((') and text.endswith('))'):
            return [self.arithmetic(text[3:-2])]
        if text.startswith(('$(', '`')):
            printed = self.capture(text[2:-1] if text.startswith('$(') else text[1:-1])
            if printed is None:
                self.unknown = True
                self._not_run.add(text)
                self.note(f'{text} is a command; it is not run, and stands here as text.')
                return [text]
            return [printed.rstrip('\n')]
        body = text[2:-1] if text.startswith('${') else text[1:]
        if not body:
            return ['$']
        if body[0] in '@*#?$!-0' or (body.startswith('BASH_SOURCE') and not self.name):
            special = self._special(body, text)
            if special is not None:
                return special
        match = _REFERENCE.fullmatch(body.lstrip('!#') if body[0] in '!#' else body)
        if match is None or (body[0] == '#' and match.group(3)):
            return self._not_understood(text)
        name, index, rest = match.groups()
        if body[0] == '!':
            target = self.lookup(name)
            if index is not None and isinstance(target, dict):
                return list(target)
            name = target if isinstance(target, str) else ''
        items = self._items(name, index)
        if body[0] == '#':
            return [str(len(items) if index in ('@', '*') else len(items[0]) if items else 0)]
        if index in ('@', '*') and (not rest or (rest[0] == ':' and rest[1:2] not in ('-', '+', '=', '?'))):
            items = self._slice(items, rest)
            return [' '.join(items)] if index == '*' and quoted else items
        return [self._modified(name, ' '.join(items) if items else None, rest, text)]

    def _special(self, body: str, text: str) -> list[str] | None:
        if body[0] in '@*':
            if self.positional is not None:
                return self._slice([self.name, *self.positional], body[1:], first=1) if body[1:] else list(self.positional)
            self.note(
                f'{text} stands for the arguments of the script; they are not known here, and count as none. Add them to this command to '
                'plan with them.'
            )
            return []
        if body == '#':
            return [str(len(self.positional or []))]
        if body == '0' and self.name:
            return [self.name]
        if body in ('?', '$', '!', '-', '0') or body.startswith('BASH_SOURCE'):
            self.unknown = True
            return [text]
        return None

    def _items(self, name: str, index: str | None) -> list[str]:
        """The values that NAME or NAME[index] stands for; an empty list where there is none."""
        value = self.lookup(name)
        if name == 'BASH_SOURCE' and value is None and self.name:
            value = self.name
        if isinstance(value, dict):
            key = self.inner(index or '0')
            return list(value.values()) if index in ('@', '*') else [value[key]] if key in value else []
        items = [] if value is None else [value] if isinstance(value, str) else value
        if index is None:
            return items[:1]
        if index in ('@', '*'):
            return list(items)
        try:
            number = int(self.arithmetic(index))
        except ValueError:
            return []
        return [items[number]] if -len(items) <= number < len(items) else []

    def _slice(self, items: list[str], rest: str, first: int = 0) -> list[str]:
        if not rest:
            return items
        start, _, size = rest[1:].partition(':')
        begin = int(self.arithmetic(start or str(first)))
        return items[begin:][: int(self.arithmetic(size))] if size else items[begin:]

    def _modified(self, name: str, value: str | None, rest: str, text: str) -> str:
        """${NAME} with what stands behind the name: a default, a pattern, a part."""
        if rest[:2] in (':-', ':=') or rest[:1] in ('-', '='):
            colon, argument = rest[0] == ':', rest[2:] if rest[0] == ':' else rest[1:]
            if value is None or (colon and not value):
                value = self.inner(argument)
                if '=' in rest[:2]:
                    self.assign(name, value)
            return value
        if rest[:2] == ':+' or rest[:1] == '+':
            given = bool(value) if rest[0] == ':' else value is not None
            return self.inner(rest[2:] if rest[0] == ':' else rest[1:]) if given else ''
        if value is None:
            return self._unset(name, text)
        if not rest or rest[:2] == ':?' or rest[0] == '?':
            return value
        if rest[0] in '#%':
            size = 2 if rest[:2] in ('##', '%%') else 1
            return trim(value, rest[:size], self._pattern(rest[size:]))
        if rest[0] == '/':
            everywhere = rest[:2] == '//'
            old, _, new = re.sub(r'\\/', '\0', rest[2 if everywhere else 1 :]).partition('/')
            return replace(value, self._pattern(old.replace('\0', '/')), self.inner(new), everywhere=everywhere)
        if rest in ('^^', ',,', '^', ','):
            head = value.upper() if rest[0] == '^' else value.lower()
            return head if len(rest) == 2 else head[:1] + value[1:]
        if rest[0] == ':':
            return self._part(value, rest)
        self._not_understood(text)
        return text

    def _part(self, value: str, rest: str) -> str:
        start, _, size = rest[1:].partition(':')
        begin = int(self.arithmetic(start))
        begin = max(0, len(value) + begin) if begin < 0 else begin
        if not size:
            return value[begin:]
        number = int(self.arithmetic(size))
        return value[begin : begin + number] if number >= 0 else value[begin:number]

    def _unset(self, name: str, text: str) -> str:
        if name.isdigit():
            if self.positional is not None:
                return ''
            self.unknown = True
            self.note(f'{text} is an argument of the script; it is not known here, and stands as text.')
            return text
        if name not in self.variables:
            self.note(f'${name} is not set anywhere in the script or the environment; it counts as empty.')
        return ''

    def _not_understood(self, text: str) -> list[str]:
        self.unknown = True
        self.note(f'{text} is not understood, and stands here as text.')
        return [text]

    def inner(self, text: str) -> str:
        """An argument inside ${...}: quotes and variables, blanks kept."""
        return ''.join(piece for piece, _ in self._pattern(text))

    def _pattern(self, text: str) -> list[tuple[str, bool]]:
        parser = Parser(text)
        pieces: list[tuple[str, bool]] = []
        while parser.position < len(text):
            if text[parser.position] in ' \t\n;|&()<>':
                pieces.append((text[parser.position], False))
                parser.position += 1
            else:
                pieces += self.pattern(parser.word())
        return pieces

    def arithmetic(self, text: str) -> str:
        plain = self.inner(text) if '$' in text or '`' in text else text
        try:
            return str(Arithmetic(plain, self.number, self.assign).value())
        except (ValueError, RecursionError):
            self.unknown = True
            self.note(f'$(({text})) is not understood, and counts as 0.')
            return '0'

    def number(self, name: str) -> str:
        items = self._items(name, None)
        return items[0] if items else ''


def _braces(parts: list[Part]) -> list[list[Part]]:
    """{a,b} and {1..3}, outside quotes, into several words."""
    for start, part in enumerate(parts):
        if part != ('{', False, False):
            continue
        depth, cuts = 0, [start]
        for position in range(start, len(parts)):
            if parts[position][1] or parts[position][2]:
                continue
            char = parts[position][0]
            depth += (char == '{') - (char == '}')
            if char == ',' and depth == 1:
                cuts.append(position)
            if depth == 0:
                inner = [parts[left + 1 : right] for left, right in zip(cuts, [*cuts[1:], position])]
                numbers = _RANGE.fullmatch(''.join(text for text, _, _ in inner[0])) if len(inner) == 1 else None
                if numbers is not None:
                    low, high = int(numbers.group(1)), int(numbers.group(2))
                    step = 1 if high >= low else -1
                    inner = [[(str(number), True, False)] for number in list(range(low, high + step, step))[:1000]]
                elif len(inner) == 1:
                    break
                return [
                    [*parts[:start], *head, *rest]
                    for choice in inner
                    for head in _braces(choice)
                    for rest in _braces(parts[position + 1 :])
                ]
    return [parts]
