"""The two row kernels in Triton, for NVIDIA and AMD GPUs; one program handles one row of a chunk.

Both kernels only move memory: ``accumulate`` reads the chunk once, ``gradient_`` reads and writes it once.  What
makes them fast is 16-byte accesses, several of them in flight per thread, and few instructions per logit.

A row is cut like this, so that every access of the body is a full and aligned 16-byte vector for any vocabulary,
row stride and base address:

    | head: < VEC logits up to a 16-byte boundary | body: whole vectors | tail: < VEC logits |

The body is walked in tiles of [LANES, VEC] logits.  Each lane (one vector wide) keeps a running maximum and sum, so
that rescaling the sum costs one exponential per vector; lanes meet once per row.  Head and tail together are the
"edges", skipped where the row has none.  Nothing is compiled for a particular number of classes, stride or address:
integers and pointers are exempt from Triton's specialisation, and sizes enter as 64-bit values.

exp(x - max) is computed as exp2((x - max) * log2(e)) with the difference first: near logits of 2000 a folded
exp2(x * log2(e) - max * log2(e)) would be off by 1e-4.
"""

import functools
import math
import struct
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from loongforge.kernels.interface import Chunk, LogitTransform, RowCoefficients, RowStats
from loongforge.kernels.triton_losses import token_losses

LOG2_E = tl.constexpr(math.log2(math.e))

# Values of the kernels' TRANSFORM argument: what turns a stored logit z into the logit x of the loss.
IDENTITY = tl.constexpr(0)  # x = z
SCALE = tl.constexpr(1)  # x = factor * z
SOFTCAP = tl.constexpr(2)  # x = softcap * tanh(factor * z)


