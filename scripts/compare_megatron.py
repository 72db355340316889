"""Train the same GPT with Megatron's own ``pretrain()`` unfused, natively fused and with loongforge, and compare.

    python scripts/compare_megatron.py --output-dir runs/compare --time-limit 540

Each row is one process: loss and gradient norm of every step, the peak of allocated memory, and tokens per second.
``native`` and ``unfused, half micro-batches`` (the same sums in two halves) say how far apart Megatron's own runs get
that differ in rounding only.  As many rows as fit into the device's memory start together and train together; the last
--timed-steps of each run while the others wait, and only they count for tokens per second.  A row that runs out of
memory beside others runs again alone.  Written after every row: ``compare.json`` and the table, ``compare.md``; the
logs are in ``logs.tar.gz``.  Rows whose requirements are missing say so, and so do those that --time-limit left no time
for.  Exit status 1 where a row failed or a loss is further from the unfused one than --tolerance.

--redraw makes the table of an earlier ``compare.json`` again; --add-to runs only the rows that one lacks, and those
that --rows names.

Flags after ``--`` go to Megatron, such as ``-- --recompute-granularity selective --mtp-num-layers 1``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from megatron_table import NOT_RUN, Outcome, read_log, table, wrong_rows
from side_by_side import Ended, Job, pack, results_of, run_together, stop_on_sigterm, versions, write_whole

ROOT = Path(__file__).resolve().parents[1]
NATIVE = ("--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "native")
LINEAR = ("--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "linear")
KEEP_ALL = (*LINEAR, "--lce-logits-budget-mb", "all")
HALF = "unfused, half micro-batches"
LOSSES = {"unfused": (), HALF: (), "native": NATIVE, "linear": LINEAR, "linear, all kept": KEEP_ALL}
LOCAL = ("--transformer-impl", "local", "--no-persist-layer-norm", "--no-rope-fusion")
TRANSFORMER_ENGINE = ("--transformer-impl", "transformer_engine")
GRAPH = (*TRANSFORMER_ENGINE, "--cuda-graph-impl", "full_iteration", "--no-check-for-nan-in-loss-and-grad")
FP8_RECIPES = {"delayed": (8, 9), "tensorwise": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0)}
"""Recipe of Transformer Engine -> compute capability that it needs."""
SETTINGS = (
    "num_layers", "hidden_size", "seq_length", "vocab_size", "micro_batch_size", "global_batch_size", "train_iters",
    "fp8_format", "megatron",
)  # fmt: skip
LEAST = 10.0
"""Seconds without which no row is started."""


@dataclass(frozen=True)
class Row:
    """One run: which layers and loss."""

    layers: str
    loss: str
    flags: tuple[str, ...]
    missing: str = ""
    """Why it cannot run here."""

    @property
    def name(self) -> str:
        """As in the table."""
        return f"{self.layers}, {self.loss}"

    @property
    def base(self) -> str:
        """Row that it is compared with."""
        return f"{self.layers}, unfused"


# ---------------------------------------------------------------- what to run


def rows(arguments: argparse.Namespace) -> list[Row]:
    """Every combination that was asked for; unfused first, for the others are compared with it."""
    wanted = arguments.rows or list(LOSSES)
    chosen = {name: flags for name, flags in LOSSES.items() if name in wanted or name == "unfused"}
    if HALF in chosen:
        chosen[HALF] = ("--micro-batch-size", str(arguments.micro_batch_size // 2))
    in_fp8 = {name: flags for name, flags in chosen.items() if name in ("unfused", HALF, "linear")}
    in_graph = {name: flags for name, flags in chosen.items() if name in ("unfused", "linear", "linear, all kept")}
    missing_te = "" if find_spec("transformer_engine") else f"{NOT_RUN}transformer-engine absent"
    made = []
    if "local" in arguments.specs:
        made += _rows("local", LOCAL, chosen)
    if "te" in arguments.specs:
        made += _rows("te", TRANSFORMER_ENGINE, chosen, missing_te)
    for recipe in arguments.fp8_recipes:
        flags = (*TRANSFORMER_ENGINE, "--fp8-format", arguments.fp8_format, "--fp8-recipe", recipe)
        if recipe == "delayed":
            flags += ("--fp8-amax-history-len", "16", "--fp8-amax-compute-algo", "max")
        made += _rows(f"te {recipe} fp8", flags, in_fp8, missing_te or _missing_capability(recipe))
    if arguments.graph:
        made += _rows("te graph", GRAPH, in_graph, missing_te or ("" if _on_gpu() else f"{NOT_RUN}needs a GPU"))
    return made


def _rows(layers: str, flags: tuple[str, ...], losses: dict[str, tuple[str, ...]], missing: str = "") -> list[Row]:
    return [Row(layers, name, (*flags, *loss), missing) for name, loss in losses.items()]


def _missing_capability(recipe: str) -> str:
    import torch

    have = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    need = FP8_RECIPES[recipe]
    return "" if have >= need else f"{NOT_RUN}needs compute capability {need[0]}.{need[1]}, this is {have[0]}.{have[1]}"


def megatron_flags(arguments: argparse.Namespace) -> list[str]:
    """The model and the training, the same for every row."""
    on_gpu = _on_gpu()
    settings = {
        "num-layers": arguments.num_layers,
        "hidden-size": arguments.hidden_size,
        "ffn-hidden-size": arguments.hidden_size * 11 // 4,
        "num-attention-heads": max(1, arguments.hidden_size // 128),
        "seq-length": arguments.seq_length,
        "max-position-embeddings": arguments.seq_length,
        "micro-batch-size": arguments.micro_batch_size,
        "global-batch-size": arguments.global_batch_size or arguments.micro_batch_size,
        "train-iters": arguments.train_iters,
        "vocab-size": arguments.vocab_size,
        "tokenizer-type": "NullTokenizer",
        "position-embedding-type": "rope",
        "normalization": "RMSNorm",
        "lr": 3e-4,
        "min-lr": 3e-5,
        "lr-warmup-iters": min(5, arguments.train_iters // 4),
        "lr-decay-style": "cosine",
        "attention-dropout": 0,
        "hidden-dropout": 0,
        "log-interval": 1,
        "eval-iters": 0,
        "eval-interval": 1000,
        "num-workers": 2 if on_gpu else 0,
        "distributed-backend": "nccl" if on_gpu else "gloo",
    }
    flags = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    flags += ["--bf16", "--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights"]
    flags += ["--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion"]
    flags.append("--disable-jit-fuser")  # torch.compile: every row would spend its first step building the same code
    if not on_gpu:
        flags.append("--use-cpu-initialization")
    return flags + arguments.megatron


def rows_at_a_time(arguments: argparse.Namespace) -> int:
    """--jobs, or what the device's free memory holds by a generous estimate of an unfused bf16 row."""
    if arguments.jobs or not _on_gpu():
        return arguments.jobs or 1
    import torch

    hidden, layers, vocabulary = arguments.hidden_size, arguments.num_layers, arguments.vocab_size
    tokens = arguments.seq_length * arguments.micro_batch_size
    parameters = 2 * vocabulary * hidden + layers * 13 * hidden * hidden
    need = 18 * parameters + tokens * (12 * vocabulary + 40 * layers * hidden) + (3 << 30)
    if "local" in arguments.specs:  # whose attention keeps its scores, hidden / 128 heads of them
        need += tokens * arguments.seq_length * layers * hidden // 128 * 8
    free, _ = torch.cuda.mem_get_info()
    return max(1, min(free // need, (os.cpu_count() or 1) // 2))


# ---------------------------------------------------------------- results on disk


def measured_settings(arguments: argparse.Namespace) -> dict:
    """What the numbers depend on: sizes, and versions of what ran."""
    settings = {name: getattr(arguments, name) for name in SETTINGS}
    return {**settings, "versions": versions("triton", "megatron-core", "transformer-engine")}


def earlier(path: Path, settings: dict) -> dict[str, Outcome]:
    """Rows of an earlier ``compare.json`` that ended well; refused where it was measured otherwise."""
    with results_of(path) as content:
        for name, value in settings.items():
            before = content["settings"][name]
            if before != value:
                raise SystemExit(f"--add-to {path}: its rows were measured with {name} {before}, this run has {value}")
        rows = {row["name"]: Outcome(**row) for row in content["rows"] if row["losses"] and not row["error"]}
        table(list(rows.values()), settings)
        return in_order(rows)


def in_order(outcomes: dict[str, Outcome]) -> dict[str, Outcome]:
    """Rows of the same layers beside each other, their losses in the order of ``LOSSES``."""
    bases, losses = list({outcome.base: None for outcome in outcomes.values()}), list(LOSSES)

    def place(outcome: Outcome) -> tuple[int, int]:
        return bases.index(outcome.base), losses.index(outcome.name.partition(", ")[2])

    return {outcome.name: outcome for outcome in sorted(outcomes.values(), key=place)}


def as_json(content: dict) -> str:
    """Indented, with each list of numbers on one line."""
    text = json.dumps(content, indent=1)
    return re.sub(r"\[[^][{}\"]*\]", lambda found: " ".join(found.group().split()), text) + "\n"


# ---------------------------------------------------------------- running it


class Comparison:
    """Runs the rows and keeps the results written."""

    def __init__(self, arguments: argparse.Namespace, logs: Path) -> None:
        self.arguments, self.logs = arguments, logs
        self.deadline = time.monotonic() + arguments.time_limit
        self.settings = measured_settings(arguments)
        self.outcomes = earlier(arguments.add_to, self.settings) if arguments.add_to else {}
        self.rows = [
            row for row in rows(arguments) if row.name not in self.outcomes or row.loss in (arguments.rows or ())
        ]
        self.outcomes |= {row.name: Outcome(row.name, row.base, error=row.missing) for row in self.rows}
        self.outcomes = in_order(self.outcomes)
        self.longest = 0.0
        """Seconds of the longest wave so far: the next one will hardly take less."""

    def run(self) -> None:
        """All rows, as many at a time as fit, and once more alone those that ran out of memory beside others."""
        at_a_time = rows_at_a_time(self.arguments)
        print(f"up to {at_a_time} rows at a time", flush=True)
        todo = [row for row in self.rows if not row.missing]
        for number in range(0, len(todo), at_a_time):
            self.wave(todo[number : number + at_a_time])
        if at_a_time > 1:
            for row in todo:
                if "out of memory" in self.outcomes[row.name].error.lower():
                    self.wave([row])
        self.write()

    def wave(self, together: list[Row]) -> None:
        """Rows that run beside each other; none of them where the time left is too short for it."""
        left = self.deadline - time.monotonic()
        if left < max(LEAST, self.longest / 2):
            for row in together:
                outcome = self.outcomes[row.name]
                outcome.error = outcome.error or f"{NOT_RUN}--time-limit {self.arguments.time_limit} left {left:.0f} s"
            return
        started = time.monotonic()
        jobs = {self.job(row): row for row in together}
        until = min(self.deadline, started + self.arguments.timeout)
        run_together(list(jobs), until, lambda ended: self.ended(jobs[ended.job], ended))
        self.longest = max(self.longest, time.monotonic() - started)

    def job(self, row: Row) -> Job:
        """The process of one row."""
        paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
        single = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        environment = {
            **os.environ, **single, "MASTER_PORT": str(_free_port()), "PYTHONPATH": os.pathsep.join(paths),
            "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONUNBUFFERED": "1",  # a stopped row keeps its log
        }  # fmt: skip
        if self.arguments.timed_steps:
            environment["TIMED_STEPS"] = str(self.arguments.timed_steps)
        command = [sys.executable, "-W", "ignore", "-m", "loongforge.megatron.launch", self.arguments.script]
        log = self.logs / f"{re.sub('[^a-z0-9]+', '_', row.name)}.log"
        return Job(row.name, [*command, *megatron_flags(self.arguments), *row.flags], log, environment)

    def ended(self, row: Row, ended: Ended) -> None:
        """Read what one row printed and write all results down."""
        outcome = self.outcomes[row.name] = judge(row, ended, self.arguments.train_iters)
        print(f"{row.name}: {outcome.error or 'done'}, {outcome.seconds:.0f} s", flush=True)
        self.write()

    def write(self) -> None:
        """JSON, table and logs as they stand."""
        folder, outcomes = self.arguments.output_dir, list(self.outcomes.values())
        content = {"settings": self.settings, "rows": [asdict(outcome) for outcome in outcomes]}
        write_whole(folder / "compare.json", as_json(content))
        write_whole(folder / "compare.md", table(outcomes, self.settings))
        pack(self.logs, folder / "logs.tar.gz")


def judge(row: Row, ended: Ended, train_iters: int) -> Outcome:
    """What one run printed, and whether it did what it was to do."""
    outcome = Outcome(row.name, row.base, seconds=ended.seconds)
    read_log(ended.text, outcome)
    if ended.status is None:
        outcome.error = f"stopped at the time limit after {len(outcome.losses)} of {train_iters} steps"
    elif ended.status or len(outcome.losses) != train_iters:
        lines = ended.text.splitlines() or ["no output"]
        reason = ([line for line in lines if "Error" in line] or lines)[-1].strip()
        outcome.error = f"failed (status {ended.status}): {reason.replace('|', '/')}"
    elif "linear" in row.flags and not outcome.fused_losses:
        outcome.error = "nothing was fused"
    if outcome.error:
        outcome.log_tail = ended.text.splitlines()[-40:]
    return outcome


def _on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line; what follows ``--`` is Megatron's."""
    argv = sys.argv[1:] if argv is None else argv
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True, help="folder for table, JSON and logs")
    parser.add_argument("--script", default=str(ROOT / "scripts" / "pretrain_gpt.py"), help="Megatron script to run")
    parser.add_argument("--specs", nargs="*", default=["local", "te"], choices=("local", "te"))
    parser.add_argument("--rows", nargs="*", choices=tuple(LOSSES), help="(default all)")
    parser.add_argument("--fp8-recipes", nargs="*", default=[], choices=tuple(FP8_RECIPES))
    parser.add_argument("--fp8-format", default="hybrid", choices=("hybrid", "e4m3"))
    parser.add_argument("--graph", action="store_true", help="rows with a CUDA graph of the full iteration")
    for name, default, meaning in (
        ("num-layers", 4, ""), ("hidden-size", 2048, ""), ("seq-length", 2048, ""), ("vocab-size", 128256, ""),
        ("micro-batch-size", 2, ""), ("global-batch-size", 0, ""), ("train-iters", 50, ""),
        ("timed-steps", 30, "last steps of each row, run alone; 0: nothing is timed "),
        ("jobs", 0, "rows at a time; 0: what the device's memory holds, 1 without a GPU "),
        ("timeout", 300, "seconds for a row "), ("time-limit", 86400, "seconds for everything "),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{meaning}(default {default})")
    parser.add_argument("--tolerance", type=float, default=2e-2, help="largest relative loss difference (default 0.02)")
    parser.add_argument("--redraw", action="store_true", help="only the table, from --output-dir/compare.json")
    parser.add_argument("--add-to", type=Path, metavar="FILE", help="compare.json whose rows are kept")
    arguments = parser.parse_args(argv[:cut])
    if arguments.timed_steps and not 2 <= arguments.timed_steps <= arguments.train_iters:
        parser.error("--timed-steps must be 0, or from 2 to --train-iters: the first of them waits for its turn")
    if arguments.micro_batch_size % 2 and HALF in (arguments.rows or LOSSES):
        if arguments.rows:
            parser.error(f"--rows '{HALF}' needs an even --micro-batch-size, this is {arguments.micro_batch_size}")
        arguments.rows = [name for name in LOSSES if name != HALF]
    arguments.megatron = argv[cut + 1 :]
    return arguments


def redraw(folder: Path) -> tuple[list[Outcome], str]:
    """Write ``compare.md`` again; (rows, table)."""
    with results_of(folder / "compare.json") as content:
        outcomes = [Outcome(**row) for row in content["rows"]]
        text = table(outcomes, content["settings"])
    write_whole(folder / "compare.md", text)
    return outcomes, text


def main() -> int:
    """Run all rows and print the table."""
    arguments = parse()
    stop_on_sigterm()
    if not arguments.redraw:
        arguments.output_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as logs:
            Comparison(arguments, Path(logs)).run()
    outcomes, text = redraw(arguments.output_dir)
    print(text)
    wrong = wrong_rows(outcomes, arguments.tolerance)
    if wrong:
        print(f"FAILED: {'; '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
