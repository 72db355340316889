"""Fixtures of all tests: a clean environment, and ``tests.helpers`` importable from here and from spawned processes."""

import os
import sys
from pathlib import Path

import pytest

ROOT = str(Path(__file__).resolve().parents[1])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """No ``LCE_*`` variable of the caller's shell reaches a test."""
    for name in list(os.environ):
        if name.startswith("LCE_"):
            monkeypatch.delenv(name)
