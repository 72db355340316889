"""Megatron hook: ``install()`` makes ``cross_entropy_fusion_impl="linear"`` work.

    import loongforge.megatron
    loongforge.megatron.install()          # before the model is built
    config = TransformerConfig(..., cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="linear")

or ``loongforge.megatron.enable(config)`` for a configuration that exists already.

Importing this package does not import megatron-core.
"""

from loongforge.megatron.deferred import Counters, DeferredLogits, counters
from loongforge.megatron.hook import HookReport, enable, install, is_installed, uninstall

__all__ = ["Counters", "DeferredLogits", "HookReport", "counters", "enable", "install", "is_installed", "uninstall"]
