"""Results, table and JSON of :mod:`loongforge.bench.tensor_parallel`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loongforge.bench.communication import Overlap
from loongforge.bench.shapes import HeadShape

TARGET = 1.06
"""TP 2 with sequence parallelism and all logits kept, over the three products of its own rank."""
COLUMNS = (
    ("ms", lambda r: f"{r.step_ms:.2f}"),
    ("/floor", lambda r: f"{r.ratio:.3f}"),
    ("in series", lambda r: f"{r.series_ms:.2f}"),
    ("without", lambda r: f"{r.silent_ms:.2f}"),
    ("exposed", lambda r: f"{r.exposed_ms:.3f} +- {r.exposed_spread_ms:.3f}"),
    ("alone", lambda r: f"{r.collectives_ms:.3f}"),
    ("hidden", lambda r: share_text(r.hidden_share)),
    ("at once", lambda r: f"{r.at_once_ms:.2f}"),
    ("high priority", lambda r: f"{r.high_priority_ms:.2f}"),
    ("peak MiB", lambda r: f"{r.peak_mib:.0f}"),
    ("held MiB", lambda r: f"{r.held_mib:.0f}"),
    ("repeats", lambda r: "yes" if r.repeats else "no"),
    ("loss", lambda r: f"{r.errors['loss']:.1e}"),
    ("grad_hidden", lambda r: f"{r.errors['grad_hidden']:.1e}"),
    ("grad_weight", lambda r: f"{r.errors['grad_weight']:.1e}"),
)
LEGEND = """\
ms: forward + backward; /floor: over the three products of one rank; in series: every collective waited for at once;
without: no collectives; exposed: ms - without, median and half the interquartile distance over the rounds;
alone: the collectives by themselves; hidden: 1 - exposed / alone; at once: without the pause of 10 us after each start;
high priority: the group has a stream of high priority;
peak and held (between forward and backward) above the inputs; repeats: a second step has the same bits;
loss, grad_hidden, grad_weight: relative norms of their errors against float32, the worst rank's."""


@dataclass
class Result:
    """One variant on one shape; NaN where it was not measured."""

    variant: str
    errors: dict[str, float]
    single_errors: dict[str, float]  # of the same operation on one GPU
    repeats: bool  # a second step has the same bits
    step_ms: float = math.nan  # medians, as all times
    floor_ms: float = math.nan  # the three products of this rank
    series_ms: float = math.nan  # every collective waited for where it starts
    silent_ms: float = math.nan  # without collectives
    exposed_ms: float = math.nan  # what communication adds: median of the differences within a round
    exposed_spread_ms: float = math.nan  # half the distance between their quartiles
    at_once_ms: float = math.nan  # without the pause after each start
    high_priority_ms: float = math.nan  # on a stream of high priority
    collectives_ms: float = math.nan  # each alone, added up
    peak_mib: float = math.nan  # above the inputs, both gradients included
    held_mib: float = math.nan  # between forward and backward
    kernels: list[Overlap] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Forward plus backward over the three products of the rank."""
        return self.step_ms / self.floor_ms

    @property
    def hidden_share(self) -> float:
        """Share of the collectives' own time that the step does not see."""
        return 1 - self.exposed_ms / self.collectives_ms


def share_text(share: float) -> str:
    """A share, or that it is lost in the noise of the times it comes from."""
    return f"{share:.0%}" if 0 <= share <= 1 or share != share else "noise"


def table(shape: HeadShape, results: Sequence[Result], ranks: int) -> str:
    """One line a variant, then the communication kernels of the profiled step."""
    rows = [["variant", *(name for name, _ in COLUMNS)]]
    rows += [[result.variant, *(text(result) for _, text in COLUMNS)] for result in results]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{shape.name} ({shape}) over {ranks} ranks, floor {results[0].floor_ms:.2f} ms, one GPU's errors: "]
    lines[0] += ", ".join(f"{name} {error:.1e}" for name, error in results[0].single_errors.items())
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells))
    for result in results:
        for kernel in result.kernels:
            lines.append(
                f"  {result.variant}: {kernel.kernel} {kernel.time_us:.0f} us, "
                f"{kernel.time_us - kernel.hidden_us:.0f} us of it beside no computation"
            )
    best = results[0]
    verdict = "met" if best.ratio <= TARGET else "missed"
    lines.append(f"{best.variant}: {best.ratio:.3f} of the floor, target {TARGET} {verdict}")
    return "\n".join(lines)


def report(
    environment: dict[str, Any],
    results: Mapping[HeadShape, Sequence[Result]],
    links: Sequence[Mapping[str, Any]],
    folder: Path | None,
) -> None:
    """Print the tables last; write ``results.json`` and ``table.txt``."""
    text = [f"{environment['device']} x {environment['ranks']}, {environment['dtype']}"]
    text += [f"{name} {version}" for name, version in environment["versions"].items()]
    lines = [", ".join(text), ""]
    for link in links:
        size, bandwidth = f"{link['bytes'] / 2**20:6.1f} MiB", f"{link['gb_per_s']:7.1f} GB/s"
        lines.append(f"{link['collective']:15s} {size} {link['ms']:8.3f} ms {bandwidth}")
    lines += ["", *(table(shape, found, environment["ranks"]) + "\n" for shape, found in results.items()), LEGEND]
    print("\n".join(lines), flush=True)
    if folder is None:
        return
    (folder / "table.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    recorded = [asdict(shape) | {"results": [_line(result) for result in found]} for shape, found in results.items()]
    document = _without_nan({"environment": environment, "links": list(links), "shapes": recorded})
    (folder / "results.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _line(result: Result) -> dict[str, Any]:
    derived = {name: getattr(result, name) for name in ("ratio", "hidden_share")}
    return asdict(result) | derived


def _without_nan(value: Any) -> Any:
    """JSON has no NaN: null stands for what was not measured."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and value != value else value
