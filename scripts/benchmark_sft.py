#!/usr/bin/env python3
"""Measure masked tokens with and without compaction, float32 logits and torch.compile; prints the table last.

python scripts/benchmark_sft.py llama3-8b --output-dir docs/benchmarks/h200
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from loongforge.bench import script, sft  # noqa: E402

if __name__ == "__main__":
    script.main(__doc__, sft.add_arguments, sft.run)
