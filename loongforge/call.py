"""One call of the loss: what it needs besides its tensors, and how its tensors become a :class:`chunks.Head`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, wraps
from types import FrameType
from typing import Any, Protocol

import torch

from loongforge import checks, chunks
from loongforge.budget import Reservation, logits_budget
from loongforge.dispatch import row_kernels, tile_kernels
from loongforge.formula import Formula
from loongforge.kernels.interface import RowStats, TileKernels, TokenLossKernels
from loongforge.options import LossOptions
from loongforge.parallel import Pending, VocabParallel
from loongforge.plan import ChunkPlan, plan_chunks


def refusing_second_derivatives(backward: Callable) -> Callable:
    """Decorator of every backward: gradients are first derivatives for one upstream gradient.

    Under ``create_graph=True`` they come back connected to all they depend on, by a node that only raises.

    ``once_differentiable`` looks at the upstream gradient alone, and its error is behind a tensor that belongs to no
    graph: of ``torch.autograd.grad(loss + penalty(gradient), hidden)`` a term would be missing without a word.
    """

    @wraps(backward)
    def wrapper(ctx: Any, *grads: torch.Tensor | None) -> Any:
        checks.refuse_batched_gradients(grads)
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        seen = _SavedOnce(ctx)
        with torch.no_grad():
            results = backward(seen, *grads)
        sources = [x for x in (*seen.saved_tensors, *grads) if x is not None and x.requires_grad]
        return tuple(None if result is None else _NoSecondDerivative.apply(result, *sources) for result in results)

    return wrapper


class _SavedOnce:
    """A Function's ctx whose saved tensors are unpacked once: activation checkpointing allows no second time."""

    def __init__(self, ctx: Any) -> None:
        vars(self).update(_ctx=ctx, saved_tensors=ctx.saved_tensors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ctx, name, value)


class _NoSecondDerivative(torch.autograd.Function):
    """(gradient, what it depends on) -> the gradient."""

    @staticmethod
    def forward(ctx, gradient, *sources):  # noqa: D102
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, *_):  # noqa: D102
        raise RuntimeError(
            "trying to differentiate twice through loongforge, whose operations give first derivatives only: compute "
            "a loss that needs a second one from logits, torch.nn.functional.cross_entropy(hidden @ weight.T, target)"
        )


class WeightGradSink(Protocol):
    """Takes the weight gradient somewhere else than autograd, such as Megatron's ``weight.main_grad``."""

    def open(self) -> tuple[torch.Tensor, bool]:
        """Buffer [V, H] of any float dtype, and whether to add into it (True) or to overwrite it (False)."""

    def close(self) -> torch.Tensor:
        """The gradient that autograd gets in place of the real one."""


@dataclass(frozen=True)
class Call:
    """What one call's forward and backward share besides tensors."""

    options: LossOptions
    parallel: VocabParallel
    kernels: Any  # RowKernels; OutputKernels where outputs were asked for
    tiles: TileKernels | None
    plan: ChunkPlan
    dtype: torch.dtype  # of the operands of the matrix products
    logits_dtype: torch.dtype  # of stored logits
    num_classes: int  # global vocabulary size without padding
    rows_per_rank: int  # weight rows of each rank, padding included
    needs_grad: bool
    reservation: Reservation | None  # of kept logits; None when no backward will come
    weight_grad_sink: WeightGradSink | None


@dataclass(frozen=True)
class Labels:
    """The rows that carry no loss, and those whose label names no class (ignored or not); both [T] bool."""

    ignored_T: torch.Tensor
    no_class_T: torch.Tensor

    @classmethod
    def of(cls, target_T: torch.Tensor, call: Call) -> Labels:
        return cls.among(target_T, call.num_classes, call.options.ignore_index)

    @classmethod
    def among(cls, target_T: torch.Tensor, num_classes: int, ignore_index: int) -> Labels:
        return cls(target_T == ignore_index, target_T.clamp(0, num_classes - 1) != target_T)

    @property
    def out_of_range_T(self) -> torch.Tensor:
        """[T] bool, the rows whose label is a mistake."""
        return self.no_class_T & ~self.ignored_T

    def mark_(self, value_T: torch.Tensor) -> torch.Tensor:
        """0 for ignored rows and NaN for labels out of range, in place and whatever was there."""
        return value_T.masked_fill_(self.no_class_T, torch.nan).masked_fill_(self.ignored_T, 0.0)


