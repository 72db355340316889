"""Straight-line pieces of the FlyDSL row kernels: a row as 128-bit vectors, and the arithmetic on one vector.

A row of logits starts at any element of memory, so its address is rounded down to 16 bytes and the ``head``
elements before it are masked away.  With ``window = head + num_classes`` elements counted from the aligned address,

    | head | c0 c1 c2 .. |  ..  |  ..  | .. c(C-1) | rest |
    [   vector 0         ][  1  ][ ... ][ vector n-1      ]

only vector 0 (when head > 0) and the last one (when the window does not end on 16 bytes) are partial.  The buffer
descriptor carries the row's own 64-bit address and its length, so no 32-bit row offset exists, and it ends on the
dword that holds the last class: hardware reads whole dwords, never beyond.

Exponentials are ``exp2(x * log2(e) - reference)`` with ``reference = round(max * log2(e))``, one fused instruction
(:func:`scale_and_reference`).
The rounding of the reference is common to a whole row (1e-4 at logits of 2000) and :func:`rounding_correction`
removes it once per row.

Helpers here run while FlyDSL traces a kernel: plain Python without data-dependent branches.  The kernels call
functions, not methods: FlyDSL's rewriter takes every object whose method is called in a loop for a carried value.
"""

import flydsl.expr as fx

BLOCK = 256  # threads of a workgroup; one workgroup works on one row
VECTOR_BYTES = 16
LOG2E = 1.4426950408889634
ELEMENTS = {"bfloat16": fx.BFloat16, "float16": fx.Float16, "float32": fx.Float32}
FAST = fx.FastMathFlags.fast
# tanh(y) = y * (1 + y^2 * (T1 + y^2 * (T2 + ...))) where |y| < 1/4, to 1e-8
TANH_SERIES = (62 / 2835, -17 / 315, 2 / 15, -1 / 3, 1.0)


class Row:
    """One row of logits as bounds-checked 128-bit vectors; see the module docstring."""

    def __init__(self, logits, row, row_stride, num_classes, element) -> None:
        element_bytes = element.width // 8
        self.element, self.num_classes = element, num_classes
        self.width = VECTOR_BYTES // element_bytes
        self.first_class_pointer = logits + fx.Int64(row) * row_stride
        misaligned_bytes = fx.Int32(fx.ptrtoint(self.first_class_pointer) & (VECTOR_BYTES - 1))
        self.head = misaligned_bytes >> (element_bytes.bit_length() - 1)
        window = self.head + num_classes
        window_bytes = ((fx.Int64(window) * element_bytes + 3) >> 2) << 2
        aligned_pointer = self.first_class_pointer - fx.Int64(self.head)
        buffer = fx.rocdl.make_buffer_ptr(aligned_pointer, num_records_bytes=window_bytes)
        view = fx.make_view(buffer, fx.make_layout(1 << 30, 1))  # the descriptor bounds the accesses, not this extent
        self.vectors = fx.logical_divide(view, fx.make_layout(self.width, 1))
        self.elements = fx.logical_divide(view, fx.make_layout(1, 1))
        # Vectors [first_full, end_full) lie wholly inside the row; end_rest elements are left in vector last.
        self.first_full = (self.head > 0).select(fx.Int32(1), fx.Int32(0))
        self.last = window >> (self.width.bit_length() - 1)
        self.end_full = fx.max(self.last, self.first_full)
        self.end_rest = window & (self.width - 1)


def load_vector(row, index):
    """Vector ``index`` as it is stored; zeros beyond the descriptor."""
    register = fx.make_rmem_tensor(row.width, row.element)
    atom = fx.make_copy_atom(fx.rocdl.BufferCopy128b(), row.element.width)
    fx.copy(atom, fx.slice(row.vectors, (None, index)), register)
    return fx.memref_load_vec(register)


def store_vector(row, index, values) -> None:
    """Store ``values``, of the row's dtype, as vector ``index``."""
    register = fx.make_rmem_tensor(row.width, row.element)
    fx.memref_store_vec(values, register)
    atom = fx.make_copy_atom(fx.rocdl.BufferCopy128b(), row.element.width)
    fx.copy(atom, register, fx.slice(row.vectors, (None, index)))


def store_element(row, position, value) -> None:
    """Store ``value``, of the row's dtype, at element ``position`` of the window."""
    register = fx.make_rmem_tensor(1, row.element)
    register[0] = value
    atom = fx.make_copy_atom(fx.rocdl.BufferCopy(row.element.width), row.element)
    fx.copy(atom, register, fx.slice(row.elements, (None, position)))


def load_class_weights(row, class_weight, index):
    """The float32 weights of the classes in vector ``index``, by element: they are not aligned with the row."""
    buffer = fx.rocdl.make_buffer_ptr(class_weight, num_records_bytes=fx.Int64(row.num_classes) * 4)
    view = fx.logical_divide(fx.make_view(buffer, fx.make_layout(1 << 30, 1)), fx.make_layout(1, 1))
    register = fx.make_rmem_tensor(1, fx.Float32)
    atom = fx.make_copy_atom(fx.rocdl.BufferCopy32b(), fx.Float32)
    weights = []
    for k in range(row.width):
        # A position before the row is negative, hence beyond the descriptor: 0.
        fx.copy(atom, fx.slice(view, (None, index * row.width + k - row.head)), register)
        weights.append(fx.memref_load_vec(register)[0])
    return fx.Vector.from_elements(weights, fx.Float32)


