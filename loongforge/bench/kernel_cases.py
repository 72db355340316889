"""Every kernel of the loss by itself: how it is called, what it has to give and what it works through.

T tokens, H hidden, C vocabulary rows ``[0, C)`` of the head, one chunk or all of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from unittest import mock

import torch

from loongforge import linear_cross_entropy
from loongforge.arch import detect
from loongforge.bench.kernel_truth import Rows, empty_stats
from loongforge.bench.measure import Problem, relative_error
from loongforge.call import Labels
from loongforge.dispatch import TILE_ARCHS, choose, load_tiles, missing_package, row_kernels, why_not_gluon
from loongforge.formula import Formula
from loongforge.kernels.interface import RowKernels, RowStats, TileKernels
from loongforge.matmul import project_
from loongforge.options import IMPLEMENTATIONS, LossOptions

EXACT = 1e-5
"""Largest relative error of what is float32 from end to end."""
OLDEST_TMA = 90
"""Compute capability from which on plain Triton's tile kernels find a tensor memory accelerator."""
GEMM_SHARE = "one GEMM's share"
"""Baseline of the forward: a third of the three-GEMM floor."""
FORWARD = "loss-only forward"


@dataclass(frozen=True)
class Kernel:
    """One line of the table: what to call, or why there is nothing to call here."""

    name: str
    call: Callable[[], object] | None = None
    error: Callable[[], float] | None = None  # calls it; None where nothing can be wrong
    bar: float = EXACT  # the largest error at which it is right
    flops: int = 0
    num_bytes: int = 0
    baseline: str = ""  # the line, or GEMM_SHARE, whose time it is compared with
    missing: str = ""


def kernels_of(problem: Problem, width: int) -> Iterator[Kernel]:
    """All lines for chunks of ``width`` vocabulary rows, in the order of the table."""
    chunk = Rows.of(problem, width)
    whole = chunk if width == len(problem.weight_VH) else Rows.of(problem, len(problem.weight_VH))
    logits_TC, scratch_TC = _matrix(chunk), _matrix(chunk)
    yield Kernel("nothing between two events", lambda: None)
    yield _library("a chunk", chunk, lambda: logits_TC)
    yield from _tile_kernels("a chunk", chunk, scratch_TC)
    if whole is not chunk:
        yield _library("all rows", whole, cache(partial(_matrix, whole)))
        yield from _tile_kernels("all rows", whole, None)
    project_(logits_TC, chunk.hidden_TH, chunk.weight_CH, None)
    yield from _row_kernels(Rows.of(problem, width, logits_TC), scratch_TC)
    yield from _after_the_tiles(whole)
    yield from _losses(problem, whole)
    yield _forward(problem)


