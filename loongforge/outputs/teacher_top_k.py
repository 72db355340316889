"""Divergence of a student's head from a teacher known by its k most probable classes.

All classes outside the k are one class on both sides, with the teacher's mass q_r (0 under ``rest="renormalize"``)
and the student's p_r.  With K the k classes,

    forward  KL(q || p) = sum_K q_k * (log q_k - log p_k) + q_r * (log q_r - log p_r)
    reverse  KL(p || q) = sum_K p_k * (log p_k - log q_k) + p_r * (log p_r - log q_r)

By the data processing inequality neither exceeds the divergence over the whole vocabulary.  The gradient with respect
to the student's logit j is

    of K:       p_k - q_k                         and   p_k * (log p_k - log q_k - KL)
    elsewhere:  p_j / p_r * (p_r - q_r)           and   p_j / p_r * p_r * (log p_r - log q_r - KL)

so elsewhere it is one number per token times the softmax over the rest, which the loss's row kernels compute once the
k logits are taken out of the chunk; the k gradients then take their place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from loongforge import chunks
from loongforge.call import Call, Labels, StatisticsExchange, head_of, prepare_call
from loongforge.kernels.generic import times_slope_, transformed
from loongforge.kernels.interface import Chunk, LogitTransform, RowCoefficients, RowKernels, RowStats
from loongforge.operators import Computation, Computed, Operators
from loongforge.outputs.common import PassedOn, base, over_sum
from loongforge.per_token import products

RESTS = ("bucket", "renormalize")
LARGEST_MASS = 1.001
"""Probabilities of a teacher's k classes may sum to this much: bf16 log-probabilities sum to 1 only about."""
_HEADROOM = 64.0
"""In float16, how many times larger a gradient of the reverse divergence may be than its coefficient."""


@dataclass(frozen=True)
class TeacherTopK:
    """A teacher as its k most probable classes; nothing of it gets a gradient."""

    logprobs: torch.Tensor
    """[..., k] log-probabilities at the temperature of the call; with ``rest="renormalize"`` also logits."""
    ids: torch.Tensor
    """[..., k] integer global class numbers, each token's different from one another."""
    rest: Literal["bucket", "renormalize"] = "bucket"
    """``bucket``: what the probabilities leave of 1 belongs to all other classes together, compared as one class.
    ``renormalize``: the k probabilities are made to sum to 1 (forward divergence only)."""


class _Apart(PassedOn):
    """Row kernels that treat the k classes ``ids_TK`` (rank-local) of each token apart from the rest of a chunk."""

    def __init__(self, kernels: RowKernels, ids_TK: torch.Tensor, value_TK: torch.Tensor) -> None:
        super().__init__(kernels)  # type: ignore[arg-type]
        self._ids_TK = ids_TK
        self.value_TK = value_TK
        """Forward: the k logits x, 0 until their chunk comes.  Backward: their gradients per unit of ``onehot_T``."""

    def accumulate(self, logits_TC: torch.Tensor, chunk: Chunk, stats: RowStats) -> None:
        here_TK, column_TK = self._columns(logits_TC, chunk.first_class)
        x_TK = transformed(logits_TC.gather(1, column_TK).to(self.value_TK.dtype), chunk.transform)
        self.value_TK.copy_(torch.where(here_TK, x_TK, self.value_TK))
        lowest = -torch.inf if chunk.transform.logit_scale > 0 else torch.inf
        _put_(logits_TC, here_TK, column_TK, torch.full_like(x_TK, lowest))
        super().accumulate(logits_TC, chunk, stats)

    def gradient_(self, logits_TC: torch.Tensor, chunk: Chunk, coefficients: RowCoefficients) -> None:
        nowhere = replace(coefficients, onehot_T=torch.zeros_like(coefficients.onehot_T))
        super().gradient_(logits_TC, chunk, nowhere)
        here_TK, column_TK = self._columns(logits_TC, chunk.first_class)
        active_T1 = (coefficients.onehot_T != 0)[:, None]
        _put_(
            logits_TC, here_TK, column_TK, torch.where(active_T1, self.value_TK * coefficients.onehot_T[:, None], 0.0)
        )

    def _columns(self, logits_TC: torch.Tensor, first_class: int) -> tuple[torch.Tensor, torch.Tensor]:
        column_TK, width = self._ids_TK - first_class, logits_TC.shape[1]
        return (self._ids_TK >= 0) & (column_TK >= 0) & (column_TK < width), column_TK.clamp(0, width - 1)


