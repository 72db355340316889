"""``cross_entropy(hidden @ weight.T, target)`` as one autograd operation that never holds the logits.

Read from the bottom: :func:`linear_cross_entropy` checks and reduces, :class:`_LossPerToken` is the autograd
Function over the chunk loop of :mod:`loongforge.chunks`; :mod:`loongforge.formula` holds the algebra of the options.
T tokens, H hidden, V vocabulary rows of this rank.
"""

from __future__ import annotations

import difflib
import inspect
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from loongforge import checks, chunks, env
from loongforge.dispatch import row_kernels, tile_kernels
from loongforge.formula import Formula, scaled_for_float16
from loongforge.kernels.interface import RowKernels, RowStats, TileKernels
from loongforge.options import OPTION_NAMES, LossOptions
from loongforge.parallel import VocabParallel
from loongforge.plan import ChunkPlan, Reservation, logits_budget, plan_chunks


class WeightGradSink(Protocol):
    """Takes the weight gradient somewhere else than autograd, such as Megatron's ``weight.main_grad``."""

    def open(self) -> tuple[torch.Tensor, bool]:
        """Buffer [V, H] of any float dtype, and whether to add into it (True) or to overwrite it (False)."""

    def close(self) -> torch.Tensor:
        """The gradient that autograd gets in place of the real one."""


@dataclass(frozen=True)
class _Call:
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


@dataclass
class _KeptLogits:
    """Logits that stay between forward and backward, and their share of the budget."""

    logits: torch.Tensor
    reservation: Reservation


