#!/usr/bin/env python3
"""Check and time each kernel of the loss by itself on one device; prints the tables last.

python scripts/benchmark_kernels.py seed-pr llama3-8b dsv3 --output-dir docs/benchmarks/h200-kernels
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from loongforge.bench import kernels, script  # noqa: E402

if __name__ == "__main__":
    script.main(__doc__, kernels.add_arguments, kernels.run)
