"""Everything about Megatron that needs a GPU, in one call that keeps to a time limit.

    python scripts/megatron_on_gpu.py --output-dir runs/megatron --time-limit 570

    compare    fused against unfused: local and Transformer Engine layers, FP8, CUDA graphs (compare_megatron.py)
    tests      the tests of the memory plan that need a GPU
    training   a GPT on real text, three seeds, fused and unfused (compare_training.py)

A stage gets what the limit leaves over when the stages after it have had what they need.  Written after each stage:
``summary.md``; a table, a JSON and an archive of logs for either comparison, in folders of their own.
Exit status 1 where a stage failed or had no time.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from side_by_side import Ended, Job, run_together, stop_on_sigterm, write_whole

SCRIPTS = Path(__file__).resolve().parent
ENDING = 15
"""Seconds that a stage has to write down its results after its own limit."""
COMPARE = ("--fp8-recipes", "delayed", "blockwise", "--graph")
TESTS = (str(SCRIPTS.parent / "tests" / "planning" / "test_plan.py"), "-k", "this_gpu")


@dataclass(frozen=True)
class Stage:
    """One command; ``seconds`` is what the stages before leave for it."""

    name: str
    command: tuple[str, ...]
    seconds: int
    knows_limit: bool = True


def stages(arguments: argparse.Namespace) -> list[Stage]:
    """Those that were asked for, in order."""

    def script(name: str, folder: str) -> tuple[str, ...]:
        return (sys.executable, "-W", "ignore", str(SCRIPTS / name), "--output-dir", str(arguments.output_dir / folder))

    known = (
        Stage("compare", (*script("compare_megatron.py", "compare"), *COMPARE, *arguments.compare), 300),
        Stage("tests", (sys.executable, "-m", "pytest", "-q", "-rs", "-o", "addopts=", *TESTS), 60, knows_limit=False),
        Stage("training", (*script("compare_training.py", "training"), "--jobs", "6", *arguments.training), 190),
    )
    return [stage for stage in known if stage.name in arguments.stages]


def run(stage: Stage, limit: float, logs: Path, ended: Callable[[Ended], None]) -> None:
    """Run one stage for at most ``limit`` seconds."""
    command = limited(stage.command, int(limit - ENDING)) if stage.knows_limit else stage.command
    job = Job(stage.name, command, logs / f"{stage.name}.log", {**os.environ, "PYTHONUNBUFFERED": "1"})
    run_together([job], time.monotonic() + limit, ended, patience=ENDING)


def limited(command: tuple[str, ...], seconds: int) -> tuple[str, ...]:
    """The command with a time limit, before what follows ``--``, which is Megatron's."""
    cut = command.index("--") if "--" in command else len(command)
    return (*command[:cut], "--time-limit", str(seconds), *command[cut:])


def summary(results: list[tuple[Stage, Ended | None]]) -> str:
    """Markdown: how every stage ended, its command and the end of its output."""
    parts = []
    for stage, ended in results:
        if ended is None:
            parts.append(f"## {stage.name}: not run, the time limit left too little\n")
            continue
        outcome = "stopped at the time limit" if ended.status is None else f"exit status {ended.status}"
        tail = "\n".join(ended.text.splitlines()[-60:])
        command = shlex.join(stage.command)
        parts.append(f"## {stage.name}: {outcome}, {ended.seconds:.0f} s\n\n    {command}\n\n```text\n{tail}\n```\n")
    return "\n".join(parts)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    names = ("compare", "tests", "training")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--time-limit", type=int, default=570, help="seconds for everything (default 570)")
    parser.add_argument("--stages", nargs="+", default=names, choices=names, help="(default all)")
    parser.add_argument("--compare", type=str.split, default=[], help="further flags of compare_megatron.py, in quotes")
    parser.add_argument(
        "--training", type=str.split, default=[], help="further flags of compare_training.py, in quotes"
    )
    return parser.parse_args(argv)


def main() -> int:
    """All stages in turn."""
    deadline = time.monotonic() + (arguments := parse()).time_limit
    stop_on_sigterm()
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    todo = stages(arguments)
    results: list[tuple[Stage, Ended | None]] = []

    def note(stage: Stage, ended: Ended | None) -> None:
        results.append((stage, ended))
        print(f"{stage.name}: {'no time' if ended is None else ended.status}", flush=True)
        write_whole(arguments.output_dir / "summary.md", summary(results))

    with tempfile.TemporaryDirectory() as logs:
        for number, stage in enumerate(todo):
            left = deadline - time.monotonic()
            limit = max(left - sum(later.seconds for later in todo[number + 1 :]), min(left, stage.seconds)) - ENDING
            if limit > 2 * ENDING:
                run(stage, limit, Path(logs), partial(note, stage))
            else:
                note(stage, None)
        print(summary(results))
    return 0 if all(ended is not None and ended.status == 0 for _, ended in results) else 1


if __name__ == "__main__":
    sys.exit(main())
