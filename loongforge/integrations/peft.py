"""PEFT on an output layer: LoRA, whose adapter trains while the base does not, and copies of the layer that train."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from loongforge.integrations.hooks import logits_user


def is_lora_layer(module: nn.Module) -> bool:
    """Whether ``module`` is one of PEFT's LoRA layers; imports nothing."""
    layer = sys.modules.get("peft.tuners.lora.layer")
    return layer is not None and isinstance(module, layer.LoraLayer)


def output_layers(head: Any) -> list[Any]:
    """``head``, or the layers among which PEFT's ``modules_to_save`` chooses at each call."""
    other = sys.modules.get("peft.utils.other")
    if other is None or type(head) is not other.ModulesToSaveWrapper:
        return [head]
    return [head.original_module, *head.modules_to_save.values()]


def logits_users(head: Any) -> Iterator[str]:
    """Names of all that needs ``head``'s logits, see :func:`loongforge.integrations.hooks.logits_user`."""
    called = [head, *(layer for layer in output_layers(head) if layer is not head)]
    parts = [(layer, True) for layer in called]
    for layer in called:
        if is_lora_layer(layer):
            parts += [(part, False) for part in (layer.get_base_layer(), *layer.lora_B.values())]
    for module, is_called in parts:
        name = logits_user(module, is_called)
        if name is not None:
            yield name


class LoraHead:
    """A ``peft.tuners.lora.Linear`` seen as ``hidden @ base.T + low_rank @ up.T``."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.base_layer: nn.Module = layer.get_base_layer()

    def answer(self, request: Any, hidden: torch.Tensor) -> torch.Tensor:
        """The loss for ``request`` (see :mod:`loongforge.integrations.transformers`)."""
        layer, base = self._layer, self.base_layer
        if layer.disable_adapters and layer.merged:  # as its own forward does
            layer.unmerge()
        name = None if layer.disable_adapters or layer.merged else self._active_adapter()
        weight, bias = base.weight, base.bias
        if name is None:
            return request.answer(hidden, weight, bias=bias)
        down, up = layer.lora_A[name], layer.lora_B[name]
        low_rank = down(layer.lora_dropout[name](hidden.to(down.weight.dtype))) * layer.scaling[name]
        return request.answer(
            hidden, weight, bias=bias, adapter=(low_rank.to(hidden.dtype), up.weight.to(weight.dtype))
        )

    def _active_adapter(self) -> str | None:
        active = [name for name in self._layer.active_adapters if name in self._layer.lora_A]
        if not active:
            return None
        if len(active) != 1 or self._layer.lora_variant or self._layer.lora_B[active[0]].bias is not None:
            raise NotImplementedError(
                "the fused loss takes one plain LoRA adapter on the output layer, without DoRA, other variants and "
                f"lora_bias; active are {active}: leave the output layer out of target_modules"
            )
        return active[0]
