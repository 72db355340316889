"""``accumulate``: fold one chunk of logits into the online-softmax statistics, one workgroup per row.

Each thread keeps its own (max, sum of exponentials) over the vectors it meets; a shuffle-xor tree merges the lanes of
a wave, LDS the waves of the workgroup (one barrier; every array is written once), and thread 0 merges the result with
the statistics of the chunks before.
"""

# No `from __future__ import annotations` here: FlyDSL reads the annotations below as objects.
import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import const_expr, range_constexpr

from loongforge.kernels.flydsl.vectors import (
    BLOCK,
    ELEMENTS,
    LOG2E,
    Row,
    Transform,
    apply,
    exp2,
    finite_or_zero,
    fma,
    in_row,
    load_class_weights,
    load_vector,
    max_of,
    partial_vector,
    rounding_correction,
    scale_and_reference,
    sum_of,
)

NEG_INF = float("-inf")


def fold(vectors, maximum, sum_exp):
    """``(max, sum)`` with some vectors folded in; the sum is relative to the rounded reference of the maximum."""
    new_maximum = fx.maxnumf(maximum, max_of(vectors))
    scale, reference = scale_and_reference(new_maximum)
    new_sum = sum_of([exp2(fma(v, scale, -reference)) for v in vectors])
    # maximum = -inf comes with sum_exp = 0 and makes the factor 0 too
    return new_maximum, fx.math.fma(sum_exp, exp2(maximum * scale - reference), new_sum)


def mask(inside, x, other):
    """``x`` with ``other`` outside the row."""
    values = [inside[k].select(x[k], fx.Float32(other)) for k in range(x.numel)]
    return fx.Vector.from_elements(values, fx.Float32)


def merge_lanes(maximum, sum_exp, wave):
    """The (max, sum) of a whole wave, in every lane."""
    wave_maximum = maximum
    for distance in _distances(wave):
        wave_maximum = fx.maxnumf(wave_maximum, wave_maximum.shuffle_xor(distance, wave))
    scale, reference = scale_and_reference(wave_maximum)
    return wave_maximum, add_lanes(sum_exp * exp2(maximum * scale - reference), wave)


def add_lanes(value, wave):
    for distance in _distances(wave):
        value = value + value.shuffle_xor(distance, wave)
    return value


def _distances(wave):
    return [1 << bit for bit in range(wave.bit_length() - 1)]


def merge_waves(maxima, sums):
    """The (max, sum) of partial ones."""
    maximum = maxima[0]
    for other in maxima[1:]:
        maximum = fx.maxnumf(maximum, other)
    scale, reference = scale_and_reference(maximum)
    total = fx.Float32(0.0)
    for m, s in zip(maxima, sums, strict=True):
        total = fx.math.fma(s, exp2(m * scale - reference), total)
    return maximum, total


