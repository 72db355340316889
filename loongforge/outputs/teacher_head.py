"""Divergence of a student's head from a teacher's hidden states and weight, whose logits are recomputed chunk by chunk.

Forward folds two chunks of logits at a time into both heads' softmax statistics and one more sum per token,

    gap = sum_j exp(a_j - max_a) * ((a_j - max_a) - (b_j - max_b)),    KL(a || b) = gap / S_a - log S_a + log S_b

with a the teacher and b the student for the forward divergence, and the other way around for the reverse one.  The
gradients with respect to the student's logit j, p the student and q the teacher, are

    forward  KL(q || p):  p_j - q_j
    reverse  KL(p || q):  p_j * ((log p_j - log q_j) - KL(p || q))

The student goes through the loss's own chunk loop.  Row kernels of :class:`_BesideTeacher` take the place of the
loss's and compute the teacher's chunk for each of the student's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from loongforge import chunks, sharded
from loongforge.call import Call, Labels, head_of, refusing_second_derivatives
from loongforge.kernels.interface import (
    LogitTransform,
    OutputKernels,
    PairCoefficients,
    PairStats,
    RowCoefficients,
    RowStats,
)
from loongforge.outputs.common import PassedOn, gathered, moved, moved_relative, over_sum
from loongforge.per_token import KeptLogits, products


@dataclass(frozen=True)
class TeacherHead:
    """A teacher as hidden states and an output layer; nothing of it gets a gradient.

    Its vocabulary is the student's, rank by rank; its hidden size is its own.  Logits are the teacher's own
    ``softcap`` and ``logit_scale`` applied to ``hidden @ weight.T + bias``; the temperature comes from the call.
    """

    hidden: torch.Tensor
    """[..., H_teacher] with the student's leading shape (this rank's slice under ``sequence_parallel``)."""
    weight: torch.Tensor
    """[V, H_teacher]; the dtype of the student's."""
    bias: torch.Tensor | None = None
    """[V]."""
    logit_scale: float = 1.0
    softcap: float | None = None


class _BesideTeacher(PassedOn):
    """Row kernels over the student's chunks that compute the teacher's chunk beside each.

    ``RowCoefficients.onehot_T`` is the coefficient of the target's probabilities, here the teacher's, and
    ``relative_over_sum_T`` multiplies the gap of the two heads.
    """

    def __init__(
        self,
        kernels: OutputKernels,
        teacher: chunks.Head,
        is_reverse: bool,
        max_T: torch.Tensor,
        sum_exp_T: torch.Tensor,
        gap_sum_T: torch.Tensor | None = None,
    ) -> None:
        super().__init__(kernels)
        self._teacher, self._is_reverse = teacher, is_reverse
        self.max_T, self.sum_exp_T, self.gap_sum_T = max_T, sum_exp_T, gap_sum_T

    def accumulate(
        self,
        logits_TC: torch.Tensor,
        label_T: torch.Tensor,
        first_class: int,
        stats: RowStats,
        transform: LogitTransform,
        class_weight_C: torch.Tensor | None = None,
    ) -> None:
        assert self.gap_sum_T is not None
        student, teacher = (stats.max_T, stats.sum_exp_T), (self.max_T, self.sum_exp_T)
        for student_TC, teacher_TC in self._chunks(logits_TC, first_class, self._teacher.plan.forward_width):
            if self._is_reverse:
                pair, heads = (*student, *teacher), (student_TC, teacher_TC)
                transforms = transform, self._teacher.transform
            else:
                pair, heads = (*teacher, *student), (teacher_TC, student_TC)
                transforms = self._teacher.transform, transform
            self.kernels.accumulate_pair(*heads, PairStats(*pair, self.gap_sum_T), *transforms)

    def gradient_(
        self,
        logits_TC: torch.Tensor,
        label_T: torch.Tensor,
        first_class: int,
        coefficients: RowCoefficients,
        transform: LogitTransform,
        class_weight_C: torch.Tensor | None = None,
    ) -> None:
        c = coefficients
        teacher_over_sum_T = None if self._is_reverse else over_sum(c.onehot_T, self.sum_exp_T)
        pair = PairCoefficients(
            c.max_T, self.max_T, c.softmax_over_sum_T, c.relative_over_sum_T, teacher_over_sum_T
        )  # fmt: skip
        for student_TC, teacher_TC in self._chunks(logits_TC, first_class, self._teacher.plan.backward_width):
            self.kernels.pair_gradient_(student_TC, teacher_TC, pair, transform, self._teacher.transform)

    def _chunks(self, logits_TC: torch.Tensor, first_class: int, width: int):
        """Parts of the student's chunk (kept logits come as one wide chunk), with the teacher's logits of each."""
        num_tokens, num_classes = logits_TC.shape
        stride = logits_TC.stride(0)
        is_one_chunk = num_classes <= width
        # A row stride like the student's, so that the rows of both start at the same place of a 16-byte vector.
        stride = stride if is_one_chunk and stride - num_classes < 16 else min(width, num_classes)
        buffer = logits_TC.new_empty((num_tokens, stride))
        for start in range(0, num_classes, width):
            stop = min(start + width, num_classes)
            teacher_TC = buffer[:, : stop - start]
            self._teacher.compute_logits(first_class + start, first_class + stop, teacher_TC)
            yield logits_TC[:, start:stop], teacher_TC