def formula_of(target_T: torch.Tensor, class_weight: torch.Tensor | None, call: Call) -> Formula:
    return Formula.of(call.options, call.num_classes, target_T, class_weight)


def losses_of(stats: RowStats, formula: Formula, target_T: torch.Tensor, call: Call) -> tuple[torch.Tensor, Labels]:
    """Losses [T] of statistics over the whole vocabulary, marked, and the labels that marked them."""
    if formula.is_plain and isinstance(call.kernels, TokenLossKernels):
        loss_T, *masks = call.kernels.token_losses(target_T, stats, call.num_classes, call.options.ignore_index)
        return loss_T, Labels(*masks)
    labels = Labels.of(target_T, call)
    return labels.mark_(formula.loss(stats)), labels


def head_of(
    hidden, weight, bias, class_weight, target_T: torch.Tensor, call: Call, base_weight: torch.Tensor | None = None
) -> chunks.Head:
    """Start gathering the tokens, leave padded vocabulary rows out, number the labels from this rank's rows.

    Labels and bias, which the kernels walk without strides, are made contiguous; class weights already are.
    """
    tokens = call.parallel.gather_tokens(hidden.to(call.dtype))
    rows = call.plan.vocab_rows
    first_class = call.parallel.rank * call.rows_per_rank
    return chunks.Head(
        tokens=tokens,
        weight_VH=weight[:rows],
        bias_V=None if bias is None else bias[:rows].contiguous(),
        label_T=(target_T - first_class if first_class else target_T).contiguous(),
        class_weight_V=None if class_weight is None else class_weight[first_class : first_class + rows],
        transform=call.options.transform,
        kernels=call.kernels,
        tiles=call.tiles,
        plan=call.plan,
        logits_dtype=call.logits_dtype,
        fp32_grad_hidden=call.options.fp32_grad_hidden and call.parallel.size > 1,
        base_VH=None if base_weight is None else base_weight[:rows],
    )


class GradHiddenReduction:
    """One rounding to hidden's dtype, then the sum over ranks (of this rank's slice under sequence parallelism).

    With ``fp32_grad_hidden`` the sum comes first.
    """

    def __init__(self, hidden: torch.Tensor, parallel: VocabParallel, fp32: bool) -> None:
        self._hidden, self._parallel = hidden, parallel
        self._dtype = torch.promote_types(hidden.dtype, torch.float32) if fp32 else hidden.dtype
        self._pending: Pending | None = None

    def start(self, grad_hidden_TH: torch.Tensor) -> None:
        """Takes grad_hidden [T, H] of this rank's vocabulary rows; the caller keeps no reference."""
        if self._parallel.size > 1:
            grad_hidden_TH = grad_hidden_TH.to(self._dtype)
        shape = list(self._hidden.shape)
        if self._parallel.sequence_parallel:
            shape[0] *= self._parallel.size
        self._pending = self._parallel.reduce_grad_hidden(grad_hidden_TH.view(shape))

    def wait(self) -> torch.Tensor:
        """The gradient of hidden; without other ranks rounded only here, where the last chunk's logits are gone."""
        assert self._pending is not None
        return self._pending.wait().to(self._hidden.dtype)


