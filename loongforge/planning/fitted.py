"""Constants of the time model; written by ``python scripts/fit_plan.py --write``, not by hand.

Least relative squares over the rows of loongforge in docs/benchmarks/h200/results.json.
"""

LIBRARY_TFLOPS = 709.1
TILE_TFLOPS = 699.1
TILE_MS_PER_GIGALOGIT = 0.7997
TERABYTES_PER_SECOND = 3.582
LARGEST_ERROR = 0.028
