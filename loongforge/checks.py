"""Validation of the tensors of one call: every message says what was expected, what came and what to do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from loongforge import sharded
from loongforge.options import LossOptions
from loongforge.parallel import VocabParallel

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_QUANTISED = {
    "transformer_engine": "{}.dequantize()",
    "torchao": "{}.dequantize()",
    "bitsandbytes": "bitsandbytes.functional.dequantize_4bit({0}.data, {0}.quant_state)",
}
"""Packages whose tensor classes name a float dtype but hold something else, and how to get float rows out of them."""
_LABEL_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def compute_dtype(hidden: torch.Tensor) -> torch.dtype:
    """Dtype of the matrix products: autocast's where it is enabled for hidden's device, else hidden's own."""
    device_type = hidden.device.type
    if hidden.dtype != torch.float64 and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return hidden.dtype


def check_inputs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    class_weight: torch.Tensor | None,
    normalizer: torch.Tensor | float | None,
    options: LossOptions,
    parallel: VocabParallel,
) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless the tensors fit together; never synchronises with the host."""
    named = {"hidden": hidden, "weight": weight, "target": target, "bias": bias, "class_weight": class_weight}
    for name, value in named.items():
        if value is not None or name in ("hidden", "weight", "target"):
            check_tensor(name, value, hidden)
    check_operands(hidden, {"hidden": hidden, "weight": weight, "bias": bias})
    _check_target_dtype(target)
    _check_weight_shape(weight, hidden, options, parallel)
    _check_target_shape(hidden, target, parallel)
    _check_normalizer(normalizer, hidden, options)
    num_rows = weight.shape[0]
    num_classes = options.vocab_size or num_rows * parallel.size
    if bias is not None and bias.shape != (num_rows,):
        raise ValueError(f"bias must have shape [{num_rows}] as weight's rows, got {list(bias.shape)}")
    _check_class_weight(class_weight, num_classes)


def check_tensor(name: str, value: object, hidden: torch.Tensor) -> None:
    """A plain tensor with data, on hidden's device."""
    tensor = _check_plain_tensor(name, value)
    if tensor.device != hidden.device:
        raise ValueError(f"{name} is on {tensor.device}, hidden on {hidden.device}: move them to one device")
    check_is_here(name, tensor)


def check_token_weight(token_weight: torch.Tensor | None, target: torch.Tensor) -> None:
    """``token_weight`` has one bool or number for each label."""
    if token_weight is None:
        return
    _check_plain_tensor("token_weight", token_weight)
    if token_weight.shape != target.shape or token_weight.device != target.device or token_weight.is_complex():
        raise ValueError(
            f"token_weight must have target's shape {list(target.shape)} on {target.device}, got "
            f"{list(token_weight.shape)} of {token_weight.dtype} on {token_weight.device}"
        )
    check_is_here("token_weight", token_weight)


def check_adapter(
    adapter: tuple[torch.Tensor, torch.Tensor] | None, hidden: torch.Tensor, weight: torch.Tensor
) -> None:
    """``adapter`` is ``(low_rank [..., R], up [V, R])`` for hidden [..., H] and a frozen weight [V, H]."""
    if adapter is None:
        return
    if not isinstance(adapter, tuple) or len(adapter) != 2:
        raise TypeError(f"adapter must be a pair (low_rank [..., R], up [V, R]), got {type(adapter).__name__}")
    for name, tensor in zip(("adapter[0]", "adapter[1]"), adapter, strict=True):
        _check_plain_tensor(name, tensor)
        if tensor.dtype not in FLOAT_DTYPES or tensor.device != hidden.device:
            raise TypeError(f"{name} must be a float tensor on {hidden.device}, got {tensor.dtype} on {tensor.device}")
        check_is_here(name, tensor)
    low_rank, up = adapter
    if low_rank.shape[:-1] != hidden.shape[:-1] or up.dim() != 2 or up.shape != (weight.shape[0], low_rank.shape[-1]):
        raise ValueError(
            f"adapter must be [..., R] like hidden {list(hidden.shape)} and [{weight.shape[0]}, R] like weight's rows, "
            f"got {list(low_rank.shape)} and {list(up.shape)}"
        )
    autocast = torch.is_autocast_enabled(hidden.device.type)
    if not autocast and not low_rank.dtype == up.dtype == hidden.dtype:
        raise TypeError(f"hidden is {hidden.dtype}, the adapter {low_rank.dtype} and {up.dtype}: cast them")
    if weight.requires_grad:
        raise ValueError(
            "weight requires a gradient beside an adapter: freeze it (weight.requires_grad_(False), or pass "
            "weight.detach()), or train weight + up @ down as one matrix"
        )


