"""Train a small GPT on real text with the fused and with the plain output layer, several seeds each, and compare.

    python scripts/compare_training.py --output-dir runs/long
    python scripts/compare_training.py --output-dir runs/long --redraw
    python scripts/compare_training.py --output-dir runs/rounding --seeds 1 --yardsticks again native half

The text is the documentation inside Python packages that are installed wherever torch is: every docstring of the
standard library, torch, numpy, sympy and networkx.  A BPE vocabulary is trained on it, then ``loongforge train``'s own
loop trains each seed twice.  Written after every run: ``training.json`` (every loss) and ``logs.tar.gz``; in the end
``training.png`` (needs matplotlib; draw it elsewhere with --redraw) and a table of the seeds that are complete.  Exit
status 1 where a run failed or was stopped by --time-limit, or the mean final validation loss of the fused runs is
further from the plain ones' than --sigmas standard deviations between seeds.

--yardsticks trains each seed once more in ways that differ from the plain run in rounding at most: ``again``, which is
the same run; ``native``, with Megatron's own fused loss; ``half``, plain, each batch as two halves.  How far they end
from it is how far apart rounding alone drives two runs.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import statistics
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from side_by_side import Ended, Job, pack, results_of, run_together, stop_on_sigterm, versions, write_whole

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PACKAGES = ("torch", "numpy", "sympy", "networkx")
VARIANTS = ("fused", "unfused")
YARDSTICKS = ("again", "native", "half")
SETTINGS = (
    "seeds", "yardsticks", "fp32", "num_layers", "hidden_size", "seq_length", "vocab_size", "batch_size", "train_iters",
    "eval_interval",
)  # fmt: skip


# ---------------------------------------------------------------- text


def docstrings(path: Path) -> str:
    """Every docstring of one file; nothing where it cannot be parsed."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return ""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return "".join(f"{text}\n\n" for text in found if text)


def write_text(path: Path, max_files: int) -> int:
    """All documentation, one file after another in a fixed shuffled order; returns the number of characters."""
    folders = {"stdlib": Path(sysconfig.get_paths()["stdlib"])}
    folders |= {name: Path(spec.origin).parent for name in PACKAGES if (spec := find_spec(name)) and spec.origin}
    files = [
        file
        for folder in folders.values()
        for file in sorted(folder.rglob("*.py"))
        if "site-packages" not in file.relative_to(folder).parts
    ]
    files.sort(key=lambda file: hash_of(file.name))  # validation text comes from every package
    with ProcessPoolExecutor() as pool:
        texts = list(pool.map(docstrings, files[:max_files], chunksize=64))
    path.write_text("\n".join(text for text in texts if text), encoding="utf-8", errors="replace")
    return sum(map(len, texts))


def hash_of(name: str) -> int:
    """The same in every process, unlike ``hash``."""
    import zlib

    return zlib.crc32(name.encode())


# ---------------------------------------------------------------- one run


