"""The comparison: every contender on every shape asked for, checked before it is timed.

Peers come from the environment; one that is not installed has a line saying so.  The table is printed last, after
progress lines; JSON and one picture per shape go to the output folder.
"""

from __future__ import annotations

import argparse
import datetime
import math
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from loongforge.bench.contenders import PEERS, Contender, ours, versions
from loongforge.bench.measure import SHAPES, HeadShape, Result, floor_ms, make_problem, measure, release
from loongforge.bench.report import draw, duels, redraw, table, write_json

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BUDGET_SHARES = (0.0, 0.125, 0.25, 0.5, 0.75)
"""Default points of our curve, as shares of one copy of the logits; all of them is always the last."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "shapes", nargs="*", default=["llama3-8b"], metavar="SHAPE", help=f"{', '.join(SHAPES)}, or TOKENSxHIDDENxVOCAB"
    )
    parser.add_argument("--only", default="", help="comma-separated beginnings of contenders' names; default: everyone")
    parser.add_argument("--skip", default="", help="likewise, contenders to leave out")
    parser.add_argument("--budgets", default="", help="comma-separated MiB of kept logits, or all; default: a curve")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repetitions", type=int, default=9, help="timed steps, of which the median counts")
    parser.add_argument("--output-dir", type=Path, help="folder for results.json and SHAPE.png; default: print only")
    parser.add_argument("--redraw", type=Path, metavar="RESULTS_JSON", help="only draw the pictures of earlier results")


def run(options: argparse.Namespace) -> list[Result]:
    """Measure, print, write; returns every line."""
    if options.redraw:
        redraw(options.redraw, SHAPES)
        return []
    shapes = [parse_shape(text) for text in options.shapes]
    device, dtype = torch.device(options.device), DTYPES[options.dtype]
    environment = describe(device, dtype)
    print(", ".join(f"{key} {value}" for key, value in environment.items() if key != "versions"))
    print(", ".join(f"{name} {version}" for name, version in environment["versions"].items()), flush=True)
    everything: list[Result] = []
    tables = []
    for shape in shapes:
        budgets = parse_budgets(options.budgets) if options.budgets else default_budgets(shape, dtype)
        contenders = select([*PEERS, *ours(budgets)], options.only, options.skip)
        results, text = compare(shape, contenders, device, dtype, options.repetitions)
        everything += results
        tables.append(text)
        if options.output_dir:
            options.output_dir.mkdir(parents=True, exist_ok=True)
            write_json(options.output_dir / "results.json", environment, everything)
            if not all(math.isnan(result.peak_mib) for result in results):
                draw(options.output_dir / f"{shape.name}.png", shape, results, environment["device"])
    print("\n" + "\n\n".join(tables))
    return everything


def compare(
    shape: HeadShape, contenders: Sequence[Contender], device: torch.device, dtype: torch.dtype, repetitions: int
) -> tuple[list[Result], str]:
    """All contenders on one shape; returns their lines and the text of the table."""
    problem = make_problem(shape, device, dtype)
    release(device)
    floor = floor_ms(problem, repetitions)
    results = []
    for contender in contenders:
        result = measure(contender, shape, problem, floor, repetitions)
        results.append(result)
        outcome = f"{result.step_ms:.2f} ms" if result.status == "ok" else result.status
        print(f"  {shape.name} {result.name}: {outcome}", file=sys.stderr, flush=True)
    return results, "\n".join([table(shape, results, floor), *duels(results)])


def select(contenders: Sequence[Contender], only: str, skip: str) -> list[Contender]:
    """Those whose name begins with one of ``only`` (default: any) and with none of ``skip``."""

    def begins(name: str, prefixes: str) -> bool:
        return any(name.startswith(prefix.strip()) for prefix in prefixes.split(",") if prefix.strip())

    chosen = [one for one in contenders if (not only or begins(one.name, only)) and not begins(one.name, skip)]
    if not chosen:
        names = ", ".join(one.name for one in contenders)
        raise ValueError(f"--only {only!r} --skip {skip!r} leaves nobody to measure among {names}")
    return chosen


def parse_shape(text: str) -> HeadShape:
    if text in SHAPES:
        return SHAPES[text]
    sizes = text.split("x")
    if len(sizes) == 3 and all(size.isdecimal() and int(size) > 0 for size in sizes):
        return HeadShape(text, *map(int, sizes))
    known = ", ".join(SHAPES)
    raise ValueError(f"a shape is one of {known} or TOKENSxHIDDENxVOCAB such as 4096x2048x32000, got {text!r}")


def parse_budgets(text: str) -> list[int | str]:
    budgets: list[int | str] = []
    for item in text.split(","):
        item = item.strip()
        if item != "all" and not item.isdecimal():
            raise ValueError(f"--budgets takes whole numbers of MiB or all, separated by commas, got {item!r}")
        budgets.append("all" if item == "all" else int(item))
    return budgets


def default_budgets(shape: HeadShape, dtype: torch.dtype) -> list[int | str]:
    """Our curve: ``BUDGET_SHARES`` of one copy of the logits, then all of them."""
    logits_mib = shape.tokens * shape.vocab * dtype.itemsize / 2**20
    budgets = dict.fromkeys(int(share * logits_mib) for share in BUDGET_SHARES)
    return [*budgets, "all"]


def describe(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """What a reader needs to repeat the numbers."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    return {
        "device": name,
        "dtype": str(dtype).removeprefix("torch."),
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", *sys.argv]),
        "versions": versions(),
    }
