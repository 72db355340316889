"""Every option of the loss in one frozen dataclass: the only place where the list is written."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from typing import Any, Literal

from loongforge.kernels.interface import LogitTransform

IMPLEMENTATIONS = ("auto", "flydsl", "triton", "generic")
REDUCTIONS = ("mean", "sum", "none")
SMOOTHING_FORMULAS = ("torch", "megatron")
_LARGEST = sys.float_info.max


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """Options of :func:`loongforge.linear_cross_entropy`; raises ``ValueError`` or ``TypeError`` when built wrong."""

    reduction: Literal["mean", "sum", "none"] = "mean"
    """``none`` returns one loss per token, ``sum`` adds them, ``mean`` divides the sum by the valid tokens."""

    ignore_index: int = -100
    """Tokens with this label have loss 0 and gradient 0.  It may also be a valid class."""

    label_smoothing: float = 0.0
    """Share of the label's probability given to the other classes, in [0, 1)."""

    label_smoothing_formula: Literal["torch", "megatron"] = "torch"
    """``torch``: eps / V for every class.  ``megatron``: its V / (V - 1) scaling, so that the label keeps 1 - eps."""

    z_loss_weight: float = 0.0
    """Adds ``z_loss_weight * lse ** 2`` per valid token (PaLM, arXiv:2204.02311)."""

    softcap: float | None = None
    """Logits become ``softcap * tanh(logits / softcap)`` (Gemma 2, arXiv:2408.00118)."""

    logit_scale: float = 1.0
    """Logits are multiplied by it before the softcap (muP, Cohere, Granite; 1 / temperature)."""

    vocab_size: int | None = None
    """True global vocabulary size: labels are checked against it and padded weight rows stay out of the softmax."""

    tp_group: Any = None
    """Tensor-parallel ``torch.distributed`` process group that shards the weight's rows.  None: not sharded."""

    sequence_parallel: bool = False
    """``hidden`` is this rank's slice along dim 0 and is gathered over ``tp_group``."""

    compact_tokens: bool | int = False
    """Leave tokens without loss out of the products.  True reads their number from the device (one synchronisation);
    a number bounds the tokens that carry a loss without one, and more than that make loss and gradients NaN."""

    fp32_logits: bool = False
    """bf16 and fp16 operands give float32 logits, which are not rounded and take twice the memory."""

    fp32_grad_hidden: bool = False
    """grad_hidden is summed over ``tp_group`` in float32 and rounded after, for twice the traffic."""

    impl: Literal["auto", "flydsl", "triton", "generic"] = "auto"
    """Implementation of the row kernels; anything but ``auto`` is an error where it cannot be met."""

    logits_budget_mb: int | str | None = None
    """MiB of logits kept between forward and backward, or ``"all"``; None reads ``LCE_LOGITS_BUDGET_MB``."""

    def __post_init__(self) -> None:
        _one_of("reduction", self.reduction, REDUCTIONS)
        _one_of("impl", self.impl, IMPLEMENTATIONS)
        _one_of("label_smoothing_formula", self.label_smoothing_formula, SMOOTHING_FORMULAS)
        if not -(2**63) <= _integer("ignore_index", self.ignore_index) < 2**63:
            raise ValueError(f"ignore_index must fit 64 bits, got {self.ignore_index}")
        _number("label_smoothing", self.label_smoothing, "in [0, 1)", lambda x: 0.0 <= x < 1.0)
        _number("z_loss_weight", self.z_loss_weight, "finite and >= 0", lambda x: x >= 0.0)
        check_transform(self.logit_scale, self.softcap)
        if self.vocab_size is not None and _integer("vocab_size", self.vocab_size) < 1:
            raise ValueError(f"vocab_size must be None or at least 1, got {self.vocab_size}")
        for name in ("sequence_parallel", "fp32_logits", "fp32_grad_hidden"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if not isinstance(self.compact_tokens, bool) and _integer("compact_tokens", self.compact_tokens) < 1:
            raise ValueError(f"compact_tokens must be False, True or a bound of at least 1, got {self.compact_tokens}")
        if self.sequence_parallel and self.tp_group is None:
            raise ValueError("sequence_parallel=True needs tp_group=, the process group that hidden is split over")
        if self.fp32_grad_hidden and self.tp_group is None:
            raise ValueError("fp32_grad_hidden=True needs tp_group=, the process group over which it is summed")
        if self.logits_budget_mb is not None:
            check_budget("logits_budget_mb", self.logits_budget_mb)

    @property
    def transform(self) -> LogitTransform:
        """What the row kernels apply to each stored logit."""
        return LogitTransform(logit_scale=float(self.logit_scale), softcap=self.softcap)


OPTION_NAMES = tuple(field.name for field in fields(LossOptions))


def check_transform(logit_scale: object, softcap: object, of: str = "") -> None:
    """Raise unless both are legal; ``of`` is whose they are."""
    # The statistics are float32: far from 1e38 and 1e-38, so that products with logits stay finite there.
    legal = "finite and not 0 (of magnitude 1e-30 to 1e30)"
    _number(f"{of}logit_scale", logit_scale, legal, lambda x: 1e-30 <= abs(x) <= 1e30)
    if softcap is not None:
        legal = "finite and > 0 (1e-30 to 1e30), or None"
        _number(f"{of}softcap", softcap, legal, lambda x: 1e-30 <= x <= 1e30)


def check_budget(name: str, value: object) -> int | str:
    """Return ``value`` if it is a legal logits budget: a whole number of MiB >= 0, or ``"all"``."""
    if value == "all" and isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f'{name} must be a whole number of MiB >= 0, or "all", got {value!r}')
    if value < 0:
        raise ValueError(f'{name} must be a whole number of MiB >= 0, or "all", got {value}')
    return value


def _one_of(name: str, value: object, legal: tuple[str, ...]) -> None:
    if value not in legal:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, legal))}, got {value!r}")


def _integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
    return value


def _number(name: str, value: object, legal: str, holds) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, {legal}, got {value!r} of type {type(value).__name__}")
    # A comparison, not math.isfinite, which torch 2.11 does not trace when numbers are dynamic.
    if not abs(value) <= _LARGEST or not holds(value):
        raise ValueError(f"{name} must be a number, {legal}, got {value!r}")
