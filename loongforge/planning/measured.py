"""Rows of loongforge in a ``results.json`` of the comparison, beside what is predicted for them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from loongforge.bench.shapes import HeadShape, parse_shape
from loongforge.plan import ChunkPlan
from loongforge.planning.devices import DEVICES, MEASURED
from loongforge.planning.predict import Layer, Work, has_tiles, peak_bytes


@dataclass(frozen=True)
class OwnRow:
    """One measured setting."""

    name: str
    layer: Layer
    budget_mb: int | str
    step_ms: float
    peak_mib: float

    @property
    def shape(self) -> HeadShape:
        return self.layer.shape

    @cached_property
    def plan(self) -> ChunkPlan:
        return self.layer.plan(self.budget_mb, has_tiles(DEVICES[MEASURED]))

    @property
    def work(self) -> Work:
        return Work.of(self.plan)

    @property
    def peak_bytes(self) -> int:
        """Predicted."""
        return peak_bytes(self.layer, self.plan)


def own_rows(path: Path) -> list[OwnRow]:
    """Every row of ours that was measured."""
    recorded = json.loads(path.read_text(encoding="utf-8"))
    dtype = getattr(torch, recorded["environment"]["dtype"])
    return [
        OwnRow(
            line["name"],
            Layer(parse_shape(line["shape"]), dtype, "none" if line["per_token"] else "mean"),
            line["budget_mb"],
            line["step_ms"],
            line["peak_mib"],
        )
        for line in recorded["results"]
        if line["is_ours"] and line["status"] == "ok"
    ]
