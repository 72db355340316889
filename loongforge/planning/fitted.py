"""Constants of the time model; written by ``python scripts/fit_plan.py --write``, not by hand.

Least relative squares over the rows of loongforge in docs/benchmarks/h200/results.json.
"""

LIBRARY_TFLOPS = 711.6
TILE_TFLOPS = 690.7
TILE_MS_PER_GIGALOGIT = 0.4668
TERABYTES_PER_SECOND = 3.958
LARGEST_ERROR = 0.024
