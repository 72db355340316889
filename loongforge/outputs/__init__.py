"""What the output layer can tell beside the loss, without the logits: docs/outputs.md.

:mod:`loongforge.outputs.logprobs`, :mod:`loongforge.outputs.top_k`, :mod:`loongforge.outputs.distillation`.  Each runs
the chunk loop of :mod:`loongforge.chunks` with row kernels of its own in place of the loss's.
"""