def refuse_function_transforms() -> None:
    """``torch.func`` transforms would see an operation whose backward is not made of differentiable pieces."""
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        raise NotImplementedError(
            "the fused loss does not run inside torch.func transforms (grad, vjp, jvp, vmap, hessian, functionalize): "
            "use torch.autograd.grad or loss.backward(); torch.func.functional_call works outside of them"
        )


def refuse_batched_gradients(grads: Sequence[torch.Tensor | None]) -> None:
    """``vmap`` over a backward, of which ``is_grads_batched=True`` is an older kind than ``torch.vmap``."""
    batched = torch._C._functorch.is_batchedtensor, torch._C._functorch.is_legacy_batchedtensor
    if any(grad is not None and any(kind(grad) for kind in batched) for grad in grads):
        raise NotImplementedError(
            "a backward of loongforge takes one upstream gradient: torch.autograd.grad(..., is_grads_batched=True), "
            "torch.autograd.functional.jacobian(vectorize=True) and torch.vmap over torch.autograd.grad bring several; "
            "call torch.autograd.grad(..., retain_graph=True) once for each"
        )


def check_logits(logits: torch.Tensor, target: torch.Tensor) -> None:
    """:func:`check_inputs` for logits that already exist."""
    for name, tensor in (("logits", logits), ("target", target)):
        _check_plain_tensor(name, tensor)
    if logits.dtype not in FLOAT_DTYPES:
        raise TypeError(f"logits must be bfloat16, float16, float32 or float64, got {logits.dtype}: cast them first")
    _check_target_dtype(target)
    if logits.dim() == 0 or logits.shape[-1] == 0 or target.shape != logits.shape[:-1]:
        raise ValueError(
            f"logits must be [..., V] and target their leading shape, got {list(logits.shape)} and {list(target.shape)}"
        )
    if target.device != logits.device:
        raise ValueError(f"target is on {target.device}, logits on {logits.device}: move them to one device")


def check_reduction(
    logits: torch.Tensor,
    class_weight: torch.Tensor | None,
    normalizer: torch.Tensor | float | None,
    options: LossOptions,
    num_classes: int,
) -> None:
    """What weighs and divides the losses of existing logits."""
    _check_normalizer(normalizer, logits, options)
    check_class_weight(class_weight, logits, num_classes)


def check_class_weight(class_weight: torch.Tensor | None, like: torch.Tensor, num_classes: int) -> None:
    """A float tensor of one weight per class, on the device of ``like``."""
    if class_weight is not None:
        _check_plain_tensor("class_weight", class_weight)
        if class_weight.device != like.device:
            raise ValueError(f"class_weight is on {class_weight.device}, the rest on {like.device}: move them together")
    _check_class_weight(class_weight, num_classes)


def _check_class_weight(class_weight: torch.Tensor | None, num_classes: int) -> None:
    if class_weight is not None and (class_weight.shape != (num_classes,) or not class_weight.is_floating_point()):
        raise ValueError(
            f"class_weight must be a float tensor of shape [{num_classes}], the global vocabulary on every rank, "
            f"got {list(class_weight.shape)} of {class_weight.dtype}"
        )


