"""The tile kernels of :mod:`loongforge.kernels.triton_tiles` with specialised warps, in Gluon, for Hopper.

A program is three groups of warps around a ring of shared-memory stages.  One warp loads tiles of hidden and weight
with the tensor memory accelerator; two warpgroups take 64 of the 128 rows of a tile each, multiply what has arrived
and work on the result.  The loading warp runs ahead through every epilogue, so that the tensor cores find the next
tile's operands waiting: what the plain Triton kernels lose between two tiles (``docs/performance.md``).

    ready[stage]: the loads of a stage have landed          (1 arrival, and the bytes)
    free[stage]:  both warpgroups have finished reading it  (2 arrivals)

Step ``i`` of all tiles uses stage ``i % STAGES`` and phase ``i // STAGES % 2`` of its barriers.

Gluon is an experimental part of Triton: ``dispatch.py`` says with which versions this file is used.
"""

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from loongforge.kernels.triton_rows import _float_from_bits, _gradient
from loongforge.kernels.triton_tiles import TritonTileKernels, _store_statistics, _tile_position

_copy_in = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # the name until Triton 3.8
_copy_out = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

WARPGROUPS = gl.constexpr(2)
ROWS = gl.constexpr(64)  # of a warpgroup: the height of one tensor core instruction
BLOCK_T = gl.constexpr(128)
BLOCK_C = gl.constexpr(256)
BLOCK_H = gl.constexpr(32)  # half of the widest swizzle: more and shorter stages, which is faster
HALF_C = gl.constexpr(128)  # stored at a time, so that the staging buffer fits beside the ring
STATISTICS_STAGES = gl.constexpr(9)  # as many as shared memory holds
GRADIENT_STAGES = gl.constexpr(8)  # beside the staging buffers
GROUP = gl.constexpr(8)
REGISTERS = gl.constexpr(232)  # of a thread that multiplies; the loading warp needs 24
TILE = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16]))
HALF_TILE = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]))
OPERAND = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2))  # rows of BLOCK_H
STAGING = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
BARRIER = gl.constexpr(mbarrier.MBarrierLayout())


@gluon.jit
def _open_ring(dtype: gl.constexpr, STAGES: gl.constexpr):
    """Stages and their barriers: hidden, weight, ready, free."""
    hidden_ring = gl.allocate_shared_memory(dtype, [STAGES * WARPGROUPS, ROWS, BLOCK_H], OPERAND)
    weight_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_C, BLOCK_H], OPERAND)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=WARPGROUPS)
    fence_async_shared()
    return hidden_ring, weight_ring, ready, free


@gluon.jit
def _load_tiles(hidden_desc, weight_desc, ring, num_tokens, num_classes, hidden_size, STAGES: gl.constexpr):
    """What the loading warp does: every step of every tile of this program, as soon as a stage is free."""
    hidden_ring, weight_ring, ready, free = ring
    num_tiles = gl.cdiv(num_tokens, BLOCK_T) * gl.cdiv(num_classes, BLOCK_C)
    step = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        tile_t, tile_c = _tile_position(tile, num_tokens, num_classes, BLOCK_T, BLOCK_C, GROUP)
        for k in range(0, hidden_size, BLOCK_H):
            stage = step % STAGES
            # The first round finds every stage free: the phase before a barrier's first counts as completed.
            mbarrier.wait(free.index(stage), step // STAGES % 2 ^ 1)
            mbarrier.expect(ready.index(stage), (BLOCK_T + BLOCK_C) * BLOCK_H * 2)
            for group in gl.static_range(WARPGROUPS):
                _copy_in(
                    hidden_desc, [tile_t * BLOCK_T + group * ROWS, k], ready.index(stage),
                    hidden_ring.index(stage * WARPGROUPS + group),
                )  # fmt: skip
            _copy_in(weight_desc, [tile_c * BLOCK_C, k], ready.index(stage), weight_ring.index(stage))
            step += 1


@gluon.jit
def _logits(ring, step, bias_ptr, column, num_classes, hidden_size, STAGES: gl.constexpr, WARPGROUP: gl.constexpr):
    """float32 logits [ROWS, BLOCK_C] of one warpgroup, and the next step; what lies past the end was loaded as 0."""
    hidden_ring, weight_ring, ready, free = ring
    acc = warpgroup_mma_init(gl.zeros((ROWS, BLOCK_C), gl.float32, TILE))
    for k in range(0, hidden_size, BLOCK_H):
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), step // STAGES % 2)
        hidden = hidden_ring.index(stage * WARPGROUPS + WARPGROUP)
        acc = warpgroup_mma(hidden, weight_ring.index(stage).permute((1, 0)), acc, is_async=True)
        # One product stays in flight; the one before it has read its stage.
        acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(acc,)))
        mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
        step += 1
    z = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1)
    if bias_ptr is not None:
        z += gl.load(bias_ptr + column, mask=column < num_classes, other=0.0).to(gl.float32)[None, :]
    return z, step


