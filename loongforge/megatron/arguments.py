"""Makes ``linear`` a legal value of Megatron's ``cross_entropy_fusion_impl``."""

from __future__ import annotations

from typing import Any, Literal

from loongforge.megatron.patches import Patches

IMPL = "linear"
IMPLEMENTATIONS = Literal["native", "te", "linear"]


def allow_linear(patches: Patches) -> None:
    """``megatron.training`` derives the choices of ``--cross-entropy-fusion-impl`` from the field's type."""
    from megatron.core.model_parallel_config import ModelParallelConfig

    # Every configuration class inherits this one Field object.
    patches.set(ModelParallelConfig.__dataclass_fields__["cross_entropy_fusion_impl"], "type", IMPLEMENTATIONS)


def linear_enabled(config: Any) -> bool:
    """True where the two flags ask for the fused output layer."""
    return bool(config.cross_entropy_loss_fusion) and config.cross_entropy_fusion_impl == IMPL