def _put_(logits_TC: torch.Tensor, here_TK: torch.Tensor, column_TK: torch.Tensor, value_TK: torch.Tensor) -> None:
    """Write the values that are ``here``; the others write again what the row's first one does (or what is there)."""
    value_TK = value_TK.to(logits_TC.dtype)
    first_T1 = here_TK.to(torch.uint8).argmax(1, keepdim=True)
    any_T1 = here_TK.any(1, keepdim=True)
    spare_T1 = torch.where(any_T1, column_TK.gather(1, first_T1), 0)
    spare_value_T1 = torch.where(any_T1, value_TK.gather(1, first_T1), logits_TC[:, :1])
    logits_TC.scatter_(
        1, torch.where(here_TK, column_TK, spare_T1), torch.where(here_TK, value_TK, spare_value_T1)
    )  # fmt: skip


@dataclass
class _Student:
    """Log-probabilities of the k classes and of the rest, and the softmax statistics of the rest."""

    log_p_TK: torch.Tensor
    log_p_rest_T: torch.Tensor
    rest: RowStats


def _student(stats: RowStats, x_TK: torch.Tensor, transform: LogitTransform, num_classes: int) -> _Student:
    k = x_TK.shape[1]
    if transform.softcap is not None:
        # Capped, what was taken out is not -inf but -softcap, k times.
        surplus_T = k * torch.exp(-transform.softcap - base(stats.max_T))
        stats.sum_exp_T = (stats.sum_exp_T - surplus_T).clamp_min(0.0)
    if k == num_classes:
        stats.sum_exp_T = torch.zeros_like(stats.sum_exp_T)
    # Relative to the largest of all: differences of numbers near 2000 would lose the digits of the probabilities.
    largest_T = base(torch.maximum(stats.max_T, x_TK.amax(1)))
    x_TK, log_rest_T = x_TK - largest_T[:, None], base(stats.max_T) - largest_T + stats.sum_exp_T.log()
    log_sum_T = torch.cat([x_TK, log_rest_T[:, None]], 1).logsumexp(1)
    return _Student(x_TK - log_sum_T[:, None], log_rest_T - log_sum_T, stats)


@dataclass
class _Teacher:
    """Log-probabilities of the k classes and of the rest, and the rows that are no distribution."""

    log_q_TK: torch.Tensor
    log_q_rest_T: torch.Tensor
    bad_T: torch.Tensor


def teacher_of(logprobs_TK: torch.Tensor, ids_TK: torch.Tensor, rest: str, num_classes: int) -> _Teacher:
    """Also finds classes out of range, classes named twice and masses above 1."""
    ordered_TK = ids_TK.sort(1).values
    bad_T = (ordered_TK[:, 1:] == ordered_TK[:, :-1]).any(1)
    bad_T |= ((ids_TK < 0) | (ids_TK >= num_classes)).any(1)
    if rest == "renormalize":
        log_q_TK = logprobs_TK.log_softmax(1)
        return _Teacher(log_q_TK, torch.full_like(log_q_TK[:, 0], -torch.inf), bad_T)
    mass_T = logprobs_TK.double().exp().sum(1)
    # A confident teacher's rest is below the precision of its probabilities, and not 0, which reverse would not bear.
    rest_T = (1.0 - mass_T).clamp(min=torch.finfo(logprobs_TK.dtype).eps / 2)
    log_q_rest_T = rest_T.log().to(logprobs_TK.dtype)
    if ids_TK.shape[1] == num_classes:
        log_q_rest_T = torch.full_like(log_q_rest_T, -torch.inf)  # what rounding leaves of 1 belongs to no class
    return _Teacher(logprobs_TK, log_q_rest_T, bad_T | ~(mass_T <= LARGEST_MASS))


def _divergence(log_a: torch.Tensor, log_b: torch.Tensor) -> torch.Tensor:
    """a * (log a - log b), 0 where a is."""
    a = log_a.exp()
    return torch.where(a == 0, 0.0, a * (log_a - log_b))


