"""Megatron hook: ``install()`` makes ``cross_entropy_fusion_impl="linear"`` work.

    import loongforge.megatron
    loongforge.megatron.install()          # before the model is built
    config = TransformerConfig(..., cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="linear")

Importing this package does not import megatron-core.
"""

from loongforge.megatron.deferred import Counters, DeferredLogits, counters
from loongforge.megatron.hook import HookReport, install, is_installed, uninstall

__all__ = ["Counters", "DeferredLogits", "HookReport", "counters", "install", "is_installed", "uninstall"]