def _matrix(rows: Rows) -> torch.Tensor:
    """[T, C] with 16-byte aligned rows, as the chunk loop allocates it."""
    multiple = 16 // rows.hidden_TH.dtype.itemsize
    stride = -(-rows.width // multiple) * multiple
    return rows.hidden_TH.new_empty((len(rows.hidden_TH), stride))[:, : rows.width]


def _rounded(dtype: torch.dtype) -> float:
    """Largest relative error of what is rounded to ``dtype`` once."""
    return max(EXACT, torch.finfo(dtype).eps)


def _flops(rows: Rows) -> int:
    return 2 * rows.hidden_TH.numel() * rows.width


def _of_each(what: str, variants: Mapping[str, Any], kernel: Callable[[str, Any], Kernel]) -> Iterator[Kernel]:
    """A line for each variant; one that is a reason has nothing to call."""
    for variant, kernels in variants.items():
        name = f"{what}, {variant}"
        yield Kernel(name, missing=kernels) if isinstance(kernels, str) else kernel(name, kernels)


# ---------------------------------------------------------------- products and tiles


def _library(what: str, rows: Rows, out: Callable[[], torch.Tensor]) -> Kernel:
    """``out`` gives [T, C], and may find no room for it."""

    def call() -> None:
        project_(out(), rows.hidden_TH, rows.weight_CH, None)

    def error() -> float:
        call()
        return rows.logits_error(out())

    name = f"logits of {what}, library"
    return Kernel(name, call, error, _rounded(rows.hidden_TH.dtype), _flops(rows), baseline=name)


def _tile_kernels(what: str, rows: Rows, out_TC: torch.Tensor | None) -> Iterator[Kernel]:
    """Statistics, and where there is room for it the gradient, of all tiles in one launch."""
    variants, baseline = tile_variants(rows.hidden_TH, rows.weight_CH), f"logits of {what}, library"
    yield from _of_each(f"statistics of {what}", variants, partial(_tile_statistics, rows, baseline))
    if out_TC is not None:
        yield from _of_each(f"gradient of {what}", variants, partial(_tile_gradient, rows, out_TC, baseline))


def _tile_statistics(rows: Rows, baseline: str, name: str, tiles: TileKernels) -> Kernel:
    """Checked by the losses that come of it, timed without what follows the tiles."""

    def accumulate(stats: RowStats) -> None:
        tiles.accumulate(rows.hidden_TH, rows.weight_CH, None, rows.chunk, stats)

    def alone(stats: RowStats) -> None:
        with left_out("finish_statistics"):
            accumulate(stats)

    call, error = partial(alone, empty_stats(rows.label_T)), partial(rows.statistics_error, accumulate)
    return Kernel(name, call, error, flops=_flops(rows), baseline=baseline)


def _tile_gradient(rows: Rows, out_TC: torch.Tensor, baseline: str, name: str, tiles: TileKernels) -> Kernel:
    def call() -> None:
        tiles.gradient(rows.hidden_TH, rows.weight_CH, None, rows.chunk, rows.coefficients, out_TC)

    def error() -> float:
        out_TC.fill_(torch.nan)
        call()
        return rows.gradient_error(out_TC)

    return Kernel(name, call, error, _rounded(out_TC.dtype), _flops(rows), baseline=baseline)


def tile_variants(hidden_TH: torch.Tensor, weight_CH: torch.Tensor) -> dict[str, TileKernels | str]:
    """Gluon and plain Triton, or why they cannot run here."""
    return {name: _tiles_or_reason(name, hidden_TH, weight_CH) for name in ("gluon", "triton")}


def _tiles_or_reason(name: str, hidden_TH: torch.Tensor, weight_CH: torch.Tensor) -> TileKernels | str:
    arch, obstacle = detect(hidden_TH.device), why_no_triton(hidden_TH.device)
    if obstacle is None and name == "gluon":
        wrong_arch = f"written for {', '.join(TILE_ARCHS)}, the device is {arch}"
        obstacle = wrong_arch if arch.name not in TILE_ARCHS else why_not_gluon()
    elif obstacle is None and arch.compute_capability < OLDEST_TMA:
        obstacle = f"needs a tensor memory accelerator (sm_{OLDEST_TMA} or newer), the device is {arch}"
    if obstacle is not None:
        return obstacle
    tiles = load_tiles(name)
    if not tiles.supports(hidden_TH, weight_CH):
        return "takes bf16 and fp16 operands whose rows are multiples of 16 bytes"
    return tiles


def why_no_triton(device: torch.device) -> str | None:
    """Why nothing written in Triton can run on ``device``, or None."""
    return "needs a GPU: a kernel in Triton" if device.type != "cuda" else missing_package("triton")


@contextmanager
def left_out(name: str) -> Iterator[None]:
    """A function or kernel of ``kernels/triton_tiles.py`` replaced by nothing: what is left is timed by itself."""
    with mock.patch.object(importlib.import_module("loongforge.kernels.triton_tiles"), name, _Nothing()):
        yield


class _Nothing:
    def __call__(self, *arguments: object, **constants: object) -> None:
        pass

    def __getitem__(self, grid: object) -> _Nothing:
        return self


# ---------------------------------------------------------------- rows


def _row_kernels(rows: Rows, scratch_TC: torch.Tensor) -> Iterator[Kernel]:
    """Copies of as many bytes, then the row kernels over stored logits; the gradient is made in ``scratch_TC``."""
    assert rows.logits_TC is not None
    # Every logit is read once to accumulate; the gradient writes all rows but does not read ignored ones.
    read = rows.logits_TC.numel()
    moved = read + int((rows.label_T >= 0).sum()) * rows.width
    for step, count in (("accumulate", read), ("to gradient", moved)):
        source, copy = (scratch_TC.new_empty((count // 2,)) for _ in range(2))
        yield Kernel(_copy_for(step), partial(copy.copy_, source), num_bytes=2 * copy.nbytes)
    variants = row_variants(scratch_TC.device, scratch_TC.dtype)
    yield from _of_each("accumulate", variants, partial(_accumulate, rows, read * scratch_TC.itemsize))
    yield from _of_each("to gradient", variants, partial(_to_gradient, rows, scratch_TC, moved * scratch_TC.itemsize))


def _copy_for(step: str) -> str:
    return f"copy of as many bytes as {step}"


def _accumulate(rows: Rows, num_bytes: int, name: str, kernels: RowKernels) -> Kernel:
    def accumulate(stats: RowStats) -> None:
        assert rows.logits_TC is not None
        kernels.accumulate(rows.logits_TC, rows.chunk, stats)

    call, error = partial(accumulate, empty_stats(rows.label_T)), partial(rows.statistics_error, accumulate)
    return Kernel(name, call, error, num_bytes=num_bytes, baseline=_copy_for("accumulate"))


def _to_gradient(rows: Rows, scratch_TC: torch.Tensor, num_bytes: int, name: str, kernels: RowKernels) -> Kernel:
    def call() -> None:  # timed over its own result: the work does not depend on the numbers
        kernels.gradient_(scratch_TC, rows.chunk, rows.coefficients)

    def error() -> float:
        assert rows.logits_TC is not None
        scratch_TC.copy_(rows.logits_TC)
        call()
        return rows.gradient_error(scratch_TC)

    bar = _rounded(scratch_TC.dtype)
    return Kernel(name, call, error, bar, num_bytes=num_bytes, baseline=_copy_for("to gradient"))


def row_variants(device: torch.device, dtype: torch.dtype) -> dict[str, RowKernels | str]:
    """Every implementation of the row kernels, or why it cannot run here."""
    return {name: _rows_or_reason(name, device, dtype) for name in IMPLEMENTATIONS if name != "auto"}


def _rows_or_reason(name: Any, device: torch.device, dtype: torch.dtype) -> RowKernels | str:
    if device.type != "cuda" and name != "generic":
        return f"needs a GPU: row kernels of {name}"
    try:
        return row_kernels(device, LossOptions(impl=name), dtype)
    except (RuntimeError, NotImplementedError) as error:
        return str(error)


# ---------------------------------------------------------------- what follows the tiles, and the whole


def _after_the_tiles(rows: Rows) -> Iterator[Kernel]:
    """The fold as the forward over all rows launches it: plain Triton's computes the logits at the labels as well."""
    missing = why_no_triton(rows.hidden_TH.device)
    variants = {"gluon": missing or why_not_gluon() or False, "triton": missing or True}
    yield from _of_each("after the tiles", variants, partial(_fold_of_tiles, rows))


def _fold_of_tiles(rows: Rows, name: str, with_labels: bool) -> Kernel:
    finish_statistics = importlib.import_module("loongforge.kernels.triton_tiles_finish").finish_statistics
    tiles: Any = load_tiles("triton" if with_labels else "gluon")
    _, tile_width, _ = tiles._statistics(plain=True)
    partial_2XT = _of_tiles(rows.stats, -(-rows.width // tile_width))
    arguments = partial_2XT, rows.hidden_TH, rows.weight_CH, None, rows.chunk

    def error() -> float:
        finish_statistics(*arguments, stats := empty_stats(rows.label_T), True, with_labels)
        lse_T, expected_T = (given.max_T + given.sum_exp_T.log() for given in (stats, rows.stats))
        label_error = relative_error(stats.label_logit_T, rows.stats.label_logit_T) if with_labels else 0.0
        return relative_error(lse_T, expected_T) + label_error

    call = partial(finish_statistics, *arguments, empty_stats(rows.label_T), True, with_labels)
    operands = 2 * int((rows.label_T >= 0).sum()) * rows.hidden_TH[0].nbytes if with_labels else 0
    return Kernel(name, call, error, num_bytes=partial_2XT.nbytes + operands)


def _of_tiles(stats: RowStats, num_tiles: int) -> torch.Tensor:
    """[2, tiles, T] maxima and sums of tiles whose fold is ``stats``; every tile has another maximum."""
    below_X1 = torch.linspace(0, 5, num_tiles, device=stats.max_T.device)[:, None]
    return torch.stack([stats.max_T - below_X1, stats.sum_exp_T / num_tiles * below_X1.exp()])


def _losses(problem: Problem, rows: Rows) -> Iterator[Kernel]:
    """Losses of the tokens and masks of their labels, from the statistics."""
    target_T, options = problem.target_T, LossOptions(reduction="none")

    def in_torch() -> torch.Tensor:
        labels = Labels.among(target_T, rows.width, options.ignore_index)
        return labels.mark_(Formula.of(options, rows.width, target_T, None).loss(rows.stats))

    def in_triton() -> torch.Tensor:
        triton_losses = importlib.import_module("loongforge.kernels.triton_losses")
        return triton_losses.token_losses(target_T, rows.stats, rows.width, options.ignore_index)[0]

    variants = {"torch": in_torch, "triton": why_no_triton(target_T.device) or in_triton}
    expected_T = problem.truth[True][0]
    yield from _of_each(
        "losses of tokens", variants, lambda name, call: Kernel(name, call, lambda: relative_error(call(), expected_T))
    )


def _forward(problem: Problem) -> Kernel:
    """The whole operation without gradients."""
    hidden_TH, weight_VH = problem.hidden_TH, problem.weight_VH

    @torch.no_grad()
    def call() -> torch.Tensor:
        return linear_cross_entropy(hidden_TH, weight_VH, problem.target_T, reduction="none")

    def error() -> float:
        return relative_error(call(), problem.truth[True][0])

    name = f"{FORWARD}, {choose(hidden_TH.device, LossOptions(), hidden_TH.dtype).impl}"
    flops = 2 * hidden_TH.numel() * len(weight_VH)
    return Kernel(name, call, error, _rounded(hidden_TH.dtype), flops, baseline=GEMM_SHARE)
