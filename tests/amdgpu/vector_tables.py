"""Vector instructions that compute one 32-bit result per lane: name -> (operand types, function, result type).

Types: ``u`` and ``i`` integers, ``f`` float32.  Names are without the leading ``v_``.
"""

import numpy as np

from tests.amdgpu.numeric import (
    F32,
    F64,
    I32,
    I64,
    U32,
    U64,
    amount,
    f16_to_float,
    float_to_bf16,
    float_to_f16,
    flush,
    fma,
    maximum_number,
    minimum_number,
    sign_extend_24,
    truncate_to,
)


def _field(value, first, width):
    """Bits ``[first, first + width)``; ``width`` may be 0."""
    return (value >> amount(first)) & ((U32(1) << amount(width)) - U32(1))


def _signed_field(value, first, width):
    bits = amount(width).astype(I64)
    x = (value.astype(I64) >> amount(first).astype(I64)) & ((1 << bits) - 1)
    is_negative = (bits > 0) & ((x >> np.maximum(bits - 1, 0)) & 1 == 1)
    return np.where(is_negative, x - (1 << bits), x).astype(I32)


def _permute_bytes(high, low, selectors):
    """v_perm_b32: each byte of ``selectors`` names a byte of ``high:low``, 12 is 0x00, larger is 0xFF."""
    source = (high.astype(U64) << U64(32)) | low.astype(U64)
    result = np.zeros(np.broadcast(high, low, selectors).shape, U32)
    for k in range(4):
        selector = (selectors >> U32(8 * k)) & U32(0xFF)
        byte = ((source >> ((selector & U32(7)).astype(U64) * U64(8))) & U64(0xFF)).astype(U32)
        # 8..11 replicate the sign of bytes 1, 3, 5 and 7
        sign_byte = ((source >> ((U64(2) * (selector & U32(3)).astype(U64) + U64(1)) * U64(8))) & U64(0xFF)).astype(U32)
        sign = np.where(sign_byte >> U32(7), U32(0xFF), U32(0))
        byte = np.where(selector >= 8, sign, byte)
        byte = np.where(selector == 12, U32(0), np.where(selector > 12, U32(0xFF), byte))
        result |= byte << U32(8 * k)
    return result


def _reverse_bits(value):
    """Swap halves, then bytes, nibbles, pairs and neighbours."""
    for distance, mask in ((16, 0xFFFF), (8, 0xFF00FF), (4, 0x0F0F0F0F), (2, 0x33333333), (1, 0x55555555)):
        value = ((value >> U32(distance)) & U32(mask)) | ((value & U32(mask)) << U32(distance))
    return value


def _align_bits(high, low, shift):
    return (((high.astype(U64) << U64(32)) | low) >> amount(shift).astype(U64)).astype(U32)


def _pack_halves(low, high):
    return (low & U32(0xFFFF)) | (high << U32(16))


def _mul_high_u32(a, b):
    return ((a.astype(U64) * b.astype(U64)) >> U64(32)).astype(U32)


def _mul_high_i32(a, b):
    return ((a.astype(I64) * b.astype(I64)) >> 32).astype(I32)


def _round_toward_zero_f16(values):
    """float16 bits, truncated: the nearest one, moved towards zero where it overshoots."""
    nearest = values.astype(np.float16)
    overshoots = np.abs(nearest.astype(F64)) > np.abs(values.astype(F64))
    return (nearest.view(np.uint16) - overshoots.astype(np.uint16)).astype(U32)