class _LossPerToken(torch.autograd.Function):
    """(hidden, weight, bias, target [T], class_weight) -> loss [T]."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, target_T, class_weight, call: _Call):  # noqa: D102
        with torch.autocast(hidden.device.type, enabled=False):
            head = _head(hidden, weight, bias, class_weight, target_T, call)
            with_weighted_sum = call.options.label_smoothing != 0
            stats, kept = chunks.forward(head, with_weighted_sum, keep=call.reservation is not None)
            # Everything small comes after the products are under way, so that the device need not wait for it.
            _reduce_statistics(stats, call.parallel)
            labels = _Labels.of(target_T, call)
            loss_T = labels.mark_(_formula(target_T, class_weight, call).loss(stats))
        if call.needs_grad:
            ctx.save_for_backward(
                hidden, weight, bias, target_T, class_weight,
                stats.max_T, stats.sum_exp_T, labels.ignored_T, labels.out_of_range_T,
            )  # fmt: skip
            # Not through save_for_backward: the first backward overwrites them and lets them go.
            ctx.kept = None if kept is None else _KeptLogits(kept, call.reservation)
            ctx.call = replace(call, reservation=None)
        return loss_T

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss_T):  # noqa: D102
        call: _Call = ctx.call
        hidden, weight, bias, target_T, class_weight, max_T, sum_exp_T, *labels = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        kept, ctx.kept = ctx.kept, None
        with torch.autocast(hidden.device.type, enabled=False):
            head = _head(hidden, weight, bias, class_weight, target_T, call)
            grad_loss_T = _Labels(*labels).mark_(grad_loss_T.to(max_T.dtype, copy=True))
            coefficients = _formula(target_T, class_weight, call).coefficients(grad_loss_T, max_T, sum_exp_T)
            scale = None
            if call.dtype == torch.float16:
                coefficients, scale = scaled_for_float16(
                    coefficients, sum_exp_T, class_weight, call.options.logit_scale
                )
            weight_grad = _open_weight_grad(weight, call) if needs_weight else None
            logits = None if kept is None else kept.logits
            grads = chunks.backward(head, coefficients, logits, needs_hidden, weight_grad, needs_bias, scale)
            grad_hidden = _finish_grad_hidden(grads.hidden_TH, hidden, call.parallel) if needs_hidden else None
            grad_weight = _close_weight_grad(weight_grad, call) if needs_weight else None
            grad_bias = _with_padded_rows(grads.bias_V, bias) if needs_bias else None
        return grad_hidden, grad_weight, grad_bias, None, None, None


@dataclass(frozen=True)
class _Labels:
    """The rows that carry no loss, and those whose label names no class; both [T] bool."""

    ignored_T: torch.Tensor
    out_of_range_T: torch.Tensor

    @classmethod
    def of(cls, target_T: torch.Tensor, call: _Call) -> _Labels:
        ignored_T = target_T == call.options.ignore_index
        out_of_range_T = (target_T.clamp(0, call.num_classes - 1) != target_T).logical_and_(~ignored_T)
        return cls(ignored_T, out_of_range_T)

    def mark_(self, value_T: torch.Tensor) -> torch.Tensor:
        """0 for ignored rows and NaN for labels out of range, in place and whatever was there."""
        return value_T.masked_fill_(self.ignored_T, 0.0).masked_fill_(self.out_of_range_T, torch.nan)


def _formula(target_T: torch.Tensor, class_weight: torch.Tensor | None, call: _Call) -> Formula:
    return Formula.of(call.options, call.num_classes, target_T, class_weight)


def _head(hidden, weight, bias, class_weight, target_T: torch.Tensor, call: _Call) -> chunks.Head:
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


def _reduce_statistics(stats: RowStats, parallel: VocabParallel) -> None:
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


def _finish_grad_hidden(grad_hidden_TH: torch.Tensor, hidden: torch.Tensor, parallel: VocabParallel) -> torch.Tensor:
    """One rounding to hidden's dtype, then the sum over ranks (of this rank's slice under sequence parallelism)."""
    shape = list(hidden.shape)
    if parallel.sequence_parallel:
        shape[0] *= parallel.size
    return parallel.reduce_grad_hidden(grad_hidden_TH.to(hidden.dtype).view(shape))


def _with_padded_rows(grad_bias_V: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return nn.functional.pad(grad_bias_V, (0, bias.shape[0] - grad_bias_V.shape[0])).to(bias.dtype)


def _open_weight_grad(weight: torch.Tensor, call: _Call) -> chunks.WeightGrad:
    if call.weight_grad_sink is None:
        buffer_VH, accumulate = torch.empty_like(weight, memory_format=torch.contiguous_format), False
    else:
        buffer_VH, accumulate = call.weight_grad_sink.open()
    if not accumulate:
        buffer_VH[call.plan.vocab_rows :] = 0  # padded rows take no part in the softmax
    return chunks.WeightGrad(buffer_VH, accumulate)


def _close_weight_grad(weight_grad: chunks.WeightGrad, call: _Call) -> torch.Tensor:
    return weight_grad.buffer_VH if call.weight_grad_sink is None else call.weight_grad_sink.close()


def _prepare_call(hidden, weight, bias, num_tokens: int, options, parallel, sink: WeightGradSink | None) -> _Call:
    dtype = checks.compute_dtype(hidden)
    rows_per_rank = weight.shape[0]
    num_classes = options.vocab_size or rows_per_rank * parallel.size
    vocab_rows = min(max(num_classes - parallel.rank * rows_per_rank, 0), rows_per_rank)
    needs_grad = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)
    )
    reservation = logits_budget.reserve(options, num_tokens, vocab_rows, dtype.itemsize) if needs_grad else None
    kernels = row_kernels(hidden.device, options, dtype)
    return _Call(
        options=options,
        parallel=parallel,
        kernels=kernels,
        tiles=tile_kernels(kernels.name, hidden, weight) if dtype == hidden.dtype else None,
        plan=plan_chunks(
            kernels.name,
            num_tokens,
            hidden.shape[-1],
            vocab_rows,
            dtype.itemsize,
            kept_bytes=0 if reservation is None else reservation.num_bytes,
        ),  # fmt: skip
        dtype=dtype,
        num_classes=num_classes,
        rows_per_rank=rows_per_rank,
        needs_grad=needs_grad,
        reservation=reservation,
        weight_grad_sink=sink,
    )


def fused_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    options: LossOptions,
    *,
    bias: torch.Tensor | None = None,
    normalizer: torch.Tensor | float | None = None,
    class_weight: torch.Tensor | None = None,
    weight_grad_sink: WeightGradSink | None = None,
) -> torch.Tensor:
    """:func:`linear_cross_entropy` with its options already built, and a place for the weight gradient to go."""
    parallel = VocabParallel.from_group(options.tp_group, options.sequence_parallel)
    checks.check_inputs(hidden, weight, target, bias, class_weight, normalizer, options, parallel)
    target_T = target.reshape(-1).long()
    call = _prepare_call(hidden, weight, bias, target_T.shape[0], options, parallel, weight_grad_sink)
    if env.check_ranks():
        _check_ranks(call, hidden, weight)
    if env.check_labels():
        out_of_range = _Labels.of(target_T, call).out_of_range_T.view(target.shape)
        checks.check_labels_in_range(target, out_of_range, call.num_classes)
    if class_weight is not None:
        class_weight = class_weight.detach().to(torch.promote_types(call.dtype, torch.float32))
    loss_T = _LossPerToken.apply(hidden, weight, bias, target_T, class_weight, call)
    if options.reduction == "none":
        return loss_T.view(target.shape)
    if options.reduction == "sum":
        return loss_T.sum()
    return loss_T.sum() / _denominator(target_T, class_weight, normalizer, call, loss_T.dtype)


def _denominator(target_T, class_weight, normalizer, call: _Call, dtype: torch.dtype) -> torch.Tensor:
    """Valid tokens (their class weights, as in torch) or the caller's number; 1 where no token is valid."""
    valid_T = target_T != call.options.ignore_index
    if isinstance(normalizer, torch.Tensor):
        count = normalizer.reshape(())
    elif normalizer is not None:
        count = torch.full((), normalizer, dtype=dtype, device=target_T.device)
    elif class_weight is not None:
        label_weight_T = class_weight[target_T.clamp(0, call.num_classes - 1)]
        count = torch.where(valid_T, label_weight_T, 0.0).sum()
    else:
        count = valid_T.sum()
    return torch.where(valid_T.any() | (count != 0), count, 1).to(dtype)


