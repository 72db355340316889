"""The tile kernels of :mod:`loongforge.kernels.triton_tiles` with specialised warps, in Gluon, for Hopper.

A program has two warpgroups that multiply what a third group of warps loads: :mod:`loongforge.kernels.gluon_ring`.
A warpgroup holds its part of a tile in accumulators of 128 columns: three for the statistics of plain logits, since a
wider tile loads less per product and what moves operands takes power from the clock; two where gradients or options
need the registers.

A block's first four warps compute the logits at the labels meanwhile, each a row by itself.  Were they to wait for
each other it would be at barrier 0, which racecheck takes for a barrier of the whole block (``docs/performance.md``);
other warps have barriers with numbers of their own.

Gluon is an experimental part of Triton: ``dispatch.py`` says with which versions this file is used.
"""

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from loongforge.kernels.gluon_ring import (
    BLOCK_H,
    BLOCK_T,
    COLUMNS,
    GROUP,
    OPERAND,
    REGISTERS,
    ROWS,
    TILE,
    WARPGROUPS,
    WIDE,
    _load_tiles,
    _logits,
    _nothing,
    _open_ring,
)
from loongforge.kernels.interface import Chunk, RowStats
from loongforge.kernels.triton_rows import LOG2_E, _float_from_bits, _gradient, _offset, _transform
from loongforge.kernels.triton_tiles import TritonTileKernels, _tile_position, _weighted_tile

_copy_out = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

NARROW = gl.constexpr(2)  # accumulators
WIDE_STAGES = gl.constexpr(7)  # as many as shared memory holds
NARROW_STAGES = gl.constexpr(8)  # beside the staging buffers
STAGING = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
LABEL_ROWS = gl.constexpr(4)  # of four warps, a row each
LABEL_COLUMNS = gl.constexpr(256)
LABEL_TILE = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))


@gluon.jit
def _with_bias(z, bias_ptr, first, num_classes):
    if bias_ptr is not None:
        column = _columns(first)
        z += gl.load(bias_ptr + column, mask=column < num_classes, other=0.0).to(gl.float32)[None, :]
    return z


@gluon.jit
def _columns(first):
    return first + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, TILE))


@gluon.jit
def _logit(z, first, bias_ptr, num_classes, factor, softcap, TRANSFORM: gl.constexpr):
    """The logit of the loss from an accumulator whose first column is ``first``; -inf past the last class."""
    z = _with_bias(z, bias_ptr, first, num_classes)
    x, _ = _transform(z, factor, softcap, TRANSFORM)
    if first + COLUMNS > num_classes:  # only the last tiles pay for the mask
        x = gl.where((_columns(first) < num_classes)[None, :], x, float("-inf"))
    return x


@gluon.jit
def _exponentials(x, scale, offset):
    """``2 ** (scale * x - offset)``, the exponent rounded once; a difference and a product would cost time."""
    return gl.exp2(gl.fma(x, scale[:, None], -offset[:, None]))


