"""Liger's fused linear cross-entropy by its own names and argument order, computed by loongforge.

    from loongforge.integrations.liger import LigerFusedLinearCrossEntropyLoss

in place of ``from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss`` is the whole migration; Liger
need not be installed.  Orders, defaults and formulas are those of liger-kernel 0.8.5.  What loongforge does not have
raises NotImplementedError by its name; ``docs/migration.md`` lists every argument.

With n tokens whose label is not ``ignore_index``, class weights w and W the sum of ``w[label]`` over those tokens::

    loss_t = (1 - eps) w_y (lse - x_y) + eps / V * sum_j w_j (lse - x_j)      divided by W for "mean"
    z_t    = lse_square_scale * lse ** 2                                      divided by n for "mean"

and ``loss`` is the sum (or, for "none", the vector) of both.  Token scaling multiplies both by the label's probability,
of which no gradient is taken.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from loongforge.loss import linear_cross_entropy


@dataclass(frozen=True)
class LigerOptions:
    """Everything but the tensors, in Liger's order; raises for what loongforge does not have."""

    ce_weight: torch.Tensor | None = None
    ignore_index: int = -100
    lse_square_scale: float = 0.0
    label_smoothing: float = 0.0
    reduction: str = "mean"
    softcap: float | None = None
    return_z_loss: bool = False
    accum_dtype: torch.dtype | None = None
    use_token_scaling: bool = False
    return_token_accuracy: bool = False
    return_predicted_tokens: bool = False

    def __post_init__(self) -> None:
        for name in ("return_z_loss", "return_token_accuracy", "return_predicted_tokens"):
            if getattr(self, name):
                raise NotImplementedError(f"{name}=True: loongforge.integrations.liger returns the loss only")
        if self.accum_dtype not in (None, torch.float32):
            raise NotImplementedError(
                f"accum_dtype={self.accum_dtype}: loongforge accumulates in float32; pass None or torch.float32"
            )
        weighted = self.ce_weight is not None
        if weighted and self.lse_square_scale and self.reduction == "mean":
            raise NotImplementedError(
                "lse_square_scale with ce_weight and reduction='mean': Liger divides the two terms by different "
                "counts; use reduction='none' or 'sum'"
            )
        if self.use_token_scaling and (weighted or self.lse_square_scale or self.label_smoothing):
            raise NotImplementedError("use_token_scaling with ce_weight, lse_square_scale or label_smoothing")


_NUM_OPTIONS = len(fields(LigerOptions))


def liger_fused_linear_cross_entropy(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *options: Any,
    **named: Any,
) -> torch.Tensor:
    """``liger_kernel.transformers.functional.liger_fused_linear_cross_entropy``.

    Args:
        input: [BT, H] hidden states.
        weight: [V, H], the output layer.
        target: [BT] class numbers or ``ignore_index``.
        bias: [V].
        *options, **named: fields of :class:`LigerOptions`, by place or by name.  Liger's last argument, the size of its
            chunks ``chunk_mem_const``, is taken and has no effect: see ``LCE_LOGITS_BUDGET_MB``.

    Returns:
        The loss in float32: a scalar, or [BT] for ``reduction="none"``.
    """
    named.pop("chunk_mem_const", None)
    return _loss(input, weight, target, bias, LigerOptions(*options[:_NUM_OPTIONS], **named))


def _loss(hidden, weight, target, bias, options: LigerOptions) -> torch.Tensor:
    loss = linear_cross_entropy(
        hidden,
        weight,
        target,
        bias=bias,
        class_weight=options.ce_weight,
        ignore_index=options.ignore_index,
        z_loss_weight=options.lse_square_scale,
        label_smoothing=options.label_smoothing,
        softcap=options.softcap,
        reduction="none" if options.use_token_scaling else options.reduction,
    )
    if not options.use_token_scaling:
        return loss
    loss = loss * loss.detach().neg().exp()  # without smoothing and weights the loss is -log of the probability
    if options.reduction == "none":
        return loss
    total = loss.sum()
    return total if options.reduction == "sum" else total / (target != options.ignore_index).sum().clamp_min(1)


class LigerFusedLinearCrossEntropyLoss(nn.Module):
    """``liger_kernel.transformers.LigerFusedLinearCrossEntropyLoss``: note the order of ``forward``, weight first."""

    def __init__(self, *options: Any, **named: Any) -> None:
        super().__init__()
        self.options = LigerOptions(*options, **named)
        for field in fields(LigerOptions):  # Liger's attributes
            setattr(self, field.name, getattr(self.options, field.name))

    def forward(
        self, lin_weight: torch.Tensor, _input: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Loss of ``_input @ lin_weight.T + bias``; see :func:`liger_fused_linear_cross_entropy`."""
        return _loss(_input, lin_weight, target, bias, self.options)


class LigerFusedLinearCrossEntropyFunction:
    """``liger_kernel.ops.LigerFusedLinearCrossEntropyFunction``, of which callers use ``apply``."""

    @staticmethod
    def apply(
        _input: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None = None,
        *options: Any,
    ) -> tuple[torch.Tensor, None, None, None]:
        """(loss, z_loss, token_accuracy, predicted_tokens); the last three are never asked for and None."""
        for name, value in zip(("ce_impl", "ce_mode"), options[_NUM_OPTIONS:], strict=False):
            if value is not None:
                raise NotImplementedError(f"{name}={value!r}: the implementation is chosen by LCE_IMPL")
        return _loss(_input, weight, target, bias, LigerOptions(*options[:_NUM_OPTIONS])), None, None, None


def _show_options(function: Any) -> None:
    """``help()`` and editors see Liger's arguments."""
    signature = inspect.signature(function)
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    own = [parameter for parameter in signature.parameters.values() if parameter.kind not in variable]
    function.__signature__ = signature.replace(parameters=[*own, *inspect.signature(LigerOptions).parameters.values()])


_show_options(liger_fused_linear_cross_entropy)
_show_options(LigerFusedLinearCrossEntropyLoss.__init__)
