"""Reading a shell script without running it (import tier 0).

Knows what training scripts use: comments, quotes, line continuations, assignments and `export`, environment prefixes, `$VAR`,
`${VAR:-default}` and their relatives, arrays, arithmetic on numbers, redirections, here-documents, several commands in a file, the usual
launchers. Loops and conditions are read once from top to bottom, functions where they are defined. A command substitution is never run;
it stays as text and is reported.
"""

from __future__ import annotations

import ast
import dataclasses
import os
import re
from collections.abc import Mapping

from .shell_values import evaluate, trim

_OPERATORS = ('&&', '||', ';;', ';', '|', '&', '\n', '(', ')')
_KEYWORDS = ('then', 'do', 'else', 'elif', 'if', 'while', 'until', '{', '}', '!', 'time', 'fi', 'done', 'esac')
_ASSIGN = re.compile(r'^([A-Za-z_]\w*)(\+?)=')
_DECLARE = ('export', 'declare', 'local', 'readonly', 'typeset')


@dataclasses.dataclass(kw_only=True, slots=True)
class Word:
    """One word of a command. ``parts`` are (text, quoted, expands) pieces; ``start`` and ``end`` are offsets in the script."""

    parts: list[tuple[str, bool, bool]]
    start: int
    end: int

    @property
    def raw(self) -> str:
        return ''.join(text for text, _, _ in self.parts)


@dataclasses.dataclass(kw_only=True, slots=True)
class Command:
    """One command with its words expanded.

    ``environment`` holds the variables in force for it, ``spans`` the offsets of the word that each expanded word came from, and
    ``folder`` what the `cd` commands before it lead to.
    """

    words: list[str]
    spans: list[tuple[int, int]]
    environment: dict[str, str]
    folder: str


