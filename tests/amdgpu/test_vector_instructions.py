"""Every vector instruction of the tables, hand-assembled and run, against scalar Python arithmetic.

The references work on one lane at a time, on Python integers, fractions and math functions: nothing of numpy's array
arithmetic, which the emulator uses, is repeated here.
"""

import math
import struct
from fractions import Fraction
from functools import cache

import numpy as np
import pytest

from tests.amdgpu import assembler, toolchain
from tests.amdgpu.vector_tables import ONE, SIMPLE, TWO

pytestmark = pytest.mark.skipif(toolchain.missing() is not None, reason=str(toolchain.missing()))

LANES = 64
MASK = 0xFFFFFFFF
ARCH = "gfx942"  # where an instruction exists there
OTHER_ARCHS = {
    "gfx950": ["cvt_pk_bf16_f32", "cvt_pk_f16_f32", "maximum3_f32", "minimum3_f32", "cvt_f32_bf16"],
    "gfx1100": ["add_nc_u32", "sub_nc_u32", "subrev_nc_u32", "xor3_b32"],
    "gfx1201": ["max_num_f32", "min_num_f32", "maximum_f32", "minimum_f32", "max3_num_f32"],
}
ARCH_OF = {name: arch for arch, names in OTHER_ARCHS.items() for name in names}


def f(bits):
    return struct.unpack("<f", struct.pack("<I", bits & MASK))[0]


def i(bits):
    return bits - (1 << 32) if bits >> 31 else bits


def rounded(exact):
    """Bits of the float32 nearest to a fraction, ties to even."""
    if exact == 0:
        return 0
    sign, exact = (0x80000000, -exact) if exact < 0 else (0, exact)
    exponent = max(math.floor(math.log2(exact)), -126)
    if Fraction(2) ** exponent > exact and exponent > -126:
        exponent -= 1
    steps = round(exact / Fraction(2) ** (exponent - 23))  # Python rounds ties to even
    bits = steps + ((exponent + 126) << 23)
    return sign | min(bits, 0x7F800000)


def bits_of(value):
    try:
        return struct.unpack("<I", struct.pack("<f", value))[0]
    except OverflowError:
        return 0x7F800000 if value > 0 else 0xFF800000


def exactly(operation):
    """A float instruction from its operation on fractions; infinities and NaN go through Python floats."""

    def reference(*operands):
        values = [f(bits) for bits in operands]
        if all(math.isfinite(v) for v in values):
            exact = operation(*(Fraction(v) for v in values))
            return rounded(exact) if exact else bits_of(operation(*values))  # the float keeps the sign of 0
        return bits_of(operation(*values))

    return reference


def pick(choose):
    """maximumNumber and the like: NaN only where every operand is."""

    def reference(*operands):
        numbers = [f(bits) for bits in operands if not math.isnan(f(bits))]
        return bits_of(choose(numbers)) if numbers else bits_of(math.nan)

    return reference


def propagate(choose):
    def reference(*operands):
        values = [f(bits) for bits in operands]
        return bits_of(math.nan if any(map(math.isnan, values)) else choose(values))

    return reference


def float_function(function):
    """A transcendental function in float64, with its values outside the domain."""

    def reference(bits):
        try:
            return bits_of(function(f(bits)))
        except ZeroDivisionError:
            return bits_of(math.copysign(math.inf, f(bits)))
        except OverflowError:
            return bits_of(math.inf)
        except ValueError:
            return bits_of(-math.inf if f(bits) == 0 else math.nan)

    return reference


def log2(x):
    return -math.inf if abs(x) < 2.0**-126 else math.log2(x)  # denormals count as 0


def round_half_even(x):
    return math.copysign(float(round(x)), x) if math.isfinite(x) else x


def whole(function):
    return lambda bits: bits_of(math.copysign(function(f(bits)), f(bits)) if math.isfinite(f(bits)) else f(bits))


def to_integer(low, high):
    def reference(bits):
        value = f(bits)
        return 0 if math.isnan(value) else int(min(max(value, low), high)) & MASK

    return reference


def f16(bits):
    return struct.unpack("<e", struct.pack("<H", bits & 0xFFFF))[0]


def to_f16(value):
    try:
        return struct.unpack("<H", struct.pack("<e", value))[0]
    except OverflowError:
        return 0x7C00 if value > 0 else 0xFC00


def to_f16_toward_zero(value):
    half = to_f16(value)
    return half - 1 if math.isfinite(value) and abs(f16(half)) > abs(value) else half


def to_bf16(bits):
    if math.isnan(f(bits)):
        return (bits >> 16) | 0x40
    low, kept = bits & 0xFFFF, bits >> 16
    return kept + (low > 0x8000 or (low == 0x8000 and kept & 1))


def byte_select(high, low, selectors):
    source = (high << 32 | low).to_bytes(8, "little")
    result = bytearray()
    for s in selectors.to_bytes(4, "little"):
        if s < 8:
            result.append(source[s])
        elif s < 12:
            result.append(0xFF if source[2 * (s - 8) + 1] & 0x80 else 0)
        else:
            result.append(0 if s == 12 else 0xFF)
    return int.from_bytes(result, "little")


