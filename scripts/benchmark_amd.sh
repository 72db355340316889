#!/usr/bin/env bash
# usage: scripts/benchmark_amd.sh [--dtype float16] [--repeats 50]
# For a machine with an AMD GPU and a torch for ROCm, after: pip install -e ".[flydsl,triton]"
# Times the row kernels (cross_entropy over existing logits) and the fused operation, FlyDSL beside Triton and generic.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" scripts/benchmark_amd.py "$@"
