#!/usr/bin/env python3
"""Compare loongforge with every importable peer on one device; prints the table last.  `loongforge bench` is the same.

python scripts/benchmark.py llama3-8b dsv3 --output-dir docs/benchmarks/h200
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from loongforge.bench import run, script  # noqa: E402

if __name__ == "__main__":
    script.main(__doc__, run.add_arguments, run.run)
