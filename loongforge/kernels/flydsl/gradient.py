"""``gradient_``: overwrite one chunk of logits with its gradient, one workgroup per row.

The sweep has no barrier and no correction pass: the thread that meets the label's vector subtracts the one-hot term
there.  A row whose coefficients are all zero is not read, only filled with zeros.
"""

# No `from __future__ import annotations` here: FlyDSL reads the annotations below as objects.
import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import const_expr, range_constexpr

from loongforge.kernels.flydsl.vectors import (
    BLOCK,
    ELEMENTS,
    Row,
    Transform,
    apply_with_slope,
    exp2,
    fma,
    in_row,
    load_class_weights,
    load_vector,
    partial_vector,
    quiet,
    round_to,
    rounding_correction,
    scale_and_reference,
    store_element,
    store_vector,
)


def build(variant):
    """The launcher of one variant, for any T, C and stride."""
    element, unroll = ELEMENTS[variant.dtype], variant.unroll
    tile = BLOCK * unroll

    @flyc.kernel
    def gradient_kernel(
        logits: fx.Pointer,
        label_T: fx.Pointer,
        max_T: fx.Pointer,
        softmax_over_sum_T: fx.Pointer,
        onehot_T: fx.Pointer,
        uniform_T: fx.Pointer,
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
        maximum = quiet(fx.Float32(max_T[t]))
        coefficient = quiet(fx.Float32(softmax_over_sum_T[t]))
        onehot = quiet(fx.Float32(onehot_T[t]))
        is_active = (coefficient != 0.0) | (onehot != 0.0)
        uniform = None
        if const_expr(variant.uniform):
            uniform = quiet(fx.Float32(uniform_T[t]))
            is_active = is_active | (uniform != 0.0)
        scale, reference = scale_and_reference(maximum)
        coefficient = coefficient * rounding_correction(maximum)

        # The label's place in the window; -1 where it lies outside this chunk.
        label = fx.Int64(label_T[t]) - first_class
        label_here = (label >= 0) & (label < fx.Int64(num_classes))
        label_position = label_here.select(fx.Int32(label) + row.head, fx.Int32(-1))
        label_vector = label_position >> (row.width.bit_length() - 1)

        def gradient_of(stored, index):
            x, slope = apply_with_slope(transform, stored)
            g = exp2(fma(x, scale, -reference)) * coefficient
            if const_expr(variant.uniform):
                g = g - (load_class_weights(row, class_weight_C, index) if variant.class_weighted else 1.0) * uniform
            if index == label_vector:
                g = fx.Vector.from_elements(
                    [
                        ((index * row.width + k) == label_position).select(g[k] - onehot, g[k])
                        for k in range_constexpr(row.width)
                    ],
                    fx.Float32,
                )
            g = g if slope is None else g * slope
            return round_to(element, g, variant.target.bf16_instruction)

        num_tiles = (row.end_full - row.first_full) // tile
        rest = row.first_full + num_tiles * tile + thread
        partial_index, is_mine = partial_vector(row, thread)
        if is_active:
            for i in range(0, num_tiles, 1):
                index = row.first_full + i * tile + thread
                stored = [load_vector(row, index + u * BLOCK) for u in range_constexpr(unroll)]
                for u in range_constexpr(unroll):
                    store_vector(row, index + u * BLOCK, gradient_of(stored[u], index + u * BLOCK))
            stored = [load_vector(row, rest + u * BLOCK) for u in range_constexpr(unroll)]
            for u in range_constexpr(unroll):
                if rest + u * BLOCK < row.end_full:
                    store_vector(row, rest + u * BLOCK, gradient_of(stored[u], rest + u * BLOCK))
            if is_mine:
                g = gradient_of(load_vector(row, partial_index), partial_index)
                for k in range_constexpr(row.width):
                    if in_row(row, partial_index * row.width + k):
                        store_element(row, partial_index * row.width + k, g[k])
        else:
            zeros = fx.Vector.filled((row.width,), 0.0, element)
            for index in range(row.first_full + thread, row.end_full, BLOCK):
                store_vector(row, index, zeros)
            if is_mine:
                for k in range_constexpr(row.width):
                    if in_row(row, partial_index * row.width + k):
                        store_element(row, partial_index * row.width + k, zeros[k])

    @flyc.jit
    def gradient(
        logits: fx.Pointer,
        label_T: fx.Pointer,
        max_T: fx.Pointer,
        softmax_over_sum_T: fx.Pointer,
        onehot_T: fx.Pointer,
        uniform_T: fx.Pointer,
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
        gradient_kernel(
            logits,
            label_T,
            max_T,
            softmax_over_sum_T,
            onehot_T,
            uniform_T,
            class_weight_C,
            row_stride,
            num_classes,
            first_class,
            logit_scale,
            softcap,
            inverse_softcap,
        ).launch(grid=(num_rows, 1, 1), block=(BLOCK, 1, 1), stream=stream)

    return gradient
