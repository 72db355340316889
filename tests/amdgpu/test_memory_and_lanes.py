"""Memory, LDS, barriers and cross-lane instructions in small hand-assembled programs, and every detection firing."""

import numpy as np
import pytest

from tests.amdgpu import assembler, launch, toolchain
from tests.amdgpu.errors import EmulatorError

pytestmark = pytest.mark.skipif(toolchain.missing() is not None, reason=str(toolchain.missing()))

LANES = np.arange(64, dtype=np.uint32)
DATA = (LANES * 2654435761).astype(np.uint32)
LOAD = "global_load_dword v2, v1, s[4:5]\n"
STORE = "global_store_dword v1, v5, s[6:7]\n"


def outputs(body, arch="gfx942", data=DATA, **options):
    return assembler.run(LOAD + body + STORE, arch, data, 64, **options)


# -- across lanes --------------------------------------------------------------------------------------------------


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


# -- vector instructions with their own rules ----------------------------------------------------------------------


def test_compares_selects_and_carries():
    body = """
      v_cmp_gt_u32 vcc, 0x80000000, v2
      v_cndmask_b32 v3, 1, 2, vcc
      v_add_co_u32 v4, vcc, v2, v2
      v_addc_co_u32 v3, vcc, 0, v3, vcc
      v_sub_co_u32 v4, vcc, v4, v2
      v_subb_co_u32 v5, vcc, v3, 0, vcc
    """
    for lane, found in enumerate(outputs(body)):
        wide = (2 if DATA[lane] < 0x80000000 else 1) * 2**32 + 2 * int(DATA[lane]) - int(DATA[lane])
        assert found == wide >> 32


def test_64_bit_integers():
    body = """
      v_mov_b32 v3, v0
      v_lshlrev_b64 v[8:9], 7, v[2:3]
      v_lshrrev_b64 v[8:9], 3, v[8:9]
      v_lshl_add_u64 v[8:9], v[2:3], 2, v[8:9]
      v_mad_u64_u32 v[8:9], s[20:21], v2, v0, v[8:9]
      v_mov_b64 v[10:11], v[8:9]
      v_xor_b32 v5, v10, v11
    """
    for lane, found in enumerate(outputs(body)):
        wide = int(DATA[lane]) | lane << 32
        total = ((wide << 7) % 2**64 >> 3) + (wide << 2) + int(DATA[lane]) * lane
        assert found == (total ^ total >> 32) & 0xFFFFFFFF


def floats(body, data, arch="gfx942"):
    return assembler.run(body, arch, data, 64).view(np.float32)


def test_packed_float32():
    data = np.random.default_rng(2).normal(size=128).astype(np.float32)
    body = """
      global_load_dword v2, v1, s[4:5]
      global_load_dword v3, v1, s[4:5] offset:256
      v_pk_mul_f32 v[8:9], v[2:3], v[2:3] op_sel:[0,1] op_sel_hi:[1,0] neg_lo:[1,0]
      v_pk_add_f32 v[8:9], v[8:9], v[2:3] op_sel_hi:[1,0]
      v_pk_fma_f32 v[8:9], v[8:9], v[2:3], v[2:3]
      v_pk_mov_b32 v[10:11], v[8:9], v[8:9] op_sel:[1,0]
      v_sub_f32 v5, v10, v11
      global_store_dword v1, v5, s[6:7]
    """
    a, b = data[:64], data[64:]
    low, high = (-a * b + a).astype(np.float64) * a + a, (b * a + a).astype(np.float64) * b + b
    assert (floats(body, data) == high.astype(np.float32) - low.astype(np.float32)).all()


