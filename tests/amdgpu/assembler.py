"""Hand-assembled kernels for tests: a body of instructions -> code object -> run on the emulator.

A kernel gets the addresses of two buffers, ``s[4:5]`` input and ``s[6:7]`` output, and the byte offset of its dword in
``v1``.  Waits are left out: the emulator completes every instruction at once.
"""

import struct

import numpy as np

from tests.amdgpu.launch import Emulator
from tests.amdgpu.memory import GlobalMemory
from tests.amdgpu.toolchain import assemble

NUM_VECTOR, NUM_SCALAR = 64, 96
TEMPLATE = """
.amdgcn_target "amdgcn-amd-amdhsa--{arch}"
.text
.globl kernel
.p2align 8
.type kernel,@function
kernel:
  s_load_dwordx4 s[4:7], s[0:1], 0x0
  v_lshlrev_b32 v1, 2, v0
{body}
  s_endpgm
.rodata
.p2align 6
.amdhsa_kernel kernel
  .amdhsa_group_segment_fixed_size {lds}
  .amdhsa_kernarg_size 16
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
  .amdhsa_system_sgpr_workgroup_id_x 1
  .amdhsa_next_free_vgpr {vectors}
  .amdhsa_next_free_sgpr {scalars}
  {extra}
.end_amdhsa_kernel
.amdgpu_metadata
---
amdhsa.version: [1, 2]
amdhsa.kernels:
  - .name: kernel
    .symbol: kernel.kd
    .kernarg_segment_size: 16
    .group_segment_fixed_size: {lds}
    .private_segment_fixed_size: 0
    .kernarg_segment_align: 8
    .wavefront_size: {wave}
    .sgpr_count: {scalars}
    .vgpr_count: {vectors}
    .max_flat_workgroup_size: 256
    .args:
      - {{.size: 8, .offset: 0, .value_kind: global_buffer, .address_space: global}}
      - {{.size: 8, .offset: 8, .value_kind: global_buffer, .address_space: global}}
...
.end_amdgpu_metadata
"""


def kernel(body: str, arch: str, lds: int = 0) -> bytes:
    """The code object of a kernel with this body."""
    is_wave64 = arch.startswith("gfx9")
    extra = ".amdhsa_accum_offset 64" if is_wave64 else ".amdhsa_wavefront_size32 1"
    return assemble(
        TEMPLATE.format(
            arch=arch,
            body=body,
            lds=lds,
            vectors=NUM_VECTOR,
            scalars=NUM_SCALAR,
            wave=64 if is_wave64 else 32,
            extra=extra,
        ),
        arch,
    )


def run(
    body: str,
    arch: str,
    inputs: np.ndarray,
    num_outputs: int,
    *,
    threads: int = 64,
    groups: int = 1,
    lds: int = 0,
    seed: int | None = None,
) -> np.ndarray:
    """uint32 outputs of a body, with ``inputs`` (any dtype) in the input buffer; unwritten outputs are 0xAAAAAAAA."""
    memory = GlobalMemory()
    data = np.ascontiguousarray(inputs)
    output = np.full(num_outputs, 0xAAAAAAAA, np.uint32)
    memory.add(data.ctypes.data, data.nbytes, writable=False)
    memory.add(output.ctypes.data, output.nbytes)
    arguments = [struct.pack("<Q", array.ctypes.data) for array in (data, output)]
    emulator = Emulator(kernel(body, arch, lds), arch, memory, seed=seed)
    emulator.launch("kernel", (groups, 1, 1), (threads, 1, 1), arguments)
    return output


LANES = np.arange(64, dtype=np.uint32)
DATA = (LANES * 2654435761).astype(np.uint32)
LOAD = "global_load_dword v2, v1, s[4:5]\n"
STORE = "global_store_dword v1, v5, s[6:7]\n"


def outputs(body: str, arch: str = "gfx942", data: np.ndarray = DATA, **options) -> np.ndarray:
    """What a body makes in ``v5`` of ``data`` in ``v2``, one value per lane of 64."""
    return run(LOAD + body + STORE, arch, data, 64, **options)
