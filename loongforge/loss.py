"""``cross_entropy(hidden @ weight.T, target)`` as one autograd operation that never holds the logits.

Read from the bottom: :func:`linear_cross_entropy` checks and reduces, :class:`_LossPerToken` is the autograd
Function over the chunk loop of :mod:`loongforge.chunks`; :mod:`loongforge.formula` holds the algebra of the options.
T tokens, H hidden, V vocabulary rows of this rank.
"""

from __future__ import annotations

import difflib
import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from loongforge import checks, chunks, env
from loongforge.call import (
    Call,
    GradHiddenReduction,
    Labels,
    StatisticsExchange,
    WeightGradSink,
    formula_of,
    head_of,
    prepare_call,
    refusing_second_derivatives,
)
from loongforge.formula import scaled_for_float16
from loongforge.gradients_in_forward import LossSum, gradient_bytes
from loongforge.options import OPTION_NAMES, LossOptions
from loongforge.parallel import VocabParallel
from loongforge.plan import Reservation


@dataclass
class _KeptLogits:
    """Logits that stay between forward and backward, and their share of the budget."""

    logits: torch.Tensor
    reservation: Reservation


class _LossPerToken(torch.autograd.Function):
    """(hidden, weight, bias, target [T], class_weight) -> loss [T]."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, target_T, class_weight, call: Call):  # noqa: D102
        with torch.autocast(hidden.device.type, enabled=False):
            head = head_of(hidden, weight, bias, class_weight, target_T, call)
            with_weighted_sum = call.options.label_smoothing != 0
            stats, kept = chunks.forward(head, with_weighted_sum, keep=call.reservation is not None)
            # Everything small comes after the products are under way, so that the device need not wait for it.
            exchange = StatisticsExchange(stats, call.parallel)
            labels, formula = Labels.of(target_T, call), formula_of(target_T, class_weight, call)
            stats = exchange.wait()
            loss_T = labels.mark_(formula.loss(stats))
        if call.needs_grad:
            ctx.save_for_backward(
                hidden, weight, bias, target_T, class_weight,
                stats.max_T, stats.sum_exp_T, labels.ignored_T, labels.out_of_range_T,
            )  # fmt: skip
            # Not through save_for_backward: the first backward overwrites them and lets them go.
            ctx.kept = None if kept is None or call.reservation is None else _KeptLogits(kept, call.reservation)
            ctx.call = replace(call, reservation=None)
        return loss_T

    @staticmethod
    @refusing_second_derivatives
    def backward(ctx, grad_loss_T):  # noqa: D102
        call: Call = ctx.call
        hidden, weight, bias, target_T, class_weight, max_T, sum_exp_T, *labels = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        kept, ctx.kept = ctx.kept, None
        with torch.autocast(hidden.device.type, enabled=False):
            head = head_of(hidden, weight, bias, class_weight, target_T, call)
            grad_loss_T = Labels(*labels).mark_(grad_loss_T.to(max_T.dtype, copy=True))
            coefficients = formula_of(target_T, class_weight, call).coefficients(grad_loss_T, max_T, sum_exp_T)
            scale = None
            if call.dtype == torch.float16:
                coefficients, scale = scaled_for_float16(
                    coefficients, sum_exp_T, class_weight, call.options.logit_scale
                )
            weight_grad = _open_weight_grad(weight, call) if needs_weight else None
            logits = None if kept is None else kept.logits
            reduction = GradHiddenReduction(hidden, call.parallel) if needs_hidden else None
            take = reduction.start if reduction else None
            grad_bias = chunks.backward(head, coefficients, logits, take, weight_grad, needs_bias, scale)
            grad_hidden = reduction.wait() if reduction else None
            grad_weight = _close_weight_grad(weight_grad, call) if needs_weight else None
            grad_bias = _with_padded_rows(grad_bias, bias) if needs_bias else None
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _with_padded_rows(grad_bias_V: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return nn.functional.pad(grad_bias_V, (0, bias.shape[0] - grad_bias_V.shape[0])).to(bias.dtype)


def _open_weight_grad(weight: torch.Tensor, call: Call) -> chunks.WeightGrad:
    if call.weight_grad_sink is None:
        buffer_VH, accumulate = torch.empty_like(weight, memory_format=torch.contiguous_format), False
    else:
        buffer_VH, accumulate = call.weight_grad_sink.open()
    if not accumulate:
        buffer_VH[call.plan.vocab_rows :] = 0  # padded rows take no part in the softmax
    return chunks.WeightGrad(buffer_VH, accumulate)


def _close_weight_grad(weight_grad: chunks.WeightGrad, call: Call) -> torch.Tensor:
    return weight_grad.buffer_VH if call.weight_grad_sink is None else call.weight_grad_sink.close()


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
    # A sum has one upstream gradient for all tokens; over ranks its statistics would have to travel chunk by chunk.
    may_run_in_forward = options.reduction != "none" and parallel.size == 1 and weight_grad_sink is None
    saved = gradient_bytes(hidden, weight, bias) if may_run_in_forward else None
    call = prepare_call(
        hidden, weight, bias, class_weight is not None, target_T.shape[0], options, parallel, weight_grad_sink, saved
    )
    if env.check_ranks():
        _check_ranks(call, hidden, weight)
    if env.check_labels():
        out_of_range = Labels.of(target_T, call).out_of_range_T.view(target.shape)
        checks.check_labels_in_range(target, out_of_range, call.num_classes)
    if class_weight is not None:
        class_weight = class_weight.detach().to(torch.promote_types(call.dtype, torch.float32))
    function = LossSum if call.plan.tokens_per_chunk else _LossPerToken
    loss = function.apply(hidden, weight, bias, target_T, class_weight, call)
    return reduce_loss(loss, target, target_T, class_weight, normalizer, call)


def reduce_loss(loss, target, target_T, class_weight, normalizer, call: Call) -> torch.Tensor:
    """``options.reduction`` of the losses of single tokens (or of what already is their sum)."""
    if call.options.reduction == "none":
        return loss.view(target.shape)
    loss = loss.sum()
    if call.options.reduction == "sum":
        return loss
    return loss / _denominator(target_T, class_weight, normalizer, call, loss.dtype)


def _denominator(target_T, class_weight, normalizer, call: Call, dtype: torch.dtype) -> torch.Tensor:
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


def _check_ranks(call: Call, hidden: torch.Tensor, weight: torch.Tensor) -> None:
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
        hidden, weight, target, build_options(options), bias=bias, normalizer=normalizer, class_weight=class_weight
    )


class LinearCrossEntropy(nn.Module):
    """:func:`linear_cross_entropy` as a module that holds the options (and ``class_weight`` as a buffer)."""

    def __init__(self, *, class_weight: torch.Tensor | None = None, **options: Any) -> None:
        super().__init__()
        self.options = build_options(options)
        self.class_weight: torch.Tensor | None
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


def build_options(options: dict[str, Any]) -> LossOptions:
    for name in options:
        if name not in OPTION_NAMES:
            close = difflib.get_close_matches(name, OPTION_NAMES, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise TypeError(f"unknown option {name!r}: {hint}options are {', '.join(OPTION_NAMES)}")
    return LossOptions(**options)


def with_options_spelled_out(function: Any) -> None:
    """Show the fields of LossOptions in ``help()`` and editors without writing the list a second time."""
    signature = inspect.signature(function)
    explicit = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    fields = inspect.signature(LossOptions).parameters.values()
    function.__signature__ = signature.replace(parameters=[*explicit, *fields])


with_options_spelled_out(linear_cross_entropy)
with_options_spelled_out(LinearCrossEntropy.__init__)
