"""torch's AdamW under megatron-core's distributed optimizer, around the loading of a checkpoint.

Megatron expects an Adam that keeps one step count per parameter group; torch keeps a tensor per parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from loongforge.train.errors import CheckpointError


def allocate_state(optimizer: Any) -> None:
    """Give a fresh AdamW the state it would have before its first step: Megatron asserts that there is a step count."""
    for adam in _torch_adams(optimizer):
        for group in adam.param_groups:
            for parameter in group["params"]:
                if not adam.state[parameter]:
                    adam.state[parameter] = {
                        "step": torch.zeros((), dtype=torch.float32),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }


def step_count(optimizer: Any) -> float | None:
    """Updates done so far, the same for every parameter; None for an Adam that is not torch's."""
    for adam in _torch_adams(optimizer):
        for state in adam.state.values():
            return float(state["step"])
    return None


def restore_step_count(optimizer: Any, count: float | None) -> None:
    """Megatron leaves the distributed optimizer's counts at 0, and one tensor shared by all parameters elsewhere."""
    for adam in _torch_adams(optimizer):
        if count is None:
            raise CheckpointError("the checkpoint was written with the Adam of Apex or Transformer Engine: install it")
        for state in adam.state.values():
            state["step"] = torch.full_like(state["step"], count)


def _torch_adams(optimizer: Any) -> Iterator[torch.optim.AdamW]:
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part.optimizer, torch.optim.AdamW):
            yield part.optimizer