def signed_field(a, b, c):
    width = c & 31
    digits = f"{i(a) >> (b & 31) & (1 << width) - 1:0{max(width, 1)}b}" if width else "0"
    return (int(digits, 2) - (1 << width) if width and digits[0] == "1" else int(digits, 2)) & MASK


def low24(bits):
    return bits & 0xFFFFFF


def signed24(bits):
    return low24(bits) - (1 << 24) if bits >> 23 & 1 else low24(bits)


ADD = exactly(lambda a, b: a + b)
REFERENCES = {
    "mov_b32": lambda a: a,
    "not_b32": lambda a: MASK - a,
    "bfrev_b32": lambda a: int(f"{a:032b}"[::-1], 2),
    "exp_f32": float_function(lambda x: 0.0 if x < -126 else 2.0**x if not math.isnan(x) else x),
    "log_f32": float_function(log2),
    "rcp_f32": float_function(lambda x: 1.0 / x),
    "rcp_iflag_f32": float_function(lambda x: 1.0 / x),
    "rsq_f32": float_function(lambda x: 1.0 / math.sqrt(x)),
    "sqrt_f32": float_function(math.sqrt),
    "rndne_f32": whole(round_half_even),
    "floor_f32": lambda a: bits_of(float(math.floor(f(a))) or f(a) * 0.0 if math.isfinite(f(a)) else f(a)),
    "trunc_f32": whole(lambda x: float(math.trunc(x))),
    "cvt_f32_i32": lambda a: rounded(Fraction(i(a))),
    "cvt_f32_u32": lambda a: rounded(Fraction(a)),
    "cvt_i32_f32": to_integer(-(2**31), 2**31 - 1),
    "cvt_u32_f32": to_integer(0, 2**32 - 1),
    "cvt_f32_f16": lambda a: bits_of(f16(a)),
    "cvt_f16_f32": lambda a: to_f16(f(a)),
    "cvt_f32_bf16": lambda a: (a & 0xFFFF) << 16,
    "add_f32": ADD,
    "sub_f32": exactly(lambda a, b: a - b),
    "subrev_f32": exactly(lambda a, b: b - a),
    "mul_f32": exactly(lambda a, b: a * b),
    "max_f32": pick(max),
    "min_f32": pick(min),
    "max_num_f32": pick(max),
    "min_num_f32": pick(min),
    "maximum_f32": propagate(max),
    "minimum_f32": propagate(min),
    "ldexp_f32": lambda a, b: (
        rounded(Fraction(f(a)) * Fraction(2) ** max(min(i(b), 300), -300)) if math.isfinite(f(a)) and f(a) else a
    ),
    "add_u32": lambda a, b: (a + b) & MASK,
    "add_nc_u32": lambda a, b: (a + b) & MASK,
    "sub_u32": lambda a, b: (a - b) & MASK,
    "sub_nc_u32": lambda a, b: (a - b) & MASK,
    "subrev_u32": lambda a, b: (b - a) & MASK,
    "subrev_nc_u32": lambda a, b: (b - a) & MASK,
    "and_b32": lambda a, b: a & b,
    "or_b32": lambda a, b: a | b,
    "xor_b32": lambda a, b: a ^ b,
    "xnor_b32": lambda a, b: MASK - (a ^ b),
    "lshlrev_b32": lambda a, b: (b << a % 32) & MASK,
    "lshrrev_b32": lambda a, b: b >> a % 32,
    "ashrrev_i32": lambda a, b: (i(b) >> a % 32) & MASK,
    "max_i32": lambda a, b: max(a, b, key=i),
    "min_i32": lambda a, b: min(a, b, key=i),
    "max_u32": max,
    "min_u32": min,
    "mul_lo_u32": lambda a, b: (a * b) & MASK,
    "mul_hi_u32": lambda a, b: (a * b) >> 32,
    "mul_hi_i32": lambda a, b: ((i(a) * i(b)) >> 32) & MASK,
    "mul_u32_u24": lambda a, b: (low24(a) * low24(b)) & MASK,
    "mul_i32_i24": lambda a, b: (signed24(a) * signed24(b)) & MASK,
    "cvt_pk_bf16_f32": lambda a, b: to_bf16(a) | to_bf16(b) << 16,
    "cvt_pk_f16_f32": lambda a, b: to_f16(f(a)) | to_f16(f(b)) << 16,
    "cvt_pkrtz_f16_f32": lambda a, b: to_f16_toward_zero(f(a)) | to_f16_toward_zero(f(b)) << 16,
    "pack_b32_f16": lambda a, b: (a & 0xFFFF) | (b & 0xFFFF) << 16,
    "bfm_b32": lambda a, b: (((1 << a % 32) - 1) << b % 32) & MASK,
    "fma_f32": exactly(lambda a, b, c: a * b + c),
    "mad_u32_u24": lambda a, b, c: (low24(a) * low24(b) + c) & MASK,
    "add3_u32": lambda a, b, c: (a + b + c) & MASK,
    "lshl_add_u32": lambda a, b, c: ((a << b % 32) + c) & MASK,
    "add_lshl_u32": lambda a, b, c: ((a + b) << c % 32) & MASK,
    "lshl_or_b32": lambda a, b, c: (a << b % 32) & MASK | c,
    "and_or_b32": lambda a, b, c: a & b | c,
    "or3_b32": lambda a, b, c: a | b | c,
    "xor3_b32": lambda a, b, c: a ^ b ^ c,
    "xad_u32": lambda a, b, c: ((a ^ b) + c) & MASK,
    "bfe_u32": lambda a, b, c: (a >> b % 32) % (1 << c % 32),
    "bfe_i32": signed_field,
    "bfi_b32": lambda a, b, c: (a & b) | ((MASK - a) & c),
    "alignbit_b32": lambda a, b, c: ((a << 32 | b) >> c % 32) & MASK,
    "perm_b32": byte_select,
    "max3_f32": pick(max),
    "min3_f32": pick(min),
    "max3_num_f32": pick(max),
    "maximum3_f32": propagate(max),
    "minimum3_f32": propagate(min),
    "max3_i32": lambda a, b, c: max(a, b, c, key=i),
    "min3_i32": lambda a, b, c: min(a, b, c, key=i),
}
# v_exp, v_log, v_rcp, v_rsq and v_sqrt are accurate to about one unit in the last place on hardware, too.
APPROXIMATE = ("exp_f32", "log_f32", "rcp_f32", "rcp_iflag_f32", "rsq_f32", "sqrt_f32")


