"""Each kernel of the loss by itself on this device: checked, then timed behind the floor of the comparison.

All take turns in every repetition, so that a line is compared with its baseline of the same run; operands come from
memory, not from a cache that the kernel before has filled.  The forward without gradients is also taken apart into its
device kernels.  What cannot run here has a line that says why.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from loongforge.bench.kernel_cases import FORWARD, GEMM_SHARE, Kernel, kernels_of
from loongforge.bench.measure import failure, interleaved_ms, make_problem, release
from loongforge.bench.progress import Progress
from loongforge.bench.report import heading, write_json, write_text
from loongforge.bench.run import DEFAULT_SHAPE, DTYPES, add_measurement_flags, describe, device_of
from loongforge.bench.shapes import SHAPES, HeadShape, add_size_flags, positive, shapes_of
from loongforge.dispatch import choose
from loongforge.errors import require_folder
from loongforge.options import LossOptions
from loongforge.plan import plan_chunks

PROFILES = 3
"""Profiled forwards; of each kernel's times the median counts."""


@dataclass
class Line:
    """One kernel on one shape; NaN where it was not measured."""

    shape: str
    name: str
    status: str = "ok"
    ms: float = math.nan
    spread_ms: float = math.nan  # half the distance of the quartiles
    baseline: str = ""
    baseline_ms: float = math.nan
    floor_ms: float = math.nan
    flops: int = 0
    num_bytes: int = 0
    error: float = math.nan
    kernels: list[dict[str, Any]] = field(default_factory=list)  # of the forward: name and us of each device kernel
    gaps_us: float = math.nan  # from its first kernel to the end of its last, when none of them ran

    @property
    def ratio(self) -> float:
        """Time over the baseline's."""
        return self.ms / self.baseline_ms


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``scripts/benchmark_kernels.py``."""
    known = ", ".join(SHAPES)
    parser.add_argument(
        "shapes", nargs="*", metavar="SHAPE", help=f"{known}, or TOKENSxHIDDENxVOCAB; default: {DEFAULT_SHAPE}"
    )
    add_size_flags(parser)
    parser.add_argument("--chunk", type=positive, metavar="C", help="vocabulary rows of a chunk; default: the plan's")
    add_measurement_flags(parser, repetitions=7)
    parser.add_argument("--output-dir", type=Path, help="folder for results.json and table.txt; default: print only")


def run(options: argparse.Namespace) -> list[Line]:
    """Measure, print the tables last, write; returns every line."""
    shapes, device, dtype = shapes_of(options, DEFAULT_SHAPE), device_of(options.device), DTYPES[options.dtype]
    require_folder(options.output_dir)
    environment = describe(device, dtype)
    print(heading(environment), flush=True)
    progress, measured, text = Progress(2 * len(shapes)), [], ""
    with torch.cuda.device(device if device.type == "cuda" else -1):
        for shape in shapes:
            width = min(options.chunk or planned_width(shape, device, dtype), shape.vocab)
            lines = measure(shape, width, device, dtype, options.repetitions, progress)
            measured += lines
            text += "\n\n" * bool(text) + table(shape, width, lines, device)
            if options.output_dir:
                write_json(options.output_dir / "results.json", environment, measured)
                write_text(options.output_dir, environment, text)
            release(device)
    print("\n" + text)
    return measured


def planned_width(shape: HeadShape, device: torch.device, dtype: torch.dtype) -> int:
    """Vocabulary rows of a chunk in backward."""
    impl = choose(device, LossOptions(), dtype).impl
    return plan_chunks(impl, shape.tokens, shape.hidden, shape.vocab, dtype.itemsize).backward_width


def measure(
    shape: HeadShape, width: int, device: torch.device, dtype: torch.dtype, repetitions: int, progress: Progress
) -> list[Line]:
    """Check every kernel, time those that are right, take the forward apart."""
    problem = make_problem(shape, device, dtype)
    release(device)
    calls: dict[str, Callable[[], object]] = {}
    lines = []
    with progress.step(f"{shape.name} checks") as step:
        for kernel in kernels_of(problem, width):
            lines.append(check(shape, kernel))
            if lines[-1].status == "ok" and kernel.call is not None:
                calls[kernel.name] = kernel.call
        step.outcome = f"{len(calls)} of {len(lines)} can be timed"
    with progress.step(f"{shape.name} times") as step:
        floors, times = interleaved_ms(problem.floor, calls, device, repetitions)
        _fill(lines, floors, times)
        for line in lines:
            if line.name.startswith(FORWARD) and line.status == "ok" and device.type == "cuda":
                line.kernels, line.gaps_us = taken_apart(problem.floor, calls[line.name])
        step.outcome = f"three products {statistics.median(floors):.2f} ms"
    return lines


def check(shape: HeadShape, kernel: Kernel) -> Line:
    """The line of a kernel that is not timed yet; what it raises becomes its status."""
    line = Line(shape.name, kernel.name, baseline=kernel.baseline, flops=kernel.flops, num_bytes=kernel.num_bytes)
    if kernel.missing:
        line.status = kernel.missing
    elif kernel.error is not None:
        try:
            line.error = kernel.error()
        except Exception as error:  # a kernel that a device or a compiler refuses must not end the measurement
            line.status = failure(error)
        else:
            if not line.error <= kernel.bar:
                line.status = f"wrong: off by {line.error:.1e}, more than {kernel.bar:.1e}"
    return line


def _fill(lines: Sequence[Line], floors: Sequence[float], times: dict[str, list[float]]) -> None:
    floor_ms = statistics.median(floors)
    medians = {name: statistics.median(of_one) for name, of_one in times.items()} | {GEMM_SHARE: floor_ms / 3}
    for line in lines:
        line.floor_ms = floor_ms
        line.ms = medians.get(line.name, math.nan)
        line.baseline_ms = medians.get(line.baseline, math.nan)
        if len(times.get(line.name, ())) > 1:
            low, _, high = statistics.quantiles(times[line.name], n=4, method="inclusive")
            line.spread_ms = (high - low) / 2


def taken_apart(floor: Callable[[], object], call: Callable[[], object]) -> tuple[list[dict[str, Any]], float]:
    """Device kernels of ``call`` behind a floor in their order, with microseconds, and those when none of them ran."""

    def behind_floor() -> None:
        floor()
        call()

    count = max(len(device_kernels(call)) for _ in range(2))  # the first may find the profiler starting
    profiles = [device_kernels(behind_floor)[-count:] for _ in range(PROFILES)] if count else []
    profiles = [profile for profile in profiles if len(profile) == count]  # the profiler may drop events
    if not profiles:
        return [], math.nan
    times_us = [statistics.median(stop - start for _, start, stop in same) for same in zip(*profiles, strict=True)]
    kernels = [{"name": name, "us": us} for (name, _, _), us in zip(profiles[0], times_us, strict=True)]
    gaps_us = [profile[-1][2] - profile[0][1] - sum(stop - start for _, start, stop in profile) for profile in profiles]
    return kernels, statistics.median(gaps_us)


def device_kernels(call: Callable[[], object]) -> list[tuple[str, float, float]]:
    """Name, begin and end in microseconds of everything that ``call`` runs on the GPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    spans = [(event.name, event.time_range.start, event.time_range.end) for event in events]
    return sorted(spans, key=lambda span: span[1])