def _check_normalizer(normalizer: object, hidden: torch.Tensor, options: LossOptions) -> None:
    if normalizer is None:
        return
    if options.reduction != "mean":
        raise ValueError(f"normalizer needs reduction='mean', got reduction={options.reduction!r}")
    if isinstance(normalizer, torch.Tensor):
        _check_plain_tensor("normalizer", normalizer)
        if normalizer.numel() != 1 or normalizer.device != hidden.device or normalizer.is_complex():
            raise ValueError(
                f"normalizer must be a number or a tensor of one real element on {hidden.device}, "
                f"got shape {list(normalizer.shape)} of {normalizer.dtype} on {normalizer.device}"
            )
    elif isinstance(normalizer, bool) or not isinstance(normalizer, (int, float)):
        raise TypeError(f"normalizer must be a number or a scalar tensor, got {type(normalizer).__name__}")
    else:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        largest = torch.finfo(dtype).max
        if abs(normalizer) > largest and abs(normalizer) != math.inf:
            raise ValueError(f"normalizer must fit {dtype}, got a number beyond {largest:.1e}")


def check_is_here(name: str, tensor: torch.Tensor) -> None:
    """Raise unless ``tensor`` is dense and all of it is in memory."""
    _check_has_data(name, tensor)
    if not torch.compiler.is_compiling():
        sharded.refuse_shard(name, tensor)


def _check_has_data(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_meta or tensor.layout != torch.strided:
        kind = "a meta tensor" if tensor.is_meta else f"layout {tensor.layout}"
        raise TypeError(f"{name} must be a dense tensor with data, got {kind}")


def _check_plain_tensor(name: str, tensor: object) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if type(tensor).__name__ == "DTensor":
        raise TypeError(
            f"{name} is a DTensor with placements {tensor.placements}: "  # type: ignore[attr-defined]
            f"pass {name}.to_local() and, for a weight sharded over its rows, tp_group=; "
            "or gather it with full_tensor()"
        )
    if torch.compiler.is_compiling() or type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor
    for cls in type(tensor).__mro__:
        how = _QUANTISED.get(cls.__module__.partition(".")[0])
        if how is not None:
            raise TypeError(
                f"{name} is a quantised {cls.__module__}.{type(tensor).__name__}: the output layer takes bf16, fp16 or "
                f"fp32 rows; keep it out of quantisation, or pass {how.format(name)}"
            )
    return tensor


def check_operands(hidden: torch.Tensor, named: Mapping[str, torch.Tensor | None]) -> None:
    """Floats of hidden's dtype, or of any under autocast."""
    for name, tensor in named.items():
        if tensor is not None and tensor.dtype not in FLOAT_DTYPES:
            raise TypeError(
                f"{name} must be bfloat16, float16, float32 or float64, got {tensor.dtype}: dequantise or cast it first"
            )
    autocast = compute_dtype(hidden) != hidden.dtype or torch.is_autocast_enabled(hidden.device.type)
    for name, tensor in named.items():
        if tensor is not None and tensor.dtype != hidden.dtype and not (autocast and hidden.dtype != torch.float64):
            raise TypeError(
                f"hidden is {hidden.dtype} and {name} is {tensor.dtype}: cast one of them"
                + ("" if hidden.dtype == torch.float64 else ", or run under torch.autocast")
            )


def check_hidden(hidden: torch.Tensor) -> None:
    """For what looks at its shape before :func:`check_inputs` does."""
    _check_plain_tensor("hidden", hidden)
    if hidden.dim() < 2:
        raise ValueError(f"hidden must be [..., H] with at least two dimensions, got {list(hidden.shape)}")


def _check_target_dtype(target: torch.Tensor) -> None:
    if target.dtype not in _LABEL_DTYPES:
        kind = "class probabilities are not supported" if target.is_floating_point() else "cast it to int64"
        raise TypeError(f"target must hold integer class indices, got {target.dtype}; {kind}")


def _check_weight_shape(
    weight: torch.Tensor, hidden: torch.Tensor, options: LossOptions, parallel: VocabParallel
) -> None:
    if weight.numel() == 0 or weight.dim() != 2:
        raise ValueError(
            f"weight must be [V, H] with rows, got shape {list(weight.shape)}: it looks like a shard that was not "
            "gathered (DeepSpeed ZeRO-3: deepspeed.zero.GatheredParameters; FSDP: call the loss inside the wrapped "
            "module's forward)"
        )
    check_hidden(hidden)
    if hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden must be [..., H] with H = {weight.shape[1]} as in weight [V, H] = {list(weight.shape)}, "
            f"got {list(hidden.shape)}"
        )
    check_vocabulary("weight has", "rows", weight.shape[0], options, parallel)


