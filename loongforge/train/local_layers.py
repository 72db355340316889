"""megatron-core's own layers, which need no other package, with norms that work under sequence parallelism."""

from __future__ import annotations

import copy
from typing import Any

import torch

_NORMS = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}


class LocalNorm:
    """torch's norm, built as megatron-core builds norms.

    megatron-core's wrapper of the same norms refuses sequence parallelism, where all that is needed is the mark that
    makes it add up the gradients of the norm's weights over the tensor-parallel ranks.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> Any:
        """A norm over ``hidden_size``; what Megatron passes for its fused norms is not needed."""
        norm = _NORMS[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


def local_layer_spec(normalization: str) -> Any:
    """One transformer layer."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = copy.deepcopy(get_gpt_layer_local_spec(normalization=normalization))
    spec.submodules.input_layernorm = LocalNorm
    spec.submodules.pre_mlp_layernorm = LocalNorm
    return spec


def local_block_spec(megatron_config: Any, layer_spec: Any) -> Any:
    """This pipeline stage's layers and the norm after the last."""
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    layers = [layer_spec] * get_num_layers_to_build(megatron_config)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=LocalNorm)