def _teacher_head(hidden, weight, bias, teacher_transform: LogitTransform, call: Call) -> chunks.Head:
    return replace(head_of(hidden, weight, bias, None, _no_label(hidden), call), transform=teacher_transform)


def _no_label(hidden: torch.Tensor) -> torch.Tensor:
    """The kernels of two heads look at no label."""
    return torch.empty(0, dtype=torch.int64, device=hidden.device)


class DivergenceFromHead(torch.autograd.Function):
    """(student's hidden, weight, bias, teacher's hidden, weight, bias, ignored [T]) -> divergence [T]."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, ignored_T,
                teacher_transform: LogitTransform, is_reverse: bool, call: Call):  # fmt: skip # noqa: D102
        with torch.autocast(hidden.device.type, enabled=False):
            head = head_of(hidden, weight, bias, None, _no_label(hidden), call)
            teacher = _teacher_head(teacher_hidden, teacher_weight, teacher_bias, teacher_transform, call)
            zeros_T = head.tokens.new_empty((call.plan.num_tokens,), head.statistics_dtype).zero_()
            rows = _BesideTeacher(
                call.kernels, teacher, is_reverse,
                torch.full_like(zeros_T, -torch.inf), zeros_T, zeros_T.clone(),
            )  # fmt: skip
            keep = call.reservation is not None
            stats, kept = chunks.forward(replace(head, kernels=rows), with_weighted_sum=False, keep=keep)
            teacher.tokens.wait()  # where nothing needed them, other ranks may have
            student, teacher_stats, gap_T = _over_ranks(stats, rows, is_reverse, call)
            log_ratio_T = teacher_stats[1].log() - student[1].log()
            divergence_T = gap_T + (log_ratio_T if is_reverse else -log_ratio_T)
            labels = Labels(ignored_T, torch.zeros_like(ignored_T))
        if call.needs_grad:
            ctx.save_for_backward(
                hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, ignored_T,
                *student, *teacher_stats, gap_T,
            )  # fmt: skip
            ctx.kept = KeptLogits.of(kept, call.reservation)
            ctx.call, ctx.rest = replace(call, reservation=None), (teacher_transform, is_reverse)
            ctx.shapes = sharded.shapes_of(weight, bias, teacher_weight, teacher_bias)
        return labels.mark_(divergence_T)

    @staticmethod
    @refusing_second_derivatives
    def backward(ctx, grad_T):  # noqa: D102
        (hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, ignored_T,
         max_T, sum_exp_T, teacher_max_T, teacher_sum_exp_T, gap_T) = ctx.saved_tensors  # fmt: skip
        names = ("weight", "bias", "teacher.weight", "teacher.bias")
        sharded.require_unchanged(names, (weight, bias, teacher_weight, teacher_bias), ctx.shapes)
        (teacher_transform, is_reverse), call = ctx.rest, ctx.call
        kept, ctx.kept = ctx.kept, None
        labels = Labels(ignored_T, torch.zeros_like(ignored_T))
        grad_T = labels.mark_(grad_T.to(max_T.dtype, copy=True))
        if is_reverse:
            softmax_T, onehot_T = labels.mark_(-grad_T * gap_T), torch.zeros_like(grad_T)
            relative_over_sum_T = over_sum(grad_T, sum_exp_T)
        else:
            softmax_T, onehot_T, relative_over_sum_T = grad_T, grad_T, None
        coefficients = RowCoefficients(max_T, over_sum(softmax_T, sum_exp_T), onehot_T, None, relative_over_sum_T)
        with torch.autocast(hidden.device.type, enabled=False):
            teacher = _teacher_head(teacher_hidden, teacher_weight, teacher_bias, teacher_transform, call)
        rows = _BesideTeacher(call.kernels, teacher, is_reverse, teacher_max_T, teacher_sum_exp_T)
        operands = (hidden, weight, bias, _no_label(hidden), None, None)
        logits, needs = None if kept is None else kept.logits, ctx.needs_input_grad[:3]
        grads = products(coefficients, operands, sum_exp_T, logits, needs, replace(call, kernels=rows))
        teacher.tokens.wait()
        return *grads, None, None, None, None, None, None, None


def _over_ranks(stats: RowStats, rows: _BesideTeacher, is_reverse: bool, call: Call):
    """(max, sum) of student and of teacher over all ranks, and the gap per unit of the weighting head's sum."""
    assert rows.gap_sum_T is not None
    values = (stats.max_T, stats.sum_exp_T, rows.max_T, rows.sum_exp_T, rows.gap_sum_T)
    max_RT, sum_RT, teacher_max_RT, teacher_sum_RT, gap_RT = gathered(values, call.parallel)
    max_T, teacher_max_T = max_RT.amax(0), teacher_max_RT.amax(0)
    scale_RT, shift_RT = moved(max_RT, max_T)
    teacher_scale_RT, teacher_shift_RT = moved(teacher_max_RT, teacher_max_T)
    sum_T, teacher_sum_T = (sum_RT * scale_RT).sum(0), (teacher_sum_RT * teacher_scale_RT).sum(0)
    if is_reverse:
        gap_T = moved_relative(gap_RT, sum_RT, scale_RT, shift_RT - teacher_shift_RT).sum(0) / sum_T
    else:
        gap_T = moved_relative(gap_RT, teacher_sum_RT, teacher_scale_RT, teacher_shift_RT - shift_RT).sum(0)
        gap_T = gap_T / teacher_sum_T
    return (max_T, sum_T), (teacher_max_T, teacher_sum_T), gap_T
