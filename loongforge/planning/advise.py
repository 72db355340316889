"""The table over budgets, and the budget that a given amount of free memory allows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from loongforge.bench.run import default_budgets
from loongforge.plan import KEPT_MULTIPLE, ChunkPlan
from loongforge.planning.predict import Layer, Rates, Work, peak_bytes

MARGIN = 1.05
"""Free memory must hold this many times the predicted peak: predictions are within 5% of what was measured."""
MIB = 1 << 20
MOST_BUDGETS = 2048
"""Budgets tried at most: a larger vocabulary is walked in larger steps."""


@dataclass(frozen=True)
class Row:
    """What one budget costs."""

    budget_mb: int | str
    plan: ChunkPlan
    peak_bytes: int
    time_ms: float | None


def rows(layer: Layer, rates: Rates | None, with_tiles: bool) -> list[Row]:
    """From nothing kept to everything."""
    return [row(layer, budget, rates, with_tiles) for budget in default_budgets(layer.shape, layer.dtype)]


def row(layer: Layer, budget_mb: int | str, rates: Rates | None, with_tiles: bool) -> Row:
    plan = layer.plan(budget_mb, with_tiles)
    time_ms = None if rates is None else rates.milliseconds(Work.of(plan))
    return Row(budget_mb, plan, peak_bytes(layer, plan), time_ms)


def recommend(layer: Layer, free_bytes: int, rates: Rates | None, with_tiles: bool) -> Row | None:
    """The fastest budget whose peak fits ``free_bytes``, None where none does.

    Fastest is the least predicted time, and the least work where no time is predicted.
    """
    fitting = [one for one in _candidates(layer, rates, with_tiles) if one.peak_bytes * MARGIN <= free_bytes]
    return min(fitting, key=_cost, default=None)


def smallest(layer: Layer, rates: Rates | None, with_tiles: bool) -> Row:
    """The budget with the lowest peak: not always 0."""
    return min(_candidates(layer, rates, with_tiles), key=lambda one: (one.peak_bytes, _cost(one)))


def _cost(one: Row) -> tuple[float, int]:
    return (one.plan.flops if one.time_ms is None else one.time_ms, one.peak_bytes)


def _candidates(layer: Layer, rates: Rates | None, with_tiles: bool) -> Iterable[Row]:
    """Every budget that makes a difference: a whole MiB for each multiple of rows that could be kept."""
    bytes_per_row = layer.shape.tokens * layer.itemsize
    multiples = -(-layer.shape.vocab // KEPT_MULTIPLE)
    steps = range(0, layer.shape.vocab, KEPT_MULTIPLE * -(-multiples // MOST_BUDGETS))
    budgets: list[int | str] = [*dict.fromkeys(-(-kept * bytes_per_row // MIB) for kept in steps), "all"]
    return (row(layer, budget, rates, with_tiles) for budget in budgets)
