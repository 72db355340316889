"""Every output in plain torch with materialised logits, in the dtype of the inputs or in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from loongforge import TeacherHead, TeacherTopK
from tests.helpers import Inputs, make_inputs

TOKENS, HIDDEN, VOCAB, TRUE_VOCAB = 37, 24, 101, 90
TEMPERATURE = 0.7


def logits_of(hidden, weight, bias, *, softcap=None, logit_scale=1.0, vocab_size=None, temperature=1.0):
    """The logits of the loss [T, V], in at least float32."""
    x = F.linear(hidden, weight, bias)
    x = x.to(torch.promote_types(x.dtype, torch.float32)).reshape(-1, weight.shape[0])[:, :vocab_size] * logit_scale
    x = x if softcap is None else softcap * torch.tanh(x / softcap)
    return x / temperature


def head_options(options: dict[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in ("softcap", "logit_scale", "vocab_size", "temperature") if name in options}


def logprobs(inputs: Inputs, **options: Any) -> dict[str, torch.Tensor]:
    """What :func:`loongforge.linear_logprobs` returns, by name; per token, 0 where the label is ignored."""
    x = logits_of(inputs.hidden, inputs.weight, inputs.bias, **head_options(options))
    target_T = inputs.target.reshape(-1)
    valid_T = target_T != options.get("ignore_index", -100)
    log_p = x.log_softmax(1)
    entropy_T = -(log_p.exp() * torch.where(log_p == -torch.inf, 0.0, log_p)).sum(1)
    log_sum_exp_T = x.logsumexp(1)
    values = {
        "logprobs": log_p.gather(1, target_T.clamp(0, x.shape[1] - 1)[:, None])[:, 0],
        "log_sum_exp": log_sum_exp_T,
        "entropy": entropy_T,
        "z_loss": options.get("z_loss_weight", 0.0) * log_sum_exp_T.square(),
    }
    return {name: torch.where(valid_T, value, 0.0) for name, value in values.items()}


def predictions(inputs: Inputs, **options: Any) -> torch.Tensor:
    x = logits_of(inputs.hidden.detach(), inputs.weight.detach(), inputs.bias, **head_options(options))
    target_T = inputs.target.reshape(-1)
    return torch.where(target_T != options.get("ignore_index", -100), x.argmax(1), -1)


def kl(log_a: torch.Tensor, log_b: torch.Tensor) -> torch.Tensor:
    """KL(a || b) per row; classes of probability 0 in a cost nothing."""
    possible = log_a != -torch.inf
    return (log_a.exp() * (torch.where(possible, log_a, 0.0) - torch.where(possible, log_b, 0.0))).sum(1)


def divergence(inputs: Inputs, teacher: TeacherHead | TeacherTopK, kind: str = "forward", **options: Any):
    """What :func:`loongforge.linear_distillation` returns per token."""
    log_p = logits_of(inputs.hidden, inputs.weight, inputs.bias, **head_options(options)).log_softmax(1)
    if isinstance(teacher, TeacherHead):
        own = {"softcap": teacher.softcap, "logit_scale": teacher.logit_scale}
        own |= {name: options[name] for name in ("vocab_size", "temperature") if name in options}
        tensors = (
            None if t is None else t.to(inputs.hidden.dtype) for t in (teacher.hidden, teacher.weight, teacher.bias)
        )
        log_q = logits_of(*tensors, **own).log_softmax(1)  # rounded as the student's are
    else:
        ids, log_q = teacher.ids.flatten(0, -2), teacher.logprobs.flatten(0, -2).to(log_p.dtype)
        apart = log_p.gather(1, ids)
        if teacher.rest == "renormalize":
            log_p, log_q = apart, log_q.log_softmax(1)
        else:
            rest = log_p.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)
            log_p = torch.cat([apart, rest], 1)
            log_q = torch.cat([log_q, (-log_q.exp().sum(1, keepdim=True)).log1p()], 1)
    value_T = kl(log_q, log_p) if kind == "forward" else kl(log_p, log_q)
    return torch.where(inputs.target.reshape(-1) != options.get("ignore_index", -100), value_T, 0.0)


@dataclass
class Case:
    """Inputs and teachers of one dtype."""

    inputs: Inputs
    head: TeacherHead

    def top_k(self, k: int, rest: str = "bucket", **options: Any) -> TeacherTopK:
        """The teacher's k most probable classes, exact for its dtype."""
        h = self.head
        x = logits_of(h.hidden.double(), h.weight.double(), h.bias.double(), softcap=h.softcap, **options)
        best = x.log_softmax(1).topk(k)
        return TeacherTopK(best.values, best.indices, rest)


def make_case(dtype=torch.float64, *, tokens=TOKENS, bias=True, seed=0, ignore_index=-100, vocab=VOCAB, hidden=HIDDEN):
    """A student and a teacher of another width and its own softcap; every fifth label ignored."""
    inputs = make_inputs(tokens, hidden, vocab, dtype, seed=seed, bias=bias, ignored=0.0, spread=1.5)
    inputs.target.remainder_(min(vocab, TRUE_VOCAB))
    inputs.target[::5] = ignore_index
    other = make_inputs(tokens, hidden // 2, vocab, dtype, seed=seed + 1, bias=True, ignored=0.0, spread=1.5)
    return Case(inputs, TeacherHead(other.hidden, other.weight, other.bias, softcap=6.0))
