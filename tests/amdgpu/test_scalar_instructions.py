"""Scalar instructions, hand-assembled and run, against Python integers: the result and the condition code."""

import math
import struct

import numpy as np
import pytest

from tests.amdgpu import assembler, toolchain

pytestmark = pytest.mark.skipif(toolchain.missing() is not None, reason=str(toolchain.missing()))

M32, M64 = 2**32 - 1, 2**64 - 1
KEEP = None  # the instruction leaves the condition code alone
VALUES = [
    (0, 0),
    (1, M64),
    (M64, 1),
    (0x80000000, 0x7FFFFFFF),
    (0x7FFFFFFF, 0xFFFFFFFF80000000),
    (0x123456789ABCDEF0, 0x0000000000040008),
    (0xFEDCBA9876543210, 0xFFFFFFFFFFFFFFF7),
    (5, 3),
    (0xFFFFFFFF, 33),
]


def i32(x):
    return (x & M32) - (2**32 if x & 2**31 else 0)


def i64(x):
    return x - (2**64 if x & 2**63 else 0)


def f32(x):
    return struct.unpack("<f", struct.pack("<I", x & M32))[0]


def float_bits(x):
    return int(np.float32(x).view(np.uint32))


def nonzero(operation, bits):
    mask = 2**bits - 1
    return lambda a, b, scc: (operation(a & mask, b & mask) & mask, int(operation(a & mask, b & mask) & mask != 0))


def sum32(operation):
    """Unsigned: the condition code is the carry or borrow."""
    return lambda a, b, scc: (
        operation(a & M32, b & M32, scc) & M32,
        int(not 0 <= operation(a & M32, b & M32, scc) <= M32),
    )


def signed_sum(operation):
    def reference(a, b, scc):
        exact = operation(i32(a), i32(b))
        return exact & M32, int(not -(2**31) <= exact < 2**31)

    return reference


def chosen(key, larger):
    def reference(a, b, scc):
        a, b = a & M32, b & M32
        takes_a = key(a) > key(b) if larger else key(a) < key(b)
        return (a if takes_a else b), int(takes_a)

    return reference


def bit_field(a, b, scc):
    offset, width = b & 31, (b >> 16) & 127
    result = ((a & M32) >> offset) & (2 ** min(width, 32) - 1)
    return result, int(result != 0)


def compared(relation, convert):
    return lambda a, b, scc: (None, int(relation(convert(a), convert(b))))


def plain(operation):
    return lambda a, b, scc: (operation(a, b), KEEP)


