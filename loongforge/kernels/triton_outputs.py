"""Row kernels of the outputs beside the loss: entropy, first maximum, and the divergence of two heads; see triton_rows.

They walk a row as the kernels of :mod:`loongforge.kernels.triton_rows` do: whole 16-byte vectors in tiles of
[LANES, VEC] logits, then the edges.  Kernels of their own, so that the loss's stay as they are.

One online sum serves the entropy and both divergences: with weights of head a,

    relative = sum exp(a - max_a) * ((a - max_a) - (b - max_b))        (without b: the entropy's)

A partial result is (max_a, sum_a, relative, max_b); merging two moves each to the common maxima.
"""

import triton
import triton.language as tl

from loongforge.kernels.triton_rows import (
    IDENTITY,
    LOG2_E,
    LaunchConfig,
    _edges,
    _float_from_bits,
    _offset,
    _split_row,
    _transform,
)

ACCUMULATE_CONFIG = LaunchConfig(threads=128, vectors=1)
GRADIENT_CONFIG = LaunchConfig(threads=256, vectors=1)

_NUMBERS = (
    "row_stride", "b_row_stride", "num_classes", "first_class",
    "factor_bits", "softcap_bits", "b_factor_bits", "b_softcap_bits",
)  # fmt: skip
_ACCUMULATE_POINTERS = (
    "logits_ptr", "b_ptr", "label_ptr", "max_ptr", "sum_exp_ptr", "label_logit_ptr",
    "relative_ptr", "argmax_ptr", "b_max_ptr", "b_sum_exp_ptr",
)  # fmt: skip
_GRADIENT_POINTERS = (
    "logits_ptr", "b_ptr", "label_ptr", "max_ptr", "softmax_over_sum_ptr", "onehot_ptr",
    "relative_over_sum_ptr", "b_max_ptr", "b_over_sum_ptr",
)  # fmt: skip
_NO_COLUMN = tl.constexpr(2**31 - 1)


@triton.jit
def _moved(max_x, base):
    """What the exponentials of a partial sum are multiplied by when its maximum becomes ``base``."""
    return tl.exp2((max_x - base) * LOG2_E)


@triton.jit
def _relative_terms(a, base_a, b_shifted):
    """exp(a - base), and exp(a - base) * ((a - base) - b_shifted), which is 0 where the exponential is."""
    distance = a - base_a
    e = tl.exp2(distance * LOG2_E)
    return e, tl.where(e == 0.0, 0.0, e * (distance - b_shifted))


@triton.jit
def _moved_relative(relative, sum_exp, scale, shift):
    """A partial relative sum after its maxima moved: each distance grew by ``shift``, each weight by ``scale``."""
    return tl.where(scale == 0.0, 0.0, scale * (relative + sum_exp * shift))


@triton.jit
def _fold_tile(a, b, max_a, sum_a, relative, max_b, sum_b, PAIR: tl.constexpr, RELATIVE: tl.constexpr):
    """One online step of every lane over its vector of logits."""
    new_max_a = tl.maximum(max_a, tl.max(a, 1))
    base_a = _offset(new_max_a)
    scale_a = _moved(max_a, base_a)
    if RELATIVE:
        shift = _offset(max_a) - base_a
        if PAIR:
            new_max_b = tl.maximum(max_b, tl.max(b, 1))
            base_b = _offset(new_max_b)
            shift -= _offset(max_b) - base_b
            b = b - base_b[:, None]
            sum_b = sum_b * _moved(max_b, base_b) + tl.sum(tl.exp2(b * LOG2_E), 1)
            max_b = new_max_b
            e, terms = _relative_terms(a, base_a[:, None], b)
        else:
            e, terms = _relative_terms(a, base_a[:, None], 0.0)
        relative = _moved_relative(relative, sum_a, scale_a, shift) + tl.sum(terms, 1)
        sum_a = sum_a * scale_a + tl.sum(e, 1)
    else:
        sum_a = sum_a * scale_a + tl.sum(tl.exp2((a - base_a[:, None]) * LOG2_E), 1)
    return new_max_a, sum_a, relative, max_b, sum_b


