"""Side-by-side measurement of output-layer losses on one device; see :mod:`loongforge.bench.run`."""