def test_pk_mov_takes_each_half_by_op_sel():
    """Result low from source 0 and result high from source 1; ``op_sel_hi`` has no part in it."""
    body = """
      v_mov_b32 v2, 2
      v_mov_b32 v3, 3
      v_mov_b32 v6, 6
      v_mov_b32 v7, 7
      v_pk_mov_b32 v[8:9], v[2:3], v[6:7] op_sel:[1,0]
      v_lshl_or_b32 v5, v8, 8, v9
    """
    assert (outputs(body) == 0x306).all()


def test_mixed_precision_fma():
    halves = np.random.default_rng(3).normal(size=128).astype(np.float16)
    body = """
      global_load_dword v2, v1, s[4:5]
      v_mov_b32 v3, 2.0
      v_fma_mix_f32 v4, v2, v3, -v2 op_sel:[0,0,1] op_sel_hi:[1,0,1]
      v_mov_b32 v6, 0x11112222
      v_fma_mixlo_f16 v6, v2, 1.0, 1.0 op_sel:[1,0,0] op_sel_hi:[1,1,1]
      v_cvt_f32_f16 v6, v6
      v_add_f32 v5, v4, v6
      global_store_dword v1, v5, s[6:7]
    """
    low, high = halves[::2].astype(np.float32), halves[1::2].astype(np.float32)
    expected = (low * 2 - high) + (high + 1).astype(np.float16).astype(np.float32)
    assert (floats(body, halves.view(np.uint32)) == expected).all()


def test_division_steps():
    data = np.random.default_rng(4).normal(size=128).astype(np.float32)
    body = """
      global_load_dword v2, v1, s[4:5]
      global_load_dword v3, v1, s[4:5] offset:256
      v_div_scale_f32 v4, s[20:21], v3, v3, v2
      v_div_scale_f32 v6, vcc, v2, v3, v2
      v_rcp_f32 v7, v4
      v_fma_f32 v8, -v4, v7, 1.0
      v_fma_f32 v7, v8, v7, v7
      v_mul_f32 v8, v6, v7
      v_fma_f32 v9, -v4, v8, v6
      v_fma_f32 v8, v9, v7, v8
      v_fma_f32 v9, -v4, v8, v6
      v_div_fmas_f32 v8, v9, v7, v8
      v_div_fixup_f32 v5, v8, v3, v2
      global_store_dword v1, v5, s[6:7]
    """
    assert (floats(body, data) == data[:64] / data[64:]).all()


