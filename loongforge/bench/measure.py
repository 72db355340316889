"""Inputs, truth, errors, time and memory of one contender on one shape."""

from __future__ import annotations

import gc
import math
import statistics
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from loongforge.bench import timeline
from loongforge.bench.contenders import Contender, LossFunction
from loongforge.bench.shapes import HeadShape

LARGEST_ERROR = 0.05
"""A contender whose loss or gradient is further off than this (relative norm) is reported as wrong and not timed."""


@dataclass(frozen=True)
class Problem:
    """Tensors that every contender gets, and the truth for both kinds of upstream gradient."""

    hidden_TH: torch.Tensor
    weight_VH: torch.Tensor
    target_T: torch.Tensor
    upstream_T: torch.Tensor  # non-uniform gradient for contenders with a loss per token
    truth: dict[bool, tuple[torch.Tensor, ...]]  # per_token -> loss, grad_hidden, grad_weight
    floor: Callable[[], None]  # three_products


@dataclass
class Result:
    """One line of the table; NaN where it was not measured."""

    shape: str
    name: str
    per_token: bool
    is_ours: bool
    budget_mb: int | str | None = None
    status: str = "ok"
    step_ms: float = math.nan
    forward_ms: float = math.nan
    floor_ms: float = math.nan
    peak_mib: float = math.nan
    errors: dict[str, float] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Forward plus backward over the three-GEMM floor."""
        return self.step_ms / self.floor_ms

    @property
    def forward_ratio(self) -> float:
        """Forward without gradients over one GEMM's share of the floor."""
        return self.forward_ms / (self.floor_ms / 3)

    @property
    def gradient_error(self) -> float:
        return max(self.errors.get("grad_hidden", math.nan), self.errors.get("grad_weight", math.nan))


