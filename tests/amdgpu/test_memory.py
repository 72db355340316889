"""Memory, LDS and barriers in small hand-assembled programs, and every detection firing."""

import numpy as np
import pytest

from tests.amdgpu import assembler, launch, toolchain
from tests.amdgpu.assembler import DATA, LOAD, STORE, outputs
from tests.amdgpu.errors import EmulatorError

pytestmark = pytest.mark.skipif(toolchain.missing() is not None, reason=str(toolchain.missing()))


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
