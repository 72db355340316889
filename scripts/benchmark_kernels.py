#!/usr/bin/env python3
"""Check and time each kernel of the loss by itself on one device; prints the tables last.

python scripts/benchmark_kernels.py seed-pr llama3-8b dsv3 --output-dir docs/benchmarks/h200-kernels
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from loongforge.bench.kernels import add_arguments, run  # noqa: E402
from loongforge.errors import UsageError  # noqa: E402

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    try:
        run(parser.parse_args())
    except UsageError as error:
        parser.error(str(error))
