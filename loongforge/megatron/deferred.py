"""``DeferredLogits``: what the output layer returns in place of logits that nobody may ever need.

The loss takes it as it is.  Whatever else touches it (a metric, a logger, an adapter's hook that adds its output)
gets real logits from the layer's own forward, differentiable in the caller's grad mode.  S sequence, B batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from loongforge import env
from loongforge.loss import fused_loss
from loongforge.megatron import support
from loongforge.megatron.main_grad import main_grad_sink
from loongforge.options import LossOptions

logger = logging.getLogger(__name__)

IGNORE_INDEX = -100


@dataclass
class Counters:
    """How often each thing happened in this process."""

    fused: int = 0
    """Losses computed by the fused operation."""

    materialized: int = 0
    """Times that something else than the loss asked for the logits, and got them."""


counters = Counters()


@dataclass
class Usage:
    """What became of one :class:`DeferredLogits`; the forward that made it looks at this in the end."""

    description: str
    reached: bool = False
    """The loss, or a tensor operation in the forward's own grad mode, has seen it."""

    touched: bool = False
    """Something other than the loss has asked for real logits."""


@dataclass
class HeadCall:
    """One call of the output layer inside a labelled forward."""

    layer: Any  # ColumnParallelLinear
    hidden: torch.Tensor  # [S, B, H], this rank's slice along S under sequence parallelism
    weight: torch.Tensor  # [V, H]
    gather_output: bool
    project: Callable[[], torch.Tensor]  # the layer's own forward: real logits
    grad_enabled: bool = field(default_factory=torch.is_grad_enabled)
    usages: list[Usage] = field(default_factory=list)

    @property
    def tp_size(self) -> int:
        """Ranks that share the vocabulary."""
        return self.layer.output_size // self.layer.output_size_per_partition


