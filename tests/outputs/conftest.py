"""Fixtures of the outputs' tests: chunks narrow enough for every case to have several and a ragged last one."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def narrow_chunks(monkeypatch):
    monkeypatch.setenv("LCE_FWD_VOCAB_SPLIT_SIZE", "48")
    monkeypatch.setenv("LCE_BWD_VOCAB_SPLIT_SIZE", "40")
