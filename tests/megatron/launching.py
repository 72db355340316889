"""Starts worker.py, one process a rank, against one version of megatron-core."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.helpers import environment_of_checkout
from tests.megatron.matrix import INSTALLED, Row

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FETCH = "scripts/fetch_megatron_wheels.py"


def environment(version: str) -> dict[str, str]:
    """Environment of a process that sees this version; skips where its wheel was not fetched."""
    result = environment_of_checkout()
    if version != INSTALLED:
        spec = importlib.util.spec_from_file_location("fetch_megatron_wheels", ROOT / FETCH)
        wheels = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(wheels)
        if not wheels.is_unpacked(version):
            pytest.skip(f"megatron-core {version} is not unpacked: python {FETCH}")
        result["PYTHONPATH"] = os.pathsep.join([str(wheels.wheel_folder(version)), result["PYTHONPATH"]])
    return result


def run_rows(version: str, rows: list[Row]) -> dict[str, list[dict]]:
    """Row name -> what each rank measured; all rows need the same number of processes."""
    world = rows[0].world
    # Narrow chunks that do not divide the vocabulary.
    base = {
        **environment(version),
        "WORLD_SIZE": str(world),
        "LCE_GENERIC_FWD_VOCAB_SPLIT_SIZE": "48",
        "LCE_GENERIC_BWD_VOCAB_SPLIT_SIZE": "80",
    }
    with tempfile.TemporaryDirectory() as folder:
        task, log = Path(folder) / "task.json", Path(folder) / "log"
        task.write_text(json.dumps({"rows": [asdict(row) for row in rows]}))
        command = [sys.executable, str(HERE / "worker.py"), str(task)]
        with log.open("w") as output:
            processes = [
                subprocess.Popen(command, env={**base, "RANK": str(rank)}, stdout=output, stderr=output)
                for rank in range(world)
            ]
            _wait(processes, deadline=time.monotonic() + 90 + 30 * len(rows))
        ranks = [task.with_suffix(f".rank{rank}") for rank in range(world)]
        reports = [json.loads(path.read_text()) for path in ranks if path.exists()]
        assert len(reports) == world, f"a worker died before its first row:\n{log.read_text()[-4000:]}"
    if version != INSTALLED:
        assert {report["version"] for report in reports} == {version}
    measured: dict[str, list[dict]] = {}
    for report in reports:
        for result in report["results"]:
            measured.setdefault(result["row"], []).append(result)
    return measured


def _wait(processes: list[subprocess.Popen], deadline: float) -> None:
    """Until all have ended; past the deadline, or once one has failed, the others are killed."""
    while any(process.poll() is None for process in processes):
        failed = any(process.poll() for process in processes)
        if failed or time.monotonic() > deadline:
            time.sleep(2)
            for process in processes:
                process.kill()
        time.sleep(0.1)