ONE = {
    "mov_b32": ("u", lambda a: a, "u"),
    "not_b32": ("u", lambda a: ~a, "u"),
    "bfrev_b32": ("u", _reverse_bits, "u"),
    "exp_f32": ("f", lambda a: flush(np.exp2(a)), "f"),
    "log_f32": ("f", lambda a: np.log2(flush(a)), "f"),
    "rcp_f32": ("f", lambda a: F32(1) / a, "f"),
    "rcp_iflag_f32": ("f", lambda a: F32(1) / a, "f"),
    "rsq_f32": ("f", lambda a: F32(1) / np.sqrt(a), "f"),
    "sqrt_f32": ("f", np.sqrt, "f"),
    "rndne_f32": ("f", np.rint, "f"),
    "floor_f32": ("f", np.floor, "f"),
    "trunc_f32": ("f", np.trunc, "f"),
    "cvt_f32_i32": ("i", lambda a: a.astype(F32), "f"),
    "cvt_f32_u32": ("u", lambda a: a.astype(F32), "f"),
    "cvt_i32_f32": ("f", lambda a: truncate_to(a, -(2**31), 2**31 - 1).astype(I32), "i"),
    "cvt_u32_f32": ("f", lambda a: truncate_to(a, 0, 2**32 - 1).astype(U32), "u"),
    "cvt_f32_f16": ("u", f16_to_float, "f"),
    "cvt_f16_f32": ("f", float_to_f16, "u"),
    "cvt_f32_bf16": ("u", lambda a: (a & U32(0xFFFF)) << U32(16), "u"),
}
TWO = {
    "add_f32": ("ff", np.add, "f"),
    "sub_f32": ("ff", np.subtract, "f"),
    "subrev_f32": ("ff", lambda a, b: b - a, "f"),
    "mul_f32": ("ff", np.multiply, "f"),
    "max_f32": ("ff", maximum_number, "f"),
    "min_f32": ("ff", minimum_number, "f"),
    "max_num_f32": ("ff", maximum_number, "f"),
    "min_num_f32": ("ff", minimum_number, "f"),
    "maximum_f32": ("ff", np.maximum, "f"),
    "minimum_f32": ("ff", np.minimum, "f"),
    "ldexp_f32": ("fi", lambda a, b: np.ldexp(a.astype(F64), b).astype(F32), "f"),
    "add_u32": ("uu", np.add, "u"),
    "add_nc_u32": ("uu", np.add, "u"),
    "sub_u32": ("uu", np.subtract, "u"),
    "sub_nc_u32": ("uu", np.subtract, "u"),
    "subrev_u32": ("uu", lambda a, b: b - a, "u"),
    "subrev_nc_u32": ("uu", lambda a, b: b - a, "u"),
    "and_b32": ("uu", np.bitwise_and, "u"),
    "or_b32": ("uu", np.bitwise_or, "u"),
    "xor_b32": ("uu", np.bitwise_xor, "u"),
    "xnor_b32": ("uu", lambda a, b: ~(a ^ b), "u"),
    "lshlrev_b32": ("uu", lambda a, b: b << amount(a), "u"),
    "lshrrev_b32": ("uu", lambda a, b: b >> amount(a), "u"),
    "ashrrev_i32": ("ui", lambda a, b: b >> amount(a).astype(I32), "i"),
    "max_i32": ("ii", np.maximum, "i"),
    "min_i32": ("ii", np.minimum, "i"),
    "max_u32": ("uu", np.maximum, "u"),
    "min_u32": ("uu", np.minimum, "u"),
    "mul_lo_u32": ("uu", np.multiply, "u"),
    "mul_hi_u32": ("uu", _mul_high_u32, "u"),
    "mul_hi_i32": ("ii", _mul_high_i32, "i"),
    "mul_u32_u24": ("uu", lambda a, b: (a & U32(0xFFFFFF)) * (b & U32(0xFFFFFF)), "u"),
    "mul_i32_i24": ("ii", lambda a, b: sign_extend_24(a) * sign_extend_24(b), "i"),
    "cvt_pk_bf16_f32": ("ff", lambda a, b: _pack_halves(float_to_bf16(a), float_to_bf16(b)), "u"),
    "cvt_pk_f16_f32": ("ff", lambda a, b: _pack_halves(float_to_f16(a), float_to_f16(b)), "u"),
    "cvt_pkrtz_f16_f32": (
        "ff",
        lambda a, b: _pack_halves(_round_toward_zero_f16(a), _round_toward_zero_f16(b)),
        "u",
    ),
    "pack_b32_f16": ("uu", _pack_halves, "u"),
    "bfm_b32": ("uu", lambda a, b: ((U32(1) << amount(a)) - U32(1)) << amount(b), "u"),
}
THREE = {
    "fma_f32": ("fff", fma, "f"),
    "mad_u32_u24": ("uuu", lambda a, b, c: (a & U32(0xFFFFFF)) * (b & U32(0xFFFFFF)) + c, "u"),
    "add3_u32": ("uuu", lambda a, b, c: a + b + c, "u"),
    "lshl_add_u32": ("uuu", lambda a, b, c: (a << amount(b)) + c, "u"),
    "add_lshl_u32": ("uuu", lambda a, b, c: (a + b) << amount(c), "u"),
    "lshl_or_b32": ("uuu", lambda a, b, c: (a << amount(b)) | c, "u"),
    "and_or_b32": ("uuu", lambda a, b, c: (a & b) | c, "u"),
    "or3_b32": ("uuu", lambda a, b, c: a | b | c, "u"),
    "xor3_b32": ("uuu", lambda a, b, c: a ^ b ^ c, "u"),
    "xad_u32": ("uuu", lambda a, b, c: (a ^ b) + c, "u"),
    "bfe_u32": ("uuu", _field, "u"),
    "bfe_i32": ("iuu", _signed_field, "i"),
    "bfi_b32": ("uuu", lambda a, b, c: (a & b) | (~a & c), "u"),
    "alignbit_b32": ("uuu", _align_bits, "u"),
    "perm_b32": ("uuu", _permute_bytes, "u"),
    "max3_f32": ("fff", lambda a, b, c: maximum_number(maximum_number(a, b), c), "f"),
    "min3_f32": ("fff", lambda a, b, c: minimum_number(minimum_number(a, b), c), "f"),
    "max3_num_f32": ("fff", lambda a, b, c: maximum_number(maximum_number(a, b), c), "f"),
    "maximum3_f32": ("fff", lambda a, b, c: np.maximum(np.maximum(a, b), c), "f"),
    "minimum3_f32": ("fff", lambda a, b, c: np.minimum(np.minimum(a, b), c), "f"),
    "max3_i32": ("iii", lambda a, b, c: np.maximum(np.maximum(a, b), c), "i"),
    "min3_i32": ("iii", lambda a, b, c: np.minimum(np.minimum(a, b), c), "i"),
}
SIMPLE = {**ONE, **TWO, **THREE}
