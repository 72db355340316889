"""Row kernels: one module an implementation, all with the interface of :mod:`loongforge.kernels.interface`."""
