"""Arithmetic of the instruction set on numpy arrays: bit casts, bfloat16, minimum and maximum with NaN, shifts."""

import numpy as np

U32, I32, F32, U64, I64, F64 = np.uint32, np.int32, np.float32, np.uint64, np.int64, np.float64
TYPES = {"u": U32, "i": I32, "f": F32}
SMALLEST_NORMAL = F32(1.1754944e-38)


def as_float(bits):
    return np.ascontiguousarray(bits, U32).view(F32)


def as_bits(values):
    return np.ascontiguousarray(values, F32).view(U32)


def join64(low, high):
    return low.astype(U64) | (high.astype(U64) << U64(32))


def low32(values):
    return (values & U64(0xFFFFFFFF)).astype(U32)


def high32(values):
    return (values >> U64(32)).astype(U32)


def bf16_to_float(halves):
    return (halves.astype(U32) << U32(16)).view(F32)


def float_to_bf16(values):
    """Bits of the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = as_bits(values)
    rounded = bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))
    return np.where(np.isnan(values), (bits >> U32(16)) | U32(0x40), rounded >> U32(16)).astype(U32)


def f16_to_float(halves):
    return (halves & U32(0xFFFF)).astype(np.uint16).view(np.float16).astype(F32)


def float_to_f16(values):
    return values.astype(np.float16).view(np.uint16).astype(U32)


def fma(a, b, c):
    """``a * b + c``; the product is exact in float64, the sum is rounded there before it is rounded to float32."""
    with np.errstate(all="ignore"):
        return (a.astype(F64) * b + c).astype(F32)


def flush(values):
    """Denormals become zeros of the same sign."""
    return np.where(np.abs(values) < SMALLEST_NORMAL, np.copysign(F32(0), values), values).astype(F32)


def maximum_number(a, b):
    """IEEE maximumNumber: the other operand where one is NaN."""
    return np.where(np.isnan(a), b, np.where(np.isnan(b), a, np.maximum(a, b)))


def minimum_number(a, b):
    return np.where(np.isnan(a), b, np.where(np.isnan(b), a, np.minimum(a, b)))


def amount(bits, mask=31):
    """A shift amount: its low bits count."""
    return bits & U32(mask)


def truncate_to(values, low, high):
    return np.clip(np.nan_to_num(np.trunc(values.astype(F64))), low, high)


def sign_extend_24(values):
    return (values << 8) >> 8


def is_ordered(a, b):
    return ~(np.isnan(a) | np.isnan(b))


COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "neq": np.not_equal,
    "lg": lambda a, b: (a < b) | (a > b),
    "o": is_ordered,
    "u": lambda a, b: ~is_ordered(a, b),
    "nlt": lambda a, b: ~(a < b),
    "nle": lambda a, b: ~(a <= b),
    "ngt": lambda a, b: ~(a > b),
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
}
INTEGER_COMPARE = {name: COMPARE["ne" if name == "lg" else name] for name in ("eq", "ne", "lg", "lt", "le", "gt", "ge")}
