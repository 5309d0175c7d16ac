"""A shell script as a tree of commands (import tier 0; pure). Nothing is expanded here, and nothing is run."""

from __future__ import annotations

import dataclasses
import re

# (text, whether it was quoted, whether it is an expansion: $..., `...`)
Part = tuple[str, bool, bool]
_BLANK = ' \t\r'
_WORD_ENDS = ' \t\r\n;|&()<>'
_REDIRECTION = re.compile(r'\d*(<<<|<<-?|>>|>&|<&|&>>|&>|>\||>(?!\()|<(?!\())')
_PLACEHOLDER = re.compile(r'<[A-Za-z_][\w.-]*>(?=\s|$)')  # <node1_ip>, left for the reader of an example to fill in
_OPERATORS = ('&&', '||', '|&', '|', '&')
_KEYWORD = re.compile(r'(if|then|elif|else|fi|for|while|until|do|done|case|esac|in|function|select|time|\{|\}|!|\[\[)(?=[\s;&|()]|$)')
_ARRAY = re.compile(r'[A-Za-z_]\w*\+?=')
_FUNCTION = re.compile(r'([A-Za-z_][\w.:-]*)[ \t]*\([ \t]*\)')
_ESCAPES = {'n': '\n', 't': '\t', 'r': '\r', 'a': '\a', 'b': '\b', 'e': '\x1b', 'f': '\f', 'v': '\v'}


@dataclasses.dataclass(kw_only=True, slots=True)
class Word:
    """One word. ``start`` and ``end`` are offsets in the script; ``items`` are the elements of NAME=( ... )."""

    parts: list[Part]
    start: int
    end: int
    items: list[Word] | None = None

    @property
    def raw(self) -> str:
        return ''.join(text for text, _, _ in self.parts)


@dataclasses.dataclass(kw_only=True, slots=True)
class Heredoc:
    marker: Word
    body: str = ''
    strips_tabs: bool = False


@dataclasses.dataclass(kw_only=True, slots=True)
class Node:
    """One command. ``kind`` says which members it has; ``start`` is its offset.

    simple: words, heredocs, input (of <<<). list: items. if: branches of (condition, body), the last condition None for else.
    for: words[0] the name, words[1:] the values. while, until: branches[0]. case: words[0], choices. group, subshell: items.
    function: text (its name), items. arithmetic: text. test: words (of [[ ]]). not: items.
    """

    kind: str
    start: int
    words: list[Word] = dataclasses.field(default_factory=list)
    heredocs: list[Heredoc] = dataclasses.field(default_factory=list)
    input: Word | None = None
    items: list[tuple[Node, str]] = dataclasses.field(default_factory=list)  # (command, the operator behind it)
    branches: list[tuple[Node | None, Node]] = dataclasses.field(default_factory=list)
    choices: list[tuple[list[Word], Node]] = dataclasses.field(default_factory=list)
    text: str = ''