LOGIC = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
    "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
}
u32 = M32.__and__
# name -> (architecture, reference of (a, b, scc) -> (result or None for compares, condition code))
CASES = {
    **{f"{name}_b{bits}": ("gfx942", nonzero(op, bits)) for name, op in LOGIC.items() for bits in (32, 64)},
    "lshl_b32": ("gfx942", nonzero(lambda a, b: a << b % 32, 32)),
    "lshl_b64": ("gfx942", nonzero(lambda a, b: a << b % 64, 64)),
    "lshr_b32": ("gfx942", nonzero(lambda a, b: a >> b % 32, 32)),
    "lshr_b64": ("gfx942", nonzero(lambda a, b: a >> b % 64, 64)),
    "ashr_i32": ("gfx942", nonzero(lambda a, b: i32(a) >> b % 32, 32)),
    "ashr_i64": ("gfx942", nonzero(lambda a, b: i64(a) >> b % 64, 64)),
    "add_u32": ("gfx942", sum32(lambda a, b, scc: a + b)),
    "sub_u32": ("gfx942", sum32(lambda a, b, scc: a - b)),
    "addc_u32": ("gfx942", sum32(lambda a, b, scc: a + b + scc)),
    "subb_u32": ("gfx942", sum32(lambda a, b, scc: a - b - scc)),
    "add_i32": ("gfx942", signed_sum(lambda a, b: a + b)),
    "sub_i32": ("gfx942", signed_sum(lambda a, b: a - b)),
    "add_co_ci_u32": ("gfx1201", sum32(lambda a, b, scc: a + b + scc)),
    "sub_co_ci_u32": ("gfx1201", sum32(lambda a, b, scc: a - b - scc)),
    "add_co_i32": ("gfx1201", signed_sum(lambda a, b: a + b)),
    "sub_co_i32": ("gfx1201", signed_sum(lambda a, b: a - b)),
    "add_nc_u64": ("gfx1201", plain(lambda a, b: (a + b) & M64)),
    "sub_nc_u64": ("gfx1201", plain(lambda a, b: (a - b) & M64)),
    "mul_u64": ("gfx1201", plain(lambda a, b: (a * b) & M64)),
    "mul_i32": ("gfx942", plain(lambda a, b: (a * b) & M32)),
    "mul_hi_u32": ("gfx942", plain(lambda a, b: (a & M32) * (b & M32) >> 32)),
    "mul_hi_i32": ("gfx942", plain(lambda a, b: (i32(a) * i32(b) >> 32) & M32)),
    "min_i32": ("gfx942", chosen(i32, larger=False)),
    "max_i32": ("gfx942", chosen(i32, larger=True)),
    "min_u32": ("gfx942", chosen(u32, larger=False)),
    "max_u32": ("gfx942", chosen(u32, larger=True)),
    "bfe_u32": ("gfx942", bit_field),
    "lshl1_add_u32": ("gfx942", sum32(lambda a, b, scc: (a << 1) + b)),
    "lshl2_add_u32": ("gfx942", sum32(lambda a, b, scc: (a << 2) + b)),
    "pack_ll_b32_b16": ("gfx942", plain(lambda a, b: (a & 0xFFFF) | (b & 0xFFFF) << 16)),
    "pack_lh_b32_b16": ("gfx942", plain(lambda a, b: (a & 0xFFFF) | (b & 0xFFFF0000))),
    "pack_hh_b32_b16": ("gfx942", plain(lambda a, b: (a >> 16 & 0xFFFF) | (b & 0xFFFF0000))),
    "cselect_b32": ("gfx942", lambda a, b, scc: ((a if scc else b) & M32, KEEP)),
    "cselect_b64": ("gfx942", lambda a, b, scc: (a if scc else b, KEEP)),
    "mul_f32": ("gfx1201", plain(lambda a, b: float_bits(np.float32(f32(a)) * np.float32(f32(b))))),
    "add_f32": ("gfx1201", plain(lambda a, b: float_bits(np.float32(f32(a)) + np.float32(f32(b))))),
    "cmp_eq_u32": ("gfx942", compared(int.__eq__, u32)),
    "cmp_lg_u32": ("gfx942", compared(int.__ne__, u32)),
    "cmp_lt_u32": ("gfx942", compared(int.__lt__, u32)),
    "cmp_gt_u32": ("gfx942", compared(int.__gt__, u32)),
    "cmp_lt_i32": ("gfx942", compared(int.__lt__, i32)),
    "cmp_ge_i32": ("gfx942", compared(int.__ge__, i32)),
    "cmp_eq_u64": ("gfx942", compared(int.__eq__, lambda x: x)),
    "cmp_lg_u64": ("gfx942", compared(int.__ne__, lambda x: x)),
    "cmp_lt_f32": ("gfx1201", compared(float.__lt__, f32)),
    "bitcmp1_b32": ("gfx942", lambda a, b, scc: (None, a >> b % 32 & 1)),
}


