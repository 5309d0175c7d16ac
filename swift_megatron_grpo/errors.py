"""Errors that are meant for the person at the terminal (import tier 0: standard library only)."""


class UserError(ValueError):
    """Something in the user's input is wrong.

    The message says what is wrong, what was given, what would be right, and what happens otherwise. It is printed once, without a
    traceback, and the process ends with exit code 2.
    """


class RunError(RuntimeError):
    """A run that had started cannot go on (a reward function failed, a deadline passed, a server is gone).

    The message names the phase, the rank and the last thing done. The process ends with exit code 1.
    """
