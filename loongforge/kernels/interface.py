"""What an implementation is: two row kernels over one chunk of logits.

Shape suffixes: T tokens, C vocabulary rows of one chunk.  A chunk covers the rank-local vocabulary rows
``[first_class, first_class + C)``; ``label_T`` holds int64 rank-local row numbers, and any other number (negative
ones too) where the label lies on another rank or names no class.  Everything per token is float32 (float64 when the
logits are float64).

The logit the loss sees is ``x = softcap * tanh(logit_scale * z / softcap)`` of the stored number ``z``
(``x = logit_scale * z`` without a softcap).  Every supported loss has a gradient of one form,

    d loss_t / d x_tj = softmax_t * p_tj - onehot_t * [j == label_t] - uniform_t * class_weight_j

so the options of the loss reduce to three coefficients per token and the kernels know none of them by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class LogitTransform:
    """``x = softcap * tanh(logit_scale * z / softcap)``; ``softcap=None`` leaves the tanh out."""

    logit_scale: float = 1.0
    softcap: float | None = None


@dataclass
class RowStats:
    """Online-softmax statistics of the chunks seen so far; every tensor is [T] and is updated in place."""

    max_T: torch.Tensor  # running maximum of x, starts at -inf
    sum_exp_T: torch.Tensor  # running sum of exp(x - max_T), starts at 0
    label_logit_T: torch.Tensor  # x at the label, starts at 0 and stays 0 where the label is elsewhere
    weighted_sum_T: torch.Tensor | None  # running sum of class_weight_j * x_j; None unless label smoothing needs it


@dataclass(frozen=True)
class RowCoefficients:
    """What turns a chunk of logits into its gradient; every tensor is [T] and contiguous.

    ``max_T`` and ``softmax_over_sum_T`` (the coefficient divided by the global sum of exponentials) give
    ``softmax_t * p_tj = softmax_over_sum_t * exp(x_tj - max_t)``.  A row whose coefficients are all zero is
    inactive and must become exact zeros whatever its logits hold (0 * NaN is NaN: select, do not multiply).
    NaN coefficients must give NaN.
    """

    max_T: torch.Tensor
    softmax_over_sum_T: torch.Tensor
    onehot_T: torch.Tensor
    uniform_T: torch.Tensor | None  # None without label smoothing


class RowKernels(Protocol):
    """The two row kernels.  Neither may synchronise with the host or depend on data for its shapes."""

    name: str

    def accumulate(
        self,
        logits_TC: torch.Tensor,
        label_T: torch.Tensor,
        first_class: int,
        stats: RowStats,
        transform: LogitTransform,
        class_weight_C: torch.Tensor | None = None,
    ) -> None:
        """Fold one chunk into ``stats``.

        ``logits_TC`` [T, C] has unit stride along C and any row stride; it is only read.  ``label_T`` [T] int64.
        ``class_weight_C`` [C] in the statistics' dtype weighs ``weighted_sum_T`` (None: all ones).
        Chunks and rows of -inf are legal and leave ``sum_exp_T`` at 0; +inf and NaN end in NaN as in torch.
        """

    def gradient_(
        self,
        logits_TC: torch.Tensor,
        label_T: torch.Tensor,
        first_class: int,
        coefficients: RowCoefficients,
        transform: LogitTransform,
        class_weight_C: torch.Tensor | None = None,
    ) -> None:
        """Overwrite ``logits_TC`` with the gradient with respect to the stored logits ``z``.

        That is the formula of this module's docstring times ``dx/dz`` (``logit_scale * (1 - (x / softcap)**2)``),
        computed in float32 and rounded once to the dtype of ``logits_TC``.
        """


class TileKernels(Protocol):
    """The same two steps with the GEMM inside, for operands and devices where that is faster.

    They see unrounded float32 logits; forward and backward of one chunk must both use them or neither.
    """

    def supports(self, hidden_TH: torch.Tensor, weight_VH: torch.Tensor) -> bool:
        """Whether these operands' dtypes, sizes and alignment can be used."""

    def accumulate(
        self,
        hidden_TH: torch.Tensor,
        weight_CH: torch.Tensor,
        bias_C: torch.Tensor | None,
        label_T: torch.Tensor,
        first_class: int,
        stats: RowStats,
        transform: LogitTransform,
        class_weight_C: torch.Tensor | None = None,
    ) -> None:
        """:meth:`RowKernels.accumulate` of ``hidden @ weight.T + bias``; scratch is 1/32 byte per logit and number."""

    def gradient(
        self,
        hidden_TH: torch.Tensor,
        weight_CH: torch.Tensor,
        bias_C: torch.Tensor | None,
        out_TC: torch.Tensor,
        label_T: torch.Tensor,
        first_class: int,
        coefficients: RowCoefficients,
        transform: LogitTransform,
        class_weight_C: torch.Tensor | None = None,
    ) -> None:
        """:meth:`RowKernels.gradient_` of ``hidden @ weight.T + bias``, into ``out_TC`` with 16-byte aligned rows."""
