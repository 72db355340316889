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

from loongforge.call import Labels  # noqa: E402
from loongforge.kernels.interface import LogitTransform, RowStats  # noqa: E402
from tests.amdgpu.row_checks import RowCase  # noqa: E402
from tests.amdgpu.triton_host import EmulatedTritonRowKernels  # noqa: E402


@pytest.mark.parametrize("arch", ("gfx942", "gfx950", "gfx1100", "gfx1201"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=("bf16", "fp32"))
def test_vocabularies(arch, dtype):
    kernels = EmulatedTritonRowKernels(arch)
    for vocab in (1, 7, 1003, 2049):
        RowCase(vocab, dtype).check(kernels)
    assert len({sha256 for _, sha256 in kernels.launches}) == 2  # nothing is specialised on a shape


@pytest.mark.parametrize("arch", ("gfx942", "gfx950", "gfx1100", "gfx1201"))
def test_losses_of_tokens(arch):
    target_T = torch.arange(300) % 40
    target_T[::7], target_T[3::7], target_T[5::7] = -100, 40, -1
    rows = [torch.linspace(low, high, 300) for low, high in ((-50.0, 2000.0), (1e-3, 1e5), (-60.0, 1999.0))]
    stats = RowStats(*rows, None)
    loss_T, *masks = EmulatedTritonRowKernels(arch).token_losses(target_T, stats, 40, -100)
    labels = Labels.among(target_T, 40, -100)
    expected_T = labels.mark_(rows[1].double().log() - (rows[2] - rows[0]).double())
    torch.testing.assert_close(loss_T.double(), expected_T, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert torch.equal(masks[0], labels.ignored_T) and torch.equal(masks[1], labels.no_class_T)


@pytest.mark.parametrize("arch", ("gfx942", "gfx1201"))
def test_all_options(arch):
    transform = LogitTransform(logit_scale=1.7, softcap=3.1)
    case = RowCase(1003, torch.float16, chunk=700, transform=transform, uniform=True, class_weighted=True)
    case.check(EmulatedTritonRowKernels(arch))