def _check_ranks(call: _Call, hidden: torch.Tensor, weight: torch.Tensor) -> None:
    checks.refuse_under_graph_capture("LCE_CHECK_RANKS", hidden.device)
    facts = {
        "number of tokens": call.plan.num_tokens,
        "hidden size": hidden.shape[-1],
        "number of weight rows": weight.shape[0],
        "vocab_size": call.num_classes,
        "bytes of one hidden element": hidden.element_size(),
        "hidden.requires_grad": int(hidden.requires_grad),
    }
    call.parallel.require_equal(tuple(facts), tuple(facts.values()), hidden.device)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    normalizer: torch.Tensor | float | None = None,
    class_weight: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Cross-entropy of ``hidden @ weight.T + bias`` without ever holding the logits.

    Args:
        hidden: [..., H]; bf16, fp16, fp32 or fp64.  Under ``sequence_parallel`` this rank's slice along dim 0.
        weight: [V, H], this rank's rows of the output layer; hidden's dtype, or any under autocast.
        target: [...] integer *global* class indices; hidden's leading shape, gathered under ``sequence_parallel``.
        bias: [V], added to the logits.
        normalizer: what ``reduction="mean"`` divides by instead of this rank's valid tokens: a number or a scalar
            tensor on the device (the global count under data parallelism, ``num_items_in_batch``).
        class_weight: [V_global] float, weight of each class as in ``torch.nn.functional.cross_entropy``; no gradient.
        **options: fields of :class:`loongforge.LossOptions`.

    Returns:
        The loss in fp32 (fp64 for fp64 inputs): a scalar, or target's shape for ``reduction="none"``.  Without a
        valid token ``mean`` is 0 with zero gradients attached.  A label outside ``[0, V_global)`` that is not
        ``ignore_index`` makes its loss, its row of grad_hidden and this rank's grad_weight NaN
        (``LCE_CHECK_LABELS=1`` raises IndexError instead).

    Raises:
        TypeError, ValueError: inputs that do not fit together, unknown options.
        RuntimeError: ``impl`` cannot run on this device.  NotImplementedError: it lacks an option.
    """
    return fused_loss(
        hidden, weight, target, _build(options), bias=bias, normalizer=normalizer, class_weight=class_weight
    )


class LinearCrossEntropy(nn.Module):
    """:func:`linear_cross_entropy` as a module that holds the options (and ``class_weight`` as a buffer)."""

    def __init__(self, *, class_weight: torch.Tensor | None = None, **options: Any) -> None:
        super().__init__()
        self.options = _build(options)
        self.register_buffer("class_weight", class_weight)

    def forward(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
    ) -> torch.Tensor:
        """See :func:`linear_cross_entropy`."""
        return fused_loss(
            hidden, weight, target, self.options, bias=bias, normalizer=normalizer, class_weight=self.class_weight
        )

    def extra_repr(self) -> str:
        """The options that differ from their defaults."""
        defaults = LossOptions()
        named = ((name, getattr(self.options, name)) for name in OPTION_NAMES)
        return ", ".join(f"{name}={value!r}" for name, value in named if value != getattr(defaults, name))


def _build(options: dict[str, Any]) -> LossOptions:
    for name in options:
        if name not in OPTION_NAMES:
            close = difflib.get_close_matches(name, OPTION_NAMES, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise TypeError(f"unknown option {name!r}: {hint}options are {', '.join(OPTION_NAMES)}")
    return LossOptions(**options)


def _with_options_spelled_out(function: Any) -> None:
    """Show the fields of LossOptions in ``help()`` and editors without writing the list a second time."""
    signature = inspect.signature(function)
    explicit = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    fields = inspect.signature(LossOptions).parameters.values()
    function.__signature__ = signature.replace(parameters=[*explicit, *fields])


_with_options_spelled_out(linear_cross_entropy)
_with_options_spelled_out(LinearCrossEntropy.__init__)
