"""The comparison: every contender on every shape asked for, checked before it is timed.

Peers come from the environment; one that is not installed has a line saying so.  The table is printed last, after
progress lines; JSON and one picture per shape go to the output folder.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from loongforge.bench.contenders import PEERS, Contender, ours, versions
from loongforge.bench.measure import Result, make_problem, measure, release
from loongforge.bench.progress import Progress
from loongforge.bench.report import draw, heading, redraw, tables, write
from loongforge.bench.shapes import SHAPES, HeadShape, add_size_flags, positive, shapes_of
from loongforge.errors import UsageError, require_folder

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BUDGET_SHARES = (0.0, 0.125, 0.25, 0.5, 0.75)
"""Default points of our curve, as shares of one copy of the logits; all of them is always the last."""


DEFAULT_SHAPE = "llama3-8b"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The only list of the flags of ``loongforge bench`` and ``scripts/benchmark.py``."""
    known = ", ".join(SHAPES)
    parser.add_argument(
        "shapes", nargs="*", metavar="SHAPE", help=f"{known}, or TOKENSxHIDDENxVOCAB; default: {DEFAULT_SHAPE}"
    )
    add_size_flags(parser)
    parser.add_argument("--only", default="", help="comma-separated beginnings of contenders' names; default: everyone")
    parser.add_argument("--skip", default="", help="likewise, contenders to leave out")
    parser.add_argument("--budgets", default="", help="comma-separated MiB of kept logits, or all; default: a curve")
    add_measurement_flags(parser)
    parser.add_argument("--output-dir", type=Path, help="for results.json, table.txt and SHAPE.png; default: print")
    parser.add_argument(
        "--redraw",
        type=Path,
        metavar="RESULTS_JSON",
        help="only draw and tabulate earlier results",
    )


def add_measurement_flags(parser: argparse.ArgumentParser, repetitions: int = 9) -> None:
    """``--dtype``, ``--device`` and ``--repetitions``."""
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--device", help="default: the GPU if there is one, else cpu")
    parser.add_argument(
        "--repetitions", type=positive, default=repetitions, help="timed steps, of which the median counts"
    )


def run(options: argparse.Namespace) -> list[Result]:
    """Measure, print, write; returns every line."""
    if options.redraw:
        redraw(options.redraw)
        return []
    shapes = shapes_of(options, DEFAULT_SHAPE)
    device, dtype = device_of(options.device), DTYPES[options.dtype]
    work = []
    for shape in shapes:
        budgets = parse_budgets(options.budgets) if options.budgets else default_budgets(shape, dtype)
        work.append((shape, select([*PEERS, *ours(budgets)], options.only, options.skip)))
    require_folder(options.output_dir)
    environment = describe(device, dtype)
    print(heading(environment), flush=True)
    measured: dict[str, list[Result]] = {}
    progress = Progress(sum(len(contenders) for _, contenders in work))
    for shape, contenders in work:
        measured[shape.name] = compare(shape, contenders, device, dtype, options.repetitions, progress)
        if options.output_dir:
            write(options.output_dir, environment, measured)
            _draw(options.output_dir / f"{shape.name}.png", shape, measured[shape.name], environment["device"])
    print("\n" + tables(measured))
    return [result for results in measured.values() for result in results]


def _draw(path: Path, shape: HeadShape, results: Sequence[Result], device_name: str) -> None:
    """The measurement must not end because the picture cannot be drawn here."""
    if importlib.util.find_spec("matplotlib") is None:
        json_file = path.with_name("results.json")
        print(f"{path.name}: no matplotlib (pip install 'loongforge[plot]'); --redraw {json_file} draws it later")
    else:
        draw(path, shape, results, device_name)


def compare(
    shape: HeadShape,
    contenders: Sequence[Contender],
    device: torch.device,
    dtype: torch.dtype,
    repetitions: int,
    progress: Progress,
) -> list[Result]:
    """All contenders on one shape."""
    problem = make_problem(shape, device, dtype)
    release(device)
    results = []
    for contender in contenders:
        with progress.step(f"{shape.name} {contender.name}") as step:
            result = measure(contender, shape, problem, repetitions)
            step.outcome = f"{result.step_ms:.2f} ms" if result.status == "ok" else result.status
        results.append(result)
    return results


def select(contenders: Sequence[Contender], only: str, skip: str) -> list[Contender]:
    """Those whose name begins with one of ``only`` (default: any) and with none of ``skip``."""

    def begins(name: str, prefixes: str) -> bool:
        return any(name.startswith(prefix.strip()) for prefix in prefixes.split(",") if prefix.strip())

    chosen = [one for one in contenders if (not only or begins(one.name, only)) and not begins(one.name, skip)]
    if not chosen:
        names = ", ".join(one.name for one in contenders)
        raise UsageError(f"--only {only!r} --skip {skip!r} leaves nobody to measure among {names}")
    return chosen


def device_of(text: str | None) -> torch.device:
    """The device asked for, by default the GPU if there is one; :class:`UsageError` where it is not there."""
    if text is None:
        text = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise UsageError(f"--device {text!r} is no device: cpu, cuda or cuda:1 are") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device must be cpu or cuda, got {text!r}")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise UsageError(f"--device {text!r} is not there: torch {torch.__version__} sees {count} GPUs")
    return device


def parse_budgets(text: str) -> list[int | str]:
    budgets: list[int | str] = []
    for item in text.split(","):
        item = item.strip()
        if item != "all" and not item.isdecimal():
            raise UsageError(f"--budgets takes whole numbers of MiB or all, separated by commas, got {item!r}")
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
        "command": _command(),
        "versions": versions(),
    }


def _command() -> str:
    program, *arguments = sys.argv
    name = Path(program).name
    words = ["loongforge"] if name in ("loongforge", "cli.py", "__main__.py") else ["python", program]
    return shlex.join([*words, *arguments])
