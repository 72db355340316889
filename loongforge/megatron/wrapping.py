"""Refusals when Megatron wraps a model for data parallelism: after it was built, before training starts.

    FullyShardedDataParallel, MegatronFSDP      refused, before they touch the model
    DistributedDataParallel                     the output layer is checked again: LoRA or PEFT may be around it by now
    TorchFullyShardedDataParallel               the same, when it is done: it may have sharded the output layer itself

What comes later still, or is wrapped by other means, is refused at the first labelled forward.  ``import
megatron.core`` loads these classes; nothing is imported for this, and what could not be imported is left out.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from loongforge.megatron import support
from loongforge.megatron.arguments import linear_enabled
from loongforge.megatron.patches import Patches

_MODULE = "megatron.core.distributed"
MEGATRON_FSDP = (
    (f"{_MODULE}.fsdp.mcore_fsdp_adapter", "FullyShardedDataParallel"),  # what Megatron wraps with
    (f"{_MODULE}.fsdp.src.megatron_fsdp.megatron_fsdp", "MegatronFSDP"),  # inside the former, or used by itself
)
CHECKED = (
    (f"{_MODULE}.distributed_data_parallel", "DistributedDataParallel"),
    (f"{_MODULE}.torch_fully_sharded_data_parallel", "TorchFullyShardedDataParallel"),
)


def guard_wrappers(patches: Patches) -> None:
    """Wrap the constructors of the data-parallel wrappers that are loaded."""
    for names, guard in ((MEGATRON_FSDP, _refusing), (CHECKED, _checking)):
        for module_name, class_name in names:
            wrapper = getattr(sys.modules.get(module_name), class_name, None)
            if wrapper is not None:
                patches.set(wrapper, "__init__", guard(wrapper.__init__))


def _refusing(original: Callable) -> Callable:
    @functools.wraps(original)
    def init(wrapper, *args, **kwargs):
        # Every stage of a pipeline, not just the one with the output layer: none is left waiting for another.
        if list(_models_to_fuse(args, kwargs)):
            raise support.megatron_fsdp_refused()
        original(wrapper, *args, **kwargs)

    return init


def _checking(original: Callable) -> Callable:
    @functools.wraps(original)
    def init(wrapper, *args, **kwargs):
        original(wrapper, *args, **kwargs)
        for model in _models_to_fuse(args, kwargs):
            if getattr(model, "output_layer", None) is not None:
                support.check_output_layer(model)

    return init


def _models_to_fuse(args: tuple, kwargs: dict) -> Iterator[Any]:
    """Every language model in what is wrapped whose configuration asks for the fused loss.

    That is the one module among the arguments, whatever they are called: others replace these constructors too.
    """
    from megatron.core.models.common.language_module.language_module import LanguageModule

    for module in (*args, *kwargs.values()):
        for part in module.modules() if isinstance(module, torch.nn.Module) else ():
            if isinstance(part, LanguageModule) and linear_enabled(part.config):
                yield part
