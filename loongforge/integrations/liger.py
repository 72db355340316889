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
from collections.abc import Container
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from loongforge import checks
from loongforge.loss import build_options, linear_cross_entropy
from loongforge.outputs.logprobs import linear_logprobs


@dataclass(frozen=True)
class LigerOptions:
    """Everything but the tensors, in Liger's order; raises for what makes no sense or loongforge does not have."""

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
        if self.accum_dtype not in (None, torch.float32):
            raise NotImplementedError(
                f"accum_dtype={self.accum_dtype}: loongforge accumulates in float32; pass None or torch.float32"
            )
        for name in ("return_z_loss", "use_token_scaling", "return_token_accuracy", "return_predicted_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        build_options(self.of_the_loss)

    @property
    def of_the_loss(self) -> dict[str, Any]:
        """Those that are options of :func:`loongforge.linear_cross_entropy`, by its names."""
        return {
            "ignore_index": self.ignore_index,
            "z_loss_weight": self.lse_square_scale,
            "label_smoothing": self.label_smoothing,
            "softcap": self.softcap,
            "reduction": self.reduction,
        }

    @property
    def needs_outputs(self) -> bool:
        """Whether more than the reduced loss of :func:`loongforge.linear_cross_entropy` is asked for."""
        returned = self.return_z_loss or self.return_token_accuracy or self.return_predicted_tokens
        two_counts = self.ce_weight is not None and self.lse_square_scale != 0 and self.reduction == "mean"
        return returned or self.use_token_scaling or two_counts


@dataclass
class CrossEntropyOutput:
    """What Liger returns in place of the loss where anything else is asked for; None where it was not."""

    loss: torch.Tensor
    z_loss: torch.Tensor | None = None
    token_accuracy: torch.Tensor | None = None
    predicted_tokens: torch.Tensor | None = None


_NAMES = tuple(field.name for field in fields(LigerOptions))
_NUM_OPTIONS = len(_NAMES)


def liger_fused_linear_cross_entropy(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *options: Any,
    **named: Any,
) -> torch.Tensor | CrossEntropyOutput:
    """``liger_kernel.transformers.functional.liger_fused_linear_cross_entropy``.

    Args:
        input: [BT, H] hidden states.
        weight: [V, H], the output layer.
        target: [BT] class numbers or ``ignore_index``.
        bias: [V].
        *options, **named: fields of :class:`LigerOptions`, by place or by name.  Liger's last argument, the size of its
            chunks ``chunk_mem_const``, is taken and has no effect: see ``LCE_LOGITS_BUDGET_MB``.

    Returns:
        The loss in float32: a scalar, or [BT] for ``reduction="none"``.  :class:`CrossEntropyOutput` where a z-loss (of
        the loss's shape, without gradient), a token accuracy (likewise) or predicted tokens ([BT], -1 where ignored)
        are asked for.
    """
    options = _without(("chunk_mem_const",), options, named)
    named.pop("chunk_mem_const", None)
    return _unpacked(input, weight, target, bias, LigerOptions(*options, **named))


def _without(names: tuple[str, ...], options: tuple, named: Container[str] = ()) -> tuple:
    """Options by place without those of ``names`` that may follow :class:`LigerOptions`."""
    more = options[_NUM_OPTIONS:]
    if len(more) > len(names) or any(name in named for name in names[: len(more)]):
        raise TypeError(f"{len(more)} arguments after the {_NUM_OPTIONS} options by place, expected {', '.join(names)}")
    return options[:_NUM_OPTIONS]


def _unpacked(hidden, weight, target, bias, options: LigerOptions) -> torch.Tensor | CrossEntropyOutput:
    output = _compute(hidden, weight, target, bias, options)
    returned = options.return_z_loss or options.return_token_accuracy or options.return_predicted_tokens
    return output if returned else output.loss


def _compute(hidden, weight, target, bias, options: LigerOptions) -> CrossEntropyOutput:
    if options.needs_outputs:
        return _compute_with_outputs(hidden, weight, target, bias, options)
    loss = linear_cross_entropy(
        hidden, weight, target, bias=bias, class_weight=options.ce_weight, **options.of_the_loss
    )  # fmt: skip
    return CrossEntropyOutput(loss)


def _compute_with_outputs(hidden, weight, target, bias, options: LigerOptions) -> CrossEntropyOutput:
    """One pass for log-probabilities and all outputs; label smoothing takes a second one."""
    shared: dict[str, Any] = {"bias": bias, "ignore_index": options.ignore_index, "softcap": options.softcap}
    predict = options.return_token_accuracy or options.return_predicted_tokens
    outputs = linear_logprobs(hidden, weight, target, predictions=predict, **shared)
    checks.check_class_weight(options.ce_weight, weight, weight.shape[0])
    target = target.long()  # a narrower dtype wraps ignore_index around, and uint8 would index as a mask
    valid = target != options.ignore_index
    label_weight = valid.to(outputs.logprobs.dtype)
    if options.ce_weight is not None:
        class_weight = options.ce_weight.detach().to(label_weight.dtype)
        label_weight = label_weight * class_weight[target.clamp(0, weight.shape[0] - 1)]
    if options.label_smoothing:
        shared |= {"label_smoothing": options.label_smoothing, "class_weight": options.ce_weight}
        loss = linear_cross_entropy(hidden, weight, target, reduction="none", **shared)
    else:
        loss = -outputs.logprobs * label_weight
    z_loss = options.lse_square_scale * outputs.log_sum_exp.square()  # 0 where ignored
    hits = None if outputs.predictions is None else ((outputs.predictions == target) & valid).to(loss.dtype)
    if options.use_token_scaling:
        probability = outputs.logprobs.detach().exp()
        loss, z_loss = loss * probability, z_loss * probability
    if options.reduction == "none":
        loss = loss + z_loss
    else:
        loss, z_loss, hits = loss.sum(), z_loss.sum(), None if hits is None else hits.sum() / _count(valid.sum())
        if options.reduction == "mean":
            loss, z_loss = loss / _count(label_weight.sum()), z_loss / _count(valid.sum())
        loss = loss + z_loss
    return CrossEntropyOutput(
        loss,
        z_loss.detach() if options.return_z_loss else None,
        hits if options.return_token_accuracy else None,
        outputs.predictions if options.return_predicted_tokens else None,
    )


def _count(number: torch.Tensor) -> torch.Tensor:
    """1 where there is nothing to divide."""
    return torch.where(number == 0, 1, number)


class LigerFusedLinearCrossEntropyLoss(nn.Module):
    """``liger_kernel.transformers.LigerFusedLinearCrossEntropyLoss``: note the order of ``forward``, weight first."""

    def __init__(self, *options: Any, **named: Any) -> None:
        super().__init__()
        given = LigerOptions(*options, **named)
        for name in _NAMES:  # Liger's attributes, which may be set later
            setattr(self, name, getattr(given, name))

    def forward(
        self, lin_weight: torch.Tensor, _input: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor | CrossEntropyOutput:
        """Loss of ``_input @ lin_weight.T + bias``; see :func:`liger_fused_linear_cross_entropy`."""
        options = LigerOptions(**{name: getattr(self, name) for name in _NAMES})
        return _unpacked(_input, lin_weight, target, bias, options)


class LigerFusedLinearCrossEntropyFunction:
    """``liger_kernel.ops.LigerFusedLinearCrossEntropyFunction``, of which callers use ``apply``."""

    @staticmethod
    def apply(
        _input: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None = None,
        *options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """(loss, z_loss, token_accuracy, predicted_tokens); None for what is not asked for."""
        chosen = options[_NUM_OPTIONS:]
        options = _without(("ce_impl", "ce_mode", "chunk_mem_const"), options)
        for name, value in zip(("ce_impl", "ce_mode"), chosen, strict=False):
            if value is not None:
                raise NotImplementedError(f"{name}={value!r}: the implementation is chosen by LCE_IMPL")
        output = _compute(_input, weight, target, bias, LigerOptions(*options))
        return output.loss, output.z_loss, output.token_accuracy, output.predicted_tokens


def _show_options(function: Any) -> None:
    """``help()`` and editors see Liger's arguments."""
    signature = inspect.signature(function)
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    own = [parameter for parameter in signature.parameters.values() if parameter.kind not in variable]
    function.__signature__ = signature.replace(parameters=[*own, *inspect.signature(LigerOptions).parameters.values()])


_show_options(liger_fused_linear_cross_entropy)
_show_options(LigerFusedLinearCrossEntropyLoss.__init__)