class StatisticsExchange:
    """Local -> global statistics: one all-gather, combined in the order of the ranks on each of them."""

    def __init__(self, stats: RowStats, parallel: VocabParallel) -> None:
        self._stats = stats
        self._names = [name for name, value_T in vars(stats).items() if value_T is not None]
        self._pending = None
        if parallel.size > 1:
            self._pending = parallel.gather_statistics(torch.stack([getattr(stats, name) for name in self._names]))

    def wait(self) -> RowStats:
        """The statistics over all ranks, bit for bit the same on each."""
        if self._pending is None:
            return self._stats
        ranks = dict(zip(self._names, self._pending.wait().unbind(1), strict=True))
        max_T = ranks["max_T"].amax(0)
        # A rank that saw only -inf keeps its 0 where another rank's maximum is finite.
        ranks["sum_exp_T"].mul_(torch.exp(ranks.pop("max_T") - max_T))
        return replace(self._stats, max_T=max_T, **{name: value_RT.sum(0) for name, value_RT in ranks.items()})


def prepare_call(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    has_class_weight: bool,
    num_tokens: int,
    options: LossOptions,
    parallel: VocabParallel,
    weight_grad_sink: WeightGradSink | None,
    gradient_bytes: int | None,
    has_adapter: bool = False,
    dtype: torch.dtype | None = None,
    outputs: frozenset[str] = frozenset(),
) -> Call:
    """Choose kernels and plan; ``gradient_bytes`` is what gradients in forward would keep, None where they cannot.

    ``outputs`` beside the loss need :class:`loongforge.kernels.interface.OutputKernels`, which tile kernels are not.
    """
    dtype = dtype or checks.compute_dtype(hidden)
    logits_dtype = torch.promote_types(dtype, torch.float32) if options.fp32_logits else dtype
    rows_per_rank = weight.shape[0]
    num_classes = options.vocab_size or rows_per_rank * parallel.size
    vocab_rows = min(max(num_classes - parallel.rank * rows_per_rank, 0), rows_per_rank)
    kernels = row_kernels(hidden.device, options, logits_dtype, has_class_weight, outputs)
    may_use_tiles = dtype == hidden.dtype and not has_adapter and not outputs
    needs_grad = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)
    )
    tiles = tile_kernels(kernels.name, hidden, weight) if may_use_tiles else None
    sizes = (num_tokens, hidden.shape[-1], vocab_rows, logits_dtype.itemsize)
    plan_for = partial(
        plan_chunks, kernels.name, *sizes,
        operand_itemsize=dtype.itemsize,
        kept_in_chunks=has_adapter or not weight.dtype == dtype == logits_dtype,
        in_tiles=tiles is not None,
        scaled=dtype == torch.float16,
        ranks_add_rounded=parallel.size > 1 and not options.fp32_grad_hidden,
        ranks_add_float32=parallel.size > 1 and options.fp32_grad_hidden,
        frozen_weight=has_adapter or not weight.requires_grad,
    )  # fmt: skip
    plan, reservation = plan_for(), None
    if needs_grad and not _will_be_run_again():
        in_forward = None if gradient_bytes is None else plan_for(gradients_in_forward=True)
        reservation = logits_budget.reserve(options, plan, in_forward, gradient_bytes or 0)
        plan = reservation.plan
    return Call(
        options=options,
        parallel=parallel,
        kernels=kernels,
        tiles=tiles,
        plan=plan,
        dtype=dtype,
        logits_dtype=logits_dtype,
        num_classes=num_classes,
        rows_per_rank=rows_per_rank,
        needs_grad=needs_grad,
        reservation=reservation,
        weight_grad_sink=weight_grad_sink,
    )


def _will_be_run_again() -> bool:
    """Whether this forward runs under ``torch.utils.checkpoint``, which drops what it saves and runs it once more.

    Kept logits would stay alive until then, and the second run, with another share of the budget, might save other
    tensors than the first, which checkpointing refuses.
    """
    top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # torch 2.7
    if top_hooks is None:
        return _is_called_by_checkpoint()
    hooks = top_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def _is_called_by_checkpoint() -> bool:
    """Whether one of the callers is the first or the second run of ``torch.utils.checkpoint`` without reentrance."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        names = frame.f_globals.get("__name__"), frame.f_code.co_name
        if names in (("torch.utils.checkpoint", "checkpoint"), ("torch.utils.checkpoint", "unpack_hook")):
            return True
        frame = frame.f_back
    return False
