"""torch's AdamW under megatron-core's distributed optimizer, around the loading of a checkpoint.

Megatron expects an Adam that keeps one step count per parameter group; torch keeps a tensor per parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


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


def separate_step_counts(optimizer: Any) -> None:
    """Megatron loads one tensor as every parameter's step count, which each parameter's update would increment."""
    for adam in _torch_adams(optimizer):
        for state in adam.state.values():
            state["step"] = state["step"].clone()


def _torch_adams(optimizer: Any) -> Iterator[torch.optim.AdamW]:
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part.optimizer, torch.optim.AdamW):
            yield part.optimizer