@gluon.jit
def _statistics_tiles(ring, work, shape, TRANSFORM: gl.constexpr, WEIGHTED_SUM: gl.constexpr, STAGES: gl.constexpr,
                      UNITS: gl.constexpr, WARPGROUP: gl.constexpr):  # fmt: skip
    gl.static_assert(UNITS == NARROW or not WEIGHTED_SUM, "a weighted sum adds up two accumulators")
    bias_ptr, partial_ptr, class_weight_ptr, factor, softcap = work
    num_tokens, num_classes, hidden_size = shape
    BLOCK_C: gl.constexpr = COLUMNS * UNITS
    num_tiles = gl.cdiv(num_tokens, BLOCK_T) * gl.cdiv(num_classes, BLOCK_C)
    step = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        a, b, c, step = _logits(ring, step, hidden_size, STAGES, UNITS, WARPGROUP)
        tile_t, tile_c = _tile_position(tile, num_tokens, num_classes, BLOCK_T, BLOCK_C, GROUP)
        row = tile_t * BLOCK_T + WARPGROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, TILE))
        first = tile_c * BLOCK_C
        a = _logit(a, first, bias_ptr, num_classes, factor, softcap, TRANSFORM)
        b = _logit(b, first + COLUMNS, bias_ptr, num_classes, factor, softcap, TRANSFORM)
        if UNITS == WIDE:
            c = _logit(c, first + 2 * COLUMNS, bias_ptr, num_classes, factor, softcap, TRANSFORM)
        partial = partial_ptr + tile_c.to(gl.int64) * num_tokens + row
        plane = gl.cdiv(num_classes, BLOCK_C).to(gl.int64) * num_tokens
        if WEIGHTED_SUM:
            weighted = _weighted_tile(a, _columns(first), class_weight_ptr, num_classes)
            weighted += _weighted_tile(b, _columns(first + COLUMNS), class_weight_ptr, num_classes)
            gl.store(partial + 2 * plane, gl.sum(weighted, 1), mask=row < num_tokens)
        tile_max = gl.max(gl.maximum(gl.maximum(a, b), c) if UNITS == WIDE else gl.maximum(a, b), 1)
        # From 2 ** 30 on numbers are so far apart that only the maximum itself counts, to any base: 2 makes the offset
        # exact, where its rounding would leave the range of exponents.
        reference = _offset(tile_max)
        scale = gl.where(gl.abs(reference) < 2.0**30, LOG2_E, 1.0)
        offset = reference * scale
        total = _exponentials(a, scale, offset) + _exponentials(b, scale, offset)
        if UNITS == WIDE:
            total += _exponentials(c, scale, offset)
        # The offset was rounded: what it is off by makes the sum one of exponentials below the maximum itself.
        rest = gl.exp2(gl.fma(reference, -scale, offset))
        gl.store(partial, tile_max, mask=row < num_tokens)
        gl.store(partial + plane, gl.sum(total, 1) * rest, mask=row < num_tokens)


@gluon.jit
def _label_logits(labels, bias_ptr, shape, factor, softcap, TRANSFORM: gl.constexpr, FIRST: gl.constexpr):
    """One dot product per row, cheaper than looking for the label in every tile; a warp's sums need no barrier."""
    hidden_ptr, weight_ptr, label_ptr, label_logit_ptr, hidden_stride, weight_stride, first_class = labels
    num_tokens, num_classes, hidden_size = shape
    column = gl.arange(0, LABEL_COLUMNS, layout=gl.SliceLayout(0, LABEL_TILE))
    for first_row in range(gl.program_id(0) * LABEL_ROWS, num_tokens, gl.num_programs(0) * LABEL_ROWS):
        row = (first_row + gl.arange(0, LABEL_ROWS, layout=gl.SliceLayout(1, LABEL_TILE))).to(gl.int64)
        exists = row < num_tokens
        label = gl.load(label_ptr + row, mask=exists, other=-1) - first_class
        inside = exists & (label >= 0) & (label < num_classes)
        label = gl.where(inside, label, 0)
        total = gl.zeros((LABEL_ROWS, LABEL_COLUMNS), gl.float32, LABEL_TILE)
        for k in range(0, hidden_size, LABEL_COLUMNS):
            place = (k + column)[None, :]
            mask = inside[:, None] & (place < hidden_size)
            hidden = gl.load(hidden_ptr + (row * hidden_stride)[:, None] + place, mask=mask, other=0.0)
            weight = gl.load(weight_ptr + (label * weight_stride)[:, None] + place, mask=mask, other=0.0)
            total += hidden.to(gl.float32) * weight.to(gl.float32)
        z = gl.sum(total, 1)
        if bias_ptr is not None:
            z += gl.load(bias_ptr + label, mask=inside, other=0.0).to(gl.float32)
        x, _ = _transform(z, factor, softcap, TRANSFORM)
        if FIRST:
            gl.store(label_logit_ptr + row, gl.where(inside, x, 0.0), mask=exists)
        else:
            gl.store(label_logit_ptr + row, x, mask=inside)


@gluon.jit
def _store_gradient(out_desc, staging, row, first, grad, active):
    """Store [ROWS, COLUMNS] through a staging buffer; what lies past the end is dropped."""
    tma.store_wait(0)  # whatever was in the staging buffer has left it
    staging.store(gl.where(active[:, None], grad, 0.0).to(out_desc.dtype))
    fence_async_shared()
    _copy_out(out_desc, [row, first], staging)


