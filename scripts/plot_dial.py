#!/usr/bin/env python3
"""Draw the dial: time and memory over the share of the logits that is kept.

python scripts/plot_dial.py docs/benchmarks/h200/results.json docs/assets/dial.png
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

HEADS = {
    "llama3-8b": "Llama 3 8B: T=8192 H=4096 V=128256",
    "dsv3": "DeepSeek-V3: T=16384 H=7168 V=129280",
    "seed-pr": "T=8192 H=2048 V=128256",
}


def points(results: list[dict], shape: str) -> list[dict]:
    """The runs with one loss per token, by what they keep."""
    return sorted(
        (r for r in results if r["shape"] == shape and r["name"].startswith("loongforge token")),
        key=lambda r: r["peak_mib"],
    )


def draw(results: list[dict], environment: dict, path: Path) -> None:
    """Time above memory, so that it can be read on a phone too."""
    figure, (time, memory) = pyplot.subplots(2, 1, figsize=(6.4, 7.2), sharex=True, layout="constrained")
    for marker, (shape, label) in zip("osD", HEADS.items(), strict=True):
        runs = points(results, shape)
        tokens, vocabulary = (int(part[2:]) for part in label.split() if part[:2] in ("T=", "V="))
        logits_mib = tokens * vocabulary * 2 / 2**20
        kept = [100 if r["budget_mb"] == "all" else 100 * r["budget_mb"] / logits_mib for r in runs]
        time.plot(kept, [r["ratio"] for r in runs], f"-{marker}", label=label, markersize=5)
        memory.plot(kept, [r["peak_mib"] / 1024 for r in runs], f"-{marker}", markersize=5)
    time.plot([0, 100], [8 / 6, 1], "--", color="0.45", label="matrix products alone (8THV to 6THV)")
    time.set(ylabel="time / time of three matrix products", ylim=(0.95, 1.45), title="forward and backward")
    memory.set(ylabel="GiB above the inputs", ylim=(0, None), title="peak memory, gradients included")
    memory.set_xlabel("logits kept between forward and backward, %")
    for axes in (time, memory):
        axes.grid(linewidth=0.4)
    figure.legend(loc="outside lower center", ncols=1, fontsize=10, frameon=False)
    figure.suptitle(f"The dial on one {environment['device']}, bf16, one loss per token", fontsize=11)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="results.json of scripts/benchmark.py")
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    recorded = json.loads(options.results.read_text(encoding="utf-8"))
    draw(recorded["results"], recorded["environment"], options.picture)
