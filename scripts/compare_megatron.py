"""Train the same GPT with Megatron's own ``pretrain()`` unfused, natively fused and with loongforge, and compare.

    python scripts/compare_megatron.py --output-dir runs/compare

Each row is one process: loss and gradient norm of every step, tokens per second (median of the second half of the
steps) and the peak of allocated memory.  The table comes last, and beside it ``compare.json``.  Rows whose
requirements are missing say so.  Exit status 1 where a loss is further from the unfused one than --tolerance.

Flags after ``--`` go to Megatron, such as ``-- --recompute-granularity selective --mtp-num-layers 1``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NATIVE = ("--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "native")
LINEAR = ("--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "linear")
KEEP_ALL = (*LINEAR, "--lce-logits-budget-mb", "all")
LOSSES = {"unfused": (), "native": NATIVE, "linear": LINEAR, "linear, all kept": KEEP_ALL}
FP8_RECIPES = {"delayed": (8, 9), "tensorwise": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0)}
"""Recipe of Transformer Engine -> compute capability that it needs."""
STEP = re.compile(
    r"iteration\s+(\d+)/.*?elapsed time per iteration \(ms\): ([\d.]+).*?lm loss: (\S+).*?grad norm: ([\d.]+|nan|inf)"
)


@dataclass(frozen=True)
class Row:
    """One run: which layers and loss."""

    name: str
    base: str
    """Row that its losses are compared with."""
    flags: tuple[str, ...]
    missing: str = ""
    """Why it cannot run here."""


@dataclass
class Outcome:
    """What one run printed."""

    name: str
    base: str
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    fused_losses: int = 0
    error: str = ""


def rows(specs: list[str], fp8_recipes: list[str], fp8_format: str, losses: list[str]) -> list[Row]:
    """Every combination that was asked for; unfused first, for the others are compared with it."""
    chosen = {name: flags for name, flags in LOSSES.items() if name in losses or name == "unfused"}
    missing_te = "" if find_spec("transformer_engine") else "not run: transformer-engine absent"
    made = []
    if "local" in specs:
        flags = ("--transformer-impl", "local", "--no-persist-layer-norm", "--no-rope-fusion")
        made += [Row(f"local, {name}", "local, unfused", (*flags, *loss)) for name, loss in chosen.items()]
    if "te" in specs:
        flags = ("--transformer-impl", "transformer_engine")
        made += [Row(f"te, {name}", "te, unfused", (*flags, *loss), missing_te) for name, loss in chosen.items()]
    for recipe in fp8_recipes:
        flags = ("--transformer-impl", "transformer_engine", "--fp8-format", fp8_format, "--fp8-recipe", recipe)
        if recipe == "delayed":
            flags += ("--fp8-amax-history-len", "16", "--fp8-amax-compute-algo", "max")
        for name in ("unfused", "linear"):
            missing = missing_te or _missing_capability(recipe)
            made.append(Row(f"te {recipe} fp8, {name}", f"te {recipe} fp8, unfused", (*flags, *LOSSES[name]), missing))
    return made


def _missing_capability(recipe: str) -> str:
    import torch

    have = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    need = FP8_RECIPES[recipe]
    return "" if have >= need else f"not run: needs compute capability {need[0]}.{need[1]}, this is {have[0]}.{have[1]}"


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
    if not on_gpu:
        flags.append("--use-cpu-initialization")
    return flags + arguments.megatron


def run(row: Row, arguments: argparse.Namespace) -> Outcome:
    """Start one row and read what Megatron logs."""
    outcome = Outcome(row.name, row.base)
    if row.missing:
        outcome.error = row.missing
        return outcome
    command = [sys.executable, "-W", "ignore", "-m", "loongforge.megatron.launch", arguments.script]
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    single = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environment = {
        **os.environ, **single, "MASTER_PORT": str(_free_port()), "PYTHONPATH": os.pathsep.join(paths),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }  # fmt: skip
    log = arguments.output_dir / f"{re.sub('[^a-z0-9]+', '_', row.name)}.log"
    with log.open("w") as output:
        status = subprocess.run(
            [*command, *megatron_flags(arguments), *row.flags],
            env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=arguments.timeout, check=False,
        ).returncode  # fmt: skip
    text = log.read_text(errors="replace")
    read_log(text, outcome)
    if status or len(outcome.losses) != arguments.train_iters:
        tail = [line for line in text.splitlines() if "Error" in line] or text.splitlines()
        outcome.error = f"failed (status {status}), see {log}: {tail[-1].strip() if tail else 'no output'}"
    elif "linear" in row.flags and not outcome.fused_losses:
        outcome.error = f"nothing was fused, see {log}"
    return outcome


def read_log(text: str, outcome: Outcome) -> None:
    """Steps, peak memory and the number of fused losses from one run's output."""
    for _, milliseconds, loss, grad_norm in STEP.findall(text):
        outcome.milliseconds.append(float(milliseconds))
        outcome.losses.append(float(loss))
        outcome.grad_norms.append(float(grad_norm))
    peak = re.search(r"PEAK MEMORY BYTES (\d+)", text)
    outcome.peak_bytes = int(peak.group(1)) if peak else 0
    fused = re.search(r"loongforge: (\d+) fused losses", text)
    outcome.fused_losses = int(fused.group(1)) if fused else 0


