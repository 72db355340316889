"""A fused model of transformers under DDP, FSDP2 and a tensor-parallel plan, in two processes."""

from __future__ import annotations

from functools import cache

import pytest

from tests.core.worlds import run_world
from tests.integrations import sharded_models

results = cache(run_world)


@pytest.mark.parametrize("check", sharded_models.CHECKS)
def test_world(check):
    failures = results(2, sharded_models.__name__)[check]
    assert not failures, failures