def make_problem(shape: HeadShape, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Problem:
    """Hidden states of unit variance, logits of unit variance, every 17th token ignored."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=device, generator=generator)

    hidden_TH = normal(shape.tokens, shape.hidden).to(dtype)
    weight_VH = (normal(shape.vocab, shape.hidden) * shape.hidden**-0.5).to(dtype)
    target_T = torch.randint(0, shape.vocab, (shape.tokens,), device=device, generator=generator)
    target_T[::17] = -100
    num_valid = (target_T >= 0).sum()
    upstream_T = torch.rand(shape.tokens, device=device, generator=generator) / num_valid
    uniform_T = torch.full_like(upstream_T, 1.0) / num_valid
    loss_T, *grads = float32_truth(hidden_TH, weight_VH, target_T, uniform_T)
    truth = {
        False: (loss_T.sum() / num_valid, *grads),
        True: float32_truth(hidden_TH, weight_VH, target_T, upstream_T),
    }
    return Problem(hidden_TH, weight_VH, target_T, upstream_T, truth, three_products(hidden_TH, weight_VH))


def float32_truth(hidden_TH, weight_VH, target_T, upstream_T, rows: int = 1024):
    """Loss per token and both gradients of ``sum(upstream * loss)`` in float32, a block of tokens at a time."""
    weight_VH = weight_VH.float()
    loss_T = torch.empty(len(target_T), device=target_T.device)
    grad_hidden = torch.empty(hidden_TH.shape, device=target_T.device)
    grad_weight = torch.zeros_like(weight_VH)
    for start in range(0, len(target_T), rows):
        block = slice(start, start + rows)
        hidden, valid, label = hidden_TH[block].float(), target_T[block] >= 0, target_T[block].clamp_min(0)[:, None]
        grad_logits = (hidden @ weight_VH.t()).log_softmax(-1)
        loss_T[block] = torch.where(valid, -grad_logits.gather(1, label)[:, 0], 0.0)
        grad_logits.exp_().scatter_add_(1, label, torch.full_like(label, -1.0, dtype=torch.float32))
        grad_logits *= torch.where(valid, upstream_T[block], 0.0)[:, None]
        grad_hidden[block] = grad_logits @ weight_VH
        grad_weight.addmm_(grad_logits.t(), hidden)
    return loss_T, grad_hidden, grad_weight


def relative_error(actual: torch.Tensor | None, expected: torch.Tensor) -> float:
    assert actual is not None, "backward left no gradient"
    return ((actual.float() - expected).norm() / expected.norm()).item()


def time_ms(call: Callable[[], object], device: torch.device, repetitions: int) -> float:
    """Median time of one call, after two warm-ups."""
    for _ in range(2):
        call()
    times = []
    for _ in range(repetitions):
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize(device)
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize(device)
            times.append(begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def behind_floor_ms(
    floor: Callable[[], object], call: Callable[[], object], device: torch.device, repetitions: int
) -> tuple[list[float], float]:
    """Times of ``floor`` and median time of ``call`` right behind it."""
    floors, times = interleaved_ms(floor, {"": call}, device, repetitions)
    return floors, statistics.median(times[""])


def interleaved_ms(
    floor: Callable[[], object], calls: Mapping[str, Callable[[], object]], device: torch.device, repetitions: int
) -> tuple[list[float], dict[str, list[float]]]:
    """Times of ``floor`` and of each call, all calls in turn and each right behind a floor, after two warm-ups.

    A GPU at its power limit slows down as it warms up: only neighbours can be compared.  And while the floor runs the
    host gets ahead, as in training, so that what is timed is the device's work and not the launch of its first kernel.
    """
    floors: list[float] = []
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repetition in range(repetitions + 2):
        for name, call in calls.items():
            floor_ms, call_ms = _two_in_a_row_ms(floor, call, device)
            if repetition >= 2:
                floors.append(floor_ms)
                times[name].append(call_ms)
    return floors, times


def _two_in_a_row_ms(
    first: Callable[[], object], second: Callable[[], object], device: torch.device
) -> tuple[float, float]:
    if device.type != "cuda":
        stamps = [time.perf_counter()]
        for call in (first, second):
            call()
            stamps.append(time.perf_counter())
        return 1e3 * (stamps[1] - stamps[0]), 1e3 * (stamps[2] - stamps[1])
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    torch.cuda.synchronize(device)
    events[0].record()
    first()
    events[1].record()
    second()
    events[2].record()
    torch.cuda.synchronize(device)
    return events[0].elapsed_time(events[1]), events[1].elapsed_time(events[2])


def three_products(hidden_TH: torch.Tensor, weight_VH: torch.Tensor) -> Callable[[], None]:
    """The products that no method can do without, through the vendor's library, a block of tokens at a time."""
    blocks = hidden_TH.split(min(4096, len(hidden_TH)))
    logits = hidden_TH.new_empty(len(blocks[0]), len(weight_VH))
    grad_hidden, grad_weight = torch.empty_like(hidden_TH), torch.empty_like(weight_VH)

    def products() -> None:
        for block in blocks:
            torch.mm(block, weight_VH.t(), out=logits[: len(block)])
        for block in blocks:
            torch.mm(logits[: len(block)], weight_VH, out=grad_hidden[: len(block)])
        for block in blocks:
            torch.mm(logits[: len(block)].t(), block, out=grad_weight)

    return products


def measure(contender: Contender, shape: HeadShape, problem: Problem, repetitions: int) -> Result:
    """Check, then measure memory, then time.  What a contender raises becomes its line's status."""
    result = Result(shape.name, contender.name, contender.per_token, contender.is_ours, contender.budget_mb)
    try:
        _measure(result, contender.build(), problem, repetitions)
    except ImportError as error:
        result.status = f"not installed: {_first_line(error)}"
    except Exception as error:  # other people's code: whatever goes wrong must not end the comparison
        result.status = failure(error)
    finally:
        release(problem.hidden_TH.device)
    return result


class Step:
    """Forward and backward of one contender on leaves of its own."""

    def __init__(self, loss_function: LossFunction, per_token: bool, problem: Problem) -> None:
        self._loss_function, self._per_token, self._problem = loss_function, per_token, problem
        self.hidden = problem.hidden_TH.detach().requires_grad_()
        self.weight = problem.weight_VH.detach().requires_grad_()

    def drop_gradients(self) -> None:
        self.hidden.grad = self.weight.grad = None

    def forward(self) -> torch.Tensor:
        return self._loss_function(self.hidden, self.weight, self._problem.target_T)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward(self._problem.upstream_T.to(loss.dtype) if self._per_token else None)

    def __call__(self) -> torch.Tensor:
        self.drop_gradients()
        loss = self.forward()
        self.backward(loss)
        return loss.detach()

    def errors(self) -> dict[str, float]:
        """Relative errors of loss and gradients."""
        actual = (self(), self.hidden.grad, self.weight.grad)
        names, truth = ("loss", "grad_hidden", "grad_weight"), self._problem.truth[self._per_token]
        return {name: relative_error(value, right) for name, value, right in zip(names, actual, truth, strict=True)}


def verdict(errors: dict[str, float]) -> str:
    """``ok``, or what is further off than :data:`LARGEST_ERROR`."""
    wrong = [name for name, error in errors.items() if not error <= LARGEST_ERROR]
    return f"wrong: {', '.join(wrong)} off by more than {LARGEST_ERROR:.0%}" if wrong else "ok"


def _measure(result: Result, loss_function: LossFunction, problem: Problem, repetitions: int) -> None:
    device = problem.hidden_TH.device
    step = Step(loss_function, result.per_token, problem)
    result.errors = step.errors()
    result.status = verdict(result.errors)
    if result.status != "ok":
        return
    result.peak_mib = _peak_bytes(step, device) / 2**20
    floors, result.step_ms = behind_floor_ms(problem.floor, step, device, repetitions)
    step.drop_gradients()
    with torch.no_grad():
        more, result.forward_ms = behind_floor_ms(
            problem.floor,
            lambda: loss_function(problem.hidden_TH, problem.weight_VH, problem.target_T),
            device,
            repetitions,
        )
    result.floor_ms = statistics.median(floors + more)


def _peak_bytes(step: Step, device: torch.device) -> int:
    """Most memory above the inputs during one step, both gradients included."""
    step()  # whatever is allocated once and stays is not counted
    step.drop_gradients()
    release(device)
    if device.type != "cuda":
        return timeline.record(device, step.forward, step.backward).peak_bytes
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def failure(error: BaseException) -> str:
    """The status of what raised ``error``."""
    return f"failed: {type(error).__name__}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    if not lines:  # an assertion without a message: where it stands
        last = traceback.extract_tb(error.__traceback__)[-1:]
        lines = [f"{Path(place.filename).name}:{place.lineno}: {place.line}" for place in last]
    return lines[0][:200] if lines else ""
