#!/usr/bin/env python3
"""Measure the output layer over the GPUs of one host, with and without sequence parallelism; prints the tables last.

torchrun --nproc_per_node 2 scripts/benchmark_tp.py --output-dir docs/benchmarks/h200-x2
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from loongforge.bench.tensor_parallel import add_arguments, run  # noqa: E402
from loongforge.errors import UsageError  # noqa: E402

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    try:
        run(parser.parse_args())
    except UsageError as error:
        parser.error(str(error))
