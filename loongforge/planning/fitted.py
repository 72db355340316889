"""Constants of the time model; written by ``python scripts/fit_plan.py --write``, not by hand.

Least relative squares over the rows of loongforge in docs/benchmarks/h200/results.json.
"""

LIBRARY_TFLOPS = 708.8
TILE_TFLOPS = 680.7
TILE_MS_PER_GIGALOGIT = 0.6855
TERABYTES_PER_SECOND = 4.412
LARGEST_ERROR = 0.08
