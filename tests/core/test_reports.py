"""The reported bugs of ``report_cases.py`` on every implementation that this machine can run."""

import pytest

from tests.core.report_cases import CASES


@pytest.mark.parametrize("name", CASES)
def test_report(name, loss, monkeypatch):
    if name == "a_quarter_million_classes":  # 5462 chunks of 48 would say no more
        for direction in ("FWD", "BWD"):
            monkeypatch.setenv(f"LCE_{direction}_VOCAB_SPLIT_SIZE", "100003")
    CASES[name].run(loss)
