#!/usr/bin/env python3
"""Fit the time model of `loongforge plan` to measurements, and say how well it repeats them.

python scripts/fit_plan.py [docs/benchmarks/h200/results.json] [--write]
"""

import argparse
import re
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from loongforge.planning.measured import OwnRow, own_rows  # noqa: E402
from loongforge.planning.predict import Rates  # noqa: E402


def fit(rows: list[OwnRow]) -> Rates:
    """Least squares of predicted / measured - 1."""
    works = [row.work for row in rows]
    columns = np.array([[w.library_flops, w.tile_flops, w.tile_logits, w.num_bytes] for w in works]) * 1e-9
    measured = np.array([row.step_ms for row in rows])
    relative = columns / measured[:, None]
    inverse = np.linalg.lstsq(relative, np.ones(len(rows)), rcond=None)[0]
    if inverse[2] < 0:  # exponentials that cost nothing beside the products
        without = np.linalg.lstsq(np.delete(relative, 2, axis=1), np.ones(len(rows)), rcond=None)[0]
        inverse = np.insert(without, 2, 0.0)
    if (np.delete(inverse, 2) <= 0).any():
        raise SystemExit(f"a rate came out negative: 1 / {inverse}; the measurements do not tell the terms apart")
    library, tile, logits, num_bytes = map(float, inverse)
    return Rates(1 / library, 1 / tile, logits, 1 / num_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, default=ROOT / "docs/benchmarks/h200/results.json")
    parser.add_argument("--write", action="store_true", help="write the constants to loongforge/planning/fitted.py")
    options = parser.parse_args()
    rows = own_rows(options.results)
    rates = fit(rows)
    rounded = Rates(*(float(f"{value:.4g}") for value in vars(rates).values()))
    errors = [rounded.milliseconds(row.work) / row.step_ms - 1 for row in rows]
    for row, error in zip(rows, errors, strict=True):
        memory = row.peak_bytes / 2**20 / row.peak_mib - 1
        print(f"{row.shape.name:10} {row.name:24} {row.step_ms:8.2f} ms {error:+7.1%}   memory {memory:+7.2%}")
    largest = max(map(abs, errors))
    constants = dict(
        zip(
            ("LIBRARY_TFLOPS", "TILE_TFLOPS", "TILE_MS_PER_GIGALOGIT", "TERABYTES_PER_SECOND"),
            vars(rounded).values(),
            strict=True,
        )
    )
    constants["LARGEST_ERROR"] = round(largest + 0.0005, 3)
    print(f"{len(rows)} rows, largest error of time {largest:.1%}")
    print("\n".join(f"{name} = {value}" for name, value in constants.items()))
    if options.write:
        target = ROOT / "loongforge/planning/fitted.py"
        text = target.read_text(encoding="utf-8")
        for name, value in constants.items():
            text = re.sub(rf"^{name} = .*$", f"{name} = {value}", text, flags=re.MULTILINE)
        target.write_text(text, encoding="utf-8")
        print(f"written to {target.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
