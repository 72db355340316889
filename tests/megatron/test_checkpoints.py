"""Checkpoints move between fused and unfused runs, tensor-parallel sizes and versions, and hold nothing new."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.megatron.launching import HERE, environment
from tests.megatron.matrix import INSTALLED

pytestmark = pytest.mark.timeout(1800)


def start(version: str, folder: Path, what: str, loss: str, tp: int) -> dict:
    """Loss of the first batch and the names in the checkpoint, equal on all ranks."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, str(HERE / "checkpoint_worker.py"), str(folder), what, loss, str(tp)]
    logs = [folder.with_name(f"{folder.name}.{what}.{rank}") for rank in range(tp)]
    processes = []
    for rank, log in enumerate(logs):
        variables = {**environment(version), "RANK": str(rank), "WORLD_SIZE": str(tp)}
        with log.open("w") as output:
            processes.append(subprocess.Popen(command, env=variables, stdout=output, stderr=output))
    try:
        statuses = [process.wait(timeout=500) for process in processes]
    finally:
        for process in processes:
            process.kill()
    outputs = [log.read_text() for log in logs]
    assert statuses == [0] * tp, "\n".join(outputs)[-4000:]
    results = [
        json.loads(line.removeprefix("RESULT "))
        for output in outputs
        for line in output.splitlines()
        if line.startswith("RESULT ")
    ]
    assert len(results) == tp and all(result == results[0] for result in results)
    assert results[0]["version"] == version and results[0]["fused"] == (loss == "linear")
    return results[0]


def test_checkpoints_move_between_losses_layouts_and_versions(tmp_path):
    """Towards newer versions: 0.16 cannot read what 0.19 writes, whatever the loss."""
    newest = "0.19.2"
    environment(newest)  # skips where it was not fetched
    fused = start(INSTALLED, tmp_path / "fused", "save", "linear", 2)
    unfused = start(newest, tmp_path / "unfused", "save", "unfused", 1)
    # 0.19 keeps Megatron's own common state beside the weights.
    names = [name for name in unfused["names"] if not name.startswith("common_state/")]
    assert fused["names"] == names, "the fused run stored something of its own"
    assert fused["loss"] != pytest.approx(unfused["loss"], rel=1e-3), "the two checkpoints must differ"
    moved = start(newest, tmp_path / "fused", "load", "unfused", 1)
    assert moved["loss"] == pytest.approx(fused["loss"], rel=1e-6)
    back = start(newest, tmp_path / "unfused", "load", "linear", 2)
    assert back["loss"] == pytest.approx(unfused["loss"], rel=1e-6)
