"""Memory over time of one loss, from the allocator's own events.

On a GPU they come from the caching allocator's history, elsewhere from the profiler.  Three marks, allocations of a
size that nothing else has, say where forward begins, where backward begins and where it ends.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

MARK_BYTES = 7919
"""A prime: no tensor of whole tokens has this size."""


@dataclass(frozen=True)
class Event:
    """Something allocated (``num_bytes`` > 0) or released (0) at an address."""

    time_ms: float
    address: int
    num_bytes: int


@dataclass(frozen=True)
class Block:
    """One allocation; ``stop_ms`` is None where it outlived backward."""

    num_bytes: int
    start_ms: float
    stop_ms: float | None


@dataclass(frozen=True)
class Timeline:
    """Allocations of one forward and backward, times counted from the start of forward."""

    blocks: tuple[Block, ...]
    backward_ms: float
    """When backward begins."""
    end_ms: float

    @property
    def peak_bytes(self) -> int:
        """Most bytes that were allocated at once."""
        changes = [(block.start_ms, block.num_bytes) for block in self.blocks]
        changes += [(block.stop_ms, -block.num_bytes) for block in self.blocks if block.stop_ms is not None]
        live = peak = 0
        for _, change in sorted(changes):  # a release comes before an allocation of the same moment
            live += change
            peak = max(peak, live)
        return peak


def record(
    device: torch.device, forward: Callable[[], torch.Tensor], backward: Callable[[torch.Tensor], object]
) -> Timeline:
    """Timeline of ``backward(forward())``.  What was allocated before is not in it."""

    def step() -> None:
        _mark(device)
        loss = forward()
        _mark(device)
        backward(loss)
        _mark(device)

    return timeline_of(_gpu_events(step, device) if device.type == "cuda" else _cpu_events(step))


def timeline_of(events: Iterable[Event]) -> Timeline:
    """Allocations between the first and the last mark, each with the release of its address."""
    marks: list[float] = []
    live: dict[int, Event] = {}
    done: list[Block] = []
    for event in sorted(events, key=lambda event: event.time_ms):
        if event.num_bytes == MARK_BYTES:
            marks.append(event.time_ms)
        elif len(marks) not in (1, 2):
            continue
        elif event.num_bytes:
            live[event.address] = event
        elif event.address in live:
            start = live.pop(event.address)
            done.append(Block(start.num_bytes, start.time_ms - marks[0], event.time_ms - marks[0]))
    if len(marks) != 3:
        raise RuntimeError(f"the allocator's record holds {len(marks)} of 3 marks")
    done += [Block(event.num_bytes, event.time_ms - marks[0], None) for event in live.values()]
    return Timeline(tuple(sorted(done, key=lambda b: b.start_ms)), marks[1] - marks[0], marks[2] - marks[0])


def _mark(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    torch.empty(MARK_BYTES, dtype=torch.uint8, device=device)


def _gpu_events(step: Callable[[], None], device: torch.device) -> list[Event]:
    """torch has no public name for this history; its own memory viewer reads the same."""
    history = torch.cuda.memory
    history._record_memory_history(enabled="all", context=None, stacks="python", max_entries=1 << 20)
    try:
        step()
        trace = history._snapshot(device)["device_traces"][device.index or 0]
    finally:
        history._record_memory_history(enabled=None)
    return gpu_events_of(trace)


def gpu_events_of(trace: Iterable[dict[str, Any]]) -> list[Event]:
    """Events of one device's part of a snapshot of the caching allocator."""
    sizes = {"alloc": lambda entry: entry["size"], "free_requested": lambda entry: 0}
    return [
        Event(entry["time_us"] / 1e3, entry["addr"], sizes[entry["action"]](entry))
        for entry in trace
        if entry["action"] in sizes
    ]


def _cpu_events(step: Callable[[], None]) -> list[Event]:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with _without_trace_points(), torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profile.export_chrome_trace(str(trace))
        entries = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    return [
        Event(float(entry["ts"]) / 1e3, int(entry["args"]["Addr"]), max(0, int(entry["args"]["Bytes"])))
        for entry in entries
        if entry.get("name") == "[memory]" and int(entry["args"]["Device Type"]) == 0
    ]


@contextmanager
def _without_trace_points() -> Iterator[None]:
    """Drop the two lines that torch 2.13 writes to standard error for each profile; all others come afterwards."""
    saved = os.dup(2)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            written.seek(0)
            for line in written:
                if not line.startswith(b"USDT:"):
                    os.write(2, line)
