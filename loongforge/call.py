"""One call of the loss: what it needs besides its tensors, and how its tensors become a :class:`chunks.Head`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from loongforge import checks, chunks
from loongforge.dispatch import row_kernels, tile_kernels
from loongforge.formula import Formula
from loongforge.kernels.interface import RowKernels, RowStats, TileKernels
from loongforge.options import LossOptions
from loongforge.parallel import VocabParallel
from loongforge.plan import ChunkPlan, Reservation, logits_budget, plan_chunks


def refusing_second_derivatives(backward: Callable) -> Callable:
    """``once_differentiable`` that also refuses where only hidden or weight would carry the second derivative.

    torch's own decorator looks at the upstream gradient alone: under ``create_graph=True`` a term would be missing
    without a word.
    """
    once = once_differentiable(backward)

    @wraps(backward)
    def wrapper(ctx: Any, grad_loss: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            grad_loss = grad_loss.detach().requires_grad_()
        return once(ctx, grad_loss)

    return wrapper


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
    kernels: RowKernels
    tiles: TileKernels | None
    plan: ChunkPlan
    dtype: torch.dtype  # of the matrix products
    num_classes: int  # global vocabulary size without padding
    rows_per_rank: int  # weight rows of each rank, padding included
    needs_grad: bool
    reservation: Reservation | None  # of kept logits; None when no backward will come
    weight_grad_sink: WeightGradSink | None


@dataclass(frozen=True)
class Labels:
    """The rows that carry no loss, and those whose label names no class; both [T] bool."""

    ignored_T: torch.Tensor
    out_of_range_T: torch.Tensor

    @classmethod
    def of(cls, target_T: torch.Tensor, call: Call) -> Labels:
        ignored_T = target_T == call.options.ignore_index
        out_of_range_T = (target_T.clamp(0, call.num_classes - 1) != target_T).logical_and_(~ignored_T)
        return cls(ignored_T, out_of_range_T)

    def mark_(self, value_T: torch.Tensor) -> torch.Tensor:
        """0 for ignored rows and NaN for labels out of range, in place and whatever was there."""
        return value_T.masked_fill_(self.ignored_T, 0.0).masked_fill_(self.out_of_range_T, torch.nan)


def formula_of(target_T: torch.Tensor, class_weight: torch.Tensor | None, call: Call) -> Formula:
    return Formula.of(call.options, call.num_classes, target_T, class_weight)


def head_of(hidden, weight, bias, class_weight, target_T: torch.Tensor, call: Call) -> chunks.Head:
    """Gather the tokens, flatten them, leave padded vocabulary rows out, number the labels from this rank's rows."""
    gathered = call.parallel.gather_tokens(hidden.to(call.dtype))
    rows = call.plan.vocab_rows
    first_class = call.parallel.rank * call.rows_per_rank
    return chunks.Head(
        hidden_TH=gathered.reshape(-1, gathered.shape[-1]),
        weight_VH=weight[:rows],
        bias_V=None if bias is None else bias[:rows],
        label_T=target_T - first_class if first_class else target_T,
        class_weight_V=None if class_weight is None else class_weight[first_class : first_class + rows],
        transform=call.options.transform,
        kernels=call.kernels,
        tiles=call.tiles,
        plan=call.plan,
    )


def reduce_statistics(stats: RowStats, parallel: VocabParallel) -> None:
    """Local -> global statistics in place: one MAX and one SUM all-reduce."""
    if parallel.size == 1:
        return
    global_max_T = parallel.max_over_ranks_(stats.max_T.clone())
    # A rank that saw only -inf keeps its 0 where another rank's maximum is finite.
    stats.sum_exp_T.mul_(torch.exp(stats.max_T - global_max_T))
    summed = [name for name in ("sum_exp_T", "label_logit_T", "weighted_sum_T") if getattr(stats, name) is not None]
    stacked = parallel.sum_over_ranks_(torch.stack([getattr(stats, name) for name in summed]))
    stats.max_T = global_max_T
    for name, total_T in zip(summed, stacked.unbind(), strict=True):
        setattr(stats, name, total_T)


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
) -> Call:
    """Choose kernels and plan; ``gradient_bytes`` is what gradients in forward would keep, None where they cannot."""
    dtype = checks.compute_dtype(hidden)
    rows_per_rank = weight.shape[0]
    num_classes = options.vocab_size or rows_per_rank * parallel.size
    vocab_rows = min(max(num_classes - parallel.rank * rows_per_rank, 0), rows_per_rank)
    kernels = row_kernels(hidden.device, options, dtype, has_class_weight)
    needs_grad = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)
    )
    reservation, kept_bytes, in_forward = None, 0, False
    if needs_grad and not _will_be_run_again():
        reservation = logits_budget.reserve(options, num_tokens, vocab_rows, dtype.itemsize, gradient_bytes)
        kept_bytes, in_forward = reservation.logits_bytes, reservation.for_gradients
    return Call(
        options=options,
        parallel=parallel,
        kernels=kernels,
        tiles=tile_kernels(kernels.name, hidden, weight) if dtype == hidden.dtype else None,
        plan=plan_chunks(
            kernels.name, num_tokens, hidden.shape[-1], vocab_rows, dtype.itemsize, kept_bytes, in_forward
        ),
        dtype=dtype,
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
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"
