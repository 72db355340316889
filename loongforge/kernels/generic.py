"""Row kernels in plain PyTorch: any device that torch runs on, float64 included.

Both walk the rows in blocks so that their float32 temporaries stay small (and in cache on a CPU).  No boolean-mask
indexing, no ``.item()``: nothing here synchronises or has a data-dependent shape.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from loongforge.kernels.interface import Chunk, LogitTransform, PairCoefficients, PairStats, RowCoefficients, RowStats

BLOCK_ELEMENTS = 1 << 20
"""Most elements of one temporary; a single row may exceed it."""


class GenericRowKernels:
    """The row kernels of :class:`loongforge.kernels.interface.OutputKernels` in PyTorch operations."""

    name = "generic"

    def accumulate(self, logits_TC: torch.Tensor, chunk: Chunk, stats: RowStats) -> None:
        for rows in _row_blocks(logits_TC):
            x_BC = transformed(logits_TC[rows].to(stats.max_T.dtype), chunk.transform)
            chunk_max_B = x_BC.amax(1)
            if stats.argmax_T is not None:
                class_B = chunk.first_class + x_BC.argmax(1)  # the first of several maxima
                stats.argmax_T[rows] = torch.where(chunk_max_B > stats.max_T[rows], class_B, stats.argmax_T[rows])
            sums = [stats.sum_exp_T[rows]]
            if stats.relative_sum_T is not None:
                sums.append(stats.relative_sum_T[rows])
            _fold(x_BC, chunk_max_B, stats.max_T[rows], *sums)
            here_B, column_B = _label_column(chunk.label_T[rows], chunk.first_class, x_BC.shape[1])
            label_logit_B = stats.label_logit_T[rows]
            label_logit_B.copy_(torch.where(here_B, x_BC.gather(1, column_B[:, None])[:, 0], label_logit_B))
            if stats.weighted_sum_T is not None:
                weighted_BC = x_BC if chunk.class_weight_C is None else x_BC * chunk.class_weight_C
                stats.weighted_sum_T[rows] += weighted_BC.sum(1)

    def gradient_(self, logits_TC: torch.Tensor, chunk: Chunk, coefficients: RowCoefficients) -> None:
        for rows in _row_blocks(logits_TC):
            softmax_B = coefficients.softmax_over_sum_T[rows]
            onehot_B = coefficients.onehot_T[rows]
            active_B = (softmax_B != 0) | (onehot_B != 0)
            x_BC = transformed(logits_TC[rows].to(softmax_B.dtype), chunk.transform)
            if coefficients.relative_over_sum_T is None:
                grad_BC = torch.exp(x_BC - coefficients.max_T[rows, None]).mul_(softmax_B[:, None])
            else:
                relative_B = coefficients.relative_over_sum_T[rows]
                active_B |= relative_B != 0
                relative_BC = x_BC - coefficients.max_T[rows, None]
                grad_BC = _weighted_softmax(relative_BC, relative_BC, softmax_B, relative_B)
            if coefficients.uniform_T is not None:
                uniform_B = coefficients.uniform_T[rows]
                active_B |= uniform_B != 0
                if chunk.class_weight_C is None:
                    grad_BC -= uniform_B[:, None]
                else:
                    grad_BC.addcmul_(uniform_B[:, None], chunk.class_weight_C, value=-1)
            here_B, column_B = _label_column(chunk.label_T[rows], chunk.first_class, x_BC.shape[1])
            at_label_B = grad_BC.gather(1, column_B[:, None])[:, 0]
            at_label_B = torch.where(here_B, at_label_B - onehot_B, at_label_B)
            grad_BC.scatter_(1, column_B[:, None], at_label_B[:, None])
            times_slope_(grad_BC, x_BC, chunk.transform)
            logits_TC[rows] = grad_BC.masked_fill_(~active_B[:, None], 0.0).to(logits_TC.dtype)

    def accumulate_pair(
        self,
        a_TC: torch.Tensor,
        b_TC: torch.Tensor,
        stats: PairStats,
        transform_a: LogitTransform,
        transform_b: LogitTransform,
    ) -> None:
        for rows in _row_blocks(a_TC):
            a_BC = transformed(a_TC[rows].to(stats.max_a_T.dtype), transform_a)
            b_BC = transformed(b_TC[rows].to(stats.max_a_T.dtype), transform_b)
            old_base_b_B = _base(stats.max_b_T[rows])
            _fold(b_BC, b_BC.amax(1), stats.max_b_T[rows], stats.sum_exp_b_T[rows])
            base_b_B = _base(stats.max_b_T[rows])
            shift_b_B = old_base_b_B - base_b_B
            sums = stats.sum_exp_a_T[rows], stats.gap_sum_T[rows]
            _fold(a_BC, a_BC.amax(1), stats.max_a_T[rows], *sums, b_BC - base_b_B[:, None], shift_b_B)

    def pair_gradient_(
        self,
        student_TC: torch.Tensor,
        teacher_TC: torch.Tensor,
        coefficients: PairCoefficients,
        transform: LogitTransform,
        teacher_transform: LogitTransform,
    ) -> None:
        c = coefficients
        for rows in _row_blocks(student_TC):
            softmax_B = c.softmax_over_sum_T[rows]
            active_B = softmax_B != 0
            x_BC = transformed(student_TC[rows].to(softmax_B.dtype), transform)
            y_BC = transformed(teacher_TC[rows].to(softmax_B.dtype), teacher_transform) - c.teacher_max_T[rows, None]
            relative_BC = x_BC - c.max_T[rows, None]
            if c.gap_over_sum_T is None:
                grad_BC = relative_BC.exp_().mul_(softmax_B[:, None])
            else:
                active_B |= c.gap_over_sum_T[rows] != 0
                grad_BC = _weighted_softmax(relative_BC, relative_BC - y_BC, softmax_B, c.gap_over_sum_T[rows])
            if c.teacher_over_sum_T is not None:
                active_B |= c.teacher_over_sum_T[rows] != 0
                grad_BC.addcmul_(c.teacher_over_sum_T[rows, None], y_BC.exp_(), value=-1)
            times_slope_(grad_BC, x_BC, transform)
            student_TC[rows] = grad_BC.masked_fill_(~active_B[:, None], 0.0).to(student_TC.dtype)

    def top_k_(
        self,
        logits_TC: torch.Tensor,
        first_class: int,
        values_TK: torch.Tensor,
        classes_TK: torch.Tensor,
        transform: LogitTransform,
    ) -> None:
        k = values_TK.shape[1]
        for rows in _row_blocks(logits_TC):
            x_BC = transformed(logits_TC[rows].to(values_TK.dtype), transform)
            # torch.topk may take any of equal values; a stable sort takes the first.
            value_BC, column_BC = x_BC.sort(dim=1, descending=True, stable=True)
            value_BN = torch.cat([values_TK[rows], value_BC[:, :k]], 1)
            class_BN = torch.cat([classes_TK[rows], column_BC[:, :k] + first_class], 1)
            values_TK[rows], classes_TK[rows] = first_k(value_BN, class_BN, k)


def first_k(value_BN: torch.Tensor, class_BN: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest values in descending order and their classes; of equal values the smaller class comes first."""
    class_BN, by_class_BN = class_BN.sort(1)
    value_BK, order_BN = value_BN.gather(1, by_class_BN).sort(dim=1, descending=True, stable=True)
    return value_BK[:, :k], class_BN.gather(1, order_BN[:, :k])