@triton.jit
def _first_maximum(x, lane_max, lane_class, columns):
    """Column of the first maximum of every lane; called before the lane's maximum is updated."""
    tile_max = tl.max(x, 1)
    first = tl.min(tl.where(x == tile_max[:, None], columns, _NO_COLUMN), 1)
    return tl.where(tile_max > lane_max, first, lane_class)


@triton.jit
def _join(max_1, sum_1, relative_1, max_b1, sum_b1, max_2, sum_2, relative_2, max_b2, sum_b2):
    """Merge two partial results of one row."""
    new_max, new_max_b = tl.maximum(max_1, max_2), tl.maximum(max_b1, max_b2)
    base, base_b = _offset(new_max), _offset(new_max_b)
    scale_1, scale_2 = _moved(max_1, base), _moved(max_2, base)
    shift_1 = (_offset(max_1) - base) - (_offset(max_b1) - base_b)
    shift_2 = (_offset(max_2) - base) - (_offset(max_b2) - base_b)
    relative = _moved_relative(relative_1, sum_1, scale_1, shift_1)
    relative += _moved_relative(relative_2, sum_2, scale_2, shift_2)
    sum_b = sum_b1 * _moved(max_b1, base_b) + sum_b2 * _moved(max_b2, base_b)
    return new_max, sum_1 * scale_1 + sum_2 * scale_2, relative, new_max_b, sum_b


@triton.jit
def _loaded(row_ptr, columns, valid, factor, softcap, TRANSFORM: tl.constexpr, STAT: tl.constexpr):
    """Logits x of the loss, -inf where there is no column."""
    x, _ = _transform(tl.load(row_ptr + columns, mask=valid, other=0.0).to(STAT), factor, softcap, TRANSFORM)
    return tl.where(valid, x, float("-inf"))