class ScriptReader:
    """One pass over a script. ``commands`` lists what would be started, ``notes`` what could not be known without running it."""

    def __init__(self, text: str, environ: Mapping[str, str]) -> None:
        self.text = text
        self.exported: dict[str, str] = dict(environ)
        self.variables: dict[str, str | list[str]] = {}
        self.folder = ''
        self.commands: list[Command] = []
        self.notes: list[str] = []
        self.position = 0

    def read(self) -> list[Command]:
        while self.position < len(self.text):
            words = self._simple_command()
            if words:
                self._run(words)
        return self.commands

    # -- lexing

    def _simple_command(self) -> list[Word]:
        words: list[Word] = []
        heredocs: list[str] = []
        text = self.text
        while self.position < len(text):
            char = text[self.position]
            if text.startswith('\\\n', self.position) or text.startswith('\\\r\n', self.position):
                self.position += 2 if text[self.position + 1] == '\n' else 3
            elif char in ' \t\r':
                self.position += 1
            elif char == '#':
                end = text.find('\n', self.position)
                self.position = len(text) if end < 0 else end
            elif self._array_follows(words):
                words.append(self._array(words.pop()))
            elif (redirection := re.compile(r'\d*(<<<|<<-?|>>|>&|<&|&>>|&>|>\||>|<)').match(text, self.position)) is not None:
                self.position = redirection.end()
                target = self._word() if self._skip_blank() else None
                if redirection.group(1) in ('<<', '<<-') and target is not None:
                    heredocs.append(target.raw)
            elif (op := next((op for op in _OPERATORS if text.startswith(op, self.position)), None)) is not None:
                self.position += len(op)
                if op == '\n':
                    for marker in heredocs:
                        self._skip_heredoc(marker)
                return words
            else:
                words.append(self._word())
        return words

    def _array_follows(self, words: list[Word]) -> bool:
        return (
            bool(words)
            and self.text[self.position] == '('
            and words[-1].end == self.position
            and bool(re.fullmatch(r'[A-Za-z_]\w*\+?=', words[-1].raw))
        )

    def _array(self, head: Word) -> Word:
        """NAME=( ... ): the words up to the closing bracket, kept as one word whose parts end in the list marker."""
        self.position += 1
        items: list[Word] = []
        while self.position < len(self.text) and self.text[self.position] != ')':
            char = self.text[self.position]
            if char in ' \t\r\n':
                self.position += 1
            elif self.text.startswith('\\\n', self.position):
                self.position += 2
            elif char == '#':
                end = self.text.find('\n', self.position)
                self.position = len(self.text) if end < 0 else end
            else:
                items.append(self._word())
        self.position += 1
        name = head.raw.rstrip('=').rstrip('+')
        values = [value for item in items for value in self.expand(item)]
        before = self.variables.get(name, []) if head.raw.endswith('+=') else []
        self.variables[name] = [*(before if isinstance(before, list) else [before]), *values]
        return Word(parts=[('', True, False)], start=head.start, end=self.position)

    def _skip_blank(self) -> bool:
        while self.position < len(self.text) and self.text[self.position] in ' \t':
            self.position += 1
        return self.position < len(self.text) and self.text[self.position] not in '\n;|&'

    def _skip_heredoc(self, marker: str) -> None:
        while self.position < len(self.text):
            end = self.text.find('\n', self.position)
            end = len(self.text) if end < 0 else end
            line = self.text[self.position : end]
            self.position = min(end + 1, len(self.text))
            if line.strip('\t') == marker:
                return

    def _word(self) -> Word:
        """The word at the position, up to a blank or an operator."""
        text, start = self.text, self.position
        parts: list[tuple[str, bool, bool]] = []
        while self.position < len(text):
            char = text[self.position]
            if char in ' \t\r\n;|&()<>':
                break
            if char == '\\':
                if text.startswith('\\\n', self.position):
                    self.position += 2
                    continue
                parts.append((text[self.position + 1 : self.position + 2], True, False))
                self.position += 2
            elif char == "'":
                end = text.find("'", self.position + 1)
                end = len(text) if end < 0 else end
                parts.append((text[self.position + 1 : end], True, False))
                self.position = end + 1
            elif char == '"':
                self._double_quotes(parts)
            elif char == '$':
                parts.append((self._dollar(), False, True))
            elif char == '`':
                parts.append((self._backquotes(), False, False))
            else:
                parts.append((char, False, False))
                self.position += 1
        if self.position == start:
            self.position += 1  # a stray operator character
        return Word(parts=parts, start=start, end=self.position)

    def _double_quotes(self, parts: list[tuple[str, bool, bool]]) -> None:
        text = self.text
        self.position += 1
        parts.append(('', True, False))
        while self.position < len(text) and text[self.position] != '"':
            char = text[self.position]
            if char == '\\' and self.position + 1 < len(text):
                following = text[self.position + 1]
                if following != '\n':
                    parts.append((following if following in '$`"\\' else '\\' + following, True, False))
                self.position += 2
            elif char == '$':
                parts.append((self._dollar(), True, True))
            elif char == '`':
                parts.append((self._backquotes(), True, False))
            else:
                parts.append((char, True, False))
                self.position += 1
        self.position += 1

    def _dollar(self) -> str:
        """The whole expansion at the position as text, brackets balanced."""
        text, start = self.text, self.position
        if text.startswith('$((', start):
            end = text.find('))', start)
            self.position = len(text) if end < 0 else end + 2
        elif text.startswith(('$(', '${'), start):
            opening, closing, depth = text[start + 1], {'(': ')', '{': '}'}[text[start + 1]], 0
            self.position = start + 1
            while self.position < len(text):
                depth += (text[self.position] == opening) - (text[self.position] == closing)
                self.position += 1
                if depth == 0:
                    break
        else:
            match = re.compile(r'\$([A-Za-z_]\w*|[0-9@*#?$!-])?').match(text, start)
            self.position = match.end() if match is not None else start + 1
        return text[start : self.position]

    def _backquotes(self) -> str:
        start = self.position
        end = self.text.find('`', start + 1)
        self.position = len(self.text) if end < 0 else end + 1
        self._note(f'{self.text[start : self.position]} is a command; it is not run, and stands here as text.')
        return self.text[start : self.position]

    # -- expansion

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def lookup(self, name: str) -> str | list[str] | None:
        return self.variables.get(name, self.exported.get(name))

    def expand(self, word: Word) -> list[str]:
        """The fields that a word becomes: variables replaced, unquoted ones split at blanks, arrays one field an element."""
        fields: list[str] = ['']
        has_text = vanished = False
        for text, quoted, expands in word.parts:
            if not expands:
                fields[-1] += text
                has_text = has_text or quoted or bool(text)
                continue
            values = self._expand_dollar(text, quoted)
            if not values:
                vanished = True  # "$@" and "${empty[@]}" are no word at all, also inside quotes
                continue
            has_text = has_text or quoted or any(values)
            fields[-1] += values[0]
            fields += values[1:]
        return fields if has_text and not (vanished and fields == ['']) else []

    def _expand_dollar(self, text: str, quoted: bool) -> list[str]:
        if text.startswith('$(('):
            return [self._arithmetic(text[3:-2])]
        if text.startswith('$('):
            self._note(f'{text} is a command; it is not run, and stands here as text.')
            return [text]
        body = text[2:-1] if text.startswith('${') else text[1:]
        if not body:
            return ['$']
        if body in '@*':
            self._note(f'{text} stands for the arguments of the script; they are not known here, and count as none.')
            return []
        array = re.fullmatch(r'([A-Za-z_]\w*)\[([@*]|\d+)\]', body)
        if array is not None:
            value = self.lookup(array.group(1))
            items = [] if value is None else value if isinstance(value, list) else [value]
            if array.group(2) not in '@*':
                return items[int(array.group(2)) : int(array.group(2)) + 1]
            return [' '.join(items)] if array.group(2) == '*' and quoted else list(items)
        if (size := re.fullmatch(r'#([A-Za-z_]\w*)(\[[@*]\])?', body)) is not None:
            return [str(len(self.lookup(size.group(1)) or ''))]
        match = re.fullmatch(r'([A-Za-z_]\w*|\d)((:?[-=+?]|##?|%%?|//?)(.*))?', body, flags=re.DOTALL)
        if match is None:
            self._note(f'{text} is not understood, and stands here as text.')
            return [text]
        value = self._with_default(match.group(1), match.group(3), match.group(4) or '', text)
        return [value] if quoted else value.split() or ([''] if value else [])

    def _with_default(self, name: str, op: str | None, argument: str, text: str) -> str:
        value = self.lookup(name)
        plain = ' '.join(value) if isinstance(value, list) else value
        if op in (':-', '-', ':=', '='):
            if plain is None or (op.startswith(':') and not plain):
                plain = self._expand_text(argument)
                if op.endswith('='):
                    self.variables[name] = plain
            return plain
        if op in (':+', '+'):
            return self._expand_text(argument) if plain else ''
        if plain is None:
            if name.isdigit():
                self._note(f'{text} is an argument of the script; it is not known here, and stands as text.')
                return text
            self._note(f'${name} is not set anywhere in the script or the environment; it counts as empty.')
            return ''
        if op in ('#', '##', '%', '%%'):
            return trim(plain, op, self._expand_text(argument))
        if op in ('/', '//'):
            old, _, new = argument.partition('/')
            return plain.replace(old, new) if op == '//' else plain.replace(old, new, 1)
        return plain

    def _expand_text(self, text: str) -> str:
        """An argument inside ${...}: quotes and nested variables."""
        if '$' not in text and '"' not in text and "'" not in text:
            return text
        inner = ScriptReader(text, self.exported)
        inner.variables, inner.notes = self.variables, self.notes
        values = []
        while inner.position < len(text):
            if text[inner.position] in ' \t\n;|&()<>':
                values.append(text[inner.position])
                inner.position += 1
            else:
                values.append(' '.join(inner.expand(inner._word())))
        return ''.join(values)

    def _arithmetic(self, text: str) -> str:
        plain = re.sub(
            r'\$\{?([A-Za-z_]\w*)\}?|([A-Za-z_]\w*)', lambda match: str(self.lookup(match.group(1) or match.group(2)) or 0), text
        )
        try:
            return str(evaluate(ast.parse(plain.strip(), mode='eval').body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            self._note(f'$(({text})) is not understood, and counts as 0.')
            return '0'

    # -- running, on paper

    def _run(self, words: list[Word]) -> None:
        while words and words[0].raw in _KEYWORDS:
            words = words[1:]
        prefix: dict[str, str] = {}
        while words and (match := _ASSIGN.match(words[0].raw)) is not None and words[0].parts[0][0] and not words[0].parts[0][1]:
            name, value = match.group(1), self._assigned(words[0], match)
            words = words[1:]
            prefix[name] = value
        if not words or all(word.parts == [('', True, False)] for word in words):
            for name, value in prefix.items():
                self._assign(name, value)
            return
        if words[0].raw in _DECLARE:
            self._declare(words[1:], export=words[0].raw == 'export')
            return
        expanded: list[str] = []
        spans: list[tuple[int, int]] = []
        for word in words:
            fields = self.expand(word)
            expanded += fields
            spans += [(word.start, word.end)] * len(fields)
        if not expanded:
            return
        if expanded[0] == 'cd' and len(expanded) > 1:
            self.folder = os.path.join(self.folder, os.path.expanduser(expanded[1]))
            return
        if expanded[0] == 'for' and len(expanded) > 3 and expanded[2] == 'in':
            self.variables[expanded[1]] = expanded[3]
            if len(expanded) > 4:
                self._note(f'The loop over {expanded[1]} is read once, with {expanded[3]}.')
            return
        if (
            expanded[0] == 'for'
            or (expanded[0] == 'set' and len(expanded) > 1)
            or expanded[0] in ('shift', 'source', '.', 'trap', 'case', 'echo')
        ):
            return
        if expanded[0] == 'unset':
            for name in expanded[1:]:
                self.variables.pop(name, None)
                self.exported.pop(name, None)
            return
        self.commands.append(Command(words=expanded, spans=spans, environment={**self.exported, **prefix}, folder=self.folder))

    def _assigned(self, word: Word, match: re.Match[str]) -> str:
        """The value of NAME=VALUE or NAME+=VALUE; no splitting, as in the shell."""
        skip = match.end()
        parts = []
        for text, quoted, expands in word.parts:
            cut = text[skip:] if skip else text
            skip = max(0, skip - len(text))
            parts.append((cut, True if expands else quoted, expands))
        value = ' '.join(self.expand(Word(parts=[('', True, False), *parts], start=word.start, end=word.end)))
        before = self.lookup(match.group(1)) if match.group(2) else ''
        return (before if isinstance(before, str) else ' '.join(before or [])) + value

    def _assign(self, name: str, value: str) -> None:
        self.variables[name] = value
        if name in self.exported:
            self.exported[name] = value

    def _declare(self, words: list[Word], export: bool) -> None:
        for word in words:
            match = _ASSIGN.match(word.raw)
            if match is not None:
                self._assign(match.group(1), self._assigned(word, match))
            name = match.group(1) if match is not None else word.raw
            value = self.variables.get(name)
            if export and isinstance(value, str):
                self.exported[name] = value
