"""Constants of the time model; written by ``python scripts/fit_plan.py --write``, not by hand.

Least relative squares over the rows of loongforge in docs/benchmarks/h200/results.json.
"""

LIBRARY_TFLOPS = 697.3
TILE_TFLOPS = 674.8
TILE_MS_PER_GIGALOGIT = 0.5612
TERABYTES_PER_SECOND = 4.117
LARGEST_ERROR = 0.029
