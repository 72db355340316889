"""Reduced losses whose gradients are computed in forward, chunk of tokens by chunk of tokens.

The upstream gradient of a sum is one number, so forward can build the gradients for the one it expects and backward
multiplies by how far off that was: no logits outlive their chunk and none is computed twice (6THV).  The price is a
float32 grad_weight [V, H] between forward and backward, which pays where tokens outnumber hidden several times.  The
saved gradients are never scaled in place: a second backward finds them as they were.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from loongforge import chunks, out_of_memory
from loongforge.budget import KeptLogits
from loongforge.call import Call, formula_of, head_of, losses_of, refusing_second_derivatives
from loongforge.formula import scaled_for_float16
from loongforge.matmul import multiplied
from loongforge.parallel import Tokens


def gradient_bytes(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> int:
    """Bytes that stay between forward and backward: grad_hidden in its own dtype (not float16), the others float32."""
    saved = [(hidden, _hidden_grad_dtype(hidden)), (weight, _wide(weight))]
    if bias is not None:
        saved.append((bias, _wide(bias)))
    return sum(tensor.numel() * dtype.itemsize for tensor, dtype in saved if tensor.requires_grad)


class LossSum(torch.autograd.Function):
    """(hidden, weight, bias, target [T], class_weight, base_weight, token_weight [T], expected upstream gradient)
    -> sum of the weighted losses, and an output of no size by which backward finds its graph.

    Without a tensor-parallel group.  The expected gradient is a scalar on the device, finite and not 0, or None for 1:
    where it is what arrives, grad_hidden is rounded to its dtype once.
    """

    @staticmethod
    def forward(  # noqa: D102
        ctx, hidden, weight, bias, target_T, class_weight, base_weight, token_weight_T, expected, call: Call
    ):
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        explained = out_of_memory.explained(call.plan, hidden.device, call.reservation)
        with explained, torch.autocast(hidden.device.type, enabled=False):
            head = head_of(hidden, weight, bias, class_weight, target_T, call, base_weight)
            grad_hidden = torch.empty_like(head.hidden_TH, dtype=_hidden_grad_dtype(hidden)) if needs_hidden else None
            grad_weight = _sum_like(weight, call.plan.vocab_rows) if needs_weight else None
            grad_bias = torch.zeros_like(bias, dtype=_wide(bias)) if needs_bias else None
            loss = head.hidden_TH.new_zeros((), dtype=head.statistics_dtype)
            for start in range(0, call.plan.num_tokens, call.plan.tokens_per_chunk):
                rows = slice(start, min(start + call.plan.tokens_per_chunk, call.plan.num_tokens))
                weight_grad = None if grad_weight is None else chunks.WeightGrad(grad_weight, accumulate=start > 0)
                take = None if grad_hidden is None else grad_hidden[rows].copy_
                share_T = None if token_weight_T is None else token_weight_T[rows]
                loss_of_chunk, grad_bias_of_chunk = _token_chunk(
                    _rows_of(head, rows),
                    target_T[rows],
                    class_weight,
                    share_T,
                    expected,
                    call,
                    take,
                    weight_grad,
                    needs_bias,
                )
                loss += loss_of_chunk
                if grad_bias is not None and grad_bias_of_chunk is not None:
                    grad_bias[: call.plan.vocab_rows] += grad_bias_of_chunk
        # Nothing here leads back to hidden and weight, which need not live until backward; this output of no size does.
        of_this_graph = loss.new_empty(0)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias, expected, of_this_graph)
        ctx.like = [None if tensor is None else (tensor.shape, tensor.dtype) for tensor in (hidden, weight, bias)]
        ctx.reservation = call.reservation
        return loss, of_this_graph

    @staticmethod
    @refusing_second_derivatives
    def backward(ctx, grad_loss, _):  # noqa: D102
        ctx.reservation = None  # it is for the time until backward: a kept loss must not starve the next step
        # One element but not a scalar tensor: a scalar would be rounded to the gradient's dtype before the product.
        factor = grad_loss.reshape(1)
        *saved_grads, expected, _ = ctx.saved_tensors
        if expected is not None:
            factor = factor / expected
        grads = []
        for saved, like in zip(saved_grads, ctx.like, strict=True):
            if saved is None:
                grads.append(None)
                continue
            shape, dtype = like
            grads.append(multiplied(saved, factor, dtype).view(shape))
        return *grads, None, None, None, None, None, None


def _rows_of(head: chunks.Head, rows: slice) -> chunks.Head:
    """The same head over some of the tokens, all of whose logits exist at once."""
    num_tokens = rows.stop - rows.start
    plan = replace(head.plan, num_tokens=num_tokens, kept_rows=head.plan.vocab_rows)
    return replace(head, tokens=Tokens(head.hidden_TH[rows]), label_T=head.label_T[rows], plan=plan)


def _token_chunk(
    head, target_T, class_weight, token_weight_T, expected, call, take_grad_hidden, weight_grad, needs_bias
):
    """Summed loss of a chunk of tokens and grad_bias for the expected upstream gradient; other gradients as asked."""
    stats, logits = chunks.forward(head, call.options.label_smoothing != 0, keep=True)
    formula = formula_of(target_T, class_weight, call)
    loss_T, labels = losses_of(stats, formula, target_T, call)
    share_T = torch.ones_like(loss_T) if token_weight_T is None else token_weight_T.clone()
    loss_T, share_T = loss_T * share_T, labels.mark_(share_T if expected is None else share_T.mul_(expected))
    coefficients, scale = formula.coefficients(share_T, stats.max_T, stats.sum_exp_T), None
    if call.dtype == torch.float16:
        coefficients, scale = scaled_for_float16(coefficients, stats.sum_exp_T, class_weight, call.options.logit_scale)
    kept = None if logits is None else KeptLogits(logits)
    grad_bias = chunks.backward(head, coefficients, kept, take_grad_hidden, weight_grad, needs_bias, scale)
    return loss_T.sum(), grad_bias


def _sum_like(weight: torch.Tensor, num_rows: int) -> torch.Tensor:
    """For the sum of weight gradients: memory that the first chunk overwrites, and zeros in padded rows."""
    total = torch.empty_like(weight, dtype=_wide(weight))
    total[num_rows:].zero_()
    return total


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _hidden_grad_dtype(hidden: torch.Tensor) -> torch.dtype:
    """float16 would underflow or overflow before the upstream gradient is known."""
    return torch.float32 if hidden.dtype == torch.float16 else hidden.dtype
