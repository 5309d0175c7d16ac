"""Passports: the one form in which this package changes code that is not its own (import tier 0: standard library only).

A patch is a function of no arguments that rebinds something in another package. It carries a `Passport` that says why it is there and
when it can go, it is applied at most once in a process, and it is listed. Where an official door exists (entry point, subclass,
registry, argument) that door is used and no patch is written.

    REGISTRY = PatchRegistry('hooks')

    @REGISTRY.patch(Passport(
        name='grpo-runtime-tasks',
        target='swift.ui.llm_train.runtime:Runtime._is_known_task',
        breaks='the GRPO tab refuses live GRPO jobs with "Rejected unknown task"',
        reference='swift/ui/llm_train/runtime.py, class Runtime (ms-swift 4.6.0)',
        versions='ms-swift>=4.6,<4.7',
        remove_when='the check asks the subclass',
    ))
    def _known_tasks() -> None:
        ...

    REGISTRY.apply('grpo-runtime-tasks')    # ['grpo-runtime-tasks'] the first time, [] afterwards
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

__all__ = ['AppliedPatch', 'Passport', 'PatchRegistry']


@dataclass(frozen=True, kw_only=True, slots=True)
class Passport:
    """Why a patch exists. Every field is a non-empty text; a missing one is a programming error and raises ValueError at import."""

    name: str
    """Unique in its registry, words joined by hyphens: what `apply` takes and what logs show."""
    target: str
    """What is rebound, as `module:attribute`; several are separated by a comma and a space."""
    breaks: str
    """What a user sees without the patch."""
    reference: str
    """Where the cause lies upstream: file and symbol with its version, or an address."""
    versions: str
    """Requirement(s) the patch was written for, in pip's notation, for example `megatron-core>=0.16,<0.20`."""
    remove_when: str
    """The condition under which the patch can be deleted."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f'passport {self.name!r}: the field {item.name!r} must say something, got {value!r}')
        for part in self.target.split(', '):
            module, colon, attribute = part.partition(':')
            if not (module and colon and attribute):
                raise ValueError(f'passport {self.name!r}: target {part!r} is not of the form module:attribute')


@dataclass(kw_only=True, slots=True)
class AppliedPatch:
    """A patch function with its passport. Calling it applies it once; the result says whether this call did it."""

    passport: Passport
    function: Callable[[], None]
    applied: bool = False

    def __call__(self) -> bool:
        """Apply the patch unless it is in place. A patch that raises counts as not applied, so that the caller may report and retry."""
        if self.applied:
            return False
        self.function()
        self.applied = True
        return True


class PatchRegistry:
    """The patches of one part of the package, in the order in which they were declared. Not thread-safe; applied at start-up."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self._patches: dict[str, AppliedPatch] = {}

    def patch(self, passport: Passport) -> Callable[[Callable[[], None]], AppliedPatch]:
        """Decorator: register a patch function under its passport. Raises ValueError for a name that is taken."""
        if passport.name in self._patches:
            raise ValueError(f'{self.owner}: two patches are called {passport.name!r}')

        def register(function: Callable[[], None]) -> AppliedPatch:
            applied = AppliedPatch(passport=passport, function=function)
            self._patches[passport.name] = applied
            return applied

        return register

    def apply(self, *names: str) -> list[str]:
        """Apply the named patches (all, in order of declaration, when none is named) and return the names applied by this call."""
        unknown = [name for name in names if name not in self._patches]
        if unknown:
            raise KeyError(f'{self.owner}: no patch called {unknown[0]!r}; there are {sorted(self._patches)}')
        return [name for name in (names or tuple(self._patches)) if self._patches[name]()]

    @property
    def applied(self) -> list[str]:
        """Names of the patches in place, in order of declaration."""
        return [name for name, patch in self._patches.items() if patch.applied]

    def __iter__(self) -> Iterator[AppliedPatch]:
        return iter(self._patches.values())

    def __len__(self) -> int:
        return len(self._patches)