def check_vocabulary(holder: str, unit: str, mine: int, options: LossOptions, parallel: VocabParallel) -> None:
    """The classes that the options name are those that ``mine`` of each rank make up."""
    size, vocab_size = parallel.size, options.vocab_size
    smoothed = options.label_smoothing and options.label_smoothing_formula == "megatron"
    if smoothed and (vocab_size or mine * size) == 1:
        raise ValueError("label_smoothing_formula='megatron' divides by V - 1 and needs a vocabulary of at least 2")
    if vocab_size is None:
        return
    if size > 1 and mine >= vocab_size:
        raise ValueError(
            f"{holder} {mine} {unit} for a vocabulary of {vocab_size} under a tensor-parallel group of {size}: it is "
            f"not sharded; pass rank {parallel.rank}'s {unit} (about {-(-vocab_size // size)}), or tp_group=None"
        )
    if mine * size < vocab_size:
        raise ValueError(
            f"{holder} {mine} {unit} on each of {size} rank(s), fewer in all than vocab_size = {vocab_size}"
        )


def _check_target_shape(hidden: torch.Tensor, target: torch.Tensor, parallel: VocabParallel) -> None:
    expected = list(hidden.shape[:-1])
    gathered = ""
    if parallel.sequence_parallel:
        expected[0] *= parallel.size
        gathered = f", dim 0 times {parallel.size} because sequence_parallel gathers it over the group"
    if list(target.shape) != expected:
        raise ValueError(
            f"target must have shape {expected} (hidden's {list(hidden.shape)} without H{gathered}), "
            f"got {list(target.shape)}: {hidden.shape[:-1].numel()} hidden rows, {target.numel()} labels"
        )


def check_labels_in_range(target: torch.Tensor, out_of_range: torch.Tensor, num_classes: int) -> None:
    """``LCE_CHECK_LABELS=1``: raise IndexError naming the first bad label.  Synchronises with the host."""
    refuse_under_graph_capture("LCE_CHECK_LABELS=1", target.device)
    positions = out_of_range.nonzero()
    if len(positions):
        row = positions[0].tolist()
        value = int(target[tuple(row)])
        raise IndexError(
            f"target{row} is {value}: labels must be in [0, {num_classes}) or equal to ignore_index "
            f"({len(positions)} such label(s))"
        )


def check_number_of_tokens(count: torch.Tensor, bound: int) -> None:
    """``LCE_CHECK_LABELS=1``: raise ValueError where more tokens carry a loss than ``compact_tokens`` allows."""
    refuse_under_graph_capture("LCE_CHECK_LABELS=1", count.device)
    if int(count) > bound:
        raise ValueError(f"{int(count)} tokens carry a loss, more than compact_tokens={bound}: raise the bound")


def refuse_under_graph_capture(name: str, device: torch.device, remedy: str = "unset it") -> None:
    """What reads a result on the host cannot be recorded by a CUDA graph."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{name} synchronises with the host and cannot run under CUDA graph capture: {remedy}")
