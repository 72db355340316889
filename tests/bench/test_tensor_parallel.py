"""``scripts/benchmark_tp.py`` over gloo at a tiny size, and the arithmetic of its columns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from loongforge.bench.communication import Collective, overlaps, shared, union
from loongforge.bench.ranks import World
from loongforge.bench.shapes import HeadShape
from loongforge.bench.tensor_parallel import VARIANTS, Head
from loongforge.bench.tensor_parallel_report import Result
from loongforge.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]


def torchrun(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LCE_FWD_VOCAB_SPLIT_SIZE": "100"}
    return subprocess.run(
        [*command, "scripts/benchmark_tp.py", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_tiny_run_prints_the_tables_last_and_writes_json(tmp_path):
    done = torchrun("24x16x512", "--device", "cpu", "--rounds", "2", "--graphs", "--output-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "24x16x512 (T=24 H=16 V=512) over 2 ranks" in done.stdout
    assert done.stdout.rstrip().endswith("TP, none kept: no GPU, nothing to capture")
    recorded = json.loads((tmp_path / "results.json").read_text())
    assert recorded["environment"]["ranks"] == 2 and (tmp_path / "table.txt").read_text() in done.stdout + "\n"
    results = recorded["shapes"][0]["results"]
    assert [result["variant"] for result in results] == [variant.name for variant in VARIANTS]
    for result in results:
        assert result["repeats"] and result["peak_mib"] is None and result["step_ms"] > 0
        assert result["ratio"] == result["step_ms"] / result["floor_ms"]
        assert set(result["errors"]) == {"loss", "grad_hidden", "grad_weight"}
    assert {link["collective"] for link in recorded["links"]} == {"all_gather", "reduce_scatter", "all_reduce"}


def test_sizes_that_do_not_divide_are_a_usage_error():
    with pytest.raises(UsageError, match="cannot be split over 2 ranks"):
        Head(HeadShape.of_sizes(24, 16, 511), World(None, None, 0, 2, torch.device("cpu")), torch.bfloat16)


def test_without_torchrun_it_says_how_to_start(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(UsageError, match="LOCAL_RANK not set: start it by torchrun --nproc_per_node 2"):
        World.join(None)


def test_columns():
    result = Result("v", {}, {}, True, step_ms=10.5, floor_ms=10.0, exposed_ms=0.3, collectives_ms=1.2)
    assert result.ratio == pytest.approx(1.05)
    assert result.hidden_share == pytest.approx(0.75)


def test_bytes_through_the_links():
    assert Collective("all_gather", 100, 4, print).sent_bytes == 75
    assert Collective("all_reduce", 100, 4, print).sent_bytes == 150


def test_union_and_shared():
    assert union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert shared((1, 5.5), [(0, 4), (5, 6)]) == 3.5


def test_overlap_of_a_profile():
    """Copies and NCCL's own ranges are no computation."""
    cuda = torch.autograd.DeviceType.CUDA
    names_and_spans = [
        ("gemm", 0, 10),
        ("ncclDevKernel_AllGather_RING_LL(args)", 5, 20),
        ("nccl:all_gather", 5, 20),
        ("Memcpy DtoD", 10, 12),
        ("gemm", 18, 30),
    ]
    events = [
        SimpleNamespace(name=name, device_type=cuda, time_range=SimpleNamespace(start=start, end=end))
        for name, start, end in names_and_spans
    ]
    events.append(SimpleNamespace(name="aten::mm", device_type=torch.autograd.DeviceType.CPU, time_range=None))
    (found,) = overlaps(SimpleNamespace(events=lambda: events))
    assert (found.kernel, found.time_us, found.hidden_us) == ("ncclDevKernel_AllGather_RING_LL", 15, 7)
