"""Gates on the machine code of the FlyDSL row kernels, for every gfx and dtype."""

from importlib.metadata import version
from pathlib import Path

import pytest
import torch

pytest.importorskip("flydsl", reason="needs flydsl (pip install 'loongforge[flydsl]')")
pytest.importorskip("triton", reason="needs triton (pip install 'loongforge[triton]')")

from tests.amdgpu import toolchain  # noqa: E402

if toolchain.missing():
    pytest.skip(toolchain.missing(), allow_module_level=True)

from loongforge.kernels.flydsl.compile import launcher  # noqa: E402
from loongforge.kernels.flydsl.variant import DTYPES, KERNELS, TARGETS, Variant  # noqa: E402
from tests.amdgpu import flydsl_host, machine_code, report  # noqa: E402
from tests.amdgpu.row_checks import RowCase  # noqa: E402
from tests.amdgpu.rows import EmulatedFlyDSLRowKernels  # noqa: E402

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "amd.md"
# Waves per SIMD: the architecture's maximum everywhere.
WAVES = {"gfx942": 8, "gfx950": 8, "gfx1100": 16, "gfx1150": 16, "gfx1151": 16, "gfx1200": 16, "gfx1201": 16}
LDS_BYTES = {"accumulate": {64: 32, 32: 64}, "gradient": {64: 0, 32: 0}}


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_gates(arch, dtype, kernel):
    figures = report.flydsl_figures(kernel, arch, dtype)
    assert figures.spills == figures.scratch_bytes == figures.flat_accesses == 0
    assert figures.wide_share >= 0.95
    assert figures.waves == figures.most_waves == WAVES[arch]
    assert figures.lds_bytes == LDS_BYTES[kernel][TARGETS[arch].wave]
    assert figures.loads_in_flight >= 4, "independent loads are issued before the first is used"
    if f"flydsl {version('flydsl')} " in DOCUMENT.read_text():
        assert report.row(kernel, arch, dtype, figures) in DOCUMENT.read_text(), "docs/amd.md is out of date"


@pytest.mark.parametrize("arch", TARGETS)
def test_options_do_not_spill(arch):
    for kernel in KERNELS:
        variant = Variant(kernel, arch, "float32", scaled=True, capped=True, uniform=True, class_weighted=True)
        figures = machine_code.measure(flydsl_host.code_object(launcher(variant)), arch, 4, report.THREADS)
        assert figures.spills == figures.scratch_bytes == figures.flat_accesses == 0


@pytest.mark.parametrize("arch", ("gfx942", "gfx950", "gfx1100", "gfx1201"))
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_more_instructions_than_triton(arch, kernel):
    for dtype in ("bfloat16", "float32"):
        ours, theirs = (f(kernel, arch, dtype) for f in (report.flydsl_figures, report.triton_figures))
        assert ours.instructions_per_element <= theirs.instructions_per_element
        assert ours.wide_share >= theirs.wide_share


@pytest.mark.parametrize("arch", ("gfx942", "gfx1201"))
def test_forward_and_backward_move_two_reads_and_one_write_of_the_logits(arch):
    """But for the partial vectors at the ends of a row, parts of which are fetched twice, and the label's logit."""
    case = RowCase(5003, torch.bfloat16, tokens=2)
    case.softmax_T[:] = 1.0
    kernels = EmulatedFlyDSLRowKernels(arch)
    stats = case.accumulate(kernels)
    (read, written) = kernels.traffic[-1]
    row_bytes = case.vocab * 2
    ends = 2 * machine_code.VECTOR_BYTES
    assert written == 0 and case.tokens * row_bytes <= read <= case.tokens * (row_bytes + 2 * ends + 2)
    case.gradient(kernels, case.coefficients(stats.max_T, stats.sum_exp_T))
    (read, written) = kernels.traffic[-1]
    assert written == case.tokens * row_bytes
    assert case.tokens * row_bytes <= read <= case.tokens * (row_bytes + 2 * ends)
