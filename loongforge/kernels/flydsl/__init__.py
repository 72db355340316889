"""The two row kernels in FlyDSL for AMD GPUs; importing this package does not import flydsl."""