@triton.jit
def _float_from_bits(bits, DTYPE: tl.constexpr):
    """Undo :func:`_bits`.  Triton passes Python floats as float32, which is too coarse for float64 logits."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True).to(DTYPE)


@triton.jit
def _tanh(u):
    """tanh from exp2; near 0, where 1 - e cancels, float32 takes the Taylor series (relative error 1e-8)."""
    a = tl.abs(u)
    e = tl.exp2(a * (-2.0 * LOG2_E))
    t = (1.0 - e) / (1.0 + e)
    t = tl.where(u < 0, -t, t)
    if u.dtype == tl.float32:
        v = u * u
        series = u + u * v * (-1.0 / 3.0 + v * (2.0 / 15.0 + v * (-17.0 / 315.0 + v * (62.0 / 2835.0))))
        t = tl.where(a < 0.25, series, t)
    return t


@triton.jit
def _transform(z, factor, softcap, TRANSFORM: tl.constexpr):
    """Return the logit x of the loss, and dx/dz."""
    if TRANSFORM == SOFTCAP:
        t = _tanh(z * factor)
        return softcap * t, softcap * factor * (1.0 - t * t)
    elif TRANSFORM == SCALE:
        return z * factor, factor
    else:
        return z, 1.0


@triton.jit
def _split_row(row_ptr, num_classes, VEC: tl.constexpr):
    """Return how many logits lie before the first 16-byte boundary, and how many whole vectors follow."""
    item_bytes: tl.constexpr = 16 // VEC
    head = (-row_ptr.to(tl.int64) & 15).to(tl.int32) // item_bytes
    head = tl.minimum(head, num_classes)
    return head, (num_classes - head) // VEC


@triton.jit
def _edges(head, num_vectors, num_classes, VEC: tl.constexpr):
    """Return the columns of head and tail in one small vector, and which of its entries exist."""
    edge = tl.arange(0, 2 * VEC)
    column = tl.where(edge < VEC, edge, head + num_vectors * VEC + edge - VEC)
    return column, (edge < head) | ((edge >= VEC) & (column < num_classes))


@triton.jit
def _offset(max_x):
    """The maximum to subtract: 0 where every logit so far was -inf, so that exp2 gives 0 and not NaN."""
    return tl.where(max_x == float("-inf"), 0.0, max_x)


@triton.jit
def _fold(max_a, sum_a, max_b, sum_b):
    """Merge two partial (maximum, sum of exponentials) pairs."""
    new_max = tl.maximum(max_a, max_b)
    offset = _offset(new_max)
    return new_max, sum_a * tl.exp2((max_a - offset) * LOG2_E) + sum_b * tl.exp2((max_b - offset) * LOG2_E)


@triton.jit
def _fold_tile(x, lane_max, lane_sum):
    """One online-softmax step of every lane over its vector of logits."""
    new_max = tl.maximum(lane_max, tl.max(x, 1))
    offset = _offset(new_max)
    tile_sum = tl.sum(tl.exp2((x - offset[:, None]) * LOG2_E), 1)
    return new_max, lane_sum * tl.exp2((lane_max - offset) * LOG2_E) + tile_sum


@triton.jit
def _weighted(x, class_weight_ptr, column, valid):
    """``class_weight * x``; columns that do not exist were loaded as 0 and stay 0."""
    if class_weight_ptr is not None:
        return x * tl.load(class_weight_ptr + column, mask=valid, other=0.0)
    else:
        return x + 0.0  # Triton 3.6 fails on a sum of what was loaded and nothing else (OptimizeThreadLocality)


# Every pointer and number: the kernels find out about alignment themselves.
_NUMBERS = ("row_stride", "num_classes", "first_class", "factor_bits", "softcap_bits")
_POINTERS = ("logits_ptr", "label_ptr", "max_ptr", "class_weight_ptr")
_UNSPECIALIZED_ACCUMULATE = [*_NUMBERS, *_POINTERS, "sum_exp_ptr", "label_logit_ptr", "weighted_sum_ptr"]
_UNSPECIALIZED_GRADIENT = [*_NUMBERS, *_POINTERS, "softmax_over_sum_ptr", "onehot_ptr", "uniform_ptr"]


@triton.jit(do_not_specialize=_UNSPECIALIZED_ACCUMULATE)
def accumulate_kernel(
    logits_ptr,
    label_ptr,
    max_ptr,
    sum_exp_ptr,
    label_logit_ptr,
    weighted_sum_ptr,  # None: not wanted
    class_weight_ptr,  # None: all ones
    row_stride: tl.int64,
    num_classes: tl.int32,
    first_class: tl.int64,
    factor_bits: tl.int64,
    softcap_bits: tl.int64,
    TRANSFORM: tl.constexpr,
    LANES: tl.constexpr,
):
    VEC: tl.constexpr = 128 // logits_ptr.dtype.element_ty.primitive_bitwidth
    STAT: tl.constexpr = max_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    factor = _float_from_bits(factor_bits, STAT)
    softcap = _float_from_bits(softcap_bits, STAT)

    # Needed only at the end; asked for first, so that the body hides the latency.
    old_max = tl.load(max_ptr + row)
    old_sum = tl.load(sum_exp_ptr + row)
    label = tl.load(label_ptr + row) - first_class
    label_is_here = (label >= 0) & (label < num_classes)
    label_z = tl.load(row_ptr + label, mask=label_is_here, other=0.0).to(STAT)

    head, num_vectors = _split_row(row_ptr, num_classes, VEC)
    lane = tl.arange(0, LANES)
    column = lane[:, None] * VEC + tl.arange(0, VEC)[None, :]
    body_ptr = tl.multiple_of(row_ptr + head, 16)
    lane_max = tl.full((LANES,), float("-inf"), STAT)
    lane_sum = tl.zeros((LANES,), STAT)
    lane_weighted = tl.zeros((LANES,), STAT)

    num_full = num_vectors // LANES
    for tile in range(num_full):
        z = tl.load(body_ptr + tile * (LANES * VEC) + column, eviction_policy="evict_first").to(STAT)
        x, _ = _transform(z, factor, softcap, TRANSFORM)
        lane_max, lane_sum = _fold_tile(x, lane_max, lane_sum)
        if weighted_sum_ptr is not None:
            body_column = head + tile * (LANES * VEC) + column
            lane_weighted += tl.sum(_weighted(x, class_weight_ptr, body_column, body_column >= 0), 1)

    if num_vectors > num_full * LANES:
        valid = (num_full * LANES + lane < num_vectors)[:, None]
        z = tl.load(body_ptr + num_full * (LANES * VEC) + column, mask=valid, other=0.0, eviction_policy="evict_first")
        x, _ = _transform(z.to(STAT), factor, softcap, TRANSFORM)
        lane_max, lane_sum = _fold_tile(tl.where(valid, x, float("-inf")), lane_max, lane_sum)
        if weighted_sum_ptr is not None:
            body_column = head + num_full * (LANES * VEC) + column
            lane_weighted += tl.sum(_weighted(x, class_weight_ptr, body_column, valid), 1)

    weighted_sum = tl.sum(lane_weighted, 0)
    if num_vectors * VEC < num_classes:
        edge_column, edge_valid = _edges(head, num_vectors, num_classes, VEC)
        z = tl.load(row_ptr + edge_column, mask=edge_valid, other=0.0).to(STAT)
        x, _ = _transform(z, factor, softcap, TRANSFORM)
        if weighted_sum_ptr is not None:
            weighted_sum += tl.sum(_weighted(x, class_weight_ptr, edge_column, edge_valid), 0)
        x = tl.where(edge_valid, x, float("-inf"))
        edge_max = tl.max(x, 0)
        edge_sum = tl.sum(tl.exp2((x - _offset(edge_max)) * LOG2_E), 0)
        old_max, old_sum = _fold(old_max, old_sum, edge_max, edge_sum)

    row_max = tl.max(lane_max, 0)
    row_sum = tl.sum(lane_sum * tl.exp2((lane_max - _offset(row_max)) * LOG2_E), 0)
    new_max, new_sum = _fold(old_max, old_sum, row_max, row_sum)
    tl.store(max_ptr + row, new_max)
    tl.store(sum_exp_ptr + row, new_sum)
    label_x, _ = _transform(label_z, factor, softcap, TRANSFORM)
    tl.store(label_logit_ptr + row, label_x, mask=label_is_here)
    if weighted_sum_ptr is not None:
        tl.store(weighted_sum_ptr + row, tl.load(weighted_sum_ptr + row) + weighted_sum)


@triton.jit
def _gradient(z, column, valid, label, max_x, softmax_over_sum, onehot, uniform, class_weight_ptr, factor, softcap,
              TRANSFORM: tl.constexpr):  # fmt: skip
    """d loss / d z of a tile, vector or edge of one row."""
    x, slope = _transform(z, factor, softcap, TRANSFORM)
    grad_x = softmax_over_sum * tl.exp2((x - max_x) * LOG2_E)
    grad_x = tl.where(column == label, grad_x - onehot, grad_x)
    if uniform is not None:
        if class_weight_ptr is not None:
            grad_x -= uniform * tl.load(class_weight_ptr + column, mask=valid, other=0.0)
        else:
            grad_x -= uniform
    if TRANSFORM == IDENTITY:
        return grad_x
    else:
        return grad_x * slope


@triton.jit(do_not_specialize=_UNSPECIALIZED_GRADIENT)
def gradient_kernel(
    logits_ptr,
    label_ptr,
    max_ptr,
    softmax_over_sum_ptr,
    onehot_ptr,
    uniform_ptr,  # None: no label smoothing
    class_weight_ptr,  # None: all ones
    row_stride: tl.int64,
    num_classes: tl.int32,
    first_class: tl.int64,
    factor_bits: tl.int64,
    softcap_bits: tl.int64,
    TRANSFORM: tl.constexpr,
    LANES: tl.constexpr,
):
    VEC: tl.constexpr = 128 // logits_ptr.dtype.element_ty.primitive_bitwidth
    STAT: tl.constexpr = max_ptr.dtype.element_ty
    DTYPE: tl.constexpr = logits_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    factor = _float_from_bits(factor_bits, STAT)
    softcap = _float_from_bits(softcap_bits, STAT)

    max_x = tl.load(max_ptr + row)
    softmax_over_sum = tl.load(softmax_over_sum_ptr + row)
    onehot = tl.load(onehot_ptr + row)
    active = (softmax_over_sum != 0.0) | (onehot != 0.0)  # NaN counts as active
    uniform = None
    if uniform_ptr is not None:
        uniform = tl.load(uniform_ptr + row)
        active = active | (uniform != 0.0)
    max_x = tl.where(active, max_x, 0.0)
    label = tl.load(label_ptr + row) - first_class
    label = tl.where((label >= 0) & (label < num_classes), label, -1).to(tl.int32)

    head, num_vectors = _split_row(row_ptr, num_classes, VEC)
    lane = tl.arange(0, LANES)
    column = lane[:, None] * VEC + tl.arange(0, VEC)[None, :]
    body_ptr = tl.multiple_of(row_ptr + head, 16)
    # An inactive row is not read: z = 0 and max = 0 give 0 * exp(0) - 0.
    num_readable = tl.where(active, num_vectors, 0)

    num_full = num_vectors // LANES
    num_computed = num_readable // LANES
    for tile in range(num_computed):
        tile_ptr = body_ptr + tile * (LANES * VEC) + column
        z = tl.load(tile_ptr, eviction_policy="evict_last").to(STAT)
        body_column = head + tile * (LANES * VEC) + column
        grad = _gradient(z, body_column, body_column >= 0, label, max_x, softmax_over_sum, onehot, uniform,
                         class_weight_ptr, factor, softcap, TRANSFORM)  # fmt: skip
        tl.store(tile_ptr, grad.to(DTYPE))
    for tile in range(num_computed, num_full):
        tl.store(body_ptr + tile * (LANES * VEC) + column, tl.zeros((LANES, VEC), DTYPE))

    if num_vectors > num_full * LANES:
        valid = (num_full * LANES + lane < num_vectors)[:, None]
        readable = (num_full * LANES + lane < num_readable)[:, None]
        tile_ptr = body_ptr + num_full * (LANES * VEC) + column
        z = tl.load(tile_ptr, mask=readable, other=0.0, eviction_policy="evict_last").to(STAT)
        body_column = head + num_full * (LANES * VEC) + column
        grad = _gradient(z, body_column, valid, label, max_x, softmax_over_sum, onehot, uniform,
                         class_weight_ptr, factor, softcap, TRANSFORM)  # fmt: skip
        tl.store(tile_ptr, grad.to(DTYPE), mask=valid)

    if num_vectors * VEC < num_classes:
        edge_column, edge_valid = _edges(head, num_vectors, num_classes, VEC)
        readable = edge_valid & (edge_column < tl.where(active, num_classes, 0))
        z = tl.load(row_ptr + edge_column, mask=readable, other=0.0).to(STAT)
        grad = _gradient(z, edge_column, edge_valid, label, max_x, softmax_over_sum, onehot, uniform,
                         class_weight_ptr, factor, softcap, TRANSFORM)  # fmt: skip
        tl.store(row_ptr + edge_column, grad.to(DTYPE), mask=edge_valid)


@dataclass(frozen=True)
class LaunchConfig:
    """Threads of a program, and 16-byte vectors that each of them has in flight."""

    threads: int
    vectors: int

    def meta(self, warp_size: int) -> dict[str, int]:
        return {"LANES": self.threads * self.vectors, "num_warps": self.threads // warp_size}


# Best or within 2% of it on an H200 for rows of 8192 to 128256 bfloat16 logits: 3.8 to 4.5 TB/s.
ACCUMULATE_CONFIG = LaunchConfig(threads=128, vectors=2)
GRADIENT_CONFIG = LaunchConfig(threads=256, vectors=1)

_MAX_CLASSES = 2**31 - 2**20  # columns within a row are 32-bit; the margin covers the last tile


class TritonRowKernels:
    """:class:`loongforge.kernels.interface.RowKernels` on NVIDIA and AMD GPUs."""

    name = "triton"

    def accumulate(self, logits_TC: torch.Tensor, chunk: Chunk, stats: RowStats) -> None:
        rows = (stats.max_T, stats.sum_exp_T, stats.label_logit_T, stats.weighted_sum_T)
        _launch(accumulate_kernel, ACCUMULATE_CONFIG, logits_TC, chunk, rows)

    def gradient_(self, logits_TC: torch.Tensor, chunk: Chunk, coefficients: RowCoefficients) -> None:
        c = coefficients
        rows = (c.max_T, c.softmax_over_sum_T, c.onehot_T, c.uniform_T)
        _launch(gradient_kernel, GRADIENT_CONFIG, logits_TC, chunk, rows)

    token_losses = staticmethod(token_losses)


def _launch(kernel, config: LaunchConfig, logits_TC: torch.Tensor, chunk: Chunk, per_token) -> None:
    """Start one program per row on the device of the logits, which need not be the current one."""
    num_tokens, num_classes = logits_TC.shape
    if num_tokens == 0 or num_classes == 0:
        return
    assert num_classes == 1 or logits_TC.stride(1) == 1, f"logits need unit stride along C, got {logits_TC.stride()}"
    assert num_classes <= _MAX_CLASSES, f"a chunk has at most {_MAX_CLASSES} classes, got {num_classes}"
    vectors = _vectors(chunk, per_token)
    for vector in vectors:
        assert vector is None or vector.is_contiguous(), "per-token and per-class tensors must be contiguous"
    mode, factor, softcap = _transform_arguments(chunk.transform)
    numbers = (logits_TC.stride(0), num_classes, chunk.first_class, _bits(factor), _bits(softcap))
    with torch.cuda.device(logits_TC.device) if logits_TC.is_cuda else nullcontext():
        kernel[(num_tokens,)](
            logits_TC,
            *vectors,
            *numbers,
            TRANSFORM=mode,
            **config.meta(_warp_size(logits_TC.device)),
            enable_fp_fusion=True,  # whatever this Triton's default
        )


def _vectors(chunk: Chunk, per_token) -> tuple[torch.Tensor | None, ...]:
    """Labels, what a kernel has per token, and class weights, which belong to the last of it and go without it."""
    return chunk.label_T, *per_token, None if per_token[-1] is None else chunk.class_weight_C


def _transform_arguments(transform: LogitTransform) -> tuple[int, float, float]:
    if transform.softcap is not None:
        return SOFTCAP.value, transform.logit_scale / transform.softcap, transform.softcap
    if transform.logit_scale != 1.0:
        return SCALE.value, transform.logit_scale, 1.0
    return IDENTITY.value, 1.0, 1.0


def _bits(value: float) -> int:
    """The float64 bit pattern as an int64, which reaches the kernel exactly."""
    return struct.unpack("<q", struct.pack("<d", value))[0]


@functools.cache
def _warp_size(device: torch.device) -> int:
    """Threads of a warp: 32 on NVIDIA and RDNA, 64 on CDNA."""
    return torch.cuda.get_device_properties(device).warp_size if device.type == "cuda" else 32
