#!/usr/bin/env python3
"""Measure what each option of the loss and each output costs on one device; prints the table last.

python scripts/benchmark_options.py llama3-8b --output-dir docs/benchmarks/h200
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from loongforge.bench import options, script  # noqa: E402

if __name__ == "__main__":
    script.main(__doc__, options.add_arguments, options.run)
