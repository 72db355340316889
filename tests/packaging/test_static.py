"""ruff and mypy are content with the whole tree."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("tool", "arguments"),
    (("ruff", ("check", ".")), ("ruff", ("format", "--check", ".")), ("mypy", ("loongforge",))),
    ids=("ruff check", "ruff format", "mypy"),
)
def test_static(tool, arguments):
    if importlib.util.find_spec(tool) is None:
        pytest.skip(f"needs {tool} (loongforge[dev])")
    command = [sys.executable, "-m", tool, *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, f"{result.stdout[-3000:]}{result.stderr[-1000:]}"
