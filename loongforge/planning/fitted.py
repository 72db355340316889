"""Constants of the time model; written by ``python scripts/fit_plan.py --write``, not by hand.

Least relative squares over the rows of loongforge in docs/benchmarks/h200/results.json.
"""

LIBRARY_TFLOPS = 696.5
TILE_TFLOPS = 681.6
TILE_MS_PER_GIGALOGIT = 0.8248
TERABYTES_PER_SECOND = 3.786
LARGEST_ERROR = 0.032