def configuration(arguments: argparse.Namespace, variant: str, seed: int):
    """The trainer's configuration of one run."""
    from loongforge.train.config import (
        DataConfig,
        ModelConfig,
        OutputLayerConfig,
        TrainConfig,
        TrainingConfig,
    )

    return TrainConfig(
        model=ModelConfig(
            num_layers=arguments.num_layers, hidden_size=arguments.hidden_size, seq_length=arguments.seq_length,
            num_attention_heads=arguments.hidden_size // 64, normalization="RMSNorm", swiglu=True,
            ffn_hidden_size=arguments.hidden_size * 11 // 4, disable_bias_linear=True,
        ),
        training=TrainingConfig(
            train_iters=arguments.train_iters, seed=seed,
            micro_batch_size=arguments.batch_size // (2 if variant == "half" else 1),
            global_batch_size=arguments.batch_size, lr=1e-3, min_lr=1e-4, adam_beta2=0.95, weight_decay=0.1,
            lr_warmup_iters=min(100, arguments.train_iters // 10), bf16=not arguments.fp32, eval_iters=8,
        ),
        output_layer=OutputLayerConfig(
            cross_entropy_loss_fusion=variant in ("fused", "native"),
            cross_entropy_fusion_impl="native" if variant == "native" else "linear",
        ),
        data=DataConfig(
            data_path=[str(arguments.work_dir / "data" / "docs")], split="95,5,0",
            data_cache_path=str(arguments.work_dir / "data" / f"{variant}-{seed}"),
        ),
    )  # fmt: skip


def train_one(arguments: argparse.Namespace, variant: str, seed: int) -> None:
    """One run in this process: losses and validation losses as JSON, final parameters beside it."""
    import torch

    from loongforge.train.checkpoint import bare_model
    from loongforge.train.loop import open_run, start_state, train_batches, validation_loss
    from loongforge.train.step import train_step

    torch.set_num_threads(1)
    config = configuration(arguments, variant, seed)
    with open_run(config) as run:
        state, data = start_state(run), train_batches(run)
        model = bare_model(state.model)
        losses, validation = [], {}
        started = time.perf_counter()
        for step in range(1, arguments.train_iters + 1):
            losses.append(round(train_step(config, state, run.layout, data).loss, 5))
            if step % arguments.eval_interval == 0 or step == arguments.train_iters:
                validation[step] = validation_loss(run, state)
        seconds = time.perf_counter() - started
        parameters = torch.cat([parameter.detach().float().flatten().cpu() for parameter in model.parameters()])
    from loongforge.megatron import counters

    if bool(counters.fused) != (variant == "fused"):
        raise RuntimeError(f"{variant} run computed {counters.fused} fused losses")
    torch.save(parameters, arguments.work_dir / f"{variant}-{seed}.pt")
    result = {
        "variant": variant, "seed": seed, "parameters": parameters.numel(), "vocab_size": run.vocab_size,
        "losses": losses, "validation": validation, "seconds": seconds, "fused_losses": counters.fused,
    }  # fmt: skip
    write_whole(arguments.work_dir / f"{variant}-{seed}.json", json.dumps(result))


def train_all(arguments: argparse.Namespace, content: dict) -> list[str]:
    """Every run in a process of its own, --jobs at a time; adds to ``content`` and returns what is missing.

    Runs of a seed stand beside each other: where the time ends, the seeds before are complete.
    """
    combinations = [(variant, seed) for seed in arguments.seeds for variant in (*VARIANTS, *arguments.yardsticks)]
    deadline = arguments.started + arguments.time_limit - 10  # for what comes after
    missing: list[str] = []
    for number in range(0, len(combinations), arguments.jobs):
        together = {job(arguments, *pair): pair for pair in combinations[number : number + arguments.jobs]}

        def ended(run: Ended, together: dict = together) -> None:
            variant, seed = together[run.job]
            if run.status == 0:
                result = json.loads((arguments.work_dir / f"{variant}-{seed}.json").read_text())
                content["runs"].append(result)
                outcome = f"last loss {result['losses'][-1]:.4f}, {result['seconds']:.0f} s"
            else:
                reason = (run.text.splitlines() or ["no output"])[-1]
                outcome = "stopped by --time-limit" if run.status is None else f"failed (status {run.status}): {reason}"
                missing.append(f"{run.job.name}: {outcome}")
            print(f"{run.job.name}: {outcome}", flush=True)
            write_whole(arguments.output_dir / "training.json", json.dumps(content) + "\n")
            pack(arguments.work_dir, arguments.output_dir / "logs.tar.gz")

        run_together(list(together), min(deadline, time.monotonic() + arguments.timeout), ended)
    return missing


def job(arguments: argparse.Namespace, variant: str, seed: int) -> Job:
    """The process of one run."""
    command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), *sys.argv[1:]]
    command += ["--only", variant, str(seed), "--work-dir", str(arguments.work_dir)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return Job(f"{variant} seed {seed}", command, arguments.work_dir / f"{variant}-{seed}.log", environment)


# ---------------------------------------------------------------- comparison


def final_validation(result: dict) -> float:
    """Validation loss after the last step."""
    return result["validation"][max(result["validation"], key=int)]


def cosines(folder: Path, content: dict) -> dict[str, float]:
    """Cosine of all final parameters: every run against the plain one of its seed, and plain ones between seeds."""
    import torch

    def cosine(first: str, second: str) -> float:
        a, b = (torch.load(folder / f"{name}.pt").double() for name in (first, second))
        return float(a @ b / (a.norm() * b.norm()))

    seeds, between = complete_seeds(content), {}
    for variant, seed in sorted((result["variant"], result["seed"]) for result in content["runs"]):
        if variant != "unfused" and seed in seeds:
            between[pair_name(variant, seed)] = cosine(f"{variant}-{seed}", f"unfused-{seed}")
    for seed in seeds[1:]:
        between[f"unfused, seeds {seeds[0]} and {seed}"] = cosine(f"unfused-{seeds[0]}", f"unfused-{seed}")
    return between


def pair_name(variant: str, seed: int) -> str:
    """Key of a run's cosine with the plain run of its seed."""
    return f"seed {seed}" if variant == "fused" else f"{variant}, seed {seed}"


def complete_seeds(content: dict) -> list[int]:
    """Seeds that ran fused and unfused."""
    runs = {(result["variant"], result["seed"]) for result in content["runs"]}
    return sorted({seed for _, seed in runs if all((variant, seed) in runs for variant in VARIANTS)})


def report(content: dict, sigmas: float) -> bool:
    """Print the tables; whether the means agree within the seeds' noise."""
    runs = {(result["variant"], result["seed"]): result for result in content["runs"]}
    seeds = complete_seeds(content)
    print(", ".join(f"{name} {version}" for name, version in content["versions"].items()) + "\n")
    print("| seed | final validation loss, fused | unfused | difference | cosine of all parameters |")
    print("| --- | --- | --- | --- | --- |")
    finals = {variant: [final_validation(runs[variant, seed]) for seed in seeds] for variant in VARIANTS}
    for seed, fused, unfused in zip(seeds, *finals.values(), strict=True):
        cosine = content["cosines"].get(f"seed {seed}", float("nan"))  # none where the comparison was ended before
        print(f"| {seed} | {fused:.5f} | {unfused:.5f} | {fused - unfused:+.5f} | {cosine:.6f} |")
    means = {variant: statistics.mean(values) for variant, values in finals.items()}
    noise = max(map(statistics.stdev, finals.values())) if len(seeds) > 1 else float("inf")
    difference = means["fused"] - means["unfused"]
    print(f"| mean | {means['fused']:.5f} | {means['unfused']:.5f} | {difference:+.5f} | |\n")
    if len(seeds) > 1:
        share = abs(difference) / noise
        print(f"standard deviation between seeds {noise:.5f}; difference of the means {share:.2f} of it")
    else:
        print("one seed: no noise between seeds to judge by")
    for pair, cosine in content["cosines"].items():
        if pair.startswith("unfused"):
            print(f"cosine of all parameters, {pair}: {cosine:.6f}")
    report_yardsticks(content, runs, seeds)
    return abs(difference) <= sigmas * noise


def report_yardsticks(content: dict, runs: dict, seeds: list[int]) -> None:
    """How far runs that differ from the plain one in rounding only are from it."""
    found = [(variant, seed) for variant in YARDSTICKS for seed in seeds if (variant, seed) in runs]
    if not found:
        return
    print("\n| yardstick | seed | final validation loss | difference from unfused | cosine of all parameters |")
    print("| --- | --- | --- | --- | --- |")
    for variant, seed in found:
        loss, plain = (final_validation(runs[name, seed]) for name in (variant, "unfused"))
        cosine = content["cosines"].get(pair_name(variant, seed), float("nan"))
        print(f"| {variant} | {seed} | {loss:.5f} | {loss - plain:+.5f} | {cosine:.6f} |")


def draw(content: dict, path: Path) -> None:
    """Loss curves, their difference per seed, and validation losses."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    curves, differences = figure.subplots(1, 2)
    runs = {(result["variant"], result["seed"]): result for result in content["runs"]}
    seeds = complete_seeds(content)
    for number, seed in enumerate(seeds):
        for variant, style in zip(VARIANTS, ("-", "--"), strict=True):
            validation = runs[variant, seed]["validation"]
            steps = sorted(map(int, validation))
            values = [validation[str(step)] for step in steps]
            curves.plot(steps, values, style, color=f"C{number}", linewidth=1.2, label=f"{variant}, seed {seed}")
            if variant == "fused":
                other = runs["unfused", seed]["validation"]
                gaps = [value - other[str(step)] for step, value in zip(steps, values, strict=True)]
                differences.plot(steps, gaps, "-", color=f"C{number}", linewidth=1.2, label=f"fused - unfused, {seed}")
        for variant, style in zip(YARDSTICKS, ("--", "-.", (0, (1, 3))), strict=True):
            if (variant, seed) in runs:
                other = runs["unfused", seed]["validation"]
                gaps = [runs[variant, seed]["validation"][str(step)] - other[str(step)] for step in steps]
                label = f"{variant} - unfused, {seed}"
                differences.plot(steps, gaps, linestyle=style, color="k", linewidth=1.2, label=label)
    others = [runs["unfused", seed]["validation"] for seed in seeds]
    for number in range(1, len(seeds)):
        gaps = [others[number][str(step)] - others[0][str(step)] for step in steps]
        label = f"unfused, seed {seeds[number]} - {seeds[0]}"
        differences.plot(steps, gaps, ":", color="0.5", linewidth=1.2, label=label)
    curves.set(xlabel="step", ylabel="validation loss")
    differences.set(xlabel="step", ylabel="difference of validation losses")
    for axes in (curves, differences):
        axes.grid(linewidth=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--redraw", action="store_true", help="only the picture and the table of an earlier run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, all on the same device (default 2)")
    parser.add_argument("--yardsticks", nargs="*", default=[], choices=YARDSTICKS, help="further runs of each seed")
    parser.add_argument("--fp32", action="store_true", help="train in fp32 instead of bf16")
    parser.add_argument("--sigmas", type=float, default=2.0, help="allowed difference of the means (default 2)")
    for name, default in (
        ("num-layers", 4), ("hidden-size", 384), ("seq-length", 256), ("vocab-size", 32768), ("batch-size", 32),
        ("train-iters", 1200), ("eval-interval", 100), ("timeout", 900), ("max-files", 1 << 20), ("time-limit", 86400),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help=f"(default {default})")
    parser.add_argument("--only", nargs=2, metavar=("VARIANT", "SEED"), help="one run, in this process")
    parser.add_argument("--work-dir", type=Path, help="text, parameters and logs (default: a temporary folder)")
    arguments = parser.parse_args(argv)
    if arguments.batch_size % 2 and "half" in arguments.yardsticks:
        parser.error(f"--yardsticks half needs an even --batch-size, this is {arguments.batch_size}")
    return arguments


def prepare_text(arguments: argparse.Namespace) -> dict:
    """Text, vocabulary and tokens in the work folder, those of an earlier run where it has them; their numbers."""
    from loongforge.train.preprocess import preprocess

    numbers = arguments.work_dir / "data" / "numbers.json"
    request = {"max_files": arguments.max_files, "vocab_size": arguments.vocab_size}
    if numbers.exists() and (known := json.loads(numbers.read_text()))["request"] == request:
        return known["counts"]
    numbers.parent.mkdir(parents=True, exist_ok=True)
    text = arguments.work_dir / "docs.txt"
    characters = write_text(text, arguments.max_files)
    counts = preprocess([str(text)], str(arguments.work_dir / "data" / "docs"), "bpe", arguments.vocab_size)
    print(f"{characters} characters, {counts.tokens} tokens, vocabulary {counts.vocab_size}", flush=True)
    write_whole(numbers, json.dumps({"request": request, "counts": vars(counts)}))
    return vars(counts)


def compare(arguments: argparse.Namespace) -> list[str]:
    """All runs and ``training.json``; the runs that are missing."""
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        arguments.work_dir = arguments.work_dir or Path(folder)
        settings = {name: getattr(arguments, name) for name in SETTINGS}
        content = {"settings": settings, "versions": versions("triton", "megatron-core"), "cosines": {}, "runs": []}
        content["text"] = prepare_text(arguments)
        missing = train_all(arguments, content)
        content["cosines"] = cosines(arguments.work_dir, content)
    write_whole(arguments.output_dir / "training.json", json.dumps(content) + "\n")
    return missing


def main() -> int:
    """All runs, the JSON, the picture and the table."""
    started = time.monotonic()
    arguments = parse()
    folder = arguments.output_dir
    if arguments.only:
        train_one(arguments, arguments.only[0], int(arguments.only[1]))
        return 0
    stop_on_sigterm()
    arguments.started = started
    missing = [] if arguments.redraw else compare(arguments)
    with results_of(folder / "training.json") as content:
        if not complete_seeds(content):
            print("no seed has both runs")
            return 1
        try:
            draw(content, folder / "training.png")
        except ImportError:
            print("training.png not drawn: matplotlib is missing (pip install 'loongforge[plot]'); --redraw elsewhere")
        agree = report(content, arguments.sigmas)
    if missing:
        print(f"MISSING: {'; '.join(missing)}")
    return 0 if agree and not missing else 1


if __name__ == "__main__":
    sys.exit(main())
