"""What an implementation is: two row kernels over one chunk of logits.

Shape suffixes: T tokens, C vocabulary rows of one chunk.  Everything per token is float32 (float64 when the logits are
float64).

The logit the loss sees is ``x = softcap * tanh(logit_scale * z / softcap)`` of the stored number ``z``
(``x = logit_scale * z`` without a softcap).  Every supported loss has a gradient of one form,

    d loss_t / d x_tj = softmax_t * p_tj - onehot_t * [j == label_t] - uniform_t * class_weight_j

so the options of the loss reduce to three coefficients per token and the kernels know none of them by name.  The
entropy adds a term ``relative_t * p_tj * (x_tj - max_t)``.

Outputs beside the loss (:mod:`loongforge.outputs`) need more of an implementation: :class:`OutputKernels`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, runtime_checkable

import torch


@dataclass(frozen=True)
class LogitTransform:
    """``x = softcap * tanh(logit_scale * z / softcap)``; ``softcap=None`` leaves the tanh out."""

    logit_scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True)
class Chunk:
    """The rank-local vocabulary rows ``[first_class, first_class + C)``, and what of a call their logits meet."""

    label_T: torch.Tensor
    """[T] int64 rank-local rows; any other number (negative ones too) where the label is on another rank or none."""
    first_class: int
    transform: LogitTransform
    class_weight_C: torch.Tensor | None = None
    """[C] in the statistics' dtype, used with label smoothing only; None: all ones."""

    def of(self, rows: slice) -> Chunk:
        """The same for some of the tokens."""
        return replace(self, label_T=self.label_T[rows])


@dataclass
class RowStats:
    """Online-softmax statistics of the chunks seen so far; every tensor is [T] and is updated in place."""

    max_T: torch.Tensor  # running maximum of x, starts at -inf
    sum_exp_T: torch.Tensor  # running sum of exp(x - max_T), starts at 0
    label_logit_T: torch.Tensor  # x at the label, starts at 0 and stays 0 where the label is elsewhere
    weighted_sum_T: torch.Tensor | None  # running sum of class_weight_j * x_j; None unless label smoothing needs it
    # Of OutputKernels only:
    relative_sum_T: torch.Tensor | None = None  # running sum of exp(x - max_T) * (x - max_T), starts at 0
    argmax_T: torch.Tensor | None = None  # int64 class of the first maximum, counted as first_class; starts at 0

    def of(self, rows: slice) -> RowStats:
        """Views of some of the tokens."""
        return RowStats(*_of_rows(self, rows))


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
    relative_over_sum_T: torch.Tensor | None = None  # of OutputKernels only: the entropy's term over sum_exp

    def of(self, rows: slice) -> RowCoefficients:
        """Views of some of the tokens."""
        return RowCoefficients(*_of_rows(self, rows))


def _of_rows(record: RowStats | RowCoefficients, rows: slice) -> list[Any]:
    values = (getattr(record, field.name) for field in fields(record))
    return [None if value is None else value[rows] for value in values]


@dataclass
class PairStats:
    """Of two heads a and b over the same classes, for ``KL(a || b)``; every tensor is [T] and updated in place."""

    max_a_T: torch.Tensor  # as RowStats.max_T and sum_exp_T
    sum_exp_a_T: torch.Tensor
    max_b_T: torch.Tensor
    sum_exp_b_T: torch.Tensor
    gap_sum_T: torch.Tensor  # running sum of exp(a - max_a) * ((a - max_a) - (b - max_b)), starts at 0


@dataclass(frozen=True)
class PairCoefficients:
    """What turns a chunk of a student's logits x and a teacher's y into a gradient of x; every tensor is [T].

        exp(x - max) * (softmax_over_sum + gap_over_sum * ((x - max) - (y - teacher_max)))
          - teacher_over_sum * exp(y - teacher_max)

    A row whose coefficients are all zero becomes exact zeros, NaN coefficients give NaN.
    """

    max_T: torch.Tensor
    teacher_max_T: torch.Tensor
    softmax_over_sum_T: torch.Tensor
    gap_over_sum_T: torch.Tensor | None
    teacher_over_sum_T: torch.Tensor | None


