"""Runs ``test_triton_rows.py`` under Triton's interpreter, which needs a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton (pip install 'loongforge[triton]')")
TESTS = Path(__file__).with_name("test_triton_rows.py")


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is on: that file has run already")
def test_row_kernels_under_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", str(TESTS)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=TESTS.parents[2], env=environment, capture_output=True, text=True, timeout=550)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout, result.stdout[-2000:]
