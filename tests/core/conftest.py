"""Fixtures of the core tests."""

from tests.core.implementations import loss  # noqa: F401
