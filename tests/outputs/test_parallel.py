"""Outputs under vocabulary and sequence parallelism over gloo: ``parallel_checks.py`` in 2 and in 4 processes."""

from __future__ import annotations

from functools import cache

import pytest

from tests.core.worlds import run_world
from tests.outputs import compiled_checks, parallel_checks

results = cache(run_world)


@pytest.mark.parametrize("size", (2, 4))
@pytest.mark.parametrize("check", parallel_checks.CHECKS)
def test_world(size, check):
    failures = results(size, parallel_checks.__name__)[check]
    assert not failures, failures


@pytest.mark.parametrize("check", compiled_checks.CHECKS)
def test_compiled(check):
    failures = results(2, compiled_checks.__name__)[check]
    assert not failures, failures
