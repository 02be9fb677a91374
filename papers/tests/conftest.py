"""The strictness of the library's tests."""

from tests.conftest import *  # noqa: F403