@gluon.jit
def _store(out_desc, staging, row, column, tile):
    """Store a tile [ROWS, BLOCK_C] through a staging buffer, half by half; what lies past the end is dropped."""
    halves = gl.split(gl.permute(gl.reshape(tile, (ROWS, 2, HALF_C)), (0, 2, 1)))
    for half in gl.static_range(2):
        tma.store_wait(0)  # whatever was in the staging buffer has left it
        staging.store(gl.convert_layout(halves[half], HALF_TILE).to(out_desc.dtype))
        fence_async_shared()
        _copy_out(out_desc, [row, column + half * HALF_C], staging)


@gluon.jit
def _statistics_tiles(ring, bias_ptr, partial_ptr, class_weight_ptr, num_tokens, num_classes,
                      hidden_size, factor, softcap, TRANSFORM: gl.constexpr, WEIGHTED_SUM: gl.constexpr,
                      WARPGROUP: gl.constexpr):  # fmt: skip
    num_tiles = gl.cdiv(num_tokens, BLOCK_T) * gl.cdiv(num_classes, BLOCK_C)
    step = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        tile_t, tile_c = _tile_position(tile, num_tokens, num_classes, BLOCK_T, BLOCK_C, GROUP)
        row = tile_t * BLOCK_T + WARPGROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, TILE))
        column = tile_c * BLOCK_C + gl.arange(0, BLOCK_C, layout=gl.SliceLayout(0, TILE))
        z, step = _logits(ring, step, bias_ptr, column, num_classes, hidden_size, STATISTICS_STAGES, WARPGROUP)
        _store_statistics(z, row, column, tile_c, partial_ptr, class_weight_ptr, num_tokens, num_classes, factor,
                          softcap, TRANSFORM, WEIGHTED_SUM, BLOCK_C)  # fmt: skip


@gluon.jit
def _gradient_tiles(ring, out_desc, staging, bias_ptr, label_ptr, max_ptr, softmax_over_sum_ptr, onehot_ptr,
                    uniform_ptr, class_weight_ptr, num_tokens, num_classes, first_class, hidden_size, factor, softcap,
                    TRANSFORM: gl.constexpr, WARPGROUP: gl.constexpr):  # fmt: skip
    num_tiles = gl.cdiv(num_tokens, BLOCK_T) * gl.cdiv(num_classes, BLOCK_C)
    step = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        tile_t, tile_c = _tile_position(tile, num_tokens, num_classes, BLOCK_T, BLOCK_C, GROUP)
        first_row = tile_t * BLOCK_T + WARPGROUP * ROWS
        row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, TILE))
        column = tile_c * BLOCK_C + gl.arange(0, BLOCK_C, layout=gl.SliceLayout(0, TILE))
        row_exists = row < num_tokens
        exists = (column < num_classes)[None, :]
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
        z, step = _logits(ring, step, bias_ptr, column, num_classes, hidden_size, GRADIENT_STAGES, WARPGROUP)
        grad = _gradient(z, column[None, :], exists, label[:, None], max_x[:, None], softmax_over_sum[:, None],
                         onehot[:, None], uniform, class_weight_ptr, factor, softcap, TRANSFORM)  # fmt: skip
        grad = gl.where(active[:, None], grad, 0.0)
        _store(out_desc, staging, first_row, tile_c * BLOCK_C, grad.to(out_desc.dtype))
    tma.store_wait(0)


