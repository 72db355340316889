"""What the hook refuses, by name."""

from __future__ import annotations

from typing import Any

import torch

from loongforge import checks

_OFF = "or set cross_entropy_loss_fusion=False"


def check_output_layer(model: Any) -> None:
    """Raise ``NotImplementedError`` unless the fused loss can stand in for ``model.output_layer``."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    layer, config, model_name = model.output_layer, model.config, type(model).__name__
    layer_name = type(layer).__name__
    if layer_name == "TELMHeadColumnParallelLinear":
        raise _refused(
            f"TELMHeadColumnParallelLinear as {model_name}'s output layer (an MXFP8 product)",
            "set fp8_output_proj=False",
        )
    if type(layer) is own_linear_layer():
        if getattr(config, "use_mup", False):
            raise _refused(
                "muP on this Megatron branch (its own linear loss path leaves the logits unscaled)", "set use_mup=False"
            )
    elif type(layer) is not ColumnParallelLinear:
        raise _refused(
            f"{model_name}'s output layer of class {type(layer).__module__}.{layer_name}; it knows "
            "megatron.core.tensor_parallel.ColumnParallelLinear only",
            "leave the output layer out of the wrapping (LoRA, PEFT, fully_shard)",
        )
    if layer.bias is not None:
        raise _refused(f"an output layer with a bias (in {model_name})", "build it with bias=False")
    if config.defer_embedding_wgrad_compute:
        raise _refused(
            "defer_embedding_wgrad_compute (it needs the gradient of all logits at once)",
            "set defer_embedding_wgrad_compute=False",
        )
    if getattr(layer, "gtp_remat_size", 1) > 1:
        raise _refused(
            f"gtp_remat_size = {layer.gtp_remat_size} > 1 (the output layer's weight is sharded inside its product)",
            "set gtp_remat_size to 1 for the output layer",
        )
    if layer._backward_hooks or layer._backward_pre_hooks:
        raise _refused(
            f"full backward hooks on {model_name}'s output layer (its output is no tensor, so they would never fire)",
            "hook the model or the decoder instead",
        )
    if layer.disable_grad_reduce:
        raise _refused("disable_grad_reduce=True in the output layer", "set disable_grad_reduce=False")


def check_weight(layer: Any, weight: Any) -> torch.Tensor:
    """The weight of one call; refuses one that is not this rank's shard."""
    weight = layer.weight if weight is None else weight
    if weight is None:
        raise RuntimeError("the output layer has no weight of its own and none was passed to its forward")
    if hasattr(weight, "__fsdp_param__"):
        raise megatron_fsdp_refused()
    tp_size = layer.output_size // layer.output_size_per_partition
    expected = (layer.output_size_per_partition, layer.input_size)
    if tuple(weight.shape) != expected:
        raise ValueError(
            f"the output layer's weight must be this rank's shard {list(expected)} of a vocabulary of "
            f"{layer.output_size} over {tp_size} tensor-parallel rank(s), got {list(weight.shape)}: pass the shard"
        )
    if tp_size > 1 and getattr(weight, "tensor_model_parallel", True) is False:
        raise ValueError(
            f"the output layer's weight says tensor_model_parallel=False, but its layer splits {layer.output_size} "
            f"rows over {tp_size} tensor-parallel ranks: a replicated weight is not supported, shard it"
        )
    if getattr(weight, "partition_dim", 0) not in (0, -1):
        raise ValueError(
            f"the output layer's weight must be sharded along dim 0, the vocabulary, got "
            f"partition_dim={weight.partition_dim}"
        )
    return weight


def check_labels(labels_BS: torch.Tensor, num_classes: int) -> None:
    """``LCE_CHECK_LABELS=1``: raise IndexError naming the first bad label's place in the batch."""
    checks.refuse_under_graph_capture("LCE_CHECK_LABELS=1", labels_BS.device)
    positions = (labels_BS >= num_classes).nonzero()
    if len(positions):
        batch, position = positions[0].tolist()
        raise IndexError(
            f"labels[{batch}, {position}] (sample {batch} of this rank's micro-batch, token {position}) is "
            f"{int(labels_BS[batch, position])}: the vocabulary, padding included, has {num_classes} rows; negative "
            f"labels are ignored ({len(positions)} such label(s))"
        )


def own_linear_layer() -> type | None:
    """The output layer of Megatron branches that bring a ``linear`` of their own, for Blackwell only."""
    try:
        from megatron.core.transformer.linear_cross_entropy import LinearCrossEntropyModule
    except ImportError:
        return None
    return LinearCrossEntropyModule


def check_model_class(model: torch.nn.Module, known: tuple[type, ...]) -> None:
    """Raise ``NotImplementedError`` for a language model whose loss path the hook does not know."""
    if not isinstance(model, known):
        names = " and ".join(cls.__name__ for cls in known)
        raise _refused(
            f"{type(model).__name__}; it knows {names}",
            "if its forward calls output_layer and then compute_language_model_loss, name it in "
            "loongforge.megatron.install(models=[...]); or set cross_entropy_fusion_impl='native'",
        )


def megatron_fsdp_refused() -> NotImplementedError:
    """The error for Megatron-FSDP, wherever it is met first."""
    return _refused(
        "Megatron-FSDP (it decides when the weight is released, and the loss comes after the layer's forward)",
        "use the distributed optimizer instead of --use-megatron-fsdp",
    )


def _refused(what: str, instead: str) -> NotImplementedError:
    return NotImplementedError(f"cross_entropy_fusion_impl='linear' does not support {what}: {instead}, {_OFF}")
