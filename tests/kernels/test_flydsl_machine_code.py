"""Gates on the machine code of the FlyDSL row kernels, for every gfx and dtype."""

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

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "amd_kernels.md"
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
    triton = report.triton_figures(kernel, arch, dtype)
    assert figures.instructions_per_element <= triton.instructions_per_element
    assert figures.wide_share >= triton.wide_share


def test_the_document_is_what_the_command_prints():
    """Every figure of docs/amd_kernels.md: what the tests above compiled, compared as text."""
    committed = DOCUMENT.read_text()
    if report.versions() not in committed:
        pytest.skip(f"{DOCUMENT.name} is of other versions than {report.versions()}: python -m tests.amdgpu.report")
    assert committed.splitlines() == "\n".join(report.lines()).splitlines(), "run: python -m tests.amdgpu.report"


@pytest.mark.parametrize("arch", TARGETS)
def test_options_do_not_spill(arch):
    for kernel in KERNELS:
        variant = Variant(kernel, arch, "float32", scaled=True, capped=True, uniform=True, class_weighted=True)
        figures = machine_code.measure(flydsl_host.code_object(launcher(variant)), arch, 4, report.THREADS)
        assert figures.spills == figures.scratch_bytes == figures.flat_accesses == 0


def traffic(arch, case):
    """Bytes of logits ``(read, written)`` by forward, then by backward."""
    case.softmax_T[:] = 1.0
    kernels = EmulatedFlyDSLRowKernels(arch)
    stats = case.accumulate(kernels)
    case.gradient(kernels, case.coefficients(stats.max_T, stats.sum_exp_T))
    return kernels.traffic


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_reads_and_one_write_of_the_logits(arch, dtype):
    """To the byte where rows are aligned, but for the logit of the one label that lies in the row."""
    case = RowCase(2312, getattr(torch, dtype), tokens=2, first_element=0, padding=0)
    logits, label = case.logits_TV.nbytes, case.logits_TV.itemsize
    assert traffic(arch, case) == [(logits + label, 0), (logits, logits)]


@pytest.mark.parametrize("arch", ("gfx942", "gfx1201"))
def test_ragged_rows_read_no_more_than_their_end_vectors_twice(arch):
    case = RowCase(5003, torch.bfloat16, tokens=2)
    logits, ends = case.logits_TV.nbytes, case.tokens * 2 * 2 * machine_code.VECTOR_BYTES
    (read, written), (read_again, gradient) = traffic(arch, case)
    assert written == 0 and gradient == logits
    assert logits <= read <= logits + ends + case.tokens * 2 and logits <= read_again <= logits + ends