class Parser:
    """One pass over a script. Text that is no shell grammar is skipped: a report on a broken script is better than none."""

    def __init__(self, text: str, position: int = 0) -> None:
        self.text = text
        self.position = position
        self.pending: list[Heredoc] = []
        self.placeholders: list[str] = []

    def parse(self) -> Node:
        """The whole text."""
        node = Node(kind='list', start=self.position)
        while self.position < len(self.text):
            node.items += self.commands(()).items
            self.position += 1  # a closing word without its opening one
        return node

    def commands(self, closers: tuple[str, ...]) -> Node:
        """Commands up to one of ``closers``, which stays unread."""
        node = Node(kind='list', start=self.position)
        while True:
            self._skip_separators()
            if self.position >= len(self.text) or self._closes(closers):
                return node
            before = self.position
            command = self._command()
            operator = self._operator()
            if self.position == before:
                self.position += 1
            elif command is not None:
                node.items.append((command, operator))

    # -- between commands

    def _at(self, text: str) -> bool:
        return self.text.startswith(text, self.position)

    def _keyword(self) -> str:
        match = _KEYWORD.match(self.text, self.position)
        return match.group(1) if match is not None else ''

    def _closes(self, closers: tuple[str, ...]) -> bool:
        return any(self._at(closer) if closer in (')', ';;', ';&') else self._keyword() == closer for closer in closers)

    def _take(self, keyword: str) -> bool:
        self._skip_separators()
        if self._keyword() != keyword:
            return False
        self.position += len(keyword)
        return True

    def _skip_blank(self) -> None:
        while self.position < len(self.text):
            if self._at('\\\n'):
                self.position += 2
            elif self._at('\\\r\n'):
                self.position += 3
            elif self.text[self.position] in _BLANK:
                self.position += 1
            elif self.text[self.position] == '#':
                end = self.text.find('\n', self.position)
                self.position = len(self.text) if end < 0 else end
            else:
                return

    def _skip_separators(self) -> None:
        while True:
            self._skip_blank()
            if self._at('\n'):
                self._newline()
            elif self._at(';') and not self._at(';;') and not self._at(';&'):
                self.position += 1
            else:
                return

    def _newline(self) -> None:
        """The end of a line, and the here-documents that begin behind it."""
        self.position += 1
        for heredoc in self.pending:
            lines = []
            while self.position < len(self.text):
                end = self.text.find('\n', self.position)
                end = len(self.text) if end < 0 else end
                line = self.text[self.position : end]
                self.position = min(end + 1, len(self.text))
                line = line.lstrip('\t') if heredoc.strips_tabs else line
                if line.rstrip('\r') == heredoc.marker.raw:
                    break
                lines.append(line + '\n')
            heredoc.body = ''.join(lines)
        self.pending = []

    def _operator(self) -> str:
        self._skip_blank()
        for operator in _OPERATORS:
            if self._at(operator):
                self.position += len(operator)
                return operator
        return ';'

    # -- commands

    def _command(self) -> Node | None:
        start, keyword = self.position, self._keyword()
        if keyword in ('!', 'time'):
            self.position += len(keyword)
            self._skip_blank()
            command = self._command()
            return command if command is None or keyword == 'time' else Node(kind='not', start=start, items=[(command, ';')])
        if self._at('(('):
            node: Node | None = self._arithmetic()
        elif self._at('(') or keyword == '{':
            self.position += 1
            body = self.commands((')',) if keyword != '{' else ('}',))
            self.position += 1
            node = Node(kind='subshell' if keyword != '{' else 'group', start=start, items=body.items)
        elif keyword in ('if', 'for', 'select', 'while', 'until', 'case', 'function', '[['):
            self.position += len(keyword)
            node = getattr(self, f'_{_RULES.get(keyword, keyword)}')(start, keyword)
        elif (match := _FUNCTION.match(self.text, self.position)) is not None:
            self.position = match.end()
            return self._body(start, match.group(1))
        else:
            return self._simple()
        self._skip_redirections()
        return node

    def _arithmetic(self) -> Node:
        start = self.position
        end = self.text.find('))', start)
        end = len(self.text) if end < 0 else end
        self.position = end + 2
        return Node(kind='arithmetic', start=start, text=self.text[start + 2 : end])

    def _if(self, start: int, _: str) -> Node:
        node = Node(kind='if', start=start)
        condition = self.commands(('then',))
        while self._take('then'):
            node.branches.append((condition, self.commands(('elif', 'else', 'fi'))))
            if self._take('elif'):
                condition = self.commands(('then',))
            elif self._take('else'):
                node.branches.append((None, self.commands(('fi',))))
                break
            else:
                break
        self._take('fi')
        return node

    def _for(self, start: int, _: str) -> Node:
        node = Node(kind='for', start=start)
        self._skip_blank()
        if self._at('(('):
            header = self._arithmetic()
            node = Node(kind='while', start=start, text=header.text)
        else:
            node.words.append(self.word())
            if self._take('in'):
                self._skip_blank()
                while self.position < len(self.text) and self.text[self.position] not in ';\n&|()<>':
                    node.words.append(self.word())
                    self._skip_blank()
        node.branches = [(None, self._do())]
        return node

    def _while(self, start: int, keyword: str) -> Node:
        condition = self.commands(('do',))
        return Node(kind=keyword, start=start, branches=[(condition, self._do())])

    def _do(self) -> Node:
        self._take('do')
        body = self.commands(('done',))
        self._take('done')
        return body

    def _case(self, start: int, _: str) -> Node:
        self._skip_blank()
        node = Node(kind='case', start=start, words=[self.word()])
        self._take('in')
        while True:
            self._skip_separators()
            if self.position >= len(self.text) or self._keyword() == 'esac':
                self._take('esac')
                return node
            patterns = []
            while self.position < len(self.text) and not self._at(')'):
                if self.text[self.position] in _BLANK + '|(\n':
                    self.position += 1
                else:
                    patterns.append(self.word())
            self.position += 1
            node.choices.append((patterns, self.commands((';;', ';&', 'esac'))))
            while self._at(';') or self._at('&'):
                self.position += 1

    def _function(self, start: int, _: str) -> Node:
        self._skip_blank()
        name = self.word().raw
        self._skip_blank()
        if self._at('()'):
            self.position += 2
        return self._body(start, name)

    def _body(self, start: int, name: str) -> Node:
        self._skip_separators()
        body = self._command()
        return Node(kind='function', start=start, text=name, items=[(body, ';')] if body is not None else [])

    def _test(self, start: int, _: str) -> Node:
        """[[ ... ]]: words, with &&, ||, (, ), <, > as words of their own."""
        node = Node(kind='test', start=start)
        while self.position < len(self.text):
            if self.text[self.position] in _BLANK + '\n':
                self.position += 1
            elif self._at(']]'):
                self.position += 2
                return node
            else:
                size = 2 if self._at('&&') or self._at('||') else 1 if self.text[self.position] in '()<>;' else 0
                if size:
                    here = self.position
                    self.position += size
                    parts: list[Part] = [(self.text[here : self.position], False, False)]
                    node.words.append(Word(parts=parts, start=here, end=self.position))
                else:
                    node.words.append(self.word(ends=' \t\r\n' if node.words and node.words[-1].raw == '=~' else _WORD_ENDS))
        return node

    def _simple(self) -> Node:
        node = Node(kind='simple', start=self.position)
        while self.position < len(self.text):
            self._skip_blank()
            if self.position >= len(self.text) or self.text[self.position] in '\n;)' or self._at_operator():
                break
            if self._redirection(node):
                continue
            if self._at('(') and node.words and node.words[-1].end == self.position and _ARRAY.fullmatch(node.words[-1].raw):
                self._array(node.words[-1])
            elif self._at('('):
                break
            else:
                node.words.append(self.word())
        return node

    def _at_operator(self) -> bool:
        return any(self._at(operator) for operator in _OPERATORS) and not self._at('&>')

    def _redirection(self, node: Node) -> bool:
        match = _REDIRECTION.match(self.text, self.position)
        if match is None or self._goes_on():
            return False
        self.position = match.end()
        self._skip_blank()
        if self.position >= len(self.text) or self.text[self.position] in '\n;|':
            return True
        target = self.word(ends=' \t\r\n;|()<>' if match.group(1) in ('>&', '<&') else _WORD_ENDS)
        if match.group(1) in ('<<', '<<-'):
            heredoc = Heredoc(marker=target, strips_tabs=match.group(1) == '<<-')
            self.pending.append(heredoc)
            node.heredocs.append(heredoc)
        elif match.group(1) == '<<<':
            node.input = target
        return True

    def _skip_redirections(self) -> None:
        nothing = Node(kind='simple', start=self.position)
        while True:
            self._skip_blank()
            if not self._redirection(nothing):
                return

    # -- words

    def _array(self, head: Word) -> None:
        """NAME=( ... ): the elements, into ``head``."""
        self.position += 1
        head.items = []
        while self.position < len(self.text) and not self._at(')'):
            self._skip_blank()
            if self._at('\n'):
                self._newline()
            elif not self._at(')'):
                head.items.append(self.word())
        self.position += 1
        head.end = self.position

    def word(self, ends: str = _WORD_ENDS) -> Word:
        """The word at the position, up to a blank or an operator."""
        text, start = self.text, self.position
        parts: list[Part] = []
        while self.position < len(text) and (text[self.position] not in ends or self._goes_on()):
            char = text[self.position]
            if (placeholder := _PLACEHOLDER.match(text, self.position)) is not None:
                self.placeholders.append(placeholder.group())
                parts.append((placeholder.group(), True, False))
                self.position = placeholder.end()
            elif text.startswith(('\\\n', '\\\r\n'), self.position):
                self.position += 2 + (text[self.position + 1] == '\r')
            elif char == '\\':
                parts.append((text[self.position + 1 : self.position + 2], True, False))
                self.position += 2
            elif char == "'" or text.startswith("$'", self.position):
                self._single_quotes(parts)
            elif char == '"' or text.startswith('$"', self.position):
                self.position += char == '$'
                self._double_quotes(parts)
            elif char == '$':
                parts.append((self.dollar(), False, True))
            elif char == '`':
                parts.append((self._backquotes(), False, True))
            elif char in '<>':
                parts.append((self._substitution(1), False, False))
            else:
                parts.append((char, False, False))
                self.position += 1
        if self.position == start:
            self.position += 1  # a stray operator character
        return Word(parts=parts, start=start, end=self.position)

    def _goes_on(self) -> bool:
        """Whether what looks like an operator is part of a word: <( ... ), >( ... ), a <placeholder>."""
        return self.text.startswith(('<(', '>('), self.position) or _PLACEHOLDER.match(self.text, self.position) is not None

    def _single_quotes(self, parts: list[Part]) -> None:
        escapes = self._at('$')
        self.position += 2 if escapes else 1
        start = self.position
        while self.position < len(self.text) and not self._at("'"):
            self.position += 2 if escapes and self._at('\\') else 1
        value = self.text[start : self.position]
        if escapes:
            value = re.sub(r'\\(.)', lambda match: _ESCAPES.get(match.group(1), match.group(1)), value, flags=re.DOTALL)
        parts.append((value, True, False))
        self.position += 1

    def _double_quotes(self, parts: list[Part]) -> None:
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
                parts.append((self.dollar(quotes='"'), True, True))
            elif char == '`':
                parts.append((self._backquotes(), True, True))
            else:
                parts.append((char, True, False))
                self.position += 1
        self.position += 1

    def dollar(self, quotes: str = '"\'') -> str:
        """The whole expansion at the position as text. ``quotes`` are the characters that quote inside ${...}."""
        text, start = self.text, self.position
        if text.startswith('$((', start) and (end := _closing(text, start + 1, '(', ')')) and text[end - 2 : end] == '))':
            self.position = end
        elif text.startswith('$(', start):
            return self._substitution(2)
        elif text.startswith('${', start):
            self.position = _closing(text, start + 1, '{', '}', quotes) or len(text)
        else:
            match = re.compile(r'\$([A-Za-z_]\w*|[0-9@*#?$!-])?').match(text, start)
            self.position = match.end() if match is not None else start + 1
        return text[start : self.position]

    def _substitution(self, lead: int) -> str:
        """$( ... ), <( ... ), >( ... ): what stands inside is grammar again, with quotes and here-documents of its own."""
        start = self.position
        inner = Parser(self.text, start + 1 + (lead == 2))
        inner.commands((')',))
        self.position = min(inner.position + 1, len(self.text))
        return self.text[start : self.position]

    def _backquotes(self) -> str:
        start = self.position
        end = self.text.find('`', start + 1)
        self.position = len(self.text) if end < 0 else end + 1
        return self.text[start : self.position]


_RULES = {'[[': 'test', 'until': 'while', 'select': 'for'}


def _closing(text: str, start: int, opening: str, closing: str, quotes: str = '') -> int:
    """The offset behind the bracket that closes the one at ``start``; quoted brackets do not count. 0 where there is none."""
    depth, position, quote = 0, start, ''
    while position < len(text):
        char = text[position]
        if char == '\\':
            position += 1
        elif quote:
            quote = '' if char == quote else quote
        elif char in quotes:
            quote = char
        else:
            depth += (char == opening) - (char == closing)
            if depth == 0:
                return position + 1
        position += 1
    return 0
