"""PEFT's LoRA on an output layer: the adapter trains, the base does not."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn


def is_lora_layer(module: nn.Module) -> bool:
    """Whether ``module`` is one of PEFT's LoRA layers; imports nothing."""
    layer = sys.modules.get("peft.tuners.lora.layer")
    return layer is not None and isinstance(module, layer.LoraLayer)


class LoraHead:
    """A ``peft.tuners.lora.Linear`` seen as ``hidden @ base.T + low_rank @ up.T``."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.base_layer: nn.Module = layer.get_base_layer()

    def answer(self, request: Any, hidden: torch.Tensor) -> None:
        """The loss for ``request`` (see :mod:`loongforge.integrations.transformers`)."""
        base = self.base_layer
        weight, bias = base.weight, base.bias
        if self._layer.disable_adapters or self._layer.merged:
            request.answer(hidden, weight, bias=bias)
            return
        name = self._active_adapter()
        down, up = self._layer.lora_A[name], self._layer.lora_B[name]
        low_rank = down(self._layer.lora_dropout[name](hidden.to(down.weight.dtype))) * self._layer.scaling[name]
        request.answer(hidden, weight, bias=bias, adapter=(low_rank.to(hidden.dtype), up.weight.to(weight.dtype)))

    def _active_adapter(self) -> str:
        active = [name for name in self._layer.active_adapters if name in self._layer.lora_A]
        if len(active) != 1 or self._layer.lora_variant or self._layer.lora_B[active[0]].bias is not None:
            raise NotImplementedError(
                "the fused loss takes one plain LoRA adapter on the output layer, without DoRA, other variants and "
                f"lora_bias; active are {active}: leave the output layer out of target_modules"
            )
        return active[0]
