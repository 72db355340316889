"""What Megatron's check of its own arguments lets through and refuses while the flags ask for ``linear``.

``--use-megatron-fsdp`` is refused there, before anything is built.

``--deterministic-mode`` is let through.  Our loss repeats bit for bit: no atomics, sums in a fixed order.  Megatron
refuses every fused loss in that mode:

    0.16 to 0.18   an assertion on the flag in ``megatron.training.arguments.validate_args``
    0.19           the flag's entry in a table that ``megatron.training.determinism.apply_determinism_to_args`` reads

That one function runs with ``cross_entropy_loss_fusion`` out of its sight; every other requirement of the mode stays
in force, and other implementations stay refused.  ``megatron.training`` is large and often not used at all, so it is
not imported for this: the function is wrapped when something else imports it.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from loongforge.megatron import support
from loongforge.megatron.arguments import linear_enabled
from loongforge.megatron.patches import Patches

REFUSING = {
    "megatron.training.arguments": "validate_args",  # nothing of that mode in it where the next one exists
    "megatron.training.determinism": "apply_determinism_to_args",
}


def hook_validation(patches: Patches) -> None:
    """Wrap Megatron's checks, now where they are loaded and otherwise as soon as they are."""
    for module_name, function_name in REFUSING.items():
        if module_name in sys.modules:
            _wrap(patches, sys.modules[module_name], function_name)
    finder = _WhenImported({name: functools.partial(_wrap, patches) for name in REFUSING if name not in sys.modules})
    sys.meta_path.insert(0, finder)
    patches.when_undone(functools.partial(sys.meta_path.remove, finder))


def _wrap(patches: Patches, module: ModuleType, function_name: str) -> None:
    """In its module and wherever in Megatron it was imported from there by name."""
    found = getattr(module, function_name, None)
    if found is None:  # a checkout of one's own may have moved it
        return
    original = inspect.unwrap(found)
    wrapped = _checking(original, patches)
    for name, user in list(sys.modules.items()):
        if name.startswith("megatron.training") and inspect.unwrap(vars(user).get(function_name, len)) is original:
            patches.set(user, function_name, wrapped)


def _checking(original: Callable, patches: Patches) -> Callable:
    @functools.wraps(original)
    def check(args: Any, *others: Any, **named: Any) -> Any:
        # A module that imported it by name keeps it when the hook is taken off.
        linear = patches.in_place and linear_enabled(args)
        if linear and getattr(args, "use_megatron_fsdp", False):
            raise support.megatron_fsdp_refused()
        if not linear or not args.deterministic_mode:
            return original(args, *others, **named)
        args.cross_entropy_loss_fusion = False
        try:
            return original(args, *others, **named)
        finally:
            args.cross_entropy_loss_fusion = True

    return check


class _WhenImported(MetaPathFinder):
    """Calls back with a module right after its own code ran, before whoever imports it sees it."""

    def __init__(self, callbacks: dict[str, Callable[..., None]]) -> None:
        self._callbacks = callbacks

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """The spec that the other finders give, with a loader that calls back."""
        callback = self._callbacks.pop(fullname, None)
        spec = None if callback is None else importlib.util.find_spec(fullname)
        if callback is not None and spec is not None and spec.loader is not None:
            spec.loader = _Calling(spec.loader, functools.partial(callback, function_name=REFUSING[fullname]))
        return spec


class _Calling(Loader):
    def __init__(self, loader: Loader, callback: Callable[[ModuleType], None]) -> None:
        self._loader, self._callback = loader, callback

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._callback(module)
