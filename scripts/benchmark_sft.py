#!/usr/bin/env python3
"""Measure masked tokens with and without compaction, float32 logits and torch.compile; prints the table last.

python scripts/benchmark_sft.py llama3-8b --output-dir docs/benchmarks/h200
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from loongforge.bench.sft import add_arguments, run  # noqa: E402
from loongforge.errors import UsageError  # noqa: E402

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    try:
        run(parser.parse_args())
    except UsageError as error:
        parser.error(str(error))