def largest_difference(values: list[float], expected: list[float]) -> float:
    """Largest relative difference of two lists of one length; NaN where one is NaN."""
    differences = [abs(a - b) / abs(b) for a, b in zip(values, expected, strict=True)]
    return float("nan") if any(d != d for d in differences) else max(differences)


def table(outcomes: list[Outcome], tokens_per_step: int) -> str:
    """Markdown."""
    lines = [
        "| row | first loss | last loss | largest loss difference | largest gradient norm difference | tokens/s | "
        "peak GiB |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    by_name = {outcome.name: outcome for outcome in outcomes}
    for outcome in outcomes:
        if outcome.error:
            lines.append(f"| {outcome.name} | {outcome.error} | | | | | |")
            continue
        base = by_name[outcome.base]
        differences = ["", ""]
        if base is not outcome and not base.error:
            differences = [
                f"{largest_difference(outcome.losses, base.losses):.1e}",
                f"{largest_difference(outcome.grad_norms, base.grad_norms):.1e}",
            ]
        half = outcome.milliseconds[len(outcome.milliseconds) // 2 :]
        speed = tokens_per_step / statistics.median(half) * 1e3
        peak = f"{outcome.peak_bytes / 2**30:.1f}" if outcome.peak_bytes else "unknown"
        losses = f"{outcome.losses[0]:.6f} | {outcome.losses[-1]:.6f}"
        lines.append(f"| {outcome.name} | {losses} | {differences[0]} | {differences[1]} | {speed:.0f} | {peak} |")
    return "\n".join(lines)


def wrong_rows(outcomes: list[Outcome], tolerance: float) -> list[str]:
    """Rows that failed or whose losses left the unfused ones."""
    by_name = {outcome.name: outcome for outcome in outcomes}
    wrong = []
    for outcome in outcomes:
        base = by_name[outcome.base]
        if outcome.error:
            wrong += [] if outcome.error.startswith("not run") else [outcome.name]
        elif not base.error and not largest_difference(outcome.losses, base.losses) <= tolerance:
            wrong.append(outcome.name)
    return wrong


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
    parser.add_argument("--output-dir", type=Path, required=True, help="folder for logs and compare.json")
    parser.add_argument("--script", default=str(ROOT / "scripts" / "pretrain_gpt.py"), help="Megatron script to run")
    parser.add_argument("--specs", nargs="*", default=["local", "te"], choices=("local", "te"))
    parser.add_argument("--rows", nargs="*", default=list(LOSSES), choices=tuple(LOSSES), help="(default all)")
    parser.add_argument("--fp8-recipes", nargs="*", default=[], choices=tuple(FP8_RECIPES))
    parser.add_argument("--fp8-format", default="hybrid", choices=("hybrid", "e4m3"))
    for name, default in (
        ("num-layers", 12), ("hidden-size", 2048), ("seq-length", 2048), ("vocab-size", 128256),
        ("micro-batch-size", 4), ("global-batch-size", 0), ("train-iters", 50), ("timeout", 300),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help=f"(default {default})")
    parser.add_argument("--tolerance", type=float, default=2e-2, help="largest relative loss difference (default 0.02)")
    arguments = parser.parse_args(argv[:cut])
    arguments.megatron = argv[cut + 1 :]
    return arguments


def main() -> int:
    """Run, write ``compare.json``, print the table."""
    arguments = parse()
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for row in rows(arguments.specs, arguments.fp8_recipes, arguments.fp8_format, arguments.rows):
        outcomes.append(run(row, arguments))
        print(f"{row.name}: {outcomes[-1].error or 'done'}", flush=True)
        settings = {name: str(value) for name, value in vars(arguments).items()}
        content = {"settings": settings, "rows": [asdict(outcome) for outcome in outcomes]}
        (arguments.output_dir / "compare.json").write_text(json.dumps(content, indent=1) + "\n")
    batch = arguments.global_batch_size or arguments.micro_batch_size
    print(table(outcomes, batch * arguments.seq_length))
    wrong = wrong_rows(outcomes, arguments.tolerance)
    if wrong:
        print(f"FAILED: {'; '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
