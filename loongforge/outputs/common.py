"""What the outputs share: options, autograd's Function, row kernels that pass all on, statistics over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from loongforge import sharded
from loongforge.budget import KeptLogits
from loongforge.call import Call, refusing_second_derivatives
from loongforge.kernels.interface import Chunk, OutputKernels, RowCoefficients, RowStats
from loongforge.loss import build_options
from loongforge.operators import Computation, Operators, constants
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
    temperature = constants({"temperature": temperature})["temperature"]
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
        raise TypeError(f"temperature must be a number, got {temperature!r} of type {type(temperature).__name__}")
    if not 1e-6 <= temperature <= 1e6:
        raise ValueError(f"temperature must be finite and between 1e-6 and 1e6, got {temperature!r}")
    values = {name: getattr(built, name) for name in OPTION_NAMES}
    return build_options(values | at_temperature(built.logit_scale, built.softcap, temperature))


def at_temperature(logit_scale: float, softcap: float | None, temperature: float) -> dict[str, float | None]:
    """The two options for logits divided by the temperature."""
    return {"logit_scale": logit_scale / temperature, "softcap": None if softcap is None else softcap / temperature}


def per_token(
    operators: Operators,
    settings: dict[str, Any],
    operands: Sequence[torch.Tensor | None],
    options: LossOptions,
    parallel: VocabParallel,
) -> Sequence[Any]:
    """Values of the operators' computation, by them in a graph and by autograd's Function elsewhere."""
    if torch.compiler.is_compiling():
        return operators(settings, operands, options, parallel.sequence_parallel)
    computation = operators.computation(**settings)
    return _PerToken.apply(computation, computation.call(operands, options, parallel), *operands)


class _PerToken(torch.autograd.Function):
    """(computation, call, operands) -> values per token, with gradients of hidden, weight and bias."""

    @staticmethod
    def forward(ctx, computation: Computation, call: Call, *operands):  # noqa: D102
        with torch.autocast(operands[0].device.type, enabled=False):
            values, saved, kept = computation.forward(operands, call, keep=call.reservation is not None)
        ctx.set_materialize_grads(len(values) == 1)
        ctx.mark_non_differentiable(*(x for x in values if x is not None and not x.is_floating_point()))
        if call.needs_grad:
            ctx.save_for_backward(*operands, *saved)
            ctx.kept = KeptLogits.of(kept, call.reservation)
            ctx.computation, ctx.call = computation, replace(call, reservation=None)
            ctx.shapes = sharded.shapes_of(*operands)
        return tuple(values)

    @staticmethod
    @refusing_second_derivatives
    def backward(ctx, *grads):  # noqa: D102
        num_operands, tensors = len(ctx.shapes), ctx.saved_tensors  # read once: checkpointing allows no second time
        operands, saved = tensors[:num_operands], tensors[num_operands:]
        sharded.require_unchanged(ctx.computation.names(), operands, ctx.shapes)
        kept, ctx.kept = ctx.kept, None
        with torch.autocast(operands[0].device.type, enabled=False):
            found = ctx.computation.gradients(grads, operands, saved, kept, ctx.needs_input_grad[2:5], ctx.call)
        return None, None, *found, *[None] * (num_operands - 3)


class PassedOn:
    """Row kernels in the place of ``kernels`` in the chunk loop, which hand everything on; outputs override."""

    def __init__(self, kernels: OutputKernels) -> None:
        self.kernels = kernels
        self.name = kernels.name

    def accumulate(self, logits_TC: torch.Tensor, chunk: Chunk, stats: RowStats) -> None:
        self.kernels.accumulate(logits_TC, chunk, stats)

    def gradient_(self, logits_TC: torch.Tensor, chunk: Chunk, coefficients: RowCoefficients) -> None:
        self.kernels.gradient_(logits_TC, chunk, coefficients)


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