def partial_vector(row, thread):
    """``(index, is_mine)``: thread 0 takes vector 0 when it is partial, thread 1 the last one when that is."""
    has_first = row.first_full > 0
    has_last = (row.end_rest > 0) & (row.last >= row.first_full)  # else vector 0 is the last one too
    index = (thread == 0).select(fx.Int32(0), row.last)
    return index, ((thread == 0) & has_first) | ((thread == 1) & has_last)


def in_row(row, position):
    """Whether element ``position`` of the window is a class of this row."""
    return (position >= row.head) & (position < row.head + row.num_classes)


def quiet(x):
    """``x`` with every NaN replaced by the canonical one; see :func:`round_to`."""
    bits = fx.Int32(fx.Vector.from_elements([x], fx.Float32).bitcast(fx.Int32)[0])
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return fx.Vector.from_elements([is_nan.select(fx.Int32(0x7FC00000), bits)], fx.Int32).bitcast(fx.Float32)[0]


def round_to(element, values, has_bf16_instruction):
    """A float32 vector rounded to ``element``, to nearest and ties to even.

    Without an instruction for bfloat16, add 0x7FFF plus the lowest kept bit and drop 16 bits.  The usual test for NaN
    is left out (half of the instructions): the sum carries out of a NaN only where the low half of its payload is
    not zero, and here a NaN is canonical (:func:`quiet`), made by an instruction, or a widened bfloat16.
    """
    if element is not fx.BFloat16 or has_bf16_instruction:
        return values.to(element)
    bits = values.bitcast(fx.Int32)
    rounded = [bits[k] + (fx.shrui(bits[k], fx.Int32(16)) & 1) + 0x7FFF for k in range(values.numel)]
    halves = zip(rounded[::2], rounded[1::2], strict=True)
    pairs = [(high & -65536) | fx.shrui(low, fx.Int32(16)) for low, high in halves]
    return fx.Vector.from_elements(pairs, fx.Int32).bitcast(fx.BFloat16)


def fill(value, like):
    return fx.Vector.filled(like.shape, value, fx.Float32)


def fma(x, a, b):
    """``x * a + b`` with one rounding; ``x`` a vector, ``a`` and ``b`` vectors or scalars."""
    a, b = (t if isinstance(t, fx.Vector) else fill(t, x) for t in (a, b))
    return fx.math.fma(x, a, b)


def exp2(x):
    return fx.math.exp2(x, fastmath=FAST)


def add(a, b):
    return a + b


def tree(combine, values):
    """Combine a list pairwise, so that no long chain of dependent operations forms."""
    while len(values) > 1:
        paired = [combine(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = paired + values[2 * len(paired) :]
    return values[0]


def sum_of(vectors):
    """The sum of all elements of some vectors."""
    total = tree(add, vectors)
    return tree(add, [total[k] for k in range(total.numel)])


def max_of(vectors):
    """The largest element of some vectors; NaN is passed over (it comes out of the exponentials)."""
    return tree(fx.maxnumf, [v[k] for v in vectors for k in range(v.numel)])


def finite_or_zero(maximum):
    """The maximum, and 0 while only -inf was seen: -inf - -inf would be NaN."""
    return (maximum == fx.Float32(float("-inf"))).select(fx.Float32(0.0), maximum)


def scale_and_reference(maximum):
    """``(scale, round(max * scale))``: exponentials of ``x`` are ``exp2(x * scale - reference)``.

    The scale is log2(e).  From 2 ** 30 on float32 numbers are so far apart that only the maximum itself counts, to any
    base: a scale of 1 makes the product exact, whose rounding would leave the range of exponents.
    """
    point = finite_or_zero(maximum)
    scale = (fx.math.absf(point) < fx.Float32(2.0**30)).select(fx.Float32(LOG2E), fx.Float32(1.0))
    return scale, point * scale


def rounding_correction(maximum):
    """``exp2(reference - max * scale)``; see the module docstring."""
    scale, reference = scale_and_reference(maximum)
    return exp2(-fx.math.fma(finite_or_zero(maximum), scale, -reference))


def tanh(y):
    square = y * y
    series = fill(TANH_SERIES[0], y)
    for coefficient in TANH_SERIES[1:]:
        series = fma(square, series, coefficient)
    denominator = exp2(y * (2 * LOG2E)) + 1.0
    reciprocal = [fx.Float32(fx.rocdl.rcp(fx.Float32.ir_type, denominator[k].ir_value())) for k in range(y.numel)]
    large = fma(fx.Vector.from_elements(reciprocal, fx.Float32), -2.0, 1.0)
    return (square < 0.0625).select(y * series, large)


class Transform:
    """``x = softcap * tanh(logit_scale * z / softcap)`` and its slope; a scale and a cap are static choices."""

    def __init__(self, variant, logit_scale, softcap, inverse_softcap) -> None:
        self.scaled, self.capped = variant.scaled, variant.capped
        self.logit_scale, self.softcap, self.inverse_softcap = logit_scale, softcap, inverse_softcap


def apply(transform, z):
    """The logits that the loss sees, in float32, of stored logits."""
    return apply_with_slope(transform, z)[0]


def apply_with_slope(transform, z):
    """``(x, dx/dz)`` in float32 of stored logits; the slope is None where it is 1."""
    x, slope = z.to(fx.Float32), None
    if transform.scaled:
        x, slope = x * transform.logit_scale, fill(transform.logit_scale, x)
    if transform.capped:
        t = tanh(x * transform.inverse_softcap)
        x = t * transform.softcap
        cap_slope = fma(t, -t, 1.0)
        slope = cap_slope if slope is None else slope * cap_slope
    return x, slope