class RowKernels(Protocol):
    """The two row kernels.  Neither may synchronise with the host or depend on data for its shapes."""

    name: str

    def accumulate(self, logits_TC: torch.Tensor, chunk: Chunk, stats: RowStats) -> None:
        """Fold one chunk into ``stats``.

        ``logits_TC`` [T, C] has unit stride along C and any row stride; it is only read.
        Chunks and rows of -inf are legal and leave ``sum_exp_T`` at 0; +inf and NaN end in NaN as in torch.
        """

    def gradient_(self, logits_TC: torch.Tensor, chunk: Chunk, coefficients: RowCoefficients) -> None:
        """Overwrite ``logits_TC`` with the gradient with respect to the stored logits ``z``.

        That is the formula of this module's docstring times ``dx/dz`` (``logit_scale * (1 - (x / softcap)**2)``),
        computed in float32 and rounded once to the dtype of ``logits_TC``.
        """


@runtime_checkable
class TokenLossKernels(Protocol):
    """Row kernels that also make the losses of tokens of their statistics, where no option changes the formula."""

    def token_losses(
        self, target_T: torch.Tensor, stats: RowStats, num_classes: int, ignore_index: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Losses [T], and two masks [T] bool: the target is ``ignore_index``; it is outside ``[0, num_classes)``.

        ``target_T`` [T] is int64 and global, ``stats`` are of the whole vocabulary.  A loss is
        ``log(sum_exp) - (label_logit - max)``, 0 where the target is ignored, otherwise NaN where it is no class.
        """


class OutputKernels(RowKernels, Protocol):
    """Row kernels that also fill ``relative_sum_T`` and ``argmax_T``, use ``relative_over_sum_T``, and the following.

    A class of probability 0 (its exponential is 0) adds 0 to ``relative_sum_T``, ``gap_sum_T`` and their gradients,
    also where its logit is -inf.  Of equal logits the smaller class number comes first.
    """

    def accumulate_pair(
        self,
        a_TC: torch.Tensor,
        b_TC: torch.Tensor,
        stats: PairStats,
        transform_a: LogitTransform,
        transform_b: LogitTransform,
    ) -> None:
        """Fold one chunk of two heads' logits into ``stats``; both of one dtype and one layout, only read."""

    def pair_gradient_(
        self,
        student_TC: torch.Tensor,
        teacher_TC: torch.Tensor,
        coefficients: PairCoefficients,
        transform: LogitTransform,
        teacher_transform: LogitTransform,
    ) -> None:
        """Overwrite the student's stored logits with their gradient, as :meth:`RowKernels.gradient_` does."""

    def top_k_(
        self,
        logits_TC: torch.Tensor,
        first_class: int,
        values_TK: torch.Tensor,
        classes_TK: torch.Tensor,
        transform: LogitTransform,
    ) -> None:
        """Fold one chunk into the K largest x so far, in descending order.

        ``values_TK`` starts at -inf in the statistics' dtype, ``classes_TK`` (int64) at :data:`NO_CLASS`.
        """


NO_CLASS = 2**31 - 1
"""Stands behind every real class in :meth:`OutputKernels.top_k_`, whose classes lie below it."""


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
        chunk: Chunk,
        stats: RowStats,
        first: bool = False,
    ) -> None:
        """:meth:`RowKernels.accumulate` of ``hidden @ weight.T + bias``.

        Scratch is at most 1/64 byte per logit and number.  ``first``: whatever ``stats`` hold is overwritten.
        """

    def gradient(
        self,
        hidden_TH: torch.Tensor,
        weight_CH: torch.Tensor,
        bias_C: torch.Tensor | None,
        chunk: Chunk,
        coefficients: RowCoefficients,
        out_TC: torch.Tensor,
    ) -> None:
        """:meth:`RowKernels.gradient_` of ``hidden @ weight.T + bias``, into ``out_TC`` with 16-byte aligned rows."""
