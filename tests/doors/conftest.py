"""Fixtures of this folder; the machinery is in conftest_doors.py so that the tests can import it by name."""

from conftest_doors import bare_env, job, stub_env, wheel_env  # noqa: F401