def test_modifiers_subdwords_and_pairs():
    body = "v_add_u32_sdwa v5, v2, v2 dst_sel:DWORD src0_sel:WORD_1 src1_sel:BYTE_0\n"
    assert outputs(body).tolist() == [(int(x) >> 16) + (int(x) & 0xFF) for x in DATA]
    body = (
        "v_cmp_gt_u32 vcc, 9, v0\nv_mov_b32 v3, 5\nv_cndmask_b32_sdwa v5, v3, v2, vcc dst_sel:DWORD src1_sel:WORD_1\n"
    )
    assert outputs(body).tolist() == [int(DATA[k]) >> 16 if k < 9 else 5 for k in range(64)]
    clamped = outputs("v_cvt_f32_u32 v3, v0\nv_fma_f32 v5, -v3, 0.5, |v3| clamp\n").view(np.float32)
    assert clamped.tolist() == [min(lane * 0.5, 1.0) for lane in range(64)]
    swapped = outputs("v_mov_b32 v6, v0\nv_mov_b32 v7, v2\nv_dual_mov_b32 v6, v7 :: v_dual_mov_b32 v7, v6\n"
                      "v_sub_nc_u32 v5, v6, v7\n", "gfx1100")  # fmt: skip
    assert swapped.tolist() == [(int(DATA[k]) - k % 32 - 32 * (k // 32)) % 2**32 for k in range(64)]


# -- memory --------------------------------------------------------------------------------------------------------


def buffer_descriptor(size):
    return f"s_mov_b32 s8, s4\ns_and_b32 s9, s5, 0xffff\ns_mov_b32 s10, {size}\ns_mov_b32 s11, 0x27000\n"


def test_buffer_loads_stop_at_num_records():
    body = buffer_descriptor(40) + "buffer_load_dwordx4 v[8:11], v1, s[8:11], 0 offen offset:4\nv_mov_b32 v5, v10\n"
    assert outputs(body).tolist() == [int(DATA[lane + 3]) if lane + 3 < 10 else 0 for lane in range(64)]


def test_narrow_loads_and_stores():
    body = """
      global_load_ubyte v3, v1, s[4:5] offset:1
      global_load_sshort v4, v1, s[4:5] offset:2
      v_add_u32 v5, v3, v4
      v_mov_b32 v6, 0
      global_store_dword v1, v6, s[6:7]
      global_store_short v1, v5, s[6:7]
    """
    found = assembler.run(body, "gfx942", DATA, 64)
    signed = (DATA >> 16).astype(np.uint16).view(np.int16).astype(np.int64)
    assert found.tolist() == [int((DATA[k] >> 8 & 0xFF) + signed[k]) & 0xFFFF for k in range(64)]


def test_scalar_loads():
    body = """
      s_load_dwordx2 s[20:21], s[4:5], 0x8
      s_mov_b32 s24, 0x10
      s_load_dword s22, s[4:5], s24
      s_add_u32 s20, s20, s21
      s_add_u32 s20, s20, s22
      v_mov_b32 v5, s20
    """
    assert (outputs(body) == (int(DATA[2]) + int(DATA[3]) + int(DATA[4])) % 2**32).all()


def test_global_atomics():
    body = "v_mov_b32 v3, 0\nv_mov_b32 v5, v0\nglobal_atomic_add_u32 v3, v5, s[6:7] offset:252\n".replace("_u32", "")
    found = assembler.run("v_mov_b32 v6, 0\nglobal_store_dword v1, v6, s[6:7]\n" + body, "gfx942", DATA, 64)
    assert found[63] == sum(range(64)) and (found[:63] == 0).all()


REVERSE_THROUGH_LDS = """
  ds_write_b32 v1, v2
  {barrier}
  v_sub_u32 v3, 508, v1
  ds_read_b32 v5, v3
"""


def test_lds_and_barrier():
    data = np.arange(128, dtype=np.uint32)
    body = LOAD + REVERSE_THROUGH_LDS.format(barrier="s_barrier") + STORE
    for seed in (None, 1, 2):
        found = assembler.run(body, "gfx942", data, 128, threads=128, lds=512, seed=seed)
        assert (found == data[::-1]).all()


def test_paired_and_wide_lds_accesses():
    body = """
      v_lshlrev_b32 v3, 3, v0
      v_not_b32 v4, v2
      ds_write2_b32 v3, v2, v4 offset0:2 offset1:3
      ds_read_b64 v[6:7], v3 offset:8
      v_add_u32 v5, v6, v7
    """
    assert (outputs(body, lds=1024) == 0xFFFFFFFF).all()


# -- every detection fires -----------------------------------------------------------------------------------------


def test_race_without_barrier_is_caught():
    body = LOAD + REVERSE_THROUGH_LDS.format(barrier="s_nop 0") + STORE
    caught = [f"LDS race: {kind} by another wave" for kind in ("read after write", "write after read")]
    with pytest.raises(EmulatorError, match="|".join([*caught, "never written"])):
        assembler.run(body, "gfx942", np.arange(128, dtype=np.uint32), 128, threads=128, lds=512)


def test_write_after_read_race_is_caught():
    body = REVERSE_THROUGH_LDS.format(barrier="s_barrier") + "ds_write_b32 v1, v5\n"
    with pytest.raises(EmulatorError, match="LDS race: write after read by another wave"):
        assembler.run(LOAD + body + STORE, "gfx942", np.arange(128, dtype=np.uint32), 128, threads=128, lds=512)


def test_two_waves_writing_one_place_are_caught():
    with pytest.raises(EmulatorError, match="LDS race: write after write"):
        assembler.run("v_mov_b32 v3, 0\nds_write_b32 v3, v0\n", "gfx942", DATA, 1, threads=128, lds=4)


def test_a_write_after_the_reads_of_two_waves_is_caught_though_the_writer_read_last():
    body = """
      ds_write_b32 v1, v2
      s_barrier
      v_mov_b32 v3, 0
      ds_read_b32 v5, v3
      v_readfirstlane_b32 s20, v0
      s_cmp_eq_u32 s20, 0
      s_cbranch_scc1 end
      ds_write_b32 v3, v5
    end:
    """
    with pytest.raises(EmulatorError, match="LDS race: write after read"):
        assembler.run(LOAD + body, "gfx942", np.arange(128, dtype=np.uint32), 1, threads=128, lds=512)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("global_load_dword v5, v1, s[4:5] offset:4\n", "out-of-bounds load"),
        ("global_store_dword v1, v2, s[6:7] offset:4\n", "out-of-bounds store"),
        ("global_store_dword v1, v2, s[4:5]\n", "store to a read-only buffer"),
        ("global_load_dword v5, v[2:3], off\n", "v3 was never written"),
        ("v_add_u32 v5, v2, v7\n", "v7 was never written"),
        ("v_mov_b32 v6, v7\nv_add_u32 v5, v2, v6\n", "v6 was never written"),
        ("v_mov_b32 v5, s33\nv_add_u32 v5, v5, v2\n", "v5 was never written"),
        ("s_add_u32 s20, s33, 1\n", "s33, of which dword 0 was never written"),
        ("s_mov_b64 exec, 1\nv_mov_b32 v7, 0\ns_mov_b64 exec, 3\nv_add_u32 v5, v2, v7\n", "v7 was never written"),
        ("ds_read_b32 v5, v1\n", "reads LDS that was never written"),
        ("ds_write_b32 v1, v2 offset:4\n", "LDS out of bounds"),
        (buffer_descriptor(41) + "buffer_load_dword v5, v1, s[8:11], 0 offen\n", "straddles num_records"),
        ("s_setpc_b64 s[4:5]\n", "not implemented: s_setpc_b64"),
        ("v_cvt_f64_f32 v[6:7], v2\n", "not implemented: v_cvt_f64_f32"),
    ],
)
def test_errors_are_caught(body, message):
    with pytest.raises(EmulatorError, match=message):
        assembler.run(LOAD + "v_mov_b32 v5, 0\n" + body + STORE, "gfx942", DATA, 64, lds=256)


def test_a_store_beyond_the_last_byte_is_caught_though_the_dword_may_be_read():
    data = np.zeros(65, np.uint16)
    memory = "v_mov_b32 v3, 128\nglobal_load_dword v5, v3, s[4:5]\n"
    assert assembler.run(memory, "gfx942", data, 1, threads=1)[0] == 0xAAAAAAAA
    with pytest.raises(EmulatorError, match="out-of-bounds store"):
        assembler.run("v_mov_b32 v3, 2\nglobal_store_dword v3, v0, s[6:7]\n", "gfx942", data, 1, threads=1)


def test_different_barriers_and_endless_loops_are_caught(monkeypatch):
    apart = """
      v_readfirstlane_b32 s20, v0
      s_cmp_lg_u32 s20, 0
      s_cbranch_scc1 other
      s_barrier
      s_branch done
    other:
      s_barrier
    done:
    """
    with pytest.raises(EmulatorError, match="waves of one workgroup meet at different barriers"):
        assembler.run(apart, "gfx942", DATA, 1, threads=128)
    monkeypatch.setattr(launch, "MAX_STEPS", 1000)
    with pytest.raises(EmulatorError, match="no end after 1000 instructions"):
        assembler.run("again:\ns_branch again\n", "gfx942", DATA, 1)
