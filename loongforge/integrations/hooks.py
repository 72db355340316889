"""Who sees the logits of an output layer: hooks and forwards that others put on the module's object.

A pre-hook works on hidden states or recomputes a weight (pruning, the old weight norm) and a parametrization makes the
weight, so both are in force in the fused loss.  What runs after the layer or on its output's gradient needs logits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import MethodType
from typing import Any

from torch import nn
from torch.nn.modules import module as globals_of

_HARMLESS = ("torch.distributed.fsdp.", "torch.distributed._tools.", "torch.utils.")
"""Gather and release weights, or count: they take an output of any width."""


def logits_user(module: nn.Module, is_called: bool = True) -> str | None:
    """What sees or makes ``module``'s logits besides its class, or None.

    Args:
        module: the output layer, or a part of it.
        is_called: False for a part whose forward the fused loss does not run: there pre-hooks count too.
    """
    for kind, hook in _hooks(module, is_called):
        name = name_of(hook)
        if not (is_called and name.startswith(_HARMLESS)):
            return f"the {kind} {name}"
    replaced = module.__dict__.get("forward")
    if replaced is None or (is_called and (_runs(replaced, module) or is_moved_by_accelerate(module))):
        return None
    return f"the forward {name_of(replaced)} of the object"


def is_moved_by_accelerate(module: nn.Module) -> bool:
    """Whether ``device_map``, offloading or layerwise casting of accelerate, and nothing else, wraps the forward."""
    hook = module.__dict__.get("_hf_hook")
    hooks = getattr(hook, "hooks", (hook,))
    return all(type(one).__module__ == "accelerate.hooks" for one in hooks) and _runs(
        module.__dict__.get("_old_forward"), module
    )


def rebind_old_forward(module: Any) -> None:
    """Let accelerate's wrapper run the forward of the class that ``module`` has now."""
    if "_old_forward" in module.__dict__:
        module._old_forward = MethodType(type(module).forward, module)


def _runs(function: Any, module: nn.Module) -> bool:
    """Whether ``function`` is the forward of ``module``'s class, bound to it."""
    return getattr(function, "__func__", getattr(function, "func", None)) is type(module).forward


def _hooks(module: nn.Module, is_called: bool) -> Iterator[tuple[str, Any]]:
    kinds: list[tuple[str, Any]] = [
        ("forward hook", module._forward_hooks),
        ("backward hook", module._backward_hooks),
        ("backward pre-hook", module._backward_pre_hooks),
        ("global forward hook", globals_of._global_forward_hooks),
        ("global backward hook", globals_of._global_backward_hooks),
        ("global backward pre-hook", globals_of._global_backward_pre_hooks),
    ]
    if not is_called:
        kinds.append(("forward pre-hook", module._forward_pre_hooks))
    for kind, hooks in kinds:
        for hook in hooks.values():
            yield kind, hook


def name_of(function: Any) -> str:
    """``module.qualname`` of a function, or of the class of another object."""
    while isinstance(function, functools.partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"
