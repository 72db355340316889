"""Gradient accumulation fusion: the weight's gradient goes straight into Megatron's ``weight.main_grad``."""

from __future__ import annotations

from typing import Any

import torch


class MainGradSink:
    """Does for the fused head what Megatron's ``LinearWithGradAccumulationAndAsyncCommunication`` does for a layer.

    ``main_grad`` is taken at forward and attached again at backward, since a pipeline schedule may exchange it in
    between.  ``grad_added_to_main_grad`` tells DDP's hook that the gradient has arrived.  Autograd then gets a
    stand-in of the weight's shape: zeros for a tied weight (``zero_out_wgrad``), because the embedding's gradient is
    added to it and DDP adds the sum to ``main_grad``; anything at all where DDP only asserts that it exists.
    """

    def __init__(self, weight: Any) -> None:
        self._weight = weight
        self._main_grad: torch.Tensor = weight.main_grad

    def open(self) -> tuple[torch.Tensor, bool]:
        """``main_grad``, to be added into."""
        self._weight.main_grad = self._main_grad
        return self._main_grad, True

    def close(self) -> torch.Tensor:
        """The stand-in for autograd."""
        weight = self._weight
        has_flag = hasattr(weight, "grad_added_to_main_grad")
        if has_flag:
            weight.grad_added_to_main_grad = True
        if getattr(weight, "zero_out_wgrad", False) or not has_flag:
            return torch.zeros_like(weight, requires_grad=False)
        return torch.empty_like(weight, requires_grad=False)


def main_grad_sink(layer: Any, weight: torch.Tensor) -> MainGradSink | None:
    """The sink where Megatron's own output layer would accumulate into ``main_grad``, else None."""
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None or not layer.gradient_accumulation_fusion:
        return None
    if main_grad.shape != weight.shape:
        raise ValueError(
            f"the output layer's main_grad must have the weight's shape {list(weight.shape)}, "
            f"got {list(main_grad.shape)}: it is a shard, which gradient accumulation fusion cannot add into"
        )
    return MainGradSink(weight)
