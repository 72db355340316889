"""What options and outputs are measured, each with the same in torch on a block of float32 logits.

``ours`` maps :class:`Operands` to values per token; ``eager`` maps the student's and the teacher's logits of a block of
tokens, as the products leave them, and the rows of that block, to the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

from loongforge import (
    LossOptions,
    TeacherHead,
    TeacherTopK,
    linear_cross_entropy,
    linear_distillation,
    linear_logprobs,
    linear_top_k,
)

TEACHER_K = 64


@dataclass(frozen=True)
class Operands:
    """Inputs of every case; hidden, weight and bias get gradients."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    target: torch.Tensor
    class_weight: torch.Tensor
    teacher: TeacherHead
    teacher_top_k: TeacherTopK
    budget: int | str

    def rows(self, block: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Target, and the teacher's log-probabilities and ids, of a block of tokens."""
        return self.target[block], self.teacher_top_k.logprobs[block], self.teacher_top_k.ids[block]


Ours = Callable[[Operands], Sequence[torch.Tensor]]
Eager = Callable[[torch.Tensor, torch.Tensor, Operands, slice], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    name: str
    ours: Ours
    eager: Eager
    uses_bias: bool = False
    has_gradient: bool = True
    uses_teacher: bool = False


def _loss(name: str, uses_bias: bool = False, weighted: bool = False, **options) -> Case:
    def ours(o: Operands) -> Sequence[torch.Tensor]:
        bias, class_weight = o.bias if uses_bias else None, o.class_weight if weighted else None
        return [
            linear_cross_entropy(
                o.hidden, o.weight, o.target, bias=bias, class_weight=class_weight,
                reduction="none", logits_budget_mb=o.budget, **options,
            )
        ]  # fmt: skip

    def eager(x, teacher, o: Operands, block: slice) -> Sequence[torch.Tensor]:
        built, target = LossOptions(**options), o.target[block]
        x = _transformed(x, built)
        class_weight = o.class_weight if weighted else None
        loss = functional.cross_entropy(
            x, target, class_weight, label_smoothing=built.label_smoothing, reduction="none"
        )  # fmt: skip
        return [loss + torch.where(target >= 0, built.z_loss_weight * x.logsumexp(1).square(), 0.0)]

    return Case(name, ours, eager, uses_bias)


def _transformed(x: torch.Tensor, options: LossOptions) -> torch.Tensor:
    x = x * options.logit_scale
    return x if options.softcap is None else options.softcap * torch.tanh(x / options.softcap)


def _logprobs(name: str, entropy: bool = False, entropy_gradient: bool = True, predictions: bool = False) -> Case:
    def ours(o: Operands) -> Sequence[torch.Tensor]:
        out = linear_logprobs(
            o.hidden, o.weight, o.target, entropy=entropy, predictions=predictions, logits_budget_mb=o.budget
        )
        values = [out.logprobs]
        if out.entropy is not None:
            values.append(out.entropy if entropy_gradient else out.entropy.detach())
        return values if out.predictions is None else [*values, out.predictions.to(out.logprobs.dtype)]

    def eager(x, teacher, o: Operands, block: slice) -> Sequence[torch.Tensor]:
        target, log_p = o.target[block], x.log_softmax(1)
        valid = target >= 0
        values = [torch.where(valid, log_p.gather(1, target.clamp_min(0)[:, None])[:, 0], 0.0)]
        if entropy:
            value = torch.where(valid, -(log_p.exp() * log_p).sum(1), 0.0)
            values.append(value if entropy_gradient else value.detach())
        return [*values, torch.where(valid, x.argmax(1), -1).to(x.dtype)] if predictions else values

    return Case(name, ours, eager)


def _top_k(k: int) -> Case:
    def ours(o: Operands) -> Sequence[torch.Tensor]:
        return [linear_top_k(o.hidden, o.weight, k).logprobs.sum(1)]

    return Case(
        f"top_k {k}", ours, lambda x, teacher, o, block: [x.log_softmax(1).topk(k).values.sum(1)], has_gradient=False
    )


def _divergence(name: str, divergence: Literal["forward", "reverse"], from_top_k: bool) -> Case:
    def ours(o: Operands) -> Sequence[torch.Tensor]:
        teacher = o.teacher_top_k if from_top_k else o.teacher
        return [
            linear_distillation(
                o.hidden, o.weight, teacher, divergence=divergence, target=o.target,
                reduction="none", logits_budget_mb=o.budget,
            )
        ]  # fmt: skip

    def eager(x, teacher, o: Operands, block: slice) -> Sequence[torch.Tensor]:
        target, log_q, ids = o.rows(block)
        log_p = x.log_softmax(1)
        if from_top_k:
            log_p, log_q = _coarse(log_p, ids), torch.cat([log_q, (-log_q.exp().sum(1, keepdim=True)).log1p()], 1)
        else:
            log_q = teacher.log_softmax(1)
        a, b = (log_q, log_p) if divergence == "forward" else (log_p, log_q)
        return [torch.where(target >= 0, (a.exp() * (a - b)).sum(1), 0.0)]

    return Case(name, ours, eager, uses_teacher=True)


def _coarse(log_p: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    rest = log_p.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat([log_p.gather(1, ids), rest], 1)


CASES = (
    _loss("loss"),
    _loss("loss label_smoothing", label_smoothing=0.1),
    _loss("loss z_loss_weight", z_loss_weight=1e-4),
    _loss("loss softcap", softcap=30.0),
    _loss("loss logit_scale", logit_scale=0.5),
    _loss("loss bias", uses_bias=True),
    _loss("loss class_weight", weighted=True),
    _loss("loss class_weight and label_smoothing", weighted=True, label_smoothing=0.1),
    _logprobs("logprobs"),
    _logprobs("logprobs entropy without gradient", entropy=True, entropy_gradient=False),
    _logprobs("logprobs entropy", entropy=True),
    _logprobs("logprobs predictions", predictions=True),
    _top_k(1),
    _top_k(8),
    _top_k(128),
    _divergence("distillation forward head", "forward", from_top_k=False),
    _divergence("distillation reverse head", "reverse", from_top_k=False),
    _divergence(f"distillation forward top {TEACHER_K}", "forward", from_top_k=True),
    _divergence(f"distillation reverse top {TEACHER_K}", "reverse", from_top_k=True),
)
