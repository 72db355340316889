"""Instructions that move data across lanes, in small hand-assembled programs."""

import numpy as np
import pytest

from tests.amdgpu import toolchain
from tests.amdgpu.assembler import DATA, outputs

pytestmark = pytest.mark.skipif(toolchain.missing() is not None, reason=str(toolchain.missing()))


def rows(function):
    """A DPP rule within rows of 16: place in the row -> place read, or None for no source."""
    return lambda lane: None if function(lane % 16) is None else lane // 16 * 16 + function(lane % 16)


DPP = {
    "quad_perm:[3,0,2,1]": lambda lane: lane // 4 * 4 + [3, 0, 2, 1][lane % 4],
    "row_shr:3": rows(lambda k: k - 3 if k >= 3 else None),
    "row_shl:5": rows(lambda k: k + 5 if k + 5 < 16 else None),
    "row_ror:4": rows(lambda k: (k - 4) % 16),
    "row_mirror": rows(lambda k: 15 - k),
    "row_half_mirror": rows(lambda k: k // 8 * 8 + 7 - k % 8),
}


@pytest.mark.parametrize("rule", DPP)
@pytest.mark.parametrize("bound", (0, 1))
def test_dpp(rule, bound):
    suffix = " bound_ctrl:0" if bound else ""
    found = outputs(f"v_mov_b32 v5, 77\nv_mov_b32_dpp v5, v2 {rule} row_mask:0xf bank_mask:0xf{suffix}\n")
    for lane in range(64):
        source = DPP[rule](lane)
        assert found[lane] == ((0 if bound else 77) if source is None else DATA[source])


def test_dpp_masks_and_inactive_lanes():
    body = """
      v_mov_b32 v5, 77
      s_mov_b64 exec, 0xf
      v_mov_b32_dpp v5, v2 row_mirror row_mask:0xf bank_mask:0xf
      s_mov_b64 exec, -1
      v_mov_b32_dpp v5, v2 quad_perm:[1,0,3,2] row_mask:0x4 bank_mask:0x1
    """
    found = outputs(body)
    for lane in range(64):  # mirrored lanes 12 to 15 are inactive: not written; then row 2, first bank only
        assert found[lane] == (DATA[lane ^ 1] if lane in range(32, 36) else 77)


@pytest.mark.parametrize("rule", ("row_xmask:5", "row_share:9"))
def test_dpp_of_gfx11(rule):
    found = outputs(f"v_mov_b32_dpp v5, v2 {rule} row_mask:0xf bank_mask:0xf\n", "gfx1100")
    place = (lambda k: k ^ 5) if "xmask" in rule else (lambda k: 9)
    assert found.tolist() == [DATA[lane // 16 * 16 + place(lane % 16)] for lane in range(64)]


def test_dpp_broadcast_and_shift_of_gfx9():
    body = """
      v_mov_b32 v5, 0
      v_mov_b32_dpp v5, v2 row_bcast:15 row_mask:0xa bank_mask:0xf
      v_mov_b32_dpp v5, v2 row_bcast:31 row_mask:0xc bank_mask:0xf
    """
    found = outputs(body)
    for lane in range(64):
        first = DATA[lane // 16 * 16 - 1] if lane // 16 in (1, 3) else 0
        assert found[lane] == (DATA[31] if lane >= 32 else first)


def test_dpp_of_an_operation():
    found = outputs("v_mov_b32 v3, 1000\nv_add_u32_dpp v5, v2, v3 row_ror:1 row_mask:0xf bank_mask:0xf\n")
    assert found.tolist() == [(int(DATA[n // 16 * 16 + (n % 16 - 1) % 16]) + 1000) % 2**32 for n in range(64)]


def test_read_and_write_lane():
    body = """
      v_readlane_b32 s20, v2, 5
      s_mov_b32 s21, 63
      v_readlane_b32 s22, v2, s21
      s_mov_b64 exec, 0xff00
      v_readfirstlane_b32 s23, v2
      s_mov_b64 exec, -1
      v_mov_b32 v5, s20
      v_writelane_b32 v5, s22, 7
      v_writelane_b32 v5, s23, 9
    """
    found = outputs(body)
    expected = np.full(64, DATA[5])
    expected[7], expected[9] = DATA[63], DATA[8]
    assert (found == expected).all()


@pytest.mark.parametrize("name", ("v_permlane16_b32", "v_permlanex16_b32"))
def test_permlane16(name):
    body = f"s_mov_b32 s20, 0x76543210\ns_mov_b32 s21, 0x01234567\n{name} v5, v2, s20, s21\n"
    place = [0, 1, 2, 3, 4, 5, 6, 7, 7, 6, 5, 4, 3, 2, 1, 0]
    other = 16 if "x16" in name else 0
    found = outputs(body, "gfx1100")
    assert found.tolist() == [DATA[(lane // 16 * 16 ^ other) + place[lane % 16]] for lane in range(64)]


@pytest.mark.parametrize("group", (16, 32))
def test_permlane_swap(group):
    body = f"v_mov_b32 v5, v2\nv_xor_b32 v6, -1, v2\nv_permlane{group}_swap_b32 v5, v6\n"
    first = outputs(body, "gfx950")
    second = outputs(body + "v_mov_b32 v5, v6\n", "gfx950")
    for lane in range(64):
        is_odd = lane // group % 2 == 1
        assert first[lane] == (~DATA[lane ^ group] if is_odd else DATA[lane])
        assert second[lane] == (~DATA[lane] if is_odd else DATA[lane ^ group])


def test_mask_count():
    body = """
      s_mov_b32 s20, 0x0f0f1234
      s_mov_b32 s21, 0x87654321
      v_mbcnt_lo_u32_b32 v5, s20, 50
      v_mbcnt_hi_u32_b32 v5, s21, v5
    """
    mask = 0x876543210F0F1234
    assert outputs(body).tolist() == [50 + bin(mask & ((1 << lane) - 1)).count("1") for lane in range(64)]


@pytest.mark.parametrize(
    ("pattern", "source"),
    [
        ("swizzle(SWAP,16)", lambda lane: lane ^ 16),
        ("swizzle(SWAP,1)", lambda lane: lane ^ 1),
        ("swizzle(BROADCAST,8,3)", lambda lane: lane // 8 * 8 + 3),
        ("swizzle(REVERSE,8)", lambda lane: lane // 8 * 8 + 7 - lane % 8),
        ("swizzle(QUAD_PERM,2,3,0,1)", lambda lane: lane ^ 2),
        ('swizzle(BITMASK_PERM,"0p1ip")', lambda lane: lane & 32 | ((lane & 0b01001) | 0b00100 | (~lane & 0b00010))),
    ],
)
def test_swizzle(pattern, source):
    found = outputs(f"ds_swizzle_b32 v5, v2 offset:{pattern}\n")
    assert found.tolist() == [DATA[source(lane)] for lane in range(64)]


def test_bpermute():
    body = "v_mul_u32_u24 v3, 20, v0\nv_and_b32 v3, 0xff, v3\nds_bpermute_b32 v5, v3, v2\n"
    assert outputs(body).tolist() == [DATA[lane * 5 % 64] for lane in range(64)]