@cache
def operands():
    """Three operands for 64 lanes: special values, small and large numbers, any bits."""
    random = np.random.default_rng(5)
    special = [0x0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x3F800000, 0xBF800000, 0x3F000000, 0x40200000, 1]
    columns = []
    for shift in (0, 3, 7):
        values = random.integers(0, 2**32, LANES, dtype=np.uint32)
        values[16:44] = random.normal(0, 20, 28).astype(np.float32).view(np.uint32)
        values[44:52] = random.integers(0, 40, 8)
        values[: len(special)] = np.roll(special, shift)
        is_denormal = (values & 0x7F800000 == 0) & (values & 0x7FFFFFFF > 100)
        columns.append(np.where(is_denormal, values | 0x3F800000, values).astype(np.uint32))
    return columns


@cache
def results(arch):
    """One kernel with every instruction that is tested on this architecture: name -> outputs of 64 lanes."""
    names = [name for name in SIMPLE if ARCH_OF.get(name, ARCH) == arch]
    body = [f"  global_load_dword v{2 + k}, v1, s[4:5] offset:{4 * LANES * k}" for k in range(3)]
    for name in names:
        count = len(SIMPLE[name][0])
        sources = ["v2", "v3", "v4"][:count]
        if name in ("cvt_f32_f16", "cvt_f32_bf16", "pack_b32_f16") and toolchain.is_real_true16(arch):
            sources = [f"{s}.l" for s in sources]
        body += [
            f"  v_{name} v5, {', '.join(sources)}",
            "  global_store_dword v1, v5, s[6:7]",
            f"  s_add_u32 s6, s6, {4 * LANES}",
            "  s_addc_u32 s7, s7, 0",
        ]
    outputs = assembler.run("\n".join(body), arch, np.concatenate(operands()), LANES * len(names))
    return dict(zip(names, outputs.reshape(-1, LANES), strict=True))


def test_every_instruction_has_a_reference():
    assert set(REFERENCES) == set(SIMPLE)


@pytest.mark.parametrize("name", SIMPLE)
def test_instruction(name):
    actual = results(ARCH_OF.get(name, ARCH))[name]
    count = 1 if name in ONE else 2 if name in TWO else 3
    for lane in range(LANES):
        sources = [int(column[lane]) for column in operands()[:count]]
        expected, found = REFERENCES[name](*sources), int(actual[lane])
        if SIMPLE[name][2] == "f" and math.isnan(f(expected)):
            assert math.isnan(f(found)), (lane, [hex(s) for s in sources])
        elif SIMPLE[name][2] == "f" and {expected, found} <= {0, 0x80000000}:
            continue  # the sign of a zero minimum or maximum is not specified
        elif name in APPROXIMATE:
            assert abs(expected - found) <= 1, (lane, [hex(s) for s in sources], hex(expected), hex(found))
        else:
            assert found == expected or is_nan_payload(name, expected, found), (
                f"lane {lane}: {[hex(s) for s in sources]} gave {found:#x}, expected {expected:#x}"
            )


def is_nan_payload(name, expected, found):
    """float16 NaN are equal whatever their payload."""
    if "f16" not in name or not name.startswith("cvt"):
        return False
    halves = [(expected & 0xFFFF, found & 0xFFFF), (expected >> 16, found >> 16)]
    return all(a == b or (math.isnan(f16(a)) and math.isnan(f16(b))) for a, b in halves)