@triton.jit(do_not_specialize=[*_NUMBERS, *_ACCUMULATE_POINTERS])
def accumulate_outputs_kernel(
    logits_ptr,
    b_ptr,  # None: no second head
    label_ptr,  # None: no labels
    max_ptr,
    sum_exp_ptr,
    label_logit_ptr,
    relative_ptr,  # None: not wanted
    argmax_ptr,  # None: not wanted
    b_max_ptr,
    b_sum_exp_ptr,
    row_stride: tl.int64,
    b_row_stride: tl.int64,
    num_classes: tl.int32,
    first_class: tl.int64,
    factor_bits: tl.int64,
    softcap_bits: tl.int64,
    b_factor_bits: tl.int64,
    b_softcap_bits: tl.int64,
    TRANSFORM: tl.constexpr,
    B_TRANSFORM: tl.constexpr,
    B_ALIGNED: tl.constexpr,  # rows of both heads start at the same place of a 16-byte vector
    LANES: tl.constexpr,
):
    VEC: tl.constexpr = 128 // logits_ptr.dtype.element_ty.primitive_bitwidth
    STAT: tl.constexpr = max_ptr.dtype.element_ty
    PAIR: tl.constexpr = b_ptr is not None
    RELATIVE: tl.constexpr = relative_ptr is not None
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    factor, softcap = _float_from_bits(factor_bits, STAT), _float_from_bits(softcap_bits, STAT)
    b_factor, b_softcap = _float_from_bits(b_factor_bits, STAT), _float_from_bits(b_softcap_bits, STAT)

    head, num_vectors = _split_row(row_ptr, num_classes, VEC)
    lane = tl.arange(0, LANES)
    vector = lane[:, None] * VEC + tl.arange(0, VEC)[None, :]
    body_ptr = tl.multiple_of(row_ptr + head, 16)
    b_row_ptr = row_ptr
    b_body_ptr = body_ptr
    if PAIR:
        b_row_ptr = b_ptr + row * b_row_stride
        b_body_ptr = b_row_ptr + head
        if B_ALIGNED:
            b_body_ptr = tl.multiple_of(b_body_ptr, 16)
    max_a = tl.full((LANES,), float("-inf"), STAT)
    sum_a = tl.zeros((LANES,), STAT)
    relative = tl.zeros((LANES,), STAT)
    max_b = tl.full((LANES,), float("-inf"), STAT)
    sum_b = tl.zeros((LANES,), STAT)
    first = tl.full((LANES,), _NO_COLUMN, tl.int32)

    num_full = num_vectors // LANES
    for tile in range(num_full):
        columns = tile * (LANES * VEC) + vector
        a, _ = _transform(tl.load(body_ptr + columns).to(STAT), factor, softcap, TRANSFORM)
        b = a
        if PAIR:
            b, _ = _transform(tl.load(b_body_ptr + columns).to(STAT), b_factor, b_softcap, B_TRANSFORM)
        if argmax_ptr is not None:
            first = _first_maximum(a, max_a, first, columns + head)
        max_a, sum_a, relative, max_b, sum_b = _fold_tile(
            a, b, max_a, sum_a, relative, max_b, sum_b, PAIR, RELATIVE
        )  # fmt: skip

    if num_vectors > num_full * LANES:
        columns = num_full * (LANES * VEC) + vector
        valid = (num_full * LANES + lane < num_vectors)[:, None]
        a = _loaded(body_ptr, columns, valid, factor, softcap, TRANSFORM, STAT)
        b = a
        if PAIR:
            b = _loaded(b_body_ptr, columns, valid, b_factor, b_softcap, B_TRANSFORM, STAT)
        if argmax_ptr is not None:
            first = _first_maximum(a, max_a, first, columns + head)
        max_a, sum_a, relative, max_b, sum_b = _fold_tile(
            a, b, max_a, sum_a, relative, max_b, sum_b, PAIR, RELATIVE
        )  # fmt: skip

    # The lanes of the row together.
    row_max_a, row_max_b = tl.max(max_a, 0), tl.max(max_b, 0)
    base_a, base_b = _offset(row_max_a), _offset(row_max_b)
    scale_a = _moved(max_a, base_a)
    shift = (_offset(max_a) - base_a) - (_offset(max_b) - base_b)
    row_relative = tl.sum(_moved_relative(relative, sum_a, scale_a, shift), 0)
    row_sum_a = tl.sum(sum_a * scale_a, 0)
    row_sum_b = tl.sum(sum_b * _moved(max_b, base_b), 0)
    row_first = tl.min(tl.where(max_a == row_max_a, first, _NO_COLUMN), 0)

    if num_vectors * VEC < num_classes:
        columns, valid = _edges(head, num_vectors, num_classes, VEC)
        a = _loaded(row_ptr, columns, valid, factor, softcap, TRANSFORM, STAT)
        edge_max = tl.max(a, 0)
        if argmax_ptr is not None:
            edge_first = tl.min(tl.where(a == edge_max, columns, _NO_COLUMN), 0)
            row_first = tl.where(edge_max > row_max_a, edge_first, row_first)
            row_first = tl.where(edge_max == row_max_a, tl.minimum(edge_first, row_first), row_first)
        edge_max_b, edge_sum_b = row_max_b, row_sum_b  # without a second head -inf and 0
        if PAIR:
            b = _loaded(b_row_ptr, columns, valid, b_factor, b_softcap, B_TRANSFORM, STAT)
            edge_max_b = tl.max(b, 0)
            b = b - _offset(edge_max_b)
            edge_sum_b = tl.sum(tl.exp2(b * LOG2_E), 0)
            e, terms = _relative_terms(a, _offset(edge_max), b)
        else:
            e, terms = _relative_terms(a, _offset(edge_max), 0.0)
        row_max_a, row_sum_a, row_relative, row_max_b, row_sum_b = _join(
            row_max_a, row_sum_a, row_relative, row_max_b, row_sum_b,
            edge_max, tl.sum(e, 0), tl.sum(terms, 0), edge_max_b, edge_sum_b,
        )  # fmt: skip

    old_max = tl.load(max_ptr + row)
    old_relative = row_relative
    if RELATIVE:
        old_relative = tl.load(relative_ptr + row)
    old_max_b, old_sum_b = row_max_b, row_sum_b
    if PAIR:
        old_max_b, old_sum_b = tl.load(b_max_ptr + row), tl.load(b_sum_exp_ptr + row)
    new_max, new_sum, new_relative, new_max_b, new_sum_b = _join(
        old_max, tl.load(sum_exp_ptr + row), old_relative, old_max_b, old_sum_b,
        row_max_a, row_sum_a, row_relative, row_max_b, row_sum_b,
    )  # fmt: skip
    tl.store(max_ptr + row, new_max)
    tl.store(sum_exp_ptr + row, new_sum)
    if RELATIVE:
        tl.store(relative_ptr + row, new_relative)
    if argmax_ptr is not None:
        found = (row_max_a > old_max) & (row_first < num_classes)
        tl.store(argmax_ptr + row, first_class + row_first.to(tl.int64), mask=found)
    if PAIR:
        tl.store(b_max_ptr + row, new_max_b)
        tl.store(b_sum_exp_ptr + row, new_sum_b)
    if label_ptr is not None:
        label = tl.load(label_ptr + row) - first_class
        label_is_here = (label >= 0) & (label < num_classes)
        label_z = tl.load(row_ptr + label, mask=label_is_here, other=0.0).to(STAT)
        label_x, _ = _transform(label_z, factor, softcap, TRANSFORM)
        tl.store(label_logit_ptr + row, label_x, mask=label_is_here)


