"""Stand-ins for what ``megatron.training`` asks of CUDA at its start, besides those of :mod:`loongforge.megatron.cpu`.

``pretrain()`` refuses to start without CUDA.  :func:`apply` makes it believe in one GPU a process, so that a script
that calls it can be tried on a CPU with ``--distributed-backend gloo --use-cpu-initialization``.  It is for a whole
process and cannot be undone; refused where CUDA is present.
"""

from __future__ import annotations

import os
import types
from typing import Any

import torch

from loongforge.megatron import cpu

_PROPERTIES = types.SimpleNamespace(name="cpu", major=0, minor=0, total_memory=1 << 34, multi_processor_count=1)


def apply() -> None:
    """Set all stand-ins; ``RuntimeError`` where CUDA is present.  A second call changes nothing."""
    if getattr(torch.cuda, "is_available", None) is _yes:
        return
    cpu.apply()
    stand_ins: dict[str, Any] = {
        "is_available": _yes,
        "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "get_device_properties": lambda *args, **kwargs: _PROPERTIES,
        "get_device_capability": lambda *args, **kwargs: (0, 0),
        "manual_seed_all": lambda *args: None,
        "memory_stats": lambda *args, **kwargs: {},
        "reset_peak_memory_stats": lambda *args, **kwargs: None,
    }
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        stand_ins[name] = lambda *args, **kwargs: 0
    for name, stand_in in stand_ins.items():
        setattr(torch.cuda, name, stand_in)
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self  # type: ignore[method-assign, assignment]


def _yes() -> bool:
    return True
