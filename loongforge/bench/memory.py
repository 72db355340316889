"""``loongforge memory``: memory over time of the unfused loss beside ours, as JSON and as a picture of it."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from loongforge.bench.contenders import PEERS, Contender, ours
from loongforge.bench.measure import Problem, Step, make_problem, release, verdict
from loongforge.bench.records import record_of
from loongforge.bench.run import DTYPES, describe, device_of, parse_budgets
from loongforge.bench.shapes import HeadShape, add_size_flags, shapes_of
from loongforge.bench.timeline import Timeline, record
from loongforge.errors import UsageError, require_folder

UNFUSED = {
    peer.name: peer for peer in PEERS if peer.name in ("torch eager fp32 loss", "torch eager", "megatron unfused")
}
SUM_HIDDEN = "gradient of hidden, float32 sum"
REST = "one chunk, and the rest"
KINDS = (
    "gradient of weight",
    "gradient of hidden",
    SUM_HIDDEN,
    "logits or their gradient",
    "logits or their gradient in float32",
    REST,
)
NEGLIGIBLE = 1e-3
"""Blocks below this share of the peak are left out of the file."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help="as for bench; default: llama3-8b")
    add_size_flags(parser)
    parser.add_argument("--output", type=Path, metavar="FILE", help="FILE.png (FILE.json goes beside it) or FILE.json")
    parser.add_argument("--unfused", choices=UNFUSED, default="torch eager fp32 loss", help="what ours stands beside")
    parser.add_argument("--budgets", default="0,all", help="logits budgets of ours, MiB or all (default 0,all)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--device", help="default: the GPU if there is one, else cpu")
    parser.add_argument("--redraw", type=Path, metavar="FILE.json", help="only draw FILE.png of an earlier FILE.json")


def run(options: argparse.Namespace) -> str:
    """Record, write, draw; returns what to print."""
    if options.redraw:
        return _draw_file(options.redraw)
    output = options.output
    if output is None or output.suffix not in (".png", ".json"):
        raise UsageError(f"--output must name a .png or a .json file, got {output}")
    if output.suffix == ".png":
        _require_matplotlib(output)
    shapes = shapes_of(options, "llama3-8b")
    if len(shapes) != 1:
        raise UsageError(f"a picture shows one shape, got {', '.join(shape.name for shape in shapes)}")
    require_folder(output.parent)
    contenders = [UNFUSED[options.unfused]]
    contenders += [one for one in ours(parse_budgets(options.budgets)) if one.per_token]
    # Without it the host runs ahead of the device, and every allocation seems to happen at the start.
    os.environ.setdefault("CUDA_LAUNCH_BLOCKING", "1")
    recorded = record_all(shapes[0], contenders, device_of(options.device), DTYPES[options.dtype])
    data_file = output.with_suffix(".json")
    data_file.write_text(json.dumps(recorded) + "\n", encoding="utf-8")
    lines = [f"{entry['name']:32} peak {entry['peak_mib']:10.1f} MiB" for entry in recorded["timelines"]]
    lines.append(_draw_file(data_file) if output.suffix == ".png" else f"{data_file}")
    return "\n".join(lines)