@triton.jit
def _output_gradient(z, z_b, columns, label, onehot, max_x, softmax_over_sum, relative_over_sum, max_b, b_over_sum,
                     factor, softcap, b_factor, b_softcap, TRANSFORM: tl.constexpr, B_TRANSFORM: tl.constexpr,
                     PAIR: tl.constexpr):  # fmt: skip
    """d loss / d z of a tile, vector or edge of one row."""
    x, slope = _transform(z, factor, softcap, TRANSFORM)
    distance = x - max_x
    e = tl.exp2(distance * LOG2_E)
    gap = distance
    if PAIR:
        y, _ = _transform(z_b, b_factor, b_softcap, B_TRANSFORM)
        b_distance = y - max_b
        gap = distance - b_distance
    if relative_over_sum is not None:
        grad_x = tl.where(e == 0.0, 0.0, e * (softmax_over_sum + relative_over_sum * gap))
    else:
        grad_x = softmax_over_sum * e
    if b_over_sum is not None:
        grad_x -= b_over_sum * tl.exp2(b_distance * LOG2_E)
    if onehot is not None:
        grad_x = tl.where(columns == label, grad_x - onehot, grad_x)
    if TRANSFORM == IDENTITY:
        return grad_x
    else:
        return grad_x * slope


@triton.jit(do_not_specialize=[*_NUMBERS, *_GRADIENT_POINTERS])
def gradient_outputs_kernel(
    logits_ptr,
    b_ptr,  # None: no second head
    label_ptr,  # None: no labels
    max_ptr,
    softmax_over_sum_ptr,
    onehot_ptr,  # None: no labels
    relative_over_sum_ptr,  # None: no such term
    b_max_ptr,
    b_over_sum_ptr,  # None: no such term
    row_stride: tl.int64,
    b_row_stride: tl.int64,
    num_classes: tl.int32,
    first_class: tl.int64,
    factor_bits: tl.int64,
    softcap_bits: tl.int64,
    b_factor_bits: tl.int64,
    b_softcap_bits: tl.int64,
    TRANSFORM: tl.constexpr,
    B_TRANSFORM: tl.constexpr,
    B_ALIGNED: tl.constexpr,  # rows of both heads start at the same place of a 16-byte vector
    LANES: tl.constexpr,
):
    VEC: tl.constexpr = 128 // logits_ptr.dtype.element_ty.primitive_bitwidth
    STAT: tl.constexpr = max_ptr.dtype.element_ty
    DTYPE: tl.constexpr = logits_ptr.dtype.element_ty
    PAIR: tl.constexpr = b_ptr is not None
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    factor, softcap = _float_from_bits(factor_bits, STAT), _float_from_bits(softcap_bits, STAT)
    b_factor, b_softcap = _float_from_bits(b_factor_bits, STAT), _float_from_bits(b_softcap_bits, STAT)

    softmax_over_sum = tl.load(softmax_over_sum_ptr + row)
    active = softmax_over_sum != 0.0  # NaN counts as active
    relative_over_sum = None
    if relative_over_sum_ptr is not None:
        relative_over_sum = tl.load(relative_over_sum_ptr + row)
        active = active | (relative_over_sum != 0.0)
    b_over_sum = None
    if b_over_sum_ptr is not None:
        b_over_sum = tl.load(b_over_sum_ptr + row)
        active = active | (b_over_sum != 0.0)
    onehot = None
    label = tl.full((), -1, tl.int32)
    if label_ptr is not None:
        onehot = tl.load(onehot_ptr + row)
        active = active | (onehot != 0.0)
        wide_label = tl.load(label_ptr + row) - first_class
        label = tl.where((wide_label >= 0) & (wide_label < num_classes), wide_label, -1).to(tl.int32)
    max_x = tl.where(active, tl.load(max_ptr + row), 0.0)
    max_b = max_x
    b_row_ptr = row_ptr
    if PAIR:
        max_b = tl.where(active, tl.load(b_max_ptr + row), 0.0)
        b_row_ptr = b_ptr + row * b_row_stride

    head, num_vectors = _split_row(row_ptr, num_classes, VEC)
    vector = tl.arange(0, LANES)[:, None] * VEC + tl.arange(0, VEC)[None, :]
    body_ptr = tl.multiple_of(row_ptr + head, 16)
    b_body_ptr = b_row_ptr + head
    if B_ALIGNED:
        b_body_ptr = tl.multiple_of(b_body_ptr, 16)
    # An inactive row is not read: z = 0 and max = 0 with coefficients of 0 give 0.
    num_readable = tl.where(active, num_vectors, 0)

    for tile in range(tl.cdiv(num_vectors, LANES)):
        columns = tile * (LANES * VEC) + vector
        valid = (tile * LANES + tl.arange(0, LANES) < num_vectors)[:, None]
        readable = (tile * LANES + tl.arange(0, LANES) < num_readable)[:, None]
        z = tl.load(body_ptr + columns, mask=readable, other=0.0).to(STAT)
        z_b = z
        if PAIR:
            z_b = tl.load(b_body_ptr + columns, mask=readable, other=0.0).to(STAT)
        grad = _output_gradient(z, z_b, columns + head, label, onehot, max_x, softmax_over_sum, relative_over_sum,
                                max_b, b_over_sum, factor, softcap, b_factor, b_softcap, TRANSFORM, B_TRANSFORM,
                                PAIR)  # fmt: skip
        tl.store(body_ptr + columns, grad.to(DTYPE), mask=valid)

    if num_vectors * VEC < num_classes:
        columns, valid = _edges(head, num_vectors, num_classes, VEC)
        readable = valid & (columns < tl.where(active, num_classes, 0))
        z = tl.load(row_ptr + columns, mask=readable, other=0.0).to(STAT)
        z_b = z
        if PAIR:
            z_b = tl.load(b_row_ptr + columns, mask=readable, other=0.0).to(STAT)
        grad = _output_gradient(z, z_b, columns, label, onehot, max_x, softmax_over_sum, relative_over_sum,
                                max_b, b_over_sum, factor, softcap, b_factor, b_softcap, TRANSFORM, B_TRANSFORM,
                                PAIR)  # fmt: skip
        tl.store(row_ptr + columns, grad.to(DTYPE), mask=valid)
