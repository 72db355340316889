"""A test of the tests: bugs seeded into the FlyDSL kernels, each compiled and caught on the emulator."""

import importlib.util
import mmap
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("flydsl", reason="needs flydsl (pip install 'loongforge[flydsl]')")

from tests.amdgpu import toolchain  # noqa: E402

if toolchain.missing():
    pytest.skip(toolchain.missing(), allow_module_level=True)

from loongforge.kernels.flydsl import compile as flydsl_compile  # noqa: E402
from loongforge.kernels.interface import Chunk, LogitTransform, RowStats  # noqa: E402
from tests.amdgpu.errors import EmulatorError  # noqa: E402
from tests.amdgpu.row_checks import RowCase  # noqa: E402
from tests.amdgpu.rows import EmulatedFlyDSLRowKernels  # noqa: E402

SOURCES = Path(flydsl_compile.__file__).parent


def check_rows(kernels):
    RowCase(2049, torch.bfloat16, tokens=3).check(kernels)


def check_half_dword(kernels):
    """Rows end in the middle of a dword, beyond which the buffer descriptor does not protect."""
    RowCase(2048, torch.bfloat16, tokens=3).check(kernels)


def check_many_tiles(kernels):
    """Ever larger logits: each tile raises the maximum of the one before."""
    case = RowCase(20000, torch.bfloat16, tokens=1)
    case.logits_TV = torch.linspace(-30, 30, 20000).expand(1, -1).to(torch.bfloat16)
    case.check(kernels)


def check_far_rows(kernels):
    """The second row starts 5 GiB behind the first, in sparse memory."""
    with mmap.mmap(-1, 6 << 30) as block:
        everything = torch.frombuffer(block, dtype=torch.bfloat16)
        logits = everything.as_strided((2, 100), (5 << 29, 1))
        logits.copy_(torch.randn(2, 100))
        stats = RowStats(torch.full((2,), -torch.inf), torch.zeros(2), torch.zeros(2), None)
        try:
            kernels.accumulate(logits, Chunk(torch.tensor([4, 99]), 0, LogitTransform()), stats)
            assert torch.equal(stats.max_T, logits.amax(1).float())
        finally:
            del logits, everything


# name: (kernel, file, text, its replacement, the check that must fail)
MUTANTS = {
    "dropped_tail": (
        "accumulate",
        "accumulate",
        "        index, is_mine = partial_vector(row, thread)\n        if is_mine:",
        "        index, is_mine = partial_vector(row, thread)\n        if is_mine & (thread < 0):",
        check_rows,
    ),
    "dropped_tail_of_the_gradient": ("gradient", "gradient", "if is_mine:", "if is_mine & (thread < 0):", check_rows),
    "missing_barrier": ("accumulate", "accumulate", "        fx.barrier()\n", "", check_rows),
    "wrong_shuffle_width": (
        "accumulate",
        "accumulate",
        "range(wave.bit_length() - 1)]",
        "range(wave.bit_length() - 2)]",
        check_rows,
    ),
    "label_off_by_one": (
        "gradient",
        "gradient",
        "fx.Int32(label) + row.head",
        "fx.Int32(label) + row.head + 1",
        check_rows,
    ),
    "row_offset_in_32_bits": (
        "accumulate",
        "vectors",
        "logits + fx.Int64(row) * row_stride",
        "logits + fx.Int64(row * fx.Int32(row_stride))",
        check_far_rows,
    ),
    "stale_maximum": (
        "accumulate",
        "accumulate",
        "fx.math.fma(sum_exp, exp2(maximum * LOG2E - reference), new_sum)",
        "sum_exp + new_sum",
        check_many_tiles,
    ),
    "store_over_the_end": (
        "gradient",
        "gradient",
        "if in_row(row, partial_index * row.width + k):",
        "if partial_index * row.width + k >= row.head:",
        check_half_dword,
    ),
    "unaligned_head": ("gradient", "vectors", "(position >= row.head) & ", "", check_rows),
}


def load(folder, name, package):
    spec = importlib.util.spec_from_file_location(f"{package}_{name}", folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def mutated_launcher(folder, variant, kernel, file, text, replacement, monkeypatch):
    """The launcher of a variant, with one kernel built from mutated sources."""
    if variant.kernel != kernel:
        return flydsl_compile.launcher(variant)
    for name in ("vectors", kernel):
        source = (SOURCES / f"{name}.py").read_text()
        if name == file:
            assert source.count(text) >= 1, f"the mutant's text is not in {name}.py"
            source = source.replace(text, replacement)
        (folder / f"{name}.py").write_text(source)
    vectors = load(folder, "vectors", folder.name)
    monkeypatch.setitem(sys.modules, "loongforge.kernels.flydsl.vectors", vectors)
    module = load(folder, kernel, folder.name)
    monkeypatch.undo()
    with flydsl_compile._compile_for(variant.arch):
        return flydsl_compile._compile(module.build(variant), variant)


@pytest.mark.parametrize("arch", ("gfx942", "gfx1201"))
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name, arch, tmp_path, monkeypatch):
    kernel, file, text, replacement, check = MUTANTS[name]
    compiled = {}

    def compile_variant(variant):
        if variant not in compiled:
            compiled[variant] = mutated_launcher(tmp_path, variant, kernel, file, text, replacement, monkeypatch)
        return compiled[variant]

    check(EmulatedFlyDSLRowKernels(arch))  # the unmutated kernels pass
    with pytest.raises((AssertionError, EmulatorError)):
        check(EmulatedFlyDSLRowKernels(arch, compile_variant=compile_variant))
