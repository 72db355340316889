"""What a comparison says: the table, who beats whom, JSON, and time over memory as a picture."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from loongforge.bench.contenders import PEERS
from loongforge.bench.measure import Result
from loongforge.bench.records import record_of, write_whole
from loongforge.bench.shapes import HeadShape, parse_shape
from loongforge.errors import UsageError, require_folder


def table(shape: HeadShape, results: Sequence[Result]) -> str:
    """One line per contender, in the order they ran; the floor in the heading is the median of theirs."""
    floor = median_floor_ms(results)
    tflops = 6e-9 * shape.tokens * shape.hidden * shape.vocab / floor
    lines = [
        f"{shape.name}: {shape}, three-GEMM floor {floor:.2f} ms = {tflops:.1f} TFLOP/s",
        f"{'':26} {'loss':5} {'fwd+bwd ms':>10} {'x floor':>8} {'fwd ms':>8} {'x GEMM':>7} {'peak MiB':>9}"
        f" {'err loss':>9} {'err dX':>8} {'err dW':>8}",
    ]
    for result in results:
        name = f"{result.name:26} {'token' if result.per_token else 'mean':5}"
        if result.status != "ok":
            lines.append(f"{name} {result.status}")
            continue
        peak = "-" if math.isnan(result.peak_mib) else f"{result.peak_mib:.0f}"
        errors = result.errors
        lines.append(
            f"{name} {result.step_ms:10.2f} {result.ratio:8.3f} {result.forward_ms:8.2f} {result.forward_ratio:7.3f}"
            f" {peak:>9} {errors['loss']:9.1e} {errors['grad_hidden']:8.1e} {errors['grad_weight']:8.1e}"
        )
    return "\n".join(lines)


def median_floor_ms(results: Sequence[Result]) -> float:
    """Of the floors measured in front of each contender; NaN where nobody was measured."""
    floors = [result.floor_ms for result in results if not math.isnan(result.floor_ms)]
    return statistics.median(floors) if floors else math.nan


def duels(results: Sequence[Result]) -> list[str]:
    """For each peer: the smallest budget of ours at or below it in memory, time and gradient error, or the distance.

    Time is that over the floor right in front, which the state of the GPU matters least to.  Means are compared with
    means and losses per token with losses per token: their upstream gradients differ.
    """
    measured = [result for result in results if result.status == "ok" and not math.isnan(result.peak_mib)]
    lines = []
    for peer in (result for result in measured if not result.is_ours):
        mine = [result for result in measured if result.is_ours and result.per_token == peer.per_token]
        if not mine:
            continue
        better = [
            result
            for result in mine
            if result.peak_mib <= peer.peak_mib + 1
            and result.ratio <= peer.ratio
            and result.gradient_error <= 1.05 * peer.gradient_error  # equal in the two digits that are shown
        ]
        if better:
            best = min(better, key=lambda result: result.peak_mib)
            lines.append(f"{peer.name}: beaten by {best.name} ({_distance(best, peer)})")
        else:
            near = min(mine, key=lambda result: _excess(result, peer))
            lines.append(f"{peer.name}: not beaten; nearest {near.name} ({_distance(near, peer)})")
    return lines


def _excess(result: Result, peer: Result) -> float:
    """By which factor we are worse in the worst of time and memory."""
    return max(result.peak_mib / max(peer.peak_mib, 1e-9), result.ratio / peer.ratio)


def _distance(result: Result, peer: Result) -> str:
    return (
        f"time {result.ratio / peer.ratio - 1:+.1%}, memory {result.peak_mib - peer.peak_mib:+.0f} MiB, "
        f"gradient error {result.gradient_error:.1e} against {peer.gradient_error:.1e}"
    )


def write_json(path: Path, environment: dict[str, Any], results: Sequence[Any]) -> None:
    """Everything measured (dataclasses with a ratio), with the device, versions and command of the measurement."""
    lines = [
        {key: None if value != value else value for key, value in (vars(result) | {"ratio": result.ratio}).items()}
        for result in results
    ]
    write_record(path, {"environment": environment, "results": lines})


def write_record(path: Path, record: dict[str, Any]) -> None:
    """JSON in the place of an earlier one."""
    write_whole(path, json.dumps(record, indent=1) + "\n")


def write_markdown(path: Path, text: str) -> None:
    """The printed table beside the record at ``path``."""
    path.with_suffix(".md").write_text(text + "\n", encoding="utf-8")


def redraw_markdown(path: Path, report: Callable[[dict[str, Any]], str]) -> None:
    """Print the table of an earlier record and write it beside it again."""
    with record_of(path, f"{path} holds no results of this script") as record:
        text = report(record)
    require_folder(path.parent)
    write_markdown(path, text)
    print(text)


def draw(path: Path, shape: HeadShape, results: Sequence[Result], device_name: str) -> None:
    """Time, over that of the floor, over memory: each peer a point, ours a curve over the budget.

    Raises:
        UsageError: without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, ScalarFormatter
    except ImportError as error:
        raise UsageError("the picture needs matplotlib: pip install 'loongforge[plot]'") from error

    figure = Figure(figsize=(9.5, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    measured = [result for result in results if result.status == "ok" and not math.isnan(result.peak_mib)]
    for per_token, marker, label in ((True, "o-", "loongforge, loss per token"), (False, "s--", "loongforge, mean")):
        curve = [result for result in measured if result.is_ours and result.per_token == per_token]
        curve.sort(key=lambda result: math.inf if result.budget_mb == "all" else float(result.budget_mb or 0))
        if curve:
            axes.plot([r.peak_mib for r in curve], [r.ratio for r in curve], marker, label=label, zorder=3)
    styles = {peer.name: number for number, peer in enumerate(PEERS)}  # the same in every picture
    for result in measured:
        if not result.is_ours:
            number = styles.get(result.name, len(styles))
            marker, color = "XPD^v<>*hd"[number % 10], f"C{2 + number % 8}"
            axes.plot(result.peak_mib, result.ratio, marker, color=color, markersize=8, label=result.name)
    axes.axhline(1.0, color="0.6", linewidth=1, label="three GEMMs")
    axes.set(xlabel="peak memory above the inputs, MiB", xscale="log", yscale="log")
    axes.set_ylabel("forward + backward, time / three GEMMs")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(ScalarFormatter())
        axis.set_minor_formatter(ScalarFormatter())
        axis.set_tick_params(which="both", labelsize=9)
    axes.xaxis.set_minor_locator(LogLocator(subs=(2, 3, 5)))  # all nine do not fit side by side
    axes.grid(which="both", linewidth=0.3)
    axes.set_title(f"{shape.name}: {shape} on {device_name}")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)
    figure.savefig(path, dpi=130)


def heading(environment: dict[str, Any]) -> str:
    """What everything was measured with, in two lines."""
    facts = {key: value for key, value in environment.items() if key != "versions"}
    return f"{_listed(facts)}\n{_listed(environment['versions'])}"


def _listed(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in facts.items())


def tables(by_shape: dict[str, list[Result]]) -> str:
    """Table and duels of every shape."""
    return "\n\n".join(
        "\n".join([table(parse_shape(name), results), *duels(results)]) for name, results in by_shape.items()
    )


def write(folder: Path, environment: dict[str, Any], by_shape: dict[str, list[Result]]) -> None:
    """``results.json`` and ``table.txt``."""
    write_json(folder / "results.json", environment, [result for results in by_shape.values() for result in results])
    write_text(folder, environment, tables(by_shape))


def write_text(folder: Path, environment: dict[str, Any], text: str) -> None:
    """``table.txt``."""
    (folder / "table.txt").write_text(f"{heading(environment)}\n\n{text}\n", encoding="utf-8")


def redraw(path: Path) -> None:
    """Draw the pictures of a ``results.json`` again and write its ``table.txt``, beside it."""
    by_shape: dict[str, list[Result]] = {}
    with record_of(path, f"{path} is not a results.json of the comparison") as recorded:
        environment, device = recorded["environment"], recorded["environment"]["device"]
        for line in recorded["results"]:
            values: dict[str, Any] = {
                key: math.nan if value is None and key.endswith(("_ms", "_mib")) else value
                for key, value in line.items()
            }
            values.pop("ratio")
            by_shape.setdefault(line["shape"], []).append(Result(**values))
        if not by_shape:
            raise ValueError("no results in it")
        text = tables(by_shape)
        require_folder(path.parent)
        write_text(path.parent, environment, text)
        for name, results in by_shape.items():
            draw(path.with_name(f"{name}.png"), parse_shape(name), results, device)
