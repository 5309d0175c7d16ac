"""Reading a shell script without running it (import tier 0).

Knows what training scripts use: comments, quotes, line continuations, assignments and `export`, environment prefixes, `$VAR`,
`${VAR:-default}` and their relatives, arrays, arithmetic, here-documents, conditions, loops, functions, several commands in a file, the
usual launchers. A condition that the text alone decides is decided; where it depends on the machine, both branches are read and that is
said. A command substitution is never run; a few that only rearrange text (basename, dirname, echo, seq, counting commas) are worked out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Mapping

from .shell_assign import assign_word, assigned, assignment, declare
from .shell_expand import MOST_CHARACTERS, Expander
from .shell_printers import formatted, printed
from .shell_tree import Node, Parser, Word
from .shell_values import Arithmetic, Verdict, matches, test

_DECLARE = ('export', 'declare', 'local', 'readonly', 'typeset')
_SILENT = ('shift', 'source', '.', 'trap', 'echo', 'set', 'printf', 'read', 'let', 'test', '[', ':', 'true', 'false', 'return', 'exit', 'break',
           'continue', 'mapfile', 'readarray', 'shopt', 'ulimit', 'alias', 'wait')  # fmt: skip
# commands that give a word to a shell
_SHELLS = ('bash', 'sh', 'zsh', 'ssh', 'docker', 'kubectl', 'tmux', 'screen', 'srun', 'pdsh', 'script', 'watch')
_PROGRAM = re.compile(r'\b(swift|megatron)\s+(rlhf|rollout)\b')
_MOST_STEPS = 5_000  # a script that loops longer is not read further


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


class _Leave(Exception):
    """exit, return and break, where it is certain that they are reached. Its text is the word."""


class ScriptReader:
    """One pass over a script. ``commands`` lists what would be started, ``notes`` what could not be known without running it."""

    def __init__(self, text: str, environ: Mapping[str, str], name: str = '') -> None:
        self.text = text
        self.notes: list[str] = []
        self.values = Expander(environ, self.notes, name, lambda text: printed(text, self.values, self.folder))
        self.folder = ''
        self.commands: list[Command] = []
        self.functions: dict[str, Node] = {}
        self.called: set[str] = set()
        self.uncertain = 0  # depth of branches that may or may not run
        self.depth = 0
        self.steps = 0
        self.shift = 0  # where the text that is read now begins in the script

    def read(self) -> list[Command]:
        parser = Parser(self.text)
        with contextlib.suppress(_Leave):
            self._list(parser.parse())
        for name, node in list(self.functions.items()):
            if name not in self.called and _mentions_training(self.text[node.start : node.start + 20_000]):
                self.notes.append(f'The function {name} is not called with words that can be known here; it is read as it stands.')
                with contextlib.suppress(_Leave):
                    self._call(name, [])
        for text in dict.fromkeys(parser.placeholders):
            self.notes.append(f'{text} is to be filled in; a shell would read it as a redirection.')
        return self.commands

    # -- control

    def _list(self, node: Node) -> Verdict:
        verdict: Verdict = True
        before = ';'
        for command, operator in node.items:
            skip = (before == '&&' and verdict is False) or (before == '||' and verdict is True)
            if not skip:
                unsure = before in ('&&', '||') and verdict is None
                self.uncertain += unsure
                here = self._run(command)
                self.uncertain -= unsure
                verdict = None if unsure and here is not None else here
            before = operator if operator not in ('|', '|&') else ';'
        return verdict

    def _run(self, node: Node) -> Verdict:
        self.steps += 1
        if self.steps > _MOST_STEPS:
            self.values.note('The script loops longer than is read here; what follows is left out.')
            raise _Leave('exit')
        if self.values.overlong:
            self.values.note(f'A value grows beyond {MOST_CHARACTERS:,} characters, more than a command can be given; what follows is left out.')
            raise _Leave('exit')
        run = getattr(self, f'_run_{node.kind}')
        verdict: Verdict = run(node)
        return verdict

    def _run_list(self, node: Node) -> Verdict:
        return self._list(node)

    def _run_group(self, node: Node) -> Verdict:
        return self._list(node)

    def _run_not(self, node: Node) -> Verdict:
        verdict = self._list(node)
        return None if verdict is None else not verdict

    def _run_subshell(self, node: Node) -> Verdict:
        folder, variables, exported = self.folder, dict(self.values.variables), dict(self.values.exported)
        try:
            return self._list(node)
        except _Leave:
            return None
        finally:
            self.folder, self.values.variables, self.values.exported = folder, variables, exported

    def _run_function(self, node: Node) -> Verdict:
        self.functions[node.text] = node
        return True

    def _run_arithmetic(self, node: Node) -> Verdict:
        try:
            return Arithmetic(node.text.replace('$', ''), self.values.number, self.values.assign).value() != 0
        except (ValueError, RecursionError):
            self.values.note(f'(({node.text})) is not understood.')
            return None

    def _run_test(self, node: Node) -> Verdict:
        words = []
        for word in node.words:
            self.values.unknown = False
            pattern = self.values.pattern(word)
            words.append((''.join(text for text, _ in pattern), not self.values.unknown, pattern))
        return test(words, double=True)

    def _run_if(self, node: Node) -> Verdict:
        unsure = 0
        verdict: Verdict = True
        before = self._state()
        for condition, body in node.branches:
            holds = True if condition is None else self._run(condition)
            if holds is False:
                continue
            unsure += holds is None
            self.uncertain += unsure > 0
            try:
                verdict = self._run(body)
            finally:
                self.uncertain -= unsure > 0
            if holds:
                break
        if unsure and len(node.branches) > 1 and self._state() != before:
            self._line_note(node, 'the condition of this `if` depends on the machine; its branches are all read, and the last one counts')
        return None if unsure else verdict

    def _run_case(self, node: Node) -> Verdict:
        self.values.unknown = False
        value = self.values.text(node.words[0])
        if self.values.unknown:
            before = self._state()
            self.uncertain += 1
            for _, body in node.choices:
                self._run(body)
            self.uncertain -= 1
            if self._state() != before:
                self._line_note(node, 'this `case` depends on the machine; its branches are all read, and the last one counts')
            return None
        for patterns, body in node.choices:
            if any(matches(value, self.values.pattern(pattern)) for pattern in patterns):
                return self._run(body)
        return True

    def _run_for(self, node: Node) -> Verdict:
        self.values.unknown = False
        values = [field for word in node.words[1:] for field in self.values.fields(word)]
        if len(node.words) == 1:
            values = list(self.values.positional or [])
        if self.values.unknown:
            values = values[:1]
        verdict: Verdict = True
        started = len(self.commands)
        for number, value in enumerate(values):
            self.values.assign(node.words[0].raw, value)
            size = len(self.commands)
            try:
                verdict = self._run(node.branches[0][1])
            except _Leave as leave:
                if str(leave) not in ('break', 'continue'):
                    raise
                if str(leave) == 'break':
                    break
            if number and any(_trains(command) for command in self.commands[size:]):
                # the same command of the script again
                self.commands[size:] = [command for command in self.commands[size:] if not _trains(command)]
                self.values.note(f'The loop over {node.words[0].raw} is read with {values[0]}; its other values change the same command.')
        return verdict if len(self.commands) == started else None

    def _run_while(self, node: Node, holds_for: bool = True) -> Verdict:
        condition, body = node.branches[0]
        for _ in range(1000):
            holds = None if condition is None else self._run(condition)
            if holds is not None and holds != holds_for:
                return True
            self.uncertain += holds is None
            try:
                self._run(body)
            except _Leave as leave:
                if str(leave) not in ('break', 'continue'):
                    raise
                if str(leave) == 'break':
                    return None
            finally:
                self.uncertain -= holds is None
            if holds is None:
                return None
        return None

    def _run_until(self, node: Node) -> Verdict:
        return self._run_while(node, holds_for=False)

    def _state(self) -> tuple[dict, int]:
        return {name: value if isinstance(value, str) else repr(value) for name, value in self.values.variables.items()}, len(self.commands)

    def _line_note(self, node: Node, text: str) -> None:
        self.values.note(f'Line {self.text.count(chr(10), 0, node.start + self.shift) + 1}: {text}.')

    # -- simple commands

    def _run_simple(self, node: Node) -> Verdict:
        words = node.words
        prefix: dict[str, str] = {}
        while words and (match := assignment(words[0])) is not None:
            if words[0].items is not None or match.group(2):
                assign_word(self.values, words[0], match)
            else:
                prefix[match.group(1)] = assigned(self.values, words[0], match)
                if all(assignment(word) for word in words):
                    self.values.assign(match.group(1), prefix[match.group(1)])
            words = words[1:]
        if not words:
            return True
        if words[0].raw in _DECLARE:
            declare(self.values, words[1:], export=words[0].raw == 'export')
            return True
        expanded: list[str] = []
        spans: list[tuple[int, int]] = []
        for word in words:
            fields = self.values.fields(word)
            expanded += fields
            spans += [(word.start + self.shift, word.end + self.shift)] * len(fields)
        return self._start(node, words, expanded, spans, prefix) if expanded else True

    def _start(self, node: Node, words: list[Word], expanded: list[str], spans: list[tuple[int, int]], prefix: dict[str, str]) -> Verdict:
        name = expanded[0]
        while name in ('exec', 'command', 'builtin', 'sudo', 'nohup', 'nice') and len(expanded) > 1:
            expanded, spans, words = expanded[1:], spans[1:], words[1:]
            name = expanded[0]
        if name in self.functions:
            return self._call(name, expanded[1:], prefix)
        if name == 'eval':
            return self._inside(' '.join(expanded[1:]), spans[-1])
        for word, span in zip(expanded[1:], spans[1:]):
            if name in _SHELLS and _PROGRAM.search(word):
                return self._inside(word, span, prefix)
        builtin = {
            'cd': self._cd,
            'pushd': self._cd,
            '[': self._bracket,
            'test': self._bracket,
            'let': self._let,
            'unset': self._unset,
        }.get(name)
        if builtin is not None:
            return builtin(node, words, expanded)
        if name in ('exit', 'return', 'break', 'continue'):
            if not self.uncertain:
                raise _Leave(name)
            return None
        if name == 'shift' and self.values.positional is not None:
            self.values.positional = self.values.positional[int(expanded[1]) if len(expanded) > 1 and expanded[1].isdigit() else 1 :]
        if name == 'set' and '--' in expanded:
            self.values.positional = expanded[expanded.index('--') + 1 :]
        if name == 'printf' and len(expanded) > 3 and expanded[1] == '-v':
            self.values.assign(expanded[2], formatted(expanded[3], expanded[4:]))
        if name == 'read':
            return self._read(node, expanded)
        if name in ('source', '.') and len(expanded) > 1:
            return self._source(expanded[1])
        if name in _SILENT:
            return name not in ('false',) if name in ('true', 'false', ':', 'echo', 'set', 'printf', 'shift') else None
        self.commands.append(Command(words=expanded, spans=spans, environment={**self.values.exported, **prefix}, folder=self.folder))
        return None

    def _call(self, name: str, words: list[str], prefix: Mapping[str, str] | None = None) -> Verdict:
        self.called.add(name)
        if self.depth > 20:
            return None
        positional, exported = self.values.positional, dict(self.values.exported)
        self.values.positional = words
        self.values.exported.update(prefix or {})
        self.depth += 1
        try:
            return self._list(self.functions[name])
        except _Leave as leave:
            if str(leave) == 'exit':
                raise
            return None
        finally:
            self.depth -= 1
            self.values.positional = positional
            for key in prefix or {}:
                self.values.exported.pop(key, None)
                if key in exported:
                    self.values.exported[key] = exported[key]

    def _inside(self, text: str, span: tuple[int, int], prefix: Mapping[str, str] | None = None) -> Verdict:
        """Text that a shell would read once more: of eval, of bash -c. Its words stand inside the quotes at ``span``, or where it says."""
        literal = self.text[span[0] : span[0] + 1] in ('"', "'") and self.text[span[0] + 1 : span[1] - 1] == text
        exported, shift = dict(self.values.exported), self.shift
        self.values.exported.update(prefix or {})
        size = len(self.commands)
        self.depth += 1
        try:
            if literal:
                self.shift = span[0] + 1
            return self._list(Parser(text).parse()) if self.depth <= 20 else None
        finally:
            self.depth -= 1
            self.shift = shift
            if prefix:
                self.values.exported = exported
            if not literal:
                for command in self.commands[size:]:
                    command.spans = self._found_inside(command.words, span)

    def _found_inside(self, words: list[str], span: tuple[int, int]) -> list[tuple[int, int]]:
        """Where the words of a command stand in a quoted word that holds variables: those of the program where it stands there once."""
        there = list(_PROGRAM.finditer(self.text, *span))
        if len(there) != 1:
            return [span] * len(words)
        program, kind = there[0].span(1), there[0].span(2)
        return [program if following == there[0].group(2) else kind for following in [*words[1:], '']]

    def _cd(self, node: Node, words: list[Word], expanded: list[str]) -> Verdict:
        if len(expanded) > 1:
            self.folder = os.path.normpath(os.path.join(self.folder, os.path.expanduser(expanded[1])))
            self.folder = '' if self.folder == '.' else self.folder
        return True

    def _bracket(self, node: Node, words: list[Word], expanded: list[str]) -> Verdict:
        parts = []
        for word in words[1:]:
            self.values.unknown = False
            for field in self.values.fields(word):
                parts.append((field, not self.values.unknown, [(field, True)]))
        if expanded[0] == '[' and parts and parts[-1][0] == ']':
            parts.pop()
        return test(parts, double=False)

    def _let(self, node: Node, words: list[Word], expanded: list[str]) -> Verdict:
        verdict: Verdict = True
        for text in expanded[1:]:
            verdict = self._run_arithmetic(Node(kind='arithmetic', start=node.start, text=text))
        return verdict

    def _unset(self, node: Node, words: list[Word], expanded: list[str]) -> Verdict:
        for name in expanded[1:]:
            self.values.variables.pop(name, None)
            self.values.exported.pop(name, None)
        return True

    def _read(self, node: Node, expanded: list[str]) -> Verdict:
        """read NAME ... <<EOF and <<< text: one name takes all of it."""
        text = node.heredocs[-1].body if node.heredocs else ' '.join(self.values.fields(node.input)) if node.input is not None else None
        names = [word for word in expanded[1:] if word.isidentifier()]
        if text is not None and names:
            if len(names) == 1 and '-d' in expanded:
                self.values.assign(names[0], text.strip('\n') if node.heredocs else text)
            else:
                for name, value in zip(names, [*text.split(None, len(names) - 1), *([''] * len(names))]):
                    self.values.assign(name, value.strip())
        return None

    def _source(self, path: str) -> Verdict:
        """Another file's variables, where it lies here; its own commands are not this script's."""
        full = os.path.join(self.folder, os.path.expanduser(path))
        if not path.endswith(('.sh', '.env', '.conf')) or not os.path.isfile(full) or os.path.getsize(full) > 2**20 or self.depth > 5:
            return None
        with open(full, encoding='utf-8', errors='replace') as file:
            text = file.read()
        commands = self.commands
        self.commands, self.depth = [], self.depth + 1
        try:
            return self._list(Parser(text).parse())
        except _Leave:
            return None
        finally:
            self.commands, self.depth = commands, self.depth - 1


def _trains(command: Command) -> bool:
    return _mentions_training(' '.join(command.words))


def _mentions_training(text: str) -> bool:
    return re.search(r'\b(rlhf|rollout)\b', text) is not None
