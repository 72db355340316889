"""The kernels one by one: all that a CPU has, those of Triton under its interpreter, and what a line says otherwise."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from loongforge.arch import Arch
from loongforge.bench import kernel_cases, kernels
from loongforge.bench.kernel_cases import Kernel
from loongforge.bench.measure import interleaved_ms, make_problem
from loongforge.bench.progress import Progress
from loongforge.bench.shapes import HeadShape
from loongforge.kernels.generic import GenericRowKernels
from tests.helpers import worst

CPU = torch.device("cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_CPU = {
    "nothing between two events", "logits of a chunk, library", "logits of all rows, library",
    "copy of as many bytes as accumulate", "copy of as many bytes as to gradient",
    "accumulate, generic", "to gradient, generic",
    "losses of tokens, torch", "loss-only forward, generic",
}  # fmt: skip
IN_TRITON = {
    "statistics of a chunk, gluon", "statistics of a chunk, triton", "gradient of a chunk, gluon",
    "gradient of a chunk, triton", "statistics of all rows, gluon", "statistics of all rows, triton",
    "accumulate, triton", "to gradient, triton", "after the tiles, gluon",
    "after the tiles, triton", "losses of tokens, triton",
}  # fmt: skip
ELSEWHERE = {"accumulate, flydsl", "to gradient, flydsl"}


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    kernels.add_arguments(parser)
    return parser.parse_args(words)


def measured(tokens: int = 60, dtype: torch.dtype = torch.float32, width: int = 104) -> dict[str, kernels.Line]:
    shape = HeadShape("small", tokens, 16, 300)
    lines = kernels.measure(shape, width, CPU, dtype, 1, Progress(2))
    assert len({line.name for line in lines}) == len(lines)
    return {line.name: line for line in lines}


@pytest.mark.skipif(INTERPRETED, reason="the other tests of this file")
def test_a_cpu_runs_what_it_can_and_says_what_needs_a_gpu(tmp_path, capsys):
    flags = ("60x16x300", "9x8x40", "--chunk", "104", "--dtype", "fp32", "--device", "cpu", "--repetitions", "2")
    lines = kernels.run(arguments(*flags, "--output-dir", str(tmp_path)))
    first = [line for line in lines if line.shape == "60x16x300"]
    assert {line.name for line in first if line.status == "ok"} == ON_CPU
    assert {line.name for line in first if line.status.startswith("needs a GPU: ")} == IN_TRITON | ELSEWHERE
    assert all(math.isnan(line.ms) == (line.status != "ok") for line in lines)
    checked = [line for line in lines if line.status == "ok" and not line.name.startswith(("nothing", "copy"))]
    assert worst(line.error for line in checked) < 1e-5
    by_name = {line.name: line for line in first}
    forward, accumulate = by_name["loss-only forward, generic"], by_name["accumulate, generic"]
    assert forward.ratio == pytest.approx(3 * forward.ms / forward.floor_ms)
    assert accumulate.ratio == accumulate.ms / by_name["copy of as many bytes as accumulate"].ms
    assert accumulate.num_bytes == 60 * 104 * 4 and by_name["to gradient, generic"].num_bytes == (60 + 56) * 104 * 4
    printed, written = capsys.readouterr().out, (tmp_path / "table.txt").read_text()
    assert printed.count(" cpu ms ") == 4 and "60x16x300: T=60 H=16 V=300, chunks of 104, " in printed
    assert "9x8x40: T=9 H=8 V=40, chunks of 40, " in printed and "all rows" not in printed.split("9x8x40: ")[1]
    assert written.splitlines()[3:] == printed.splitlines()[3:]
    record = json.loads((tmp_path / "results.json").read_text())
    assert [result["name"] for result in record["results"]] == [line.name for line in lines]
    assert {"device", "versions", "command", "date"} <= set(record["environment"])


@pytest.mark.skipif(INTERPRETED, reason="the other tests of this file")
def test_a_wrong_or_failing_kernel_is_reported_and_not_timed(monkeypatch):
    right = GenericRowKernels.gradient_

    def half(self, logits_TC, *rest):
        right(self, logits_TC, *rest)
        logits_TC.mul_(0.5)

    def broken(self, *rest):
        raise ValueError("no room\nfor it")

    monkeypatch.setattr(GenericRowKernels, "gradient_", half)
    monkeypatch.setattr(GenericRowKernels, "accumulate", broken)
    lines = measured()
    wrong, failed = lines["to gradient, generic"], lines["accumulate, generic"]
    assert wrong.status == "wrong: off by 5.0e-01, more than 1.0e-05" and wrong.error == pytest.approx(0.5)
    assert failed.status == "failed: ValueError: no room" and math.isnan(wrong.ms) and math.isnan(failed.ms)
    assert lines["loss-only forward, generic"].status == "failed: ValueError: no room"
    assert kernels.row(wrong).endswith("more than 1.0e-05")
    assert kernels.check(HeadShape.of_sizes(1, 1, 1), Kernel("nan", error=lambda: math.nan)).status.startswith("wrong")


@pytest.mark.parametrize(
    "name, arch, triton, expected",
    [
        ("gluon", "sm_80", None, "written for sm_90, the device is nvidia sm_80"),
        ("triton", "sm_80", None, "needs a tensor memory accelerator"),
        ("triton", "sm_90", "triton is not installed", "triton is not installed"),
        ("gluon", "sm_90", None, "the Gluon kernels are for Triton 3.6 to 3.9, this is 3.1.0"),
        ("triton", "sm_100", None, "takes bf16 and fp16 operands"),
    ],
)
def test_reasons(monkeypatch, name, arch, triton, expected):
    pytest.importorskip("triton", reason="needs triton (pip install 'loongforge[triton]')")
    monkeypatch.setattr(kernel_cases, "detect", lambda device: Arch("nvidia", arch))
    monkeypatch.setattr(kernel_cases, "missing_package", lambda package: triton)
    monkeypatch.setattr("triton.__version__", "3.1.0")
    hidden = types.SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)
    assert kernel_cases._tiles_or_reason(name, hidden, None).startswith(expected)


def test_calls_take_turns_each_behind_a_floor():
    ran = []
    calls = {name: (lambda name=name: ran.append(name)) for name in "ab"}
    floors, times = interleaved_ms(lambda: ran.append("floor"), calls, CPU, 2)
    assert ran == ["floor", "a", "floor", "b"] * 4
    assert len(floors) == 4 and [len(times[name]) for name in "ab"] == [2, 2]


def test_the_forward_is_taken_apart(monkeypatch):
    """Two kernels of 5 and 1 us with 2 us between them, behind a floor of three; two profiles lost events."""
    alone = [("void at::native::first<int>(c10::Type)", 0.0, 5.0), ("second", 7.0, 8.0)]
    behind = [("gemm", 10.0 * n, 10.0 * n + 9) for n in range(3)]
    behind += [(name, start + 30, stop + 30) for name, start, stop in alone]
    profiles = iter([alone[1:], alone, behind, behind[-1:], behind])
    monkeypatch.setattr(kernels, "device_kernels", lambda call: next(profiles))
    found, gaps_us = kernels.taken_apart(lambda: None, lambda: None)
    assert [kernel["us"] for kernel in found] == [5.0, 1.0] and gaps_us == 2.0
    line = kernels.Line("s", "loss-only forward, triton", ms=0.011, baseline_ms=0.010, kernels=found, gaps_us=gaps_us)
    text = [words.split() for words in kernels.parts(line, torch.device("cuda"))[1:]]
    assert text == [
        ["5.0", "0.5000", "first<int>(Type)"],
        ["1.0", "0.1000", "second"],
        ["6.0", "0.6000", "all", "2", "kernels"],
        ["2.0", "0.2000", "between", "them"],
    ]
    monkeypatch.setattr(kernels, "device_kernels", lambda call: [])
    assert kernels.taken_apart(lambda: None, lambda: None)[0] == []


@pytest.fixture
def interpreted(monkeypatch):
    """Triton's kernels on the CPU: the plain ones under the interpreter, Gluon's on ``gluon_machine.py``.

    Gives the plain kernels of tiles and their modules.
    """
    from loongforge.kernels import (
        gluon_ring,
        gluon_tiles,
        triton_losses,
        triton_rows,
        triton_tiles,
        triton_tiles_finish,
    )
    from tests.kernels import gluon_machine

    gluon_machine.install(monkeypatch, gluon_ring, gluon_tiles, triton_rows, triton_tiles)
    tiles = {"gluon": gluon_tiles.GluonTileKernels(), "triton": triton_tiles.TritonTileKernels()}
    rows = {"triton": triton_rows.TritonRowKernels(), "flydsl": "needs an AMD GPU"}
    monkeypatch.setattr(kernel_cases, "tile_variants", lambda hidden_TH, weight_CH: tiles)
    monkeypatch.setattr(kernel_cases, "row_variants", lambda device, dtype: rows)
    monkeypatch.setattr(kernel_cases, "why_no_triton", lambda device: None)
    return {
        "statistics_kernel": triton_tiles, "tile_gradient_kernel": triton_tiles, "finish_kernel": triton_tiles_finish,
        "token_losses_kernel": triton_losses,
    }  # fmt: skip


@pytest.mark.skipif(not INTERPRETED, reason="test_kernels_of_triton_under_the_interpreter runs it")
def test_triton_and_gluon_are_right(interpreted):
    lines = measured(8, torch.float16)
    assert {name for name, line in lines.items() if line.status == "ok"} >= IN_TRITON
    assert {line.status for line in lines.values()} == {"ok", "needs an AMD GPU"}
    in_triton = [lines[name] for name in IN_TRITON]
    assert all(line.ms > 0 for line in in_triton)
    assert worst(line.error for line in in_triton if "gradient" not in line.name) < 1e-5
    assert worst(line.error for line in in_triton) < 1e-3


@pytest.mark.skipif(not INTERPRETED, reason="test_kernels_of_triton_under_the_interpreter runs it")
def test_each_call_launches_its_kernel_alone(interpreted, monkeypatch):
    launched = []

    class Recorded:
        def __init__(self, name, kernel):
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid):
            launched.append(self.name)
            return self.kernel[grid]

    for name, module in interpreted.items():
        monkeypatch.setattr(module, name, Recorded(name, getattr(module, name)))
    problem = make_problem(HeadShape("small", 8, 16, 40), CPU, torch.float16)
    expected = {
        "statistics of a chunk, triton": ["statistics_kernel"],
        "gradient of a chunk, triton": ["tile_gradient_kernel"],
        "after the tiles, gluon": ["finish_kernel"],
        "after the tiles, triton": ["finish_kernel"],
        "losses of tokens, triton": ["token_losses_kernel"],
    }
    found = {kernel.name: kernel for kernel in kernel_cases.kernels_of(problem, 40)}
    for name, names in expected.items():
        launched.clear()
        found[name].call()
        assert launched == names, name


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
def test_kernels_of_triton_under_the_interpreter():
    pytest.importorskip("triton", reason="needs triton (pip install 'loongforge[triton]')")
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, "-k", "right or alone"], cwd=Path(__file__).parents[2], env=environment,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0 and "2 passed" in result.stdout, result.stdout[-6000:] + result.stderr[-2000:]