def _with_units(student: _Student, teacher: _Teacher, is_reverse: bool):
    """The divergence [T] and its gradients for an upstream gradient of 1: of the k logits, and times p_j / p_r."""
    p, q = (student.log_p_TK, student.log_p_rest_T), (teacher.log_q_TK, teacher.log_q_rest_T)
    if not is_reverse:
        divergence_T = _divergence(q[0], p[0]).sum(1) + _divergence(q[1], p[1])
        return divergence_T, p[0].exp() - q[0].exp(), p[1].exp() - q[1].exp()
    parts_TK, part_T = _divergence(p[0], q[0]), _divergence(p[1], q[1])
    divergence_T = parts_TK.sum(1) + part_T
    unit_TK = parts_TK - p[0].exp() * divergence_T[:, None]
    return divergence_T, unit_TK, part_T - p[1].exp() * divergence_T


@dataclass(frozen=True)
class DivergenceFromTopK(Computation):
    """(student's hidden, weight, bias, ignored [T], teacher's log-probabilities and ids [T, k]) -> divergence [T]."""

    rest: str
    is_reverse: bool

    OPERANDS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor ignored, Tensor teacher_logprobs, Tensor teacher_ids"
    VALUES = ("divergence",)
    SAVED = ("unit", "unit_rest", "max", "sum_exp", "bad")

    def call(self, operands, options, parallel, dtype=None) -> Call:
        hidden, weight, bias, ignored_T, *_ = operands
        call = prepare_call(
            hidden, weight, bias, False, ignored_T.shape[0], options, parallel, None, None, dtype=dtype
        )  # fmt: skip
        # Its row kernels take classes out of a chunk, which tile kernels never store.
        return replace(call, tiles=None)

    def forward(self, operands, call: Call, keep: bool) -> Computed:
        hidden, weight, bias, ignored_T, logprobs_TK, ids_TK = operands
        head = head_of(hidden, weight, bias, None, torch.full_like(ids_TK[:, 0], -1), call)
        teacher = teacher_of(logprobs_TK.to(head.statistics_dtype), ids_TK, self.rest, call.num_classes)
        rows = _Apart(call.kernels, _local(ids_TK, call), torch.zeros_like(teacher.log_q_TK))
        stats, kept = chunks.forward(replace(head, kernels=rows), with_weighted_sum=False, keep=keep)
        stats, x_TK = StatisticsExchange(stats, call.parallel).wait(), rows.value_TK
        if call.parallel.size > 1:
            x_TK = call.parallel.gather_statistics(x_TK).wait().sum(0)
        student = _student(stats, x_TK, head.transform, call.num_classes)
        divergence_T, unit_TK, unit_rest_T = _with_units(student, teacher, self.is_reverse)
        unit_TK = times_slope_(unit_TK, x_TK, head.transform).contiguous()
        divergence_T = Labels(ignored_T, teacher.bad_T).mark_(divergence_T)
        saved = (unit_TK, unit_rest_T, base(student.rest.max_T), student.rest.sum_exp_T, teacher.bad_T)
        return Computed([divergence_T], saved, kept)

    def gradients(self, grads, operands, saved, kept, needs, call: Call):
        hidden, weight, bias, ignored_T, _, ids_TK = operands
        unit_TK, unit_rest_T, max_T, sum_exp_T, bad_T = saved
        labels = Labels(ignored_T, bad_T)
        grad_T = labels.mark_(grads[0].to(max_T.dtype, copy=True))
        rest_T = torch.where(sum_exp_T == 0, 0.0, over_sum(labels.mark_(grad_T * unit_rest_T), sum_exp_T))
        coefficients = RowCoefficients(max_T, rest_T, grad_T * _HEADROOM, None)
        rows = _Apart(call.kernels, _local(ids_TK, call), unit_TK / _HEADROOM)
        student = (hidden, weight, bias, torch.full_like(ids_TK[:, 0], -1), None, None)
        call = replace(call, kernels=rows)
        return products(coefficients, student, sum_exp_T, kept, needs, call)

    def like(self, operands, wide: torch.dtype) -> Computed:
        ignored_T, ids_TK = operands[3], operands[5]
        divergence_T, *saved = (torch.empty_like(ignored_T, dtype=wide) for _ in range(4))
        unit_TK = ids_TK.new_empty(ids_TK.shape, dtype=wide)
        return Computed([divergence_T], (unit_TK, *saved, torch.empty_like(ignored_T)))


def _local(ids_TK: torch.Tensor, call: Call) -> torch.Tensor:
    return ids_TK - call.parallel.rank * call.rows_per_rank


FROM_TOP_K = Operators("divergence_from_top_k", DivergenceFromTopK)