def _base(max_B: torch.Tensor) -> torch.Tensor:
    """What to subtract: where every logit so far is -inf, subtracting that would make NaN out of exp(-inf) = 0."""
    return torch.where(max_B == -torch.inf, 0.0, max_B)


def _fold(
    x_BC: torch.Tensor,
    chunk_max_B: torch.Tensor,
    max_B: torch.Tensor,
    sum_exp_B: torch.Tensor,
    gap_sum_B: torch.Tensor | None = None,
    other_BC: torch.Tensor | float = 0.0,
    other_shift_B: torch.Tensor | float = 0.0,
) -> None:
    """Online softmax in place: sum of exp(x - max), and of exp(x - max) * ((x - max) - other) where it is wanted.

    ``other_BC`` is given from its own base, which moved by ``other_shift_B`` since ``gap_sum_B`` was added up.
    """
    new_max_B = torch.maximum(max_B, chunk_max_B)
    base_B = _base(new_max_B)
    rescale_B = torch.exp(max_B - base_B)
    relative_BC = x_BC - base_B[:, None]
    if gap_sum_B is None:
        sum_exp_B.mul_(rescale_B).add_(relative_BC.exp_().sum(1))
    else:
        shift_B = _base(max_B) - base_B - other_shift_B
        exp_BC = relative_BC.exp()
        gap_BC = torch.where(exp_BC == 0, 0.0, exp_BC * relative_BC.sub_(other_BC))
        gap_sum_B.add_(sum_exp_B * shift_B).mul_(rescale_B).masked_fill_(rescale_B == 0, 0.0).add_(gap_BC.sum(1))
        sum_exp_B.mul_(rescale_B).add_(exp_BC.sum(1))
    max_B.copy_(new_max_B)


def _weighted_softmax(
    relative_BC: torch.Tensor, gap_BC: torch.Tensor, softmax_B: torch.Tensor, gap_coefficient_B: torch.Tensor
) -> torch.Tensor:
    """``exp(relative) * (softmax + coefficient * gap)``, 0 where the exponential is 0."""
    exp_BC = relative_BC.exp()
    weight_BC = torch.addcmul(softmax_B[:, None], gap_coefficient_B[:, None], gap_BC)
    return torch.where(exp_BC == 0, 0.0, exp_BC.mul_(weight_BC))


def _row_blocks(logits_TC: torch.Tensor) -> Iterator[slice]:
    num_tokens, width = logits_TC.shape
    step = max(1, BLOCK_ELEMENTS // max(1, width))
    for start in range(0, num_tokens, step):
        yield slice(start, min(start + step, num_tokens))


def transformed(z_BC: torch.Tensor, transform: LogitTransform) -> torch.Tensor:
    """The logits x of the loss from stored ones."""
    if transform.softcap is not None:
        return (z_BC * (transform.logit_scale / transform.softcap)).tanh_().mul_(transform.softcap)
    return z_BC if transform.logit_scale == 1.0 else z_BC * transform.logit_scale


def times_slope_(grad_BC: torch.Tensor, x_BC: torch.Tensor, transform: LogitTransform) -> torch.Tensor:
    """Multiply by dx/dz, in place; ``x_BC`` is used up."""
    if transform.softcap is not None:
        grad_BC.mul_(x_BC.div_(transform.softcap).square_().neg_().add_(1.0))
    if transform.logit_scale != 1.0:
        grad_BC.mul_(transform.logit_scale)
    return grad_BC


def _label_column(label_B: torch.Tensor, first_class: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether the label lies in this chunk, and a column that is always legal to read."""
    column_B = label_B - first_class
    here_B = (label_B >= 0) & (column_B >= 0) & (column_B < width)
    return here_B, column_B.clamp(0, width - 1)
