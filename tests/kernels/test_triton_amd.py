"""The Triton row kernels' AMD code objects against float64, executed on the emulator: no AMD GPU is involved.

gfx942 and gfx950 bring preloaded kernel arguments, all of them dynamic LDS.
"""

import os

import pytest
import torch

pytest.importorskip("triton", reason="needs triton (pip install 'loongforge[triton]')")

from tests.amdgpu import toolchain  # noqa: E402

if toolchain.missing():
    pytest.skip(toolchain.missing(), allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler in this process", allow_module_level=True)

from loongforge.kernels.interface import LogitTransform  # noqa: E402
from tests.amdgpu.row_checks import RowCase  # noqa: E402
from tests.amdgpu.triton_host import EmulatedTritonRowKernels  # noqa: E402


@pytest.mark.parametrize("arch", ("gfx942", "gfx950", "gfx1100", "gfx1201"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=("bf16", "fp32"))
def test_vocabularies(arch, dtype):
    kernels = EmulatedTritonRowKernels(arch)
    for vocab in (1, 7, 1003, 2049):
        RowCase(vocab, dtype).check(kernels)
    assert len({sha256 for _, sha256 in kernels.launches}) == 2  # nothing is specialised on a shape


@pytest.mark.parametrize("arch", ("gfx942", "gfx1201"))
def test_all_options(arch):
    transform = LogitTransform(logit_scale=1.7, softcap=3.1)
    case = RowCase(1003, torch.float16, chunk=700, transform=transform, uniform=True, class_weighted=True)
    case.check(EmulatedTritonRowKernels(arch))
