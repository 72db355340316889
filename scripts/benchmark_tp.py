#!/usr/bin/env python3
"""Measure the output layer over the GPUs of one host, with and without sequence parallelism; prints the tables last.

torchrun --nproc_per_node 2 scripts/benchmark_tp.py --output-dir docs/benchmarks/h200-x2
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from loongforge.bench import script, tensor_parallel  # noqa: E402

if __name__ == "__main__":
    script.main(__doc__, tensor_parallel.add_arguments, tensor_parallel.run)
