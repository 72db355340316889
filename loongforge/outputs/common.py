"""What the outputs share: their options, row kernels that pass everything on, and statistics over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from loongforge.kernels.interface import LogitTransform, OutputKernels, RowCoefficients, RowStats
from loongforge.loss import build_options
from loongforge.options import OPTION_NAMES, LossOptions
from loongforge.parallel import VocabParallel

HEAD_OPTIONS = ("softcap", "logit_scale", "vocab_size", "tp_group", "sequence_parallel", "fp32_logits", "impl")
"""Fields of LossOptions that every output takes."""


def output_options(
    function: str, accepted: Sequence[str], options: dict[str, Any], temperature: float, **fixed: Any
) -> LossOptions:
    """LossOptions of one output; the temperature divides what softcap and scale leave.

    ``x / t = (softcap / t) * tanh((scale / t) * z / (softcap / t))``, so that the kernels need not know of it.
    """
    for name in options:
        if name in OPTION_NAMES and name not in accepted:
            raise NotImplementedError(f"{function} has no option {name}: its options are {', '.join(accepted)}")
    built = build_options({**options, **fixed})
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
        raise TypeError(f"temperature must be a number, got {temperature!r} of type {type(temperature).__name__}")
    if not (math.isfinite(temperature) and 1e-6 <= temperature <= 1e6):
        raise ValueError(f"temperature must be finite and between 1e-6 and 1e6, got {temperature!r}")
    softcap = None if built.softcap is None else built.softcap / temperature
    return replace(built, logit_scale=built.logit_scale / temperature, softcap=softcap)


class PassedOn:
    """Row kernels in the place of ``kernels`` in the chunk loop, which hand everything on; outputs override."""

    def __init__(self, kernels: OutputKernels) -> None:
        self.kernels = kernels
        self.name = kernels.name

    def accumulate(
        self,
        logits_TC: torch.Tensor,
        label_T: torch.Tensor,
        first_class: int,
        stats: RowStats,
        transform: LogitTransform,
        class_weight_C: torch.Tensor | None = None,
    ) -> None:
        self.kernels.accumulate(logits_TC, label_T, first_class, stats, transform, class_weight_C)

    def gradient_(
        self,
        logits_TC: torch.Tensor,
        label_T: torch.Tensor,
        first_class: int,
        coefficients: RowCoefficients,
        transform: LogitTransform,
        class_weight_C: torch.Tensor | None = None,
    ) -> None:
        self.kernels.gradient_(logits_TC, label_T, first_class, coefficients, transform, class_weight_C)


def base(max_T: torch.Tensor) -> torch.Tensor:
    """What distances from the maximum are counted from: 0 where every logit is -inf."""
    return torch.where(max_T == -torch.inf, 0.0, max_T)


def gathered(values: Sequence[torch.Tensor], parallel: VocabParallel) -> tuple[torch.Tensor, ...]:
    """[R, T] of each [T]: what every rank has, with one exchange."""
    if parallel.size == 1:
        return tuple(value[None] for value in values)
    return parallel.gather_statistics(torch.stack(list(values))).wait().unbind(1)


def moved(max_RT: torch.Tensor, max_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Factor of each rank's sums of exponentials, and shift of its distances, for the maximum over ranks."""
    base_T = base(max_T)
    return torch.exp(max_RT - base_T), base(max_RT) - base_T


def moved_relative(relative: torch.Tensor, sum_exp: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor):
    """``sum exp(x - max) * distance`` after its maxima moved; 0 where the exponentials became 0."""
    return torch.where(scale == 0, 0.0, scale * (relative + sum_exp * shift))


def over_sum(coefficient_T: torch.Tensor, sum_exp_T: torch.Tensor) -> torch.Tensor:
    """What row kernels multiply exponentials by; an inactive row stays an exact 0 whatever its sum holds."""
    return torch.where(coefficient_T == 0, 0.0, coefficient_T / sum_exp_T)
