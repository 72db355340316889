"""The loss of every token and its gradients over the chunk loop, and the autograd Function that joins them.

T tokens, H hidden, V vocabulary rows of this rank.  With a low-rank adapter ``weight`` is its up-projection [V, R],
``base_weight`` [V, H] the frozen rows, and hidden [T, H + R] holds what multiplies the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from loongforge import chunks, out_of_memory, sharded
from loongforge.budget import KeptLogits
from loongforge.call import (
    Call,
    GradHiddenReduction,
    Labels,
    StatisticsExchange,
    formula_of,
    head_of,
    losses_of,
    refusing_second_derivatives,
)
from loongforge.formula import scaled_for_float16
from loongforge.kernels.interface import RowCoefficients


@dataclass
class TokenLosses:
    """Results of :func:`losses`: what the caller sees, what backward needs, and the kept logits."""

    loss_T: torch.Tensor
    max_T: torch.Tensor
    sum_exp_T: torch.Tensor
    labels: Labels
    kept: torch.Tensor | None


def losses(hidden, weight, bias, target_T, class_weight, base_weight, call: Call, keep: bool) -> TokenLosses:
    """Forward: one loss per token, over all ranks; ``keep`` logits as the plan says."""
    with torch.autocast(hidden.device.type, enabled=False):
        head = head_of(hidden, weight, bias, class_weight, target_T, call, base_weight)
        stats, kept = chunks.forward(head, call.options.label_smoothing != 0, keep)
        # Everything small comes after the products are under way, so that the device need not wait for it.
        exchange = StatisticsExchange(stats, call.parallel)
        formula = formula_of(target_T, class_weight, call)
        stats = exchange.wait()
        loss_T, labels = losses_of(stats, formula, target_T, call)
    return TokenLosses(loss_T, stats.max_T, stats.sum_exp_T, labels, kept)


def gradients(
    grad_loss_T: torch.Tensor,
    operands: Sequence[Any],
    max_T: torch.Tensor,
    sum_exp_T: torch.Tensor,
    labels: Labels,
    kept: KeptLogits | None,
    needs: Sequence[bool],
    call: Call,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Backward: gradients of hidden, weight and bias where ``needs`` says so.

    ``operands`` are hidden, weight, bias, target [T], class_weight and base_weight.
    """
    *_, target_T, class_weight, _ = operands
    grad_loss_T = labels.mark_(grad_loss_T.to(max_T.dtype, copy=True))
    coefficients = formula_of(target_T, class_weight, call).coefficients(grad_loss_T, max_T, sum_exp_T)
    return products(coefficients, operands, sum_exp_T, kept, needs, call)


def products(
    coefficients: RowCoefficients,
    operands: Sequence[Any],
    sum_exp_T: torch.Tensor,
    kept: KeptLogits | None,
    needs: Sequence[bool],
    call: Call,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """:func:`gradients` of what ``coefficients`` stand for."""
    hidden, weight, bias, target_T, class_weight, base_weight = operands
    needs_hidden, needs_weight, needs_bias = needs
    with torch.autocast(hidden.device.type, enabled=False):
        head = head_of(hidden, weight, bias, class_weight, target_T, call, base_weight)
        scale = None
        if call.dtype == torch.float16:
            coefficients, scale = scaled_for_float16(coefficients, sum_exp_T, class_weight, call.options.logit_scale)
        weight_grad = _open_weight_grad(weight, call) if needs_weight else None
        reduction = GradHiddenReduction(hidden, call.parallel, call.options.fp32_grad_hidden) if needs_hidden else None
        take = reduction.start if reduction else None
        grad_bias = chunks.backward(head, coefficients, kept, take, weight_grad, needs_bias, scale)
        grad_hidden = reduction.wait() if reduction else None
        grad_weight = _close_weight_grad(weight_grad, call) if weight_grad is not None else None
        grad_bias = _with_padded_rows(grad_bias, bias) if grad_bias is not None else None
    return grad_hidden, grad_weight, grad_bias


class LossPerToken(torch.autograd.Function):
    """(hidden, weight, bias, target [T], class_weight, base_weight) -> loss [T]."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, target_T, class_weight, base_weight, call: Call):  # noqa: D102
        operands = (hidden, weight, bias, target_T, class_weight, base_weight)
        with out_of_memory.explained(call.plan, hidden.device, call.reservation):
            result = losses(*operands, call, keep=call.reservation is not None)
        if call.needs_grad:
            labels = (result.labels.ignored_T, result.labels.no_class_T)
            ctx.save_for_backward(*operands, result.max_T, result.sum_exp_T, *labels)
            # Not through save_for_backward: the first backward takes them, overwrites them and lets them go.
            ctx.kept = KeptLogits.of(result.kept, call.reservation)
            ctx.call = replace(call, reservation=None)
            ctx.shapes = sharded.shapes_of(weight, bias, base_weight)
        return result.loss_T

    @staticmethod
    @refusing_second_derivatives
    def backward(ctx, grad_loss_T):  # noqa: D102
        *operands, max_T, sum_exp_T, ignored_T, no_class_T = ctx.saved_tensors
        _, weight, bias, _, _, base_weight = operands
        sharded.require_unchanged(("weight", "bias", "base_weight"), (weight, bias, base_weight), ctx.shapes)
        kept, ctx.kept = ctx.kept, None
        labels, needs = Labels(ignored_T, no_class_T), ctx.needs_input_grad[:3]
        own = None if kept is None else kept.reservation
        with out_of_memory.explained(ctx.call.plan, grad_loss_T.device, own, kept):
            grads = gradients(grad_loss_T, operands, max_T, sum_exp_T, labels, kept, needs, ctx.call)
        return *grads, None, None, None, None


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
