"""Vector instructions with rules of their own: carries, pairs, packed and mixed precision, division steps."""

import numpy as np
import pytest

from tests.amdgpu import assembler, toolchain
from tests.amdgpu.assembler import DATA, outputs

pytestmark = pytest.mark.skipif(toolchain.missing() is not None, reason=str(toolchain.missing()))


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
