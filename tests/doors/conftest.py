"""Fixtures of this folder; the machinery is in environments.py so that the tests can import it by name."""

from tests.doors.environments import bare_env, job, stub_env, wheel_env  # noqa: F401