def build(variant):
    """The launcher of one variant, for any T, C and stride."""
    element, wave, unroll = ELEMENTS[variant.dtype], variant.target.wave, variant.unroll
    num_waves = BLOCK // wave
    tile = BLOCK * unroll

    @fx.struct
    class Partials:
        maximum: fx.Array[fx.Float32, num_waves, 16]
        sum_exp: fx.Array[fx.Float32, num_waves, 16]
        weighted: fx.Array[fx.Float32, num_waves, 16]

    def weigh(x, index, row, class_weight):
        return x * load_class_weights(row, class_weight, index) if variant.class_weighted else x

    @flyc.kernel
    def accumulate_kernel(
        logits: fx.Pointer,
        label_T: fx.Pointer,
        max_T: fx.Pointer,
        sum_exp_T: fx.Pointer,
        label_logit_T: fx.Pointer,
        weighted_sum_T: fx.Pointer,
        class_weight_C: fx.Pointer,
        row_stride: fx.Int64,
        num_classes: fx.Int32,
        first_class: fx.Int64,
        logit_scale: fx.Float32,
        softcap: fx.Float32,
        inverse_softcap: fx.Float32,
    ):
        thread = fx.Int32(fx.thread_idx.x)
        t = fx.Int32(fx.block_idx.x)
        row = Row(logits, t, row_stride, num_classes, element)
        transform = Transform(variant, logit_scale, softcap, inverse_softcap)
        partials = fx.SharedAllocator().allocate(Partials).peek()
        maximum = fx.Float32(NEG_INF)
        sum_exp = fx.Float32(0.0)
        weighted_sum = fx.Float32(0.0)

        # Whole tiles: all loads of a tile are issued before the first use.
        num_tiles = (row.end_full - row.first_full) // tile
        for i in range(0, num_tiles, 1):
            index = row.first_full + i * tile + thread
            stored = [load_vector(row, index + u * BLOCK) for u in range_constexpr(unroll)]
            x = [apply(transform, z) for z in stored]
            maximum, sum_exp = fold(x, maximum, sum_exp)
            if const_expr(variant.uniform):
                weighted = [weigh(x[u], index + u * BLOCK, row, class_weight_C) for u in range_constexpr(unroll)]
                weighted_sum = weighted_sum + sum_of(weighted)

        # The vectors of the last, incomplete tile, then the partial vectors at the ends of the row.
        index = row.first_full + num_tiles * tile + thread
        stored = [load_vector(row, index + u * BLOCK) for u in range_constexpr(unroll)]
        for u in range_constexpr(unroll):
            if index + u * BLOCK < row.end_full:
                x = apply(transform, stored[u])
                maximum, sum_exp = fold([x], maximum, sum_exp)
                if const_expr(variant.uniform):
                    weighted_sum = weighted_sum + sum_of([weigh(x, index + u * BLOCK, row, class_weight_C)])
        index, is_mine = partial_vector(row, thread)
        if is_mine:
            x = apply(transform, load_vector(row, index))
            inside = [in_row(row, index * row.width + k) for k in range_constexpr(row.width)]
            maximum, sum_exp = fold([mask(inside, x, NEG_INF)], maximum, sum_exp)
            if const_expr(variant.uniform):
                weighted = weigh(x, index, row, class_weight_C)
                weighted_sum = weighted_sum + sum_of([mask(inside, weighted, 0.0)])

        maximum, sum_exp = merge_lanes(maximum, sum_exp, wave)
        if const_expr(variant.uniform):
            weighted_sum = add_lanes(weighted_sum, wave)
        if thread % wave == 0:
            partials.maximum[thread // wave] = maximum
            partials.sum_exp[thread // wave] = sum_exp
            if const_expr(variant.uniform):
                partials.weighted[thread // wave] = weighted_sum
        fx.barrier()

        if thread == 0:
            maxima = [fx.Float32(partials.maximum[w]) for w in range_constexpr(num_waves)]
            sums = [fx.Float32(partials.sum_exp[w]) for w in range_constexpr(num_waves)]
            maximum, sum_exp = merge_waves(maxima, sums)
            sum_exp = sum_exp * rounding_correction(maximum)
            old_maximum = fx.Float32(max_T[t])
            new_maximum = fx.maxnumf(old_maximum, maximum)
            point = finite_or_zero(new_maximum)
            old_part = fx.Float32(sum_exp_T[t]) * exp2((old_maximum - point) * LOG2E)
            max_T[t] = new_maximum
            sum_exp_T[t] = fx.math.fma(sum_exp, exp2((maximum - point) * LOG2E), old_part)
            if const_expr(variant.uniform):
                total = fx.Float32(weighted_sum_T[t])
                for w in range_constexpr(num_waves):
                    total = total + fx.Float32(partials.weighted[w])
                weighted_sum_T[t] = total
            label = fx.Int64(label_T[t]) - first_class
            if (label >= 0) & (label < fx.Int64(num_classes)):
                z = fx.Vector.from_elements([row.first_class_pointer[label]], element)
                label_logit_T[t] = apply(transform, z)[0]

    @flyc.jit
    def accumulate(
        logits: fx.Pointer,
        label_T: fx.Pointer,
        max_T: fx.Pointer,
        sum_exp_T: fx.Pointer,
        label_logit_T: fx.Pointer,
        weighted_sum_T: fx.Pointer,
        class_weight_C: fx.Pointer,
        row_stride: fx.Int64,
        num_classes: fx.Int32,
        first_class: fx.Int64,
        logit_scale: fx.Float32,
        softcap: fx.Float32,
        inverse_softcap: fx.Float32,
        num_rows: fx.Int32,
        stream: fx.Stream,
    ):
        accumulate_kernel(
            logits,
            label_T,
            max_T,
            sum_exp_T,
            label_logit_T,
            weighted_sum_T,
            class_weight_C,
            row_stride,
            num_classes,
            first_class,
            logit_scale,
            softcap,
            inverse_softcap,
        ).launch(grid=(num_rows, 1, 1), block=(BLOCK, 1, 1), stream=stream)

    return accumulate
