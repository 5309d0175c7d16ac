"""The register of every change that the CPU platform makes to other people's code (import tier 0).

A patch is a function without arguments under `@patch(...)`. Its passport says what breaks without it, where upstream the reason lies,
which versions it was written for, and when it can go. `apply(names)` runs each function once; a second call does nothing.
"""
import functools
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Passport:
    """Why a patch exists. `name` is the patch function's own name."""
    name: str
    breaks_without: str
    upstream: str
    versions: str
    can_go_when: str


_REGISTER: dict[str, tuple[Passport, Callable[[], None]]] = {}
_APPLIED: list[str] = []


def patch(*, breaks_without: str, upstream: str, versions: str, can_go_when: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Enter a patch function in the register and make it safe to call more than once.

    Raises ValueError when two patches have one name or a passport field is empty.
    """

    def enter(function: Callable[[], None]) -> Callable[[], None]:
        passport = Passport(
            name=function.__name__, breaks_without=breaks_without, upstream=upstream, versions=versions, can_go_when=can_go_when)
        blank = [field for field in Passport.__slots__ if not getattr(passport, field).strip()]
        if blank:
            raise ValueError(f'patch {passport.name}: empty passport field(s) {blank}')
        if passport.name in _REGISTER:
            raise ValueError(f'two patches are called {passport.name}')

        @functools.wraps(function)
        def once() -> None:
            if passport.name not in _APPLIED:
                function()
                _APPLIED.append(passport.name)

        _REGISTER[passport.name] = (passport, once)
        return once

    return enter


def passports() -> list[Passport]:
    """All passports in the register, in the order in which their modules were imported."""
    return [passport for passport, _ in _REGISTER.values()]


def applied() -> list[str]:
    """Names of the patches applied in this process, in order."""
    return list(_APPLIED)
