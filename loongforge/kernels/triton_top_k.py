"""The largest logits of each row in Triton, chunk by chunk; one program handles one row of a chunk.

A logit and its class travel as one int64 key, the float32 logit's bits in sortable form above, the class below and
turned around: keys sort by descending logit, and equal logits by ascending class.  A tile that holds no key larger
than the smallest kept one is passed over, any other is reduced to its own K largest keys and merged.
"""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl

from loongforge.kernels.interface import LogitTransform
from loongforge.kernels.triton_rows import (
    _bits,
    _float_from_bits,
    _transform,
    _transform_arguments,
    _warp_size,
)

BLOCK = 1024
"""Columns of one tile."""
THREADS = 128
_LOW_BITS = tl.constexpr(2**32 - 1)
_NAN_BITS = tl.constexpr(2**31 - 1)
_SMALLEST_KEY = tl.constexpr(-(2**63))


@triton.jit
def _key(x, classes):
    """Sortable key of float32 logits; NaN is the largest, as in torch.sort, and -0 equals 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(x == x, bits, _NAN_BITS)
    return (bits.to(tl.int64) << 32) | (-classes.to(tl.int64) + _LOW_BITS)


@triton.jit
def _logit(key):
    bits = (key >> 32).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _class(key):
    return -(key & _LOW_BITS) + _LOW_BITS


_POINTERS = ("logits_ptr", "values_ptr", "classes_ptr")
_NUMBERS = ("row_stride", "num_classes", "first_class", "k", "factor_bits", "softcap_bits")


@triton.jit(do_not_specialize=[*_POINTERS, *_NUMBERS])
def top_k_kernel(
    logits_ptr,
    values_ptr,
    classes_ptr,
    row_stride: tl.int64,
    num_classes: tl.int32,
    first_class: tl.int64,
    k: tl.int32,
    factor_bits: tl.int64,
    softcap_bits: tl.int64,
    TRANSFORM: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    factor, softcap = _float_from_bits(factor_bits, tl.float32), _float_from_bits(softcap_bits, tl.float32)
    place = tl.arange(0, K)
    values = tl.load(values_ptr + row * k + place, mask=place < k, other=0.0)
    classes = tl.load(classes_ptr + row * k + place, mask=place < k, other=0)
    kept = tl.where(place < k, _key(values, classes), _SMALLEST_KEY)
    smallest = tl.min(tl.where(place < k, kept, 2**63 - 1), 0)
    for start in range(0, num_classes, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(row_ptr + column, mask=column < num_classes, other=0.0).to(tl.float32)
        x, _ = _transform(z, factor, softcap, TRANSFORM)
        keys = tl.where(column < num_classes, _key(x, first_class + column), _SMALLEST_KEY)
        if tl.max(keys, 0) > smallest:
            best = tl.topk(keys, K)
            kept = tl.topk(tl.reshape(tl.join(kept, best), (2 * K,)), K)
            smallest = tl.min(tl.where(place < k, kept, 2**63 - 1), 0)
    tl.store(values_ptr + row * k + place, _logit(kept), mask=place < k)
    tl.store(classes_ptr + row * k + place, _class(kept), mask=place < k)


def fold_top_k(
    logits_TC: torch.Tensor,
    first_class: int,
    values_TK: torch.Tensor,
    classes_TK: torch.Tensor,
    transform: LogitTransform,
) -> None:
    """:meth:`loongforge.kernels.interface.OutputKernels.top_k_` for logits of at most 32 bits."""
    num_tokens, num_classes = logits_TC.shape
    if num_tokens == 0 or num_classes == 0:
        return
    assert num_classes == 1 or logits_TC.stride(1) == 1, f"logits need unit stride along C, got {logits_TC.stride()}"
    assert values_TK.is_contiguous() and classes_TK.is_contiguous(), "values and classes must be contiguous"
    assert values_TK.dtype == torch.float32 and logits_TC.dtype != torch.float64, "float64 keys do not fit 64 bits"
    mode, factor, softcap = _transform_arguments(transform)
    k = values_TK.shape[1]
    with torch.cuda.device(logits_TC.device) if logits_TC.is_cuda else nullcontext():
        top_k_kernel[(num_tokens,)](
            logits_TC, values_TK, classes_TK,
            logits_TC.stride(0), num_classes, first_class, k, _bits(factor), _bits(softcap),
            TRANSFORM=mode, **top_k_meta(k, _warp_size(logits_TC.device)),
            enable_fp_fusion=True,  # whatever this Triton's default
        )  # fmt: skip


def top_k_meta(k: int, warp_size: int) -> dict[str, int]:
    """Compile-time numbers of the kernel for the k largest."""
    return {"K": max(2, triton.next_power_of_2(k)), "BLOCK": BLOCK, "num_warps": THREADS // warp_size}
