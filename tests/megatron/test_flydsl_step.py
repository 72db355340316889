"""A Megatron model's forward and backward with FlyDSL's row kernels on the AMD emulator: no AMD GPU is involved."""

import pytest

pytest.importorskip("flydsl", reason="needs flydsl (pip install 'loongforge[flydsl]')")

from tests.amdgpu import toolchain  # noqa: E402

if toolchain.missing():
    pytest.skip(toolchain.missing(), allow_module_level=True)

from loongforge.kernels.flydsl.variant import TARGETS  # noqa: E402
from tests.amdgpu.rows import EmulatedFlyDSLRowKernels  # noqa: E402
from tests.kernels.flydsl_parallel_checks import use  # noqa: E402
from tests.megatron.small import assert_same, build, run  # noqa: E402


@pytest.mark.usefixtures("hook")
@pytest.mark.parametrize("arch", TARGETS)
def test_a_step_equals_the_unfused_one(arch, monkeypatch):
    unfused = run(build(linear=False))
    kernels = use(monkeypatch, EmulatedFlyDSLRowKernels(arch), width=300)
    assert_same(run(build()), unfused)
    assert kernels.launches
