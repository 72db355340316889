"""The implementations that the cases of this folder run on.

Generic runs everywhere.  Triton joins where there is a GPU or where the process was started with TRITON_INTERPRET=1,
FlyDSL where there is an AMD GPU of its list; nothing else in the cases depends on which one is running.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import loongforge
from loongforge import dispatch
from loongforge.arch import detect

CHUNK_WIDTH = 48


@dataclass(frozen=True)
class Subject:
    """``linear_cross_entropy`` on one implementation and device."""

    impl: str
    device: str = "cpu"

    def __call__(self, hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        moved = {k: v.to(self.device) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
        tensors = (t.to(self.device) for t in (hidden, weight, target))
        return loongforge.linear_cross_entropy(*tensors, **moved)

    def __str__(self) -> str:
        return f"{self.impl}-{self.device}"


def subjects() -> list[Subject]:
    """Generic on the CPU first, then whatever this machine can run."""
    found = [Subject("generic")]
    if os.environ.get("TRITON_INTERPRET") == "1":
        return [*found, Subject("triton")]
    if torch.cuda.is_available():
        found.append(Subject("generic", "cuda"))
        arch = detect(torch.device("cuda"))
        for impl in ("triton", "flydsl"):
            entry = next(entry for entry in dispatch._IMPLEMENTATIONS if entry.name == impl)
            if entry.runs_on(arch) is None and importlib.util.find_spec(impl) is not None:
                found.append(Subject(impl, "cuda"))
    return found


@pytest.fixture(params=subjects(), ids=str)
def loss(request, monkeypatch):
    """A :class:`Subject` whose chunks are narrow enough for every case to have several and a ragged last one."""
    return use(request.param, monkeypatch)


def use(subject: Subject, monkeypatch) -> Subject:
    """Make every call of this test run on ``subject``'s row kernels, in chunks of :data:`CHUNK_WIDTH`."""
    kernels = dispatch._load(subject.impl)
    monkeypatch.setattr("loongforge.call.row_kernels", lambda *arguments: kernels)
    for direction in ("FWD", "BWD"):
        monkeypatch.setenv(f"LCE_{direction}_VOCAB_SPLIT_SIZE", str(CHUNK_WIDTH))
    return subject