@gluon.jit
def _gradient_tiles(ring, work, shape, TRANSFORM: gl.constexpr, STAGES: gl.constexpr, UNITS: gl.constexpr,
                    WARPGROUP: gl.constexpr):  # fmt: skip
    (out_desc, staging, bias_ptr, label_ptr, max_ptr, softmax_over_sum_ptr, onehot_ptr, uniform_ptr, class_weight_ptr,
     first_class, factor, softcap) = work  # fmt: skip
    num_tokens, num_classes, hidden_size = shape
    BLOCK_C: gl.constexpr = COLUMNS * UNITS
    num_tiles = gl.cdiv(num_tokens, BLOCK_T) * gl.cdiv(num_classes, BLOCK_C)
    step = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        tile_t, tile_c = _tile_position(tile, num_tokens, num_classes, BLOCK_T, BLOCK_C, GROUP)
        first_row = tile_t * BLOCK_T + WARPGROUP * ROWS
        row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, TILE))
        row_exists = row < num_tokens
        # Asked for before the product, which hides the latency.
        max_x = gl.load(max_ptr + row, mask=row_exists, other=0.0)
        softmax_over_sum = gl.load(softmax_over_sum_ptr + row, mask=row_exists, other=0.0)
        onehot = gl.load(onehot_ptr + row, mask=row_exists, other=0.0)
        label = gl.load(label_ptr + row, mask=row_exists, other=-1) - first_class
        label = gl.where((label >= 0) & (label < num_classes), label, -1).to(gl.int32)
        active = (softmax_over_sum != 0.0) | (onehot != 0.0)
        uniform = None
        if uniform_ptr is not None:
            row_uniform = gl.load(uniform_ptr + row, mask=row_exists, other=0.0)
            active = active | (row_uniform != 0.0)
            uniform = row_uniform[:, None]
        a, b, _, step = _logits(ring, step, hidden_size, STAGES, UNITS, WARPGROUP)
        for unit in gl.static_range(UNITS):
            first = tile_c * BLOCK_C + unit * COLUMNS
            z = _with_bias(a if unit == 0 else b, bias_ptr, first, num_classes)
            column = _columns(first)
            grad = _gradient(z, column[None, :], (column < num_classes)[None, :], label[:, None], max_x[:, None],
                             softmax_over_sum[:, None], onehot[:, None], uniform, class_weight_ptr, factor, softcap,
                             TRANSFORM)  # fmt: skip
            _store_gradient(out_desc, staging.index(WARPGROUP), first_row, first, grad, active)
    tma.store_wait(0)


_NUMBERS = ["num_tokens", "num_classes", "first_class", "factor_bits", "softcap_bits"]


@gluon.jit(do_not_specialize=_NUMBERS)
def statistics_kernel(
    hidden_desc,
    weight_desc,
    hidden_ptr,
    weight_ptr,
    label_ptr,
    label_logit_ptr,
    hidden_stride: gl.int64,
    weight_stride: gl.int64,
    first_class: gl.int64,
    bias_ptr,  # None: no bias
    partial_ptr,  # [2 or 3, num_tiles_c, num_tokens]: maximum, sum of exponentials, weighted sum
    class_weight_ptr,  # None: all ones
    num_tokens: gl.int32,
    num_classes: gl.int32,
    hidden_size: gl.int32,
    factor_bits: gl.int64,
    softcap_bits: gl.int64,
    TRANSFORM: gl.constexpr,
    WEIGHTED_SUM: gl.constexpr,
    UNITS: gl.constexpr,
    FIRST: gl.constexpr,  # nothing was accumulated before
):
    factor = _float_from_bits(factor_bits, gl.float32)
    softcap = _float_from_bits(softcap_bits, gl.float32)
    work = (bias_ptr, partial_ptr, class_weight_ptr, factor, softcap)
    labels = (hidden_ptr, weight_ptr, label_ptr, label_logit_ptr, hidden_stride, weight_stride, first_class)
    shape = (num_tokens, num_classes, hidden_size)
    STAGES: gl.constexpr = WIDE_STAGES if UNITS == WIDE else NARROW_STAGES
    ring = _open_ring(hidden_desc.dtype, STAGES, UNITS)
    gl.warp_specialize(
        [
            (_label_logits, (labels, bias_ptr, shape, factor, softcap, TRANSFORM, FIRST)),
            (_statistics_tiles, (ring, work, shape, TRANSFORM, WEIGHTED_SUM, STAGES, UNITS, 0)),
            (_statistics_tiles, (ring, work, shape, TRANSFORM, WEIGHTED_SUM, STAGES, UNITS, 1)),
            (_load_tiles, (hidden_desc, weight_desc, ring, shape, STAGES, UNITS)),
        ],
        [4, 4, 1],
        [REGISTERS, REGISTERS, 24],
    )