# ---------------------------------------------------------------- what it says


def table(shape: HeadShape, width: int, lines: Sequence[Line], device: torch.device) -> str:
    """One line per kernel, then the kernels of the forward."""
    floor_ms, unit = lines[0].floor_ms, "ms" if device.type == "cuda" else f"{device.type} ms"
    tflops = 6e-9 * shape.tokens * shape.hidden * shape.vocab / floor_ms
    text = [
        f"{shape.name}: {shape}, chunks of {width}, three-GEMM floor {floor_ms:.2f} {unit} = {tflops:.1f} TFLOP/s",
        f"{'':38} {unit:>9} {'+-':>7} {'TFLOP/s':>8} {'GB/s':>7} {'error':>8} {'ratio':>7}  to",
    ]
    text += [row(line) for line in lines]
    for line in lines:
        if line.name.startswith(FORWARD) and line.status == "ok":
            text += parts(line, device)
    return "\n".join(text)


def row(line: Line) -> str:
    """Name and status, or name and numbers."""
    if line.status != "ok":
        return f"{line.name:38} {line.status}"
    tflops = f"{line.flops / line.ms / 1e9:.1f}" if line.flops else "-"
    gb_per_s = f"{line.num_bytes / line.ms / 1e6:.1f}" if line.num_bytes else "-"
    error = "-" if math.isnan(line.error) else f"{line.error:.1e}"
    spread = "-" if math.isnan(line.spread_ms) else f"{line.spread_ms:.4f}"
    text = f"{line.name:38} {line.ms:9.4f} {spread:>7} {tflops:>8} {gb_per_s:>7} {error:>8}"
    return f"{text} {line.ratio:7.3f}  {line.baseline}" if line.baseline else text


def parts(line: Line, device: torch.device) -> list[str]:
    """The forward's device kernels, their sum and the rest, over one GEMM's share."""
    if not line.kernels:
        reason = "the profiler saw none" if device.type == "cuda" else "needs a GPU: a profile of the device"
        return [f"{line.name}, its kernels: {reason}"]
    share_us, total_us = 1e3 * line.baseline_ms, sum(kernel["us"] for kernel in line.kernels)
    shown = [(kernel["us"], short(kernel["name"])) for kernel in line.kernels]
    shown += [(total_us, f"all {len(line.kernels)} kernels"), (line.gaps_us, "between them")]
    return [
        f"{line.name}, its kernels in their order (us, over {GEMM_SHARE}):",
        *(f"{us:12.1f} {us / share_us:8.4f}  {name}" for us, name in shown),
    ]


def short(name: str) -> str:
    """A kernel's name without what all have in common: ``void``, namespaces, arguments."""
    for word in ("void ", "at::native::", "(anonymous namespace)::", "c10::"):
        name = name.replace(word, "")
    return name if len(name) <= 72 else name[:69] + "..."
