"""What tests share: inputs, relative errors, the honest-baseline comparison and an allocation profile."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import profile
from torch.nn import functional as F

from loongforge import LossOptions
from loongforge.kernels.reference import reference_loss

ROOT = Path(__file__).resolve().parents[1]
LOW_PRECISION = (torch.bfloat16, torch.float16)


def environment_of_checkout(**variables: str) -> dict[str, str]:
    """For a process of its own that imports this checkout, and the rest from where this one does."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", **variables}


@dataclass
class Inputs:
    """hidden [T, H], weight [V, H], target [T] and bias [V] (or None) on the CPU."""

    hidden: torch.Tensor
    weight: torch.Tensor
    target: torch.Tensor
    bias: torch.Tensor | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [t for t in (self.hidden, self.weight, self.bias) if t is not None]

    def leaves(self, dtype: torch.dtype | None = None, device: str | None = None) -> Inputs:
        """A copy whose float tensors are leaves that require gradients."""
        copies = [
            None if t is None else t.detach().clone().to(device=device, dtype=dtype).requires_grad_()
            for t in (self.hidden, self.weight, self.bias)
        ]
        return Inputs(copies[0], copies[1], self.target.to(device or self.target.device), copies[2])


def make_inputs(
    tokens: int = 37,
    hidden: int = 24,
    vocab: int = 101,
    dtype: torch.dtype = torch.float32,
    *,
    seed: int = 0,
    ignored: float = 0.25,
    spread: float = 1.0,
    shift: float = 0.0,
    bias: bool = False,
) -> Inputs:
    """Logits of standard deviation ``spread`` around ``shift``; a share ``ignored`` of the labels is -100."""
    generator = torch.Generator().manual_seed(seed)
    hidden_TH = torch.randn(tokens, hidden, generator=generator)
    weight_VH = torch.randn(vocab, hidden, generator=generator) * (spread / hidden**0.5)
    if shift:
        hidden_TH[:, 0], weight_VH[:, 0] = 1.0, shift
    target_T = torch.randint(0, vocab, (tokens,), generator=generator)
    target_T[torch.rand(tokens, generator=generator) < ignored] = -100
    if tokens and ignored < 1.0 and (target_T == -100).all():
        target_T[0] = 0
    bias_V = torch.randn(vocab, generator=generator).to(dtype) if bias else None
    return Inputs(hidden_TH.to(dtype), weight_VH.to(dtype), target_T, bias_V)


def upstream(shape: Any, seed: int = 3) -> torch.Tensor:
    """A non-uniform float64 upstream gradient whose first entry is 0."""
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if gradient.dim():
        gradient.view(-1)[:1] = 0.0
    return gradient


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the error over the norm of the truth (over 1 where the truth is 0); infinite where NaN."""
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    assert actual.shape == expected.shape, f"shape {list(actual.shape)}, expected {list(expected.shape)}"
    scale = float(expected.norm())
    error = float((actual - expected).norm()) / (scale if scale > 0 else 1.0)
    return error if error == error else float("inf")  # comparisons and max() overlook NaN


def loss_and_gradients(loss_of: Callable[..., torch.Tensor], inputs: Inputs, gradient: torch.Tensor | None = None):
    """Loss, then the gradient of every float input; ``gradient`` is the upstream one (default :func:`upstream`)."""
    extra = {} if inputs.bias is None else {"bias": inputs.bias}
    loss = loss_of(inputs.hidden, inputs.weight, inputs.target, **extra)
    gradient = upstream(loss.shape) if gradient is None else gradient
    return [loss.detach(), *torch.autograd.grad(loss, inputs.tensors, gradient.to(loss))]


def oracle(options: LossOptions, **tensors: Any) -> Callable[..., torch.Tensor]:
    """The float64 reference as a function of (hidden, weight, target, bias=None)."""
    return lambda hidden, weight, target, bias=None: reference_loss(
        hidden, weight, target, options, bias=bias, **tensors
    )


def eager(options: LossOptions, class_weight: torch.Tensor | None = None) -> Callable[..., torch.Tensor]:
    """The honest baseline: what people write in torch, logits in the dtype of the inputs and the loss in float32."""

    def loss_of(hidden, weight, target, bias=None):
        logits = F.linear(hidden, weight, bias)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).reshape(-1, weight.shape[0])
        x = logits[:, : options.vocab_size] * options.logit_scale
        if options.softcap is not None:
            x = options.softcap * torch.tanh(x / options.softcap)
        smoothing, classes = options.label_smoothing, x.shape[1]
        if options.label_smoothing_formula == "megatron" and smoothing:
            smoothing *= classes / (classes - 1)
        target_T = target.reshape(-1)
        valid_T = target_T != options.ignore_index
        weights = None if class_weight is None else class_weight.to(x.dtype)
        loss_T = F.cross_entropy(
            x, target_T, weight=weights, ignore_index=options.ignore_index, label_smoothing=smoothing, reduction="none"
        )
        if options.z_loss_weight:
            loss_T = loss_T + torch.where(valid_T, options.z_loss_weight * x.logsumexp(1).square(), 0.0)
        if options.reduction == "none":
            return loss_T.view(target.shape)
        if options.reduction == "sum":
            return loss_T.sum()
        return loss_T.sum() / (valid_T.sum() if weights is None else weights[target_T[valid_T]].sum())

    return loss_of


NAMES = ("loss", "grad_hidden", "grad_weight", "grad_bias")


def assert_honest(ours, baseline, truth, slack: float = 1e-6):
    """``error(ours) <= 2 * error(baseline) + slack``, as a relative norm per tensor."""
    for name, mine, theirs, true in zip(NAMES, ours, baseline, truth, strict=False):
        assert mine.isfinite().all(), f"{name} is not finite"
        bar = 2.0 * relative(theirs, true) + slack
        error = relative(mine, true)
        assert error <= bar, f"{name}: relative error {error:.2e} exceeds {bar:.2e}"


@dataclass
class Allocations:
    """Bytes that a call took from torch's allocator, temporaries inside operations included."""

    largest: int
    """The largest single block."""
    peak: int
    """The most bytes alive at once, above what was alive before."""
    events: list[int]


def record_allocations(function: Callable[[], Any]) -> Allocations:
    """Run ``function`` under torch's memory profiler; its result is dropped."""
    with profile(use_kineto=True, profile_memory=True) as profiler:
        result = function()
    del result
    events = [event.nbytes() for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = peak = 0
    for num_bytes in events:
        alive += num_bytes
        peak = max(peak, alive)
    assert events, "the profiler saw no allocation"
    return Allocations(max(events), peak, events)


def poison_memory(monkeypatch) -> None:
    """Fill what ``empty_like`` and ``new_empty`` return with NaN, so that whatever nobody writes is seen."""

    def poisoned(original):
        def allocate(*args, **kwargs):
            tensor = original(*args, **kwargs)
            return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

        return allocate

    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


def worst(errors: Iterable[float]) -> float:
    """The largest error; NaN counts as infinite, whereas ``max`` passes over it unless it comes first."""
    return max(math.inf if math.isnan(error) else error for error in errors)
