"""Constants of the time model; written by ``python scripts/fit_plan.py --write``, not by hand.

Least relative squares over the rows of loongforge in docs/benchmarks/h200/results.json.
"""

LIBRARY_TFLOPS = 697.6
TILE_TFLOPS = 687.9
TILE_MS_PER_GIGALOGIT = 0.9421
TERABYTES_PER_SECOND = 3.858
LARGEST_ERROR = 0.021
