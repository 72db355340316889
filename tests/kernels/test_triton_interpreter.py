"""Runs the Triton kernels' tests under Triton's interpreter, which needs a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton (pip install 'loongforge[triton]')")
FOLDER = Path(__file__).parent


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is on: those files run anyway")
@pytest.mark.parametrize("name", ("test_triton_rows.py", "test_triton_tiles.py", "test_triton_outputs.py"))
def test_kernels_under_the_interpreter(name):
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", "-p", "no:xdist", str(FOLDER / name)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, cwd=FOLDER.parents[1], env=environment, capture_output=True, text=True, timeout=550
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout, result.stdout[-2000:]
