"""The files of every family, for the tests in this folder."""

from tests.test_step_waits import files  # noqa: F401 - a fixture