def record_all(
    shape: HeadShape, contenders: Sequence[Contender], device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Plain data: where it was recorded, and per contender its blocks, each checked against the truth first."""
    problem = make_problem(shape, device, dtype)
    timelines = [{"name": _title(one)} | _plain(_record(one, problem)) for one in contenders]
    sizes = {"tokens": shape.tokens, "hidden": shape.hidden, "vocab": shape.vocab}
    return {"environment": describe(device, dtype), "shape": sizes, "timelines": timelines}


def _title(contender: Contender) -> str:
    if not contender.is_ours:
        return f"unfused: {contender.name}"
    kept = {0: "nothing kept", "all": "all logits kept"}.get(contender.budget_mb, f"{contender.budget_mb} MiB kept")
    return f"loongforge, {kept}"


def _record(contender: Contender, problem: Problem) -> Timeline:
    try:
        step = Step(contender.build(), contender.per_token, problem)
    except ImportError as error:
        raise UsageError(f"{contender.name}: {error}") from error
    status = verdict(step.errors())
    if status != "ok":
        raise UsageError(f"{contender.name} is {status}")
    step.drop_gradients()
    release(problem.hidden_TH.device)
    return record(problem.hidden_TH.device, step.forward, step.backward)


def _plain(timeline: Timeline) -> dict[str, Any]:
    blocks = [
        {
            "bytes": block.num_bytes,
            "start_ms": round(block.start_ms, 4),
            "stop_ms": None if block.stop_ms is None else round(block.stop_ms, 4),
        }
        for block in timeline.blocks
        if block.num_bytes >= NEGLIGIBLE * timeline.peak_bytes
    ]
    return {
        "peak_mib": timeline.peak_bytes / 2**20,
        "backward_ms": round(timeline.backward_ms, 4),
        "end_ms": round(timeline.end_ms, 4),
        "blocks": blocks,
    }


def kinds_of(entry: dict[str, Any], shape: HeadShape, itemsize: int) -> list[str]:
    """What each block holds, by its size.  A chunk may be as large as the float32 sum, which outlives it."""
    kinds = [kind_of(block["bytes"], shape, itemsize) for block in entry["blocks"]]
    sums = [number for number, kind in enumerate(kinds) if kind == SUM_HIDDEN]
    for number in sorted(sums, key=lambda number: entry["blocks"][number]["stop_ms"] or entry["end_ms"])[:-1]:
        kinds[number] = REST
    return kinds


def kind_of(num_bytes: int, shape: HeadShape, itemsize: int) -> str:
    """What an allocation of this size holds."""
    logits, hidden = shape.tokens * shape.vocab, shape.tokens * shape.hidden
    exact = {
        shape.vocab * shape.hidden * itemsize: "gradient of weight",
        hidden * itemsize: "gradient of hidden",
        logits * itemsize: "logits or their gradient",
    }
    if itemsize < 4:
        exact[hidden * 4] = SUM_HIDDEN
        exact[logits * 4] = "logits or their gradient in float32"
    return exact.get(num_bytes, REST)


def _draw_file(data_file: Path) -> str:
    picture = data_file.with_suffix(".png")
    _require_matplotlib(picture)
    with record_of(data_file, f"--redraw needs a file that loongforge memory wrote, {data_file} is none") as recorded:
        _ = recorded["environment"]["device"], recorded["shape"], recorded["timelines"][0]["blocks"]
    require_folder(picture.parent)
    draw(picture, recorded)
    return f"{picture}"


def _require_matplotlib(picture: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            f"{picture} needs matplotlib: pip install 'loongforge[plot]', or write {picture.with_suffix('.json')} "
            "here and draw it elsewhere with --redraw"
        )


def draw(picture: Path, recorded: dict[str, Any]) -> None:
    """One panel a loss on common scales of memory and time: what is alive, stacked by kind."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timelines = recorded["timelines"]
    figure = Figure(figsize=(4.3 * len(timelines), 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(timelines), sharex=True, sharey=True, squeeze=False)[0]
    top = max(entry["peak_mib"] for entry in timelines)
    colors = dict(zip(KINDS, ("#4c78a8", "#72b7b2", "#a5d6d3", "#e45756", "#f2a29b", "#b0b0b0"), strict=True))
    environment, shape = recorded["environment"], HeadShape.of_sizes(**recorded["shape"])
    areas: dict[str, Any] = {}
    for axes, entry in zip(panels, timelines, strict=True):
        kinds = kinds_of(entry, shape, getattr(torch, environment["dtype"]).itemsize)
        for kind, area in _draw_panel(axes, entry, kinds, colors, top).items():
            areas.setdefault(kind, area)
    panels[0].set(ylabel="MiB above the inputs", xlim=(0, max(entry["end_ms"] for entry in timelines)))
    figure.suptitle(f"{shape}, {environment['dtype']}, {environment['device']}")
    present = [kind for kind in colors if kind in areas]
    figure.legend([areas[kind] for kind in present], present, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(picture, dpi=130)


def _draw_panel(
    axes: Any, entry: dict[str, Any], kinds: Sequence[str], colors: dict[str, str], top: float
) -> dict[str, Any]:
    """Fill one panel; returns the area of each kind that is in it."""
    times, heights = stack(entry, kinds)
    areas, floor = {}, [0.0] * len(times)
    for kind, color in colors.items():
        if max(heights[kind]) < 0.002 * top:
            continue
        upper = [low + height for low, height in zip(floor, heights[kind], strict=True)]
        areas[kind] = axes.fill_between(times, floor, upper, step="post", color=color, linewidth=0)
        floor = upper
    middle, end = entry["backward_ms"], entry["end_ms"]
    axes.axvline(middle, color="0.25", linewidth=0.9, linestyle=":")
    for start, stop, word in ((0, middle, "forward"), (middle, end, "backward")):
        if stop - start > 0.15 * end:
            axes.text((start + stop) / 2, 1.1 * top, word, ha="center", va="top", color="0.35", fontsize=9)
    axes.axvline(end, color="0.25", linewidth=0.9, linestyle=":")
    axes.axhline(entry["peak_mib"], color="0.25", linewidth=0.8, linestyle="--")
    axes.set_title(f"{entry['name']}\npeak {_mib(entry['peak_mib'])} MiB", fontsize=11)
    axes.set(xlabel="ms", ylim=(0, 1.12 * top))
    axes.spines[["top", "right"]].set_visible(False)
    return areas


def _mib(size: float) -> str:
    """Small peaks differ behind the point."""
    return f"{size:,.0f}" if size >= 100 else f"{size:.2f}"


def stack(entry: dict[str, Any], kinds: Sequence[str]) -> tuple[list[float], dict[str, list[float]]]:
    """Moments at which something changes, and MiB of each kind from each moment on."""
    changes = []
    for block, kind in zip(entry["blocks"], kinds, strict=True):
        changes.append((block["start_ms"], kind, block["bytes"] / 2**20))
        if block["stop_ms"] is not None:
            changes.append((block["stop_ms"], kind, -block["bytes"] / 2**20))
    times, live = [0.0], dict.fromkeys(KINDS, 0.0)
    heights = {kind: [0.0] for kind in KINDS}
    for time, kind, change in sorted(changes):
        live[kind] += change
        if time > times[-1]:
            times.append(time)
            for column in heights.values():
                column.append(column[-1])
        heights[kind][-1] = live[kind]
    for column in heights.values():
        column.append(column[-1])
    return [*times, entry["end_ms"]], heights