def program(name, reference):
    """All value pairs, each with the condition code 0 and 1: result low, result high, condition code."""
    is_wide = name.endswith("64")
    a, b, target = ("s[20:21]", "s[22:23]", "s[24:25]") if is_wide else ("s20", "s22", "s24")
    if name.startswith(("lshl_b64", "lshr_b64", "ashr_i64")):
        b = "s22"
    body = []
    for left, right in VALUES:
        for scc in (0, 1):
            for register, value in ((20, left), (21, left >> 32), (22, right), (23, right >> 32)):
                body.append(f"s_mov_b32 s{register}, {value & M32:#x}")
            body += ["s_mov_b64 s[24:25], 0", f"s_cmp_{'eq' if scc else 'lg'}_u32 s20, s20"]
            is_compare = reference(left, right, scc)[0] is None
            body.append(f"s_{name} {a}, {b}" if is_compare else f"s_{name} {target}, {a}, {b}")
            body.append("s_cselect_b32 s26, 1, 0")
            for k, register in enumerate((24, 25, 26)):
                body += [f"v_mov_b32 v2, s{register}", f"global_store_dword v1, v2, s[6:7] offset:{4 * k}"]
            body += ["s_add_u32 s6, s6, 12", "s_addc_u32 s7, s7, 0"]
    return "\n".join(body)


@pytest.mark.parametrize("name", CASES)
def test_instruction(name):
    arch, reference = CASES[name]
    count = 2 * len(VALUES)
    found = assembler.run(program(name, reference), arch, np.zeros(1), 3 * count, threads=1).reshape(count, 3)
    for row, ((a, b), scc) in zip(found, ((pair, scc) for pair in VALUES for scc in (0, 1)), strict=True):
        result, code = reference(a, b, scc)
        label = f"s_{name} of {a:#x}, {b:#x} with condition code {scc}"
        if result is not None:
            actual = int(row[0]) | int(row[1]) << 32
            is_nan = name.endswith("f32") and math.isnan(f32(result))
            assert math.isnan(f32(actual)) if is_nan else actual == result, label
        assert row[2] == (scc if code is KEEP else code), label


def test_exec_masks_and_immediates():
    """saveexec, wrexec, moves with immediates and sign extension, in both wave sizes."""
    for arch, bits in (("gfx942", 64), ("gfx1100", 32)):
        exec_name, pair = ("exec", lambda k: f"s[{k}:{k + 1}]") if bits == 64 else ("exec_lo", lambda k: f"s{k}")
        body = f"""
          v_mov_b32 v2, 7
          s_mov_b32 s20, 0x5
          s_mov_b32 s21, 0
          s_and_saveexec_b{bits} {pair(22)}, {pair(20)}
          v_mov_b32 v2, 9
          s_mov_b{bits} {exec_name}, {pair(22)}
          global_store_dword v1, v2, s[6:7]
          s_movk_i32 s24, 0x8000
          s_addk_i32 s24, 0x1
          s_sext_i32_i8 s25, 0x80
          s_not_b32 s26, 5
          v_mov_b32 v3, s24
          v_mov_b32 v4, s25
          s_brev_b32 s27, 1
          s_add_u32 s26, s26, s27
          v_mov_b32 v5, s26
          global_store_dword v1, v3, s[6:7] offset:128
          global_store_dword v1, v4, s[6:7] offset:256
          global_store_dword v1, v5, s[6:7] offset:384
        """
        found = assembler.run(body, arch, np.zeros(1), 128, threads=32).reshape(4, 32)
        assert found[0].tolist() == [9, 7, 9, *[7] * 29]
        assert (found[1] == 0xFFFF8001).all() and (found[2] == 0xFFFFFF80).all() and (found[3] == 0x7FFFFFFA).all()


def test_loops_and_branches():
    """The sum 1 + 2 + ... + n by a scalar loop; lanes leave a vector loop one after the other."""
    body = """
      s_mov_b32 s20, 0
      s_mov_b32 s21, 10
    again:
      s_add_i32 s20, s20, s21
      s_sub_i32 s21, s21, 1
      s_cmp_lg_u32 s21, 0
      s_cbranch_scc1 again
      v_mov_b32 v2, s20
      v_mov_b32 v3, 0
    each:
      v_add_u32 v3, 1, v3
      v_cmp_lt_u32 vcc, v3, v0
      s_and_b64 exec, exec, vcc
      s_cbranch_execnz each
      s_mov_b64 exec, -1
      v_add_u32 v2, v2, v3
      global_store_dword v1, v2, s[6:7]
    """
    found = assembler.run(body, "gfx942", np.zeros(1), 64)
    assert found.tolist() == [55 + max(lane, 1) for lane in range(64)]