def head_loss(call: HeadCall, labels_BS: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Cross-entropy [B, S] in float32; negative labels are ignored, labels beyond the vocabulary give NaN."""
    layer = call.layer
    if env.check_labels():
        support.check_labels(labels_BS, layer.output_size)
    labels_SB = labels_BS.transpose(0, 1)
    options = LossOptions(
        reduction="none",
        ignore_index=IGNORE_INDEX,
        logit_scale=scale,
        tp_group=layer.tp_group if call.tp_size > 1 else None,
        sequence_parallel=bool(layer.sequence_parallel) and call.tp_size > 1,
    )
    loss_SB = fused_loss(
        call.hidden,
        call.weight,
        # Megatron's datasets pad with other negative numbers and mask the loss later.
        torch.where(labels_SB < 0, IGNORE_INDEX, labels_SB),
        options,
        weight_grad_sink=main_grad_sink(layer, call.weight),
    )
    counters.fused += 1
    return loss_SB.transpose(0, 1).contiguous()


class DeferredLogits:
    """Logits [S, B, V] that do not exist: hidden states, weight and a scale.

    Multiplying or dividing by a number returns a new object.  In-place use raises ``TypeError``: the loss would not
    see it.
    """

    __slots__ = ("_call", "_scale", "_real", "_usage", "_spent")

    def __init__(self, call: HeadCall, scale: float = 1.0) -> None:
        self._call = call
        self._scale = scale
        self._real: dict[bool, tuple[torch.Tensor, int]] = {}
        self._spent = False
        self._usage = Usage(repr(self))
        call.usages.append(self._usage)

    # ------------------------------------------------------------------ the loss

    def loss(self, labels_BS: torch.Tensor) -> torch.Tensor:
        """Cross-entropy [B, S] in float32; negative labels are ignored, labels beyond the vocabulary give NaN."""
        self._check_unchanged()
        self._usage.reached = self._spent = True
        self._real.clear()
        return head_loss(self._call, labels_BS, self._scale)

    def _check_unchanged(self) -> None:
        for real, version in self._real.values():
            if not real.is_inference() and real._version != version:
                raise TypeError(
                    "the output layer's logits were changed in place (through a view of them) before the loss, and "
                    "the fused loss would not see it: change a copy, or set cross_entropy_loss_fusion=False"
                )

    # ------------------------------------------------------------------ everything else

    def materialize(self) -> torch.Tensor:
        """Real logits in the caller's grad mode."""
        with_grad = torch.is_grad_enabled()
        # A read without gradients does not stand for the loss of a forward that is to be differentiated.
        self._usage.reached |= with_grad or not self._call.grad_enabled
        self._usage.touched = True
        if with_grad in self._real:
            return self._real[with_grad][0]
        counters.materialized += 1
        logger.debug("logits of shape %s were asked for and are materialised", list(self.shape))
        real = self._call.project()
        if self._scale != 1.0:
            real = real * self._scale
        if not self._spent:
            self._real[with_grad] = (real, 0 if real.is_inference() else real._version)
        return real

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # noqa: D105
        kwargs = kwargs or {}
        first = args[0] if args else None
        name = getattr(func, "__name__", "")
        if isinstance(kwargs.get("out"), cls) or (isinstance(first, cls) and _writes_in_place(name)):
            raise _in_place(name)
        if isinstance(first, cls) and func in (torch.max, torch.argmax):
            return getattr(first, name)(*args[1:], **kwargs)
        if func in (torch.mul, torch.div) and not kwargs and len(args) == 2:
            scaled = _scaled(func, *args)
            if scaled is not None:
                return scaled
        args, kwargs = tree_map_only(cls, cls.materialize, (args, kwargs))
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"DeferredLogits has no attribute {name}")
        if _writes_in_place(name):
            raise _in_place(name)
        if name in _NOT_THERE:
            raise AttributeError(
                f"the output layer's logits have no .{name}: the fused loss never computes them or their gradient; "
                "set cross_entropy_loss_fusion=False to have them"
            )
        return getattr(self.materialize(), name)

    def __repr__(self) -> str:
        return f"DeferredLogits(shape={list(self.shape)}, dtype={self.dtype}, scale={self._scale})"

    def __len__(self) -> int:
        return self.shape[0]

    __hash__ = object.__hash__

    # ------------------------------------------------------------------ what can be told without logits

    @property
    def shape(self) -> torch.Size:
        """[S, B, V] as the layer's own forward would return it."""
        call = self._call
        tokens = call.tp_size if call.layer.sequence_parallel else 1
        rows = call.tp_size if call.gather_output else 1
        sequence, *batch, _ = call.hidden.shape
        return torch.Size([sequence * tokens, *batch, call.weight.shape[0] * rows])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the real logits."""
        device_type = self._call.hidden.device.type
        if torch.is_autocast_enabled(device_type):
            return torch.get_autocast_dtype(device_type)
        return self._call.hidden.dtype

    @property
    def device(self) -> torch.device:
        """Device of the real logits."""
        return self._call.hidden.device

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def dim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> torch.Size | int:
        """Shape, or one of its entries."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """Number of logits."""
        return self.shape.numel()

    # ------------------------------------------------------------------ argmax, for MTP's acceptance metric

    def max(self, *args: Any, **kwargs: Any) -> Any:
        """As ``Tensor.max``; over the vocabulary and without gradients it works chunk by chunk."""
        if self._reduces_vocabulary(*args, **kwargs):
            return torch.return_types.max(self._max_over_vocabulary())
        return self.materialize().max(*args, **kwargs)

    def argmax(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As ``Tensor.argmax``; over the vocabulary and without gradients it works chunk by chunk."""
        if self._reduces_vocabulary(*args, **kwargs):
            return self._max_over_vocabulary()[1]
        return self.materialize().argmax(*args, **kwargs)

    def _reduces_vocabulary(self, dim: Any = None, keepdim: bool = False, **others: Any) -> bool:
        over_shard = not self._call.gather_output or self._call.tp_size == 1
        return dim in (-1, self.ndim - 1) and not keepdim and not others and over_shard and not torch.is_grad_enabled()

    def _max_over_vocabulary(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Largest logit of this rank's rows and its row number, each [S, B], an eighth of the logits at a time."""
        from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

        self._usage.reached |= not self._call.grad_enabled
        call = self._call
        hidden = call.hidden
        if call.layer.sequence_parallel and call.tp_size > 1:
            hidden = gather_from_sequence_parallel_region(hidden, group=call.layer.tp_group)
        num_rows = call.weight.shape[0]
        width = -(-num_rows // 8)
        best = hidden.new_full(hidden.shape[:-1], -torch.inf)
        best_row = torch.zeros_like(best, dtype=torch.int64)
        for start in range(0, num_rows, width):
            value, row = ((hidden @ call.weight[start : start + width].t()) * self._scale).max(dim=-1)
            better = (value > best) | (value.isnan() & ~best.isnan())
            best, best_row = torch.where(better, value, best), torch.where(better, row + start, best_row)
        return best, best_row


_NOT_THERE = frozenset(
    {"data", "grad", "grad_fn", "register_hook", "register_post_accumulate_grad_hook", "retain_grad"}
)
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_UNARY = ("neg", "pos", "abs", "invert", "getitem", "iter", "contains", "bool", "float", "int")


def _writes_in_place(name: str) -> bool:
    if name.startswith("__"):
        return name in _IN_PLACE_OPERATORS
    return name.endswith("_") and not name.startswith("_")


def _in_place(name: str) -> TypeError:
    return TypeError(
        f"the output layer's logits do not exist while the loss is fused, so {name} cannot change them in place: "
        "use the operation that returns a new tensor, or set cross_entropy_loss_fusion=False"
    )


def _scaled(operation: Callable, left: Any, right: Any) -> DeferredLogits | None:
    """``deferred * number``, ``number * deferred`` or ``deferred / number`` as a new object, where it is one."""
    if operation is torch.mul and isinstance(right, DeferredLogits):
        left, right = right, left
    if not isinstance(left, DeferredLogits) or not isinstance(right, int | float) or isinstance(right, bool):
        return None
    if not 0.0 < abs(right) < float("inf"):
        return None
    left._check_unchanged()
    left._usage.reached = True
    factor = float(right) if operation is torch.mul else 1.0 / float(right)
    return DeferredLogits(left._call, left._scale * factor)


_SCALING: dict[str, Callable] = {"__mul__": torch.mul, "__rmul__": torch.mul, "__truediv__": torch.div}


def _operator(name: str) -> Callable[..., Any]:
    def method(self: DeferredLogits, *others: Any) -> Any:
        if name in _SCALING:
            scaled = _scaled(_SCALING[name], self, *others)
            if scaled is not None:
                return scaled
        others = tree_map_only(DeferredLogits, DeferredLogits.materialize, others)
        return getattr(self.materialize(), name)(*others)

    method.__name__ = name
    return method


def _refused_operator(name: str) -> Callable[..., Any]:
    def method(self: DeferredLogits, *_: Any) -> Any:
        raise _in_place(name)

    method.__name__ = name
    return method


_IN_PLACE_OPERATORS = frozenset({"__setitem__", "__delitem__", *(f"__i{name}__" for name in _BINARY)})
for _name in (*_BINARY, *(f"r{name}" for name in _BINARY), *_COMPARISONS, *_UNARY):
    setattr(DeferredLogits, f"__{_name}__", _operator(f"__{_name}__"))
for _name in _IN_PLACE_OPERATORS:
    setattr(DeferredLogits, _name, _refused_operator(_name))
