"""Row kernels in plain PyTorch: any device that torch runs on, float64 included.

Both walk the rows in blocks so that their float32 temporaries stay small (and in cache on a CPU).  No boolean-mask
indexing, no ``.item()``: nothing here synchronises or has a data-dependent shape.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from loongforge.kernels.interface import LogitTransform, RowCoefficients, RowStats

BLOCK_ELEMENTS = 1 << 20
"""Most elements of one temporary; a single row may exceed it."""


class GenericRowKernels:
    """The row kernels of :class:`loongforge.kernels.interface.RowKernels` in PyTorch operations."""

    name = "generic"

    def accumulate(
        self,
        logits_TC: torch.Tensor,
        label_T: torch.Tensor,
        first_class: int,
        stats: RowStats,
        transform: LogitTransform,
        class_weight_C: torch.Tensor | None = None,
    ) -> None:
        for rows in _row_blocks(logits_TC):
            x_BC = _transformed(logits_TC[rows].to(stats.max_T.dtype), transform)
            old_max_B = stats.max_T[rows]
            new_max_B = torch.maximum(old_max_B, x_BC.amax(1))
            # Where every logit so far is -inf, subtracting it would make NaN out of exp(-inf) = 0.
            base_B = torch.where(new_max_B == -torch.inf, 0.0, new_max_B)
            sum_exp_B = stats.sum_exp_T[rows]
            sum_exp_B.mul_(torch.exp(old_max_B - base_B)).add_(torch.exp(x_BC - base_B[:, None]).sum(1))
            old_max_B.copy_(new_max_B)
            here_B, column_B = _label_column(label_T[rows], first_class, x_BC.shape[1])
            label_logit_B = stats.label_logit_T[rows]
            label_logit_B.copy_(torch.where(here_B, x_BC.gather(1, column_B[:, None])[:, 0], label_logit_B))
            if stats.weighted_sum_T is not None:
                weighted_BC = x_BC if class_weight_C is None else x_BC * class_weight_C
                stats.weighted_sum_T[rows] += weighted_BC.sum(1)

    def gradient_(
        self,
        logits_TC: torch.Tensor,
        label_T: torch.Tensor,
        first_class: int,
        coefficients: RowCoefficients,
        transform: LogitTransform,
        class_weight_C: torch.Tensor | None = None,
    ) -> None:
        for rows in _row_blocks(logits_TC):
            softmax_B = coefficients.softmax_over_sum_T[rows]
            onehot_B = coefficients.onehot_T[rows]
            active_B = (softmax_B != 0) | (onehot_B != 0)
            x_BC = _transformed(logits_TC[rows].to(softmax_B.dtype), transform)
            grad_BC = torch.exp(x_BC - coefficients.max_T[rows, None]).mul_(softmax_B[:, None])
            if coefficients.uniform_T is not None:
                uniform_B = coefficients.uniform_T[rows]
                active_B |= uniform_B != 0
                if class_weight_C is None:
                    grad_BC -= uniform_B[:, None]
                else:
                    grad_BC.addcmul_(uniform_B[:, None], class_weight_C, value=-1)
            here_B, column_B = _label_column(label_T[rows], first_class, x_BC.shape[1])
            at_label_B = grad_BC.gather(1, column_B[:, None])[:, 0]
            at_label_B = torch.where(here_B, at_label_B - onehot_B, at_label_B)
            grad_BC.scatter_(1, column_B[:, None], at_label_B[:, None])
            if transform.softcap is not None:
                grad_BC.mul_(x_BC.div_(transform.softcap).square_().neg_().add_(1.0))
            if transform.logit_scale != 1.0:
                grad_BC.mul_(transform.logit_scale)
            logits_TC[rows] = grad_BC.masked_fill_(~active_B[:, None], 0.0).to(logits_TC.dtype)


def _row_blocks(logits_TC: torch.Tensor) -> Iterator[slice]:
    num_tokens, width = logits_TC.shape
    step = max(1, BLOCK_ELEMENTS // max(1, width))
    for start in range(0, num_tokens, step):
        yield slice(start, min(start + step, num_tokens))


def _transformed(z_BC: torch.Tensor, transform: LogitTransform) -> torch.Tensor:
    if transform.softcap is not None:
        return (z_BC * (transform.logit_scale / transform.softcap)).tanh_().mul_(transform.softcap)
    return z_BC if transform.logit_scale == 1.0 else z_BC * transform.logit_scale


def _label_column(label_B: torch.Tensor, first_class: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether the label lies in this chunk, and a column that is always legal to read."""
    column_B = label_B - first_class
    here_B = (label_B >= 0) & (column_B >= 0) & (column_B < width)
    return here_B, column_B.clamp(0, width - 1)