@gluon.jit(do_not_specialize=_NUMBERS)
def tile_gradient_kernel(
    hidden_desc,
    weight_desc,
    out_desc,
    bias_ptr,  # None: no bias
    label_ptr,
    max_ptr,
    softmax_over_sum_ptr,
    onehot_ptr,
    uniform_ptr,  # None: no label smoothing
    class_weight_ptr,  # None: all ones
    num_tokens: gl.int32,
    num_classes: gl.int32,
    first_class: gl.int64,
    hidden_size: gl.int32,
    factor_bits: gl.int64,
    softcap_bits: gl.int64,
    TRANSFORM: gl.constexpr,
):
    factor = _float_from_bits(factor_bits, gl.float32)
    softcap = _float_from_bits(softcap_bits, gl.float32)
    staging = gl.allocate_shared_memory(out_desc.dtype, [WARPGROUPS, ROWS, COLUMNS], STAGING)
    work = (out_desc, staging, bias_ptr, label_ptr, max_ptr, softmax_over_sum_ptr, onehot_ptr, uniform_ptr,
            class_weight_ptr, first_class, factor, softcap)  # fmt: skip
    shape = (num_tokens, num_classes, hidden_size)
    ring = _open_ring(hidden_desc.dtype, NARROW_STAGES, NARROW)
    gl.warp_specialize(
        [
            (_nothing, ()),
            (_gradient_tiles, (ring, work, shape, TRANSFORM, NARROW_STAGES, NARROW, 0)),
            (_gradient_tiles, (ring, work, shape, TRANSFORM, NARROW_STAGES, NARROW, 1)),
            (_load_tiles, (hidden_desc, weight_desc, ring, shape, NARROW_STAGES, NARROW)),
        ],
        [4, 4, 1],
        [REGISTERS, REGISTERS, 24],
    )


class GluonTileKernels(TritonTileKernels):
    """:class:`loongforge.kernels.interface.TileKernels` for Hopper, with specialised warps."""

    def _statistics(self, plain: bool) -> tuple[Any, int, dict[str, Any]]:
        units = WIDE.value if plain else NARROW.value
        return statistics_kernel, units * COLUMNS.value, _LAUNCH | {"UNITS": units}

    def _labels(
        self, hidden_TH: torch.Tensor, weight_CH: torch.Tensor, chunk: Chunk, stats: RowStats
    ) -> tuple[Any, ...]:
        pointers = hidden_TH, weight_CH, chunk.label_T, stats.label_logit_T
        return *pointers, hidden_TH.stride(0), weight_CH.stride(0), chunk.first_class

    def _gradient(self) -> tuple[Any, dict[str, Any]]:
        return tile_gradient_kernel, _LAUNCH

    def _operands(self, hidden_TH: torch.Tensor, weight_CH: torch.Tensor) -> tuple[Any, ...]:
        return _descriptor(hidden_TH, ROWS, BLOCK_H, OPERAND), _descriptor(weight_CH, COLUMNS, BLOCK_H, OPERAND)

    def _output(self, out_TC: torch.Tensor) -> Any:
        return _descriptor(out_TC, ROWS, COLUMNS, STAGING)


_LAUNCH = {"num_warps": 4, "enable_fp_fusion": True}  # warps that do nothing; fusion whatever this Triton's default


def _descriptor(operand: torch.Tensor, rows: Any, columns: Any, layout: Any) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(operand, [rows.value, columns.value], layout.value)
