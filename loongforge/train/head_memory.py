"""Peak memory of output layer and loss inside one real training step, from the allocator's own events.

The profiler reports every allocation and release.  Two marks bound the stretch: the moment before the output layer's
forward, and the moment its input's gradient is there; between them run forward and backward of output layer and loss
and nothing else.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_BEGIN = "loongforge: output layer begins"
_END = "loongforge: output layer's input has its gradient"


@dataclass(frozen=True)
class HeadMemory:
    """Bytes above what was allocated when the output layer began."""

    peak: int
    largest_allocation: int


class HeadMemoryProbe:
    """Measures the steps that run inside :meth:`measure`."""

    def __init__(self, output_layer: torch.nn.Module, device: torch.device) -> None:
        self._output_layer = output_layer
        self._device = device
        self.result: HeadMemory | None = None

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Profile the enclosed training step and set ``result``."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        hook = self._output_layer.register_forward_pre_hook(_mark, with_kwargs=True)
        try:
            with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
                yield
        finally:
            hook.remove()
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder, "trace.json")
            profile.export_chrome_trace(str(trace))
            events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
        self.result = head_memory(events, on_cpu=self._device.type == "cpu")


def head_memory(events: list[dict[str, Any]], on_cpu: bool) -> HeadMemory:
    """Largest sum of allocations minus releases between a begin and the next end, over all such stretches."""
    relevant = [
        event
        for event in events
        if event.get("name") in (_BEGIN, _END)
        or (event.get("name") == "[memory]" and (event["args"]["Device Type"] == 0) == on_cpu)
    ]
    peak = largest = 0
    live: int | None = None
    ended = False
    for event in sorted(relevant, key=lambda event: float(event["ts"])):
        if event["name"] == _BEGIN:
            live = 0
        elif event["name"] == _END:
            live, ended = None, True
        elif live is not None:
            num_bytes = int(event["args"]["Bytes"])
            live += num_bytes
            peak, largest = max(peak, live), max(largest, num_bytes)
    if not ended or live is not None:
        raise RuntimeError("the profile does not hold the output layer's forward and backward")
    return HeadMemory(peak=peak, largest_allocation=largest)


def _mark(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
    hidden = args[0] if args else kwargs["input_"]
    if hidden.requires_grad:
        hidden.register_hook(lambda grad: _record(_END))
        _record(_BEGIN)


def _record(name: str) -> None:
    with torch.profiler.record_function(name):
        pass
