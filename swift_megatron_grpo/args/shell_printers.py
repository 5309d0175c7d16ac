"""Commands whose output only rearranges text, for $( ... ) (import tier 0; pure).

Each printer takes (words behind the name, text given to it, the folder that `cd` led to) and gives what it prints, or None where it would
have to be run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from .shell_expand import Expander
from .shell_tree import Node, Parser


def printed(text: str, values: Expander, folder: str) -> str | None:
    """What `$(text)` prints where that can be told without running anything; None else. Pipes, and `cd FOLDER && pwd`."""
    items = Parser(text).parse().items
    output: str | None = ''
    for number, (command, operator) in enumerate(items):
        words = _known_words(command, values)
        if output is None or words is None or (number < len(items) - 1 and operator not in ('|', '&&')):
            return None
        if words[0] == 'cd' and len(words) == 2:
            folder = os.path.normpath(os.path.join(folder, words[1]))
        elif operator == '&&':
            return None
        elif words == ['cat'] and command.heredocs:
            output = command.heredocs[-1].body
        else:
            output = PRINTERS[words[0]](words[1:], output, folder) if words[0] in PRINTERS else None
    return output


def _known_words(command: Node, values: Expander) -> list[str] | None:
    if command.kind != 'simple':
        return None
    unknown, values.unknown = values.unknown, False
    words = [field for word in command.words for field in values.fields(word)]
    known, values.unknown = not values.unknown, unknown
    return words if known and words else None


def formatted(text: str, values: list[str]) -> str:
    remaining = list(values)
    filled = re.sub(r'%[-\d.]*[sdif]', lambda _: remaining.pop(0) if remaining else '', text)
    return filled.replace('\\n', '\n').replace('\\t', '\t').replace('%%', '%')


def _echo(words: list[str], given: str, folder: str) -> str:
    newline = '' if words[:1] == ['-n'] else '\n'
    return ' '.join(word for word in words if word not in ('-n', '-e')) + newline


def _translate(words: list[str], given: str, folder: str) -> str | None:
    plain = [word.encode().decode('unicode_escape') for word in words]
    if len(plain) == 2 and plain[0] == '-d':
        return ''.join(char for char in given if char not in plain[1])
    same = len(plain) == 2 and len(plain[0]) == len(plain[1])
    return given.translate(str.maketrans(plain[0], plain[1])) if same else None


def _count(words: list[str], given: str, folder: str) -> str | None:
    sizes = {'-l': given.count('\n'), '-w': len(given.split()), '-c': len(given)}
    return f'{sizes[words[0]]}\n' if len(words) == 1 and words[0] in sizes else None


def _fields_of(words: list[str], given: str, folder: str) -> str | None:
    """awk that counts or picks fields: -F',' '{print NF}'."""
    text = ' '.join(words)
    match = re.fullmatch(r'-F\s*(\S) \{\s*print (NF|\$\d+);?\s*\}', text)
    if match is None:
        return None
    rows = [line.split(match.group(1)) for line in given.splitlines()]
    picked = [str(len(row)) if match.group(2) == 'NF' else (row[int(match.group(2)[1:]) - 1 :] or [''])[0] for row in rows]
    return ''.join(value + '\n' for value in picked)


def _sequence(words: list[str], given: str, folder: str) -> str | None:
    if not words or not all(re.fullmatch(r'-?\d+', word) for word in words) or len(words) > 3:
        return None
    numbers = [int(word) for word in words]
    first, step, last = (1, 1, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1] if len(numbers) == 3 else 1, numbers[-1])
    return ''.join(f'{number}\n' for number in range(first, last + (1 if step > 0 else -1), step or 1)[:1000])


PRINTERS: dict[str, Callable[[list[str], str, str], str | None]] = {
    'echo': _echo,
    'printf': lambda words, given, folder: formatted(words[0], words[1:]) if words else None,
    'basename': lambda words, given, folder: (
        os.path.basename(words[0].rstrip('/')).removesuffix(words[1] if len(words) > 1 else '') + '\n' if words else None
    ),
    'dirname': lambda words, given, folder: (os.path.dirname(words[0].rstrip('/')) or '.') + '\n' if len(words) == 1 else None,
    'pwd': lambda words, given, folder: (folder or '.') + '\n',
    'which': lambda words, given, folder: f'{words[0]}\n' if len(words) == 1 else None,
    'seq': _sequence,
    'tr': _translate,
    'wc': _count,
    'awk': _fields_of,
}
