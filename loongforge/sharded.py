"""Parameters that something else shards: a tensor-parallel plan of DTensors is understood, a missing gather refused.

DeepSpeed's ZeRO-3, FSDP and Megatron-FSDP hold a shard of each parameter and put the whole one in place while the
module that owns it runs.  Reading ``head.weight`` at any other time finds a DTensor, an empty tensor or storage that
was released: each is refused by name, in forward and again in backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from loongforge.options import LossOptions

INSIDE = "call the loss inside the forward of the module that owns it, where the whole parameter is in place"


def refuse_shard(name: str, tensor: torch.Tensor) -> None:
    """Raise ``ValueError`` unless all that ``tensor`` says it holds is there."""
    status = getattr(getattr(tensor, "ds_status", None), "name", "AVAILABLE")
    if status != "AVAILABLE":
        shape = list(getattr(tensor, "ds_shape", ()))
        raise ValueError(
            f"{name} is a DeepSpeed ZeRO-3 parameter of shape {shape} that is {status}, only a shard of it is here: "
            f"{INSIDE}, or gather it with deepspeed.zero.GatheredParameters for forward and backward"
        )
    if is_released(tensor):
        raise ValueError(
            f"{name} {list(tensor.shape)} has no storage: whoever shards it (FSDP, Megatron-FSDP) released it; {INSIDE}"
        )


def shapes_of(*tensors: torch.Tensor | None) -> list[torch.Size | None]:
    """In forward: what :func:`require_unchanged` compares with."""
    return [None if tensor is None else tensor.shape for tensor in tensors]


def require_unchanged(names: Sequence[str], tensors: Sequence[torch.Tensor | None], shapes: Sequence[Any]) -> None:
    """In backward: raise ``RuntimeError`` where a parameter is no longer what forward read."""
    for name, tensor, shape in zip(names, tensors, shapes, strict=True):
        if tensor is not None and (tensor.shape != shape or is_released(tensor)):
            raise RuntimeError(
                f"{name} had shape {list(shape)} in forward and was released before backward (shape "
                f"{list(tensor.shape)}, {tensor.untyped_storage().nbytes()} bytes): whoever shards it (DeepSpeed "
                f"ZeRO-3, FSDP, Megatron-FSDP) must gather it for backward too; {INSIDE}"
            )


def is_released(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor's memory was given back while it kept its shape."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    return plain and not tensor.is_meta and tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def is_dtensor(value: object) -> bool:
    """By name, so that nothing of ``torch.distributed.tensor`` is imported for those who do not use it."""
    return type(value).__name__ == "DTensor"


def local_parts(
    hidden: Any, weight: Any, target: Any, bias: Any, options: LossOptions
) -> tuple[Any, Any, Any, Any, LossOptions]:
    """Local tensors and ``tp_group`` of a tensor-parallel plan: weight ``Shard(0)``, hidden that or ``Replicate``.

    Both must be DTensors of one mesh of one dimension: a weight alone may as well be FSDP2's, whose mesh has other
    tokens on every rank.  Anything else raises ``TypeError`` or ``ValueError`` that names it.
    """
    if not any(map(is_dtensor, (hidden, weight, target, bias))):
        return hidden, weight, target, bias, options
    if not (is_dtensor(hidden) and is_dtensor(weight)):
        name, value = next((n, v) for n, v in _named(hidden, weight, target, bias) if is_dtensor(v))
        raise TypeError(
            f"{name} is a DTensor with placements {value.placements}, but hidden and weight are not both: a parameter "
            f"of FSDP2 is whole inside the forward of its module ({INSIDE}); of a tensor-parallel plan pass "
            f"{name}.to_local() and, for a weight sharded over its rows, tp_group=mesh.get_group(); or gather it with "
            "full_tensor()"
        )
    from torch.distributed.tensor import Replicate, Shard

    mesh = weight.device_mesh
    if mesh.ndim != 1 or hidden.device_mesh != mesh:
        raise ValueError(
            f"hidden and weight must be DTensors of one mesh of one dimension, got {hidden.device_mesh} and {mesh}: "
            "pass to_local() of both with tp_group="
        )
    sharded, whole = (Shard(0),), (Replicate(),)
    legal = {"hidden": (whole, sharded), "weight": (sharded,), "target": (whole,), "bias": (sharded,)}
    for name, value in _named(hidden, weight, target, bias):
        if is_dtensor(value) and tuple(value.placements) not in legal[name]:
            raise ValueError(
                f"{name} is a DTensor with placements {value.placements}, supported are "
                f"{' and '.join(map(str, legal[name]))}: redistribute it"
            )
    if weight.shape[0] % mesh.size() or (tuple(hidden.placements) == sharded and hidden.shape[0] % mesh.size()):
        raise ValueError(
            f"weight {list(weight.shape)} and hidden {list(hidden.shape)} must split evenly along dim 0 over "
            f"{mesh.size()} ranks: pad them"
        )
    group = mesh.get_group()
    if options.tp_group not in (None, group):
        raise ValueError("tp_group is another group than the mesh's of hidden and weight: leave it out")
    options = replace(options, tp_group=group, sequence_parallel=tuple(hidden.placements) == sharded)
    # The loss reduces grad_hidden itself, so each gradient is placed as its tensor is.
    local = [value.to_local(grad_placements=value.placements) if is_dtensor(value) else value
             for value in (hidden, weight, target, bias)]  # fmt: skip
    return *local, options


def _named(hidden: Any, weight: Any, target: Any, bias: Any) -> list[tuple[str, Any]]:
    return [("hidden", hidden), ("weight", weight), ("target", target), ("bias", bias)]
