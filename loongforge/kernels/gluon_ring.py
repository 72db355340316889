"""A ring of shared-memory stages between one warp that loads and two warpgroups that multiply, in Gluon, for Hopper.

One warp loads tiles of hidden and weight with the tensor memory accelerator; two warpgroups take 64 of the 128 rows of
a tile each, multiply what has arrived and work on the result.  The loading warp runs ahead through every epilogue, so
that the tensor cores find the next tile's operands waiting: what the plain Triton kernels lose between two tiles
(``docs/performance.md``).

    ready[stage]: the loads of a stage have landed          (1 arrival, and the bytes)
    free[stage]:  both warpgroups have finished reading it  (2 arrivals)

Step ``i`` of all tiles uses stage ``i % STAGES`` and phase ``i // STAGES % 2`` of its barriers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from loongforge.kernels.triton_tiles import _tile_position

_copy_in = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # the name until Triton 3.8

WARPGROUPS = gl.constexpr(2)
ROWS = gl.constexpr(64)  # of a warpgroup: the height of one tensor core instruction
BLOCK_T = gl.constexpr(128)
COLUMNS = gl.constexpr(128)  # of an accumulator, and of one instruction
BLOCK_H = gl.constexpr(32)  # half of the widest swizzle: more and shorter stages, which is faster
WIDE = gl.constexpr(3)  # accumulators
GROUP = gl.constexpr(8)
REGISTERS = gl.constexpr(224)  # of a thread that multiplies; the loading warp needs 24
TILE = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]))
OPERAND = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2))  # rows of BLOCK_H
BARRIER = gl.constexpr(mbarrier.MBarrierLayout())


@gluon.jit
def _nothing():
    pass


@gluon.jit
def _set_up(ready, free, STAGES: gl.constexpr):
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=WARPGROUPS)
    fence_async_shared()


@gluon.jit
def _open_ring(dtype: gl.constexpr, STAGES: gl.constexpr, UNITS: gl.constexpr):
    """Stages and their barriers: hidden, weight, ready, free."""
    hidden_ring = gl.allocate_shared_memory(dtype, [STAGES * WARPGROUPS, ROWS, BLOCK_H], OPERAND)
    weight_ring = gl.allocate_shared_memory(dtype, [STAGES * UNITS, COLUMNS, BLOCK_H], OPERAND)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    gl.warp_specialize(
        [(_nothing, ()), (_set_up, (ready, free, STAGES)), (_nothing, ()), (_nothing, ())],
        [4, 4, 1],
        [REGISTERS, REGISTERS, 24],
    )
    return hidden_ring, weight_ring, ready, free


@gluon.jit
def _load_tiles(hidden_desc, weight_desc, ring, shape, STAGES: gl.constexpr, UNITS: gl.constexpr):
    """What the loading warp does: every step of every tile of this program, as soon as a stage is free."""
    hidden_ring, weight_ring, ready, free = ring
    num_tokens, num_classes, hidden_size = shape
    BLOCK_C: gl.constexpr = COLUMNS * UNITS
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
            for unit in gl.static_range(UNITS):
                _copy_in(
                    weight_desc, [tile_c * BLOCK_C + unit * COLUMNS, k], ready.index(stage),
                    weight_ring.index(stage * UNITS + unit),
                )  # fmt: skip
            step += 1


@gluon.jit
def _multiply(ring, step, a, b, c, STAGES: gl.constexpr, UNITS: gl.constexpr, WARPGROUP: gl.constexpr):
    """Add the products of one step; those of the step before have read their stage."""
    hidden_ring, weight_ring, ready, free = ring
    stage = step % STAGES
    mbarrier.wait(ready.index(stage), step // STAGES % 2)
    hidden = hidden_ring.index(stage * WARPGROUPS + WARPGROUP)
    a = warpgroup_mma(hidden, weight_ring.index(stage * UNITS).permute((1, 0)), a, is_async=True)
    b = warpgroup_mma(hidden, weight_ring.index(stage * UNITS + 1).permute((1, 0)), b, is_async=True)
    if UNITS == WIDE:
        c = warpgroup_mma(hidden, weight_ring.index(stage * UNITS + 2).permute((1, 0)), c, is_async=True)
        a, b, c = warpgroup_mma_wait(num_outstanding=UNITS, deps=(a, b, c))
    else:
        a, b = warpgroup_mma_wait(num_outstanding=UNITS, deps=(a, b))
    return a, b, c, step + 1


@gluon.jit
def _logits(ring, step, hidden_size, STAGES: gl.constexpr, UNITS: gl.constexpr, WARPGROUP: gl.constexpr):
    """float32 logits, two or three of [ROWS, COLUMNS], and the next step; what lies past the end was loaded as 0."""
    hidden_ring, weight_ring, ready, free = ring
    # The first products overwrite: by themselves before the loop, so that no register has to be cleared.
    zeros = gl.zeros((ROWS, COLUMNS), gl.float32, TILE)
    a, b, c, step = _multiply(ring, step, zeros, zeros, zeros, STAGES, UNITS, WARPGROUP)
    for _ in range(BLOCK_H, hidden_size, BLOCK_H):
        a, b, c, step = _multiply(ring, step, a, b, c, STAGES, UNITS, WARPGROUP)
        mbarrier.arrive(free.index((step + STAGES - 2) % STAGES), count=1)
    if UNITS == WIDE:
        a, b, c = warpgroup_mma_wait(num_outstanding=0, deps=(a, b, c))
    else:
        a, b = warpgroup_mma_wait(num_outstanding=0, deps=(a, b))
    mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1)
    return a, b, c, step
