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

from loongforge import chunks
from loongforge.call import Call, head_of, prepare_call
from loongforge.kernels.interface import (
    Chunk,
    LogitTransform,
    OutputKernels,
    PairCoefficients,
    PairStats,
    RowCoefficients,
    RowStats,
)
from loongforge.operators import Computation, Computed, Operators
from loongforge.outputs.common import PassedOn, gathered, moved, moved_relative, over_sum
from loongforge.per_token import products


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

    def accumulate(self, logits_TC: torch.Tensor, chunk: Chunk, stats: RowStats) -> None:
        assert self.gap_sum_T is not None
        student, teacher = (stats.max_T, stats.sum_exp_T), (self.max_T, self.sum_exp_T)
        for student_TC, teacher_TC in self._chunks(logits_TC, chunk.first_class, self._teacher.plan.forward_width):
            if self._is_reverse:
                pair, heads = (*student, *teacher), (student_TC, teacher_TC)
                transforms = chunk.transform, self._teacher.transform
            else:
                pair, heads = (*teacher, *student), (teacher_TC, student_TC)
                transforms = self._teacher.transform, chunk.transform
            self.kernels.accumulate_pair(*heads, PairStats(*pair, self.gap_sum_T), *transforms)

    def gradient_(self, logits_TC: torch.Tensor, chunk: Chunk, coefficients: RowCoefficients) -> None:
        c = coefficients
        teacher_over_sum_T = None if self._is_reverse else over_sum(c.onehot_T, self.sum_exp_T)
        pair = PairCoefficients(
            c.max_T, self.max_T, c.softmax_over_sum_T, c.relative_over_sum_T, teacher_over_sum_T
        )  # fmt: skip
        for student_TC, teacher_TC in self._chunks(logits_TC, chunk.first_class, self._teacher.plan.backward_width):
            self.kernels.pair_gradient_(student_TC, teacher_TC, pair, chunk.transform, self._teacher.transform)

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


def _no_label(hidden: torch.Tensor) -> torch.Tensor:
    """The kernels of two heads look at no label."""
    return torch.empty(0, dtype=torch.int64, device=hidden.device)


@dataclass(frozen=True)
class DivergenceFromHead(Computation):
    """(student's hidden, weight, bias, ignored [T], teacher's hidden, weight, bias) -> divergence [T]."""

    teacher_logit_scale: float
    teacher_softcap: float | None
    is_reverse: bool

    OPERANDS = (
        "Tensor hidden, Tensor weight, Tensor? bias, Tensor ignored, "
        "Tensor teacher_hidden, Tensor teacher_weight, Tensor? teacher_bias"
    )
    VALUES = ("divergence",)
    SAVED = ("max", "sum_exp", "teacher_max", "teacher_sum_exp", "gap")

    def call(self, operands, options, parallel, dtype=None) -> Call:
        hidden, weight, bias, ignored_T, *_ = operands
        return prepare_call(
            hidden, weight, bias, False, ignored_T.shape[0], options, parallel, None, None,
            dtype=dtype, outputs=frozenset({"divergence from a teacher's head"}),
        )  # fmt: skip

    def forward(self, operands, call: Call, keep: bool) -> Computed:
        hidden, weight, bias, ignored_T, *_ = operands
        head = head_of(hidden, weight, bias, None, _no_label(hidden), call)
        teacher = self._teacher(operands, call)
        zeros_T = head.tokens.new_empty((call.plan.num_tokens,), head.statistics_dtype).zero_()
        rows = _BesideTeacher(
            call.kernels, teacher, self.is_reverse, torch.full_like(zeros_T, -torch.inf), zeros_T, zeros_T.clone()
        )
        stats, kept = chunks.forward(replace(head, kernels=rows), with_weighted_sum=False, keep=keep)
        teacher.tokens.wait()  # where nothing needed them, other ranks may have
        student, teacher_stats, gap_T = _over_ranks(stats, rows, self.is_reverse, call)
        log_ratio_T = teacher_stats[1].log() - student[1].log()
        divergence_T = gap_T + (log_ratio_T if self.is_reverse else -log_ratio_T)
        return Computed([divergence_T.masked_fill_(ignored_T, 0.0)], (*student, *teacher_stats, gap_T), kept)

    def gradients(self, grads, operands, saved, kept, needs, call: Call):
        hidden, weight, bias, ignored_T, *_ = operands
        max_T, sum_exp_T, teacher_max_T, teacher_sum_exp_T, gap_T = saved
        grad_T = grads[0].to(max_T.dtype).masked_fill(ignored_T, 0.0)
        if self.is_reverse:
            softmax_T, onehot_T = (-grad_T * gap_T).masked_fill_(ignored_T, 0.0), torch.zeros_like(grad_T)
            relative_over_sum_T = over_sum(grad_T, sum_exp_T)
        else:
            softmax_T, onehot_T, relative_over_sum_T = grad_T, grad_T, None
        coefficients = RowCoefficients(max_T, over_sum(softmax_T, sum_exp_T), onehot_T, None, relative_over_sum_T)
        teacher = self._teacher(operands, call)
        rows = _BesideTeacher(call.kernels, teacher, self.is_reverse, teacher_max_T, teacher_sum_exp_T)
        student = (hidden, weight, bias, _no_label(hidden), None, None)
        call = replace(call, kernels=rows)
        grads = products(coefficients, student, sum_exp_T, kept, needs, call)
        teacher.tokens.wait()
        return grads

    def _teacher(self, operands, call: Call) -> chunks.Head:
        hidden, weight, bias = operands[4:]
        transform = LogitTransform(logit_scale=float(self.teacher_logit_scale), softcap=self.teacher_softcap)
        return replace(head_of(hidden, weight, bias, None, _no_label(hidden), call), transform=transform)

    def like(self, operands, wide: torch.dtype) -> Computed:
        divergence_T, *saved = (torch.empty_like(operands[3], dtype=wide) for _ in range(6))
        return Computed([divergence_T], saved)


FROM_HEAD = Operators("divergence_from_head", DivergenceFromHead)


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