_NUMBERS = ["num_tokens", "num_classes", "first_class", "factor_bits", "softcap_bits"]


@gluon.jit(do_not_specialize=_NUMBERS)
def statistics_kernel(
    hidden_desc,
    weight_desc,
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
):
    factor = _float_from_bits(factor_bits, gl.float32)
    softcap = _float_from_bits(softcap_bits, gl.float32)
    ring = _open_ring(hidden_desc.dtype, STATISTICS_STAGES)
    gl.warp_specialize(
        [
            (_statistics_tiles, (ring, bias_ptr, partial_ptr, class_weight_ptr, num_tokens,
                                 num_classes, hidden_size, factor, softcap, TRANSFORM, WEIGHTED_SUM, 0)),
            (_statistics_tiles, (ring, bias_ptr, partial_ptr, class_weight_ptr, num_tokens,
                                 num_classes, hidden_size, factor, softcap, TRANSFORM, WEIGHTED_SUM, 1)),
            (_load_tiles, (hidden_desc, weight_desc, ring, num_tokens, num_classes, hidden_size, STATISTICS_STAGES)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


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
    ring = _open_ring(hidden_desc.dtype, GRADIENT_STAGES)
    first = gl.allocate_shared_memory(out_desc.dtype, [ROWS, HALF_C], STAGING)
    second = gl.allocate_shared_memory(out_desc.dtype, [ROWS, HALF_C], STAGING)
    gl.warp_specialize(
        [
            (_gradient_tiles, (ring, out_desc, first, bias_ptr, label_ptr, max_ptr, softmax_over_sum_ptr, onehot_ptr,
                               uniform_ptr, class_weight_ptr, num_tokens, num_classes, first_class, hidden_size,
                               factor, softcap, TRANSFORM, 0)),
            (_gradient_tiles, (ring, out_desc, second, bias_ptr, label_ptr, max_ptr, softmax_over_sum_ptr, onehot_ptr,
                               uniform_ptr, class_weight_ptr, num_tokens, num_classes, first_class, hidden_size,
                               factor, softcap, TRANSFORM, 1)),
            (_load_tiles, (hidden_desc, weight_desc, ring, num_tokens, num_classes, hidden_size, GRADIENT_STAGES)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


class GluonTileKernels(TritonTileKernels):
    """:class:`loongforge.kernels.interface.TileKernels` for Hopper, with specialised warps."""

    block_c = BLOCK_C.value

    def _kernels(self) -> tuple[Any, Any, dict[str, Any]]:
        # Warps of the first warpgroup; fusion whatever this Triton's default.
        return statistics_kernel, tile_gradient_kernel, {"num_warps": 4, "enable_fp_fusion": True}

    def _operands(self, hidden_TH: torch.Tensor, weight_CH: torch.Tensor) -> tuple[Any, ...]:
        return _descriptor(hidden_TH, ROWS, BLOCK_H, OPERAND), _descriptor(weight_CH, BLOCK_C, BLOCK_H, OPERAND)

    def _output(self, out_TC: torch.Tensor) -> Any:
        return _descriptor(out_TC, ROWS, HALF_C, STAGING)


def _descriptor(operand: torch.Tensor, rows: Any, columns: Any, layout: Any) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(operand, [rows.value, columns.value], layout.value)
