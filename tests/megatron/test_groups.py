"""Process groups that the model was given, over gloo in 4 processes."""

from __future__ import annotations

import pytest

from tests.core.worlds import run_world
from tests.megatron import group_checks


@pytest.mark.parametrize("check", group_checks.CHECKS)
def test_world(check):
    failures = run_world(4, group_checks.__name__)[check]
    assert not failures, failures
