"""The FlyDSL row kernels against float64, executed on the AMD emulator: no AMD GPU is involved."""

import contextlib
import mmap
import sys
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("flydsl", reason="needs flydsl (pip install 'loongforge[flydsl]')")

from tests.amdgpu import toolchain  # noqa: E402

if toolchain.missing():
    pytest.skip(toolchain.missing(), allow_module_level=True)

from loongforge.arch import Arch  # noqa: E402
from loongforge.kernels.amd_flydsl import FlyDSLRowKernels  # noqa: E402
from loongforge.kernels.flydsl import compile as flydsl_compile  # noqa: E402
from loongforge.kernels.flydsl.variant import TARGETS, Variant  # noqa: E402
from loongforge.kernels.interface import Chunk, LogitTransform, RowCoefficients, RowStats  # noqa: E402
from tests.amdgpu.row_checks import RowCase  # noqa: E402
from tests.amdgpu.rows import EmulatedFlyDSLRowKernels  # noqa: E402
from tests.helpers import relative  # noqa: E402

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ONE_OF_EACH_WAVE_SIZE = ("gfx942", "gfx1201")
each_arch = pytest.mark.parametrize("arch", TARGETS)
each_wave_size = pytest.mark.parametrize("arch", ONE_OF_EACH_WAVE_SIZE)


@each_arch
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_vocabularies(arch, dtype):
    kernels = EmulatedFlyDSLRowKernels(arch)
    for vocab in (1, 7, 1003, 2049):
        RowCase(vocab, dtype).check(kernels)


@each_arch
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_a_large_vocabulary_in_ragged_chunks(arch, dtype):
    RowCase(32000, dtype, tokens=3, chunk=20001).check(EmulatedFlyDSLRowKernels(arch))


@each_wave_size
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_every_alignment(arch, dtype):
    """Rows start and end at every element of a 16-byte vector, down to rows that lie inside one vector."""
    kernels = EmulatedFlyDSLRowKernels(arch)
    for vocab in (1, 2, 3, 8, 13, 16, 17):
        RowCase(vocab, dtype, tokens=9, first_element=1, padding=8 - vocab % 8 + 1).check(kernels)


@each_wave_size
def test_aligned_rows(arch):
    for vocab in (8, 2048):
        RowCase(vocab, torch.bfloat16, first_element=0, padding=0).check(EmulatedFlyDSLRowKernels(arch))


OPTIONS = {
    "scale": {"transform": LogitTransform(logit_scale=-0.3)},
    "softcap": {"transform": LogitTransform(logit_scale=1.7, softcap=3.1)},
    "smoothing": {"uniform": True},
    "class_weights": {"uniform": True, "class_weighted": True},
    "all": {"transform": LogitTransform(logit_scale=1.7, softcap=3.1), "uniform": True, "class_weighted": True},
}


@pytest.mark.parametrize("arch", ("gfx942", "gfx1100", "gfx1201"))
@pytest.mark.parametrize("name", OPTIONS)
def test_options(arch, name):
    dtype = torch.float32 if arch == "gfx942" else torch.bfloat16
    RowCase(1003, dtype, chunk=700, **OPTIONS[name]).check(EmulatedFlyDSLRowKernels(arch))


@each_arch
@pytest.mark.parametrize("shift", (-30.0, 2000.0))
def test_a_common_offset_of_all_logits(arch, shift):
    RowCase(1003, torch.float32, shift=shift).check(EmulatedFlyDSLRowKernels(arch))


@each_arch
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_logits_up_to_the_ends_of_their_dtype(arch, dtype):
    """Beyond 2 ** 30 whatever is not the maximum counts for nothing, equal ones are counted."""
    case = RowCase(1003, dtype, tokens=6, chunk=600)
    largest = torch.finfo(dtype).max
    case.logits_TV[0, :990] = -largest
    case.logits_TV[1, 40:] = -1e10
    case.logits_TV[2] = -largest
    case.logits_TV[3, ::3] = largest
    case.logits_TV[4, :700], case.logits_TV[4, 700:] = -(2.0**31), -(2.0**32)
    case.logits_TV[5] *= 2.0**29
    case.check(EmulatedFlyDSLRowKernels(arch))


@each_wave_size
@pytest.mark.parametrize("seed", (0, 1))
def test_the_order_of_waves_does_not_matter(arch, seed):
    RowCase(2049, torch.bfloat16, tokens=2).check(EmulatedFlyDSLRowKernels(arch, seed=seed))


@each_arch
def test_infinities_and_nan(arch):
    """Chunks and rows of -inf are legal; +inf and NaN end in NaN."""
    kernels = EmulatedFlyDSLRowKernels(arch)
    case = RowCase(40, torch.bfloat16, tokens=5, chunk=20)
    case.logits_TV[0] = -torch.inf
    case.logits_TV[1, :20] = -torch.inf
    case.logits_TV[2, 20:] = -torch.inf
    case.logits_TV[3, 4] = torch.inf
    case.logits_TV[4, 30] = torch.nan
    stats = case.accumulate(kernels)
    x = case.x_TV[1:3]
    assert stats.max_T[0] == -torch.inf and stats.sum_exp_T[0] == 0
    assert relative(stats.sum_exp_T[1:3], torch.exp(x - x.amax(1, keepdim=True)).sum(1)) < 1e-6
    assert stats.sum_exp_T[3:].isnan().all()
    ones = torch.ones(5)
    grad = case.gradient(kernels, RowCoefficients(torch.nan_to_num(stats.max_T, neginf=-torch.inf), ones, ones, None))
    assert (grad[1, :20].float() - torch.where(torch.arange(20) == case.label_T[1], -1.0, 0.0) == 0).all()
    assert grad[4, 30].isnan()


@each_arch
def test_inactive_and_nan_rows(arch):
    """Zero coefficients make zeros out of NaN logits; NaN coefficients, whatever their payload, make NaN."""
    kernels = EmulatedFlyDSLRowKernels(arch)
    for dtype in (torch.bfloat16, torch.float32):
        case = RowCase(29, dtype, tokens=4)
        case.logits_TV[0] = torch.nan
        widest_nan = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
        softmax_T = torch.cat([torch.zeros(1), widest_nan, torch.zeros(1), torch.ones(1)])
        onehot_T = torch.cat([torch.zeros(2), widest_nan, torch.ones(1)])
        case.label_T = torch.tensor([3, -1, 5, 7])
        grad = case.gradient(kernels, RowCoefficients(torch.zeros(4), softmax_T, onehot_T, None))
        assert (grad[0] == 0).all()
        assert grad[1].isnan().all()
        assert grad[2, 5].isnan()
        assert grad[3].isfinite().all()


@each_wave_size
def test_rows_beyond_four_gigabytes(arch):
    """Row addresses are 64-bit: rows 6 GiB apart in sparse memory (only the touched pages exist)."""
    stride = (6 << 30) // 2
    with mmap.mmap(-1, 2 * (6 << 30)) as block:
        everything = torch.frombuffer(block, dtype=torch.bfloat16)
        logits = everything.as_strided((2, 100), (stride, 1))
        logits.copy_(torch.randn(2, 100))
        x = logits.double()
        stats = RowStats(torch.full((2,), -torch.inf), torch.zeros(2), torch.zeros(2), None)
        label_T = torch.tensor([4, 99])
        kernels = EmulatedFlyDSLRowKernels(arch)
        kernels.accumulate(logits, Chunk(label_T, 0, LogitTransform()), stats)
        kernels.gradient_(
            logits,
            Chunk(label_T, 0, LogitTransform()),
            RowCoefficients(stats.max_T, 1 / stats.sum_exp_T, torch.ones(2), None),
        )
        expected = torch.softmax(x, 1) - torch.nn.functional.one_hot(label_T, 100)
        assert relative(stats.label_logit_T, x.gather(1, label_T[:, None])[:, 0]) == 0
        assert relative(logits, expected) < 2**-8
        del logits, everything


@each_wave_size
def test_one_code_object_for_every_shape(arch):
    flydsl_compile.launcher.cache_clear()
    kernels = EmulatedFlyDSLRowKernels(arch)
    for vocab, tokens in ((1, 1), (7, 3), (300, 2), (5000, 1)):
        RowCase(vocab, torch.bfloat16, tokens=max(tokens, 3)).check(kernels)
    assert flydsl_compile.launcher.cache_info().misses == 2  # accumulate and gradient
    assert len({sha256 for _, sha256 in kernels.launches}) == 2


def test_empty_chunks_launch_nothing():
    kernels = EmulatedFlyDSLRowKernels("gfx942")
    for shape in ((0, 5), (3, 0)):
        stats = RowStats(*[torch.zeros(shape[0])] * 3, None)
        kernels.accumulate(
            torch.empty(shape), Chunk(torch.zeros(shape[0], dtype=torch.int64), 0, LogitTransform()), stats
        )
    assert kernels.launches == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(3, 4).t()}, "unit stride along the classes"),
        ({"label": torch.zeros(4, dtype=torch.int32)}, "label must be contiguous, of shape"),
        ({"max": torch.zeros(4, dtype=torch.float64)}, "per-token tensors must be contiguous"),
        ({"max": torch.zeros(8)[::2]}, "per-token tensors must be contiguous"),
        ({"max": torch.zeros(3)}, "per-token tensors must be contiguous"),
    ],
)
def test_what_would_touch_the_wrong_memory_is_refused(change, message):
    logits = change.get("logits", torch.zeros(4, 3))
    stats = RowStats(change.get("max", torch.zeros(4)), torch.zeros(4), torch.zeros(4), None)
    label_T = change.get("label", torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match=message):
        EmulatedFlyDSLRowKernels("gfx942").accumulate(logits, Chunk(label_T, 0, LogitTransform()), stats)


class _On(FlyDSLRowKernels):
    def __init__(self, arch):
        self.arch = arch

    def _arch(self, device):
        return self.arch


@pytest.mark.parametrize(
    ("arch", "dtype", "message"),
    [
        (Arch("amd", "gfx90a"), torch.bfloat16, "gfx942.*gfx1201; the device is amd gfx90a"),
        (Arch("nvidia", "sm_90"), torch.bfloat16, "the device is nvidia sm_90"),
        (Arch("amd", "gfx942"), torch.float64, "take logits in bfloat16, float16, float32, got float64"),
    ],
)
def test_unsupported_devices_and_dtypes_are_refused_by_name(arch, dtype, message):
    with pytest.raises(NotImplementedError, match=message):
        _On(arch).prepare(torch.device("cpu"), dtype, LogitTransform(), uniform=False, class_weighted=False)


def test_a_missing_or_old_flydsl_is_named(monkeypatch):
    def absent(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(flydsl_compile, "version", absent)
    with pytest.raises(RuntimeError, match=r"needs the package flydsl >= 0.5.*pip install 'loongforge\[flydsl\]'"):
        flydsl_compile.require_flydsl()
    monkeypatch.setattr(flydsl_compile, "version", lambda name: "0.4.9.dev1")
    with pytest.raises(RuntimeError, match=r"needs flydsl >= 0.5, found 0.4.9.dev1"):
        flydsl_compile.require_flydsl()


def test_a_kernel_that_does_not_compile_names_itself_and_flydsl_s_message(monkeypatch):
    def broken(launch, variant):
        raise ValueError("no such instruction")

    flydsl_compile.launcher.cache_clear()
    monkeypatch.setattr(flydsl_compile, "_compile", broken)
    variant = Variant("gradient", "gfx1150", "float16", uniform=True)
    with pytest.raises(RuntimeError, match=r"gradient kernel for gfx1150, float16 \(uniform\): no such instruction"):
        flydsl_compile.launcher(variant)


def test_a_flydsl_that_cannot_be_imported_is_a_kernel_that_does_not_compile(monkeypatch):
    flydsl_compile.launcher.cache_clear()
    monkeypatch.setitem(sys.modules, "loongforge.kernels.flydsl.gradient", None)
    with pytest.raises(RuntimeError, match="could not compile the gradient kernel for gfx942, float16: import of"):
        flydsl_compile.launcher(Variant("gradient", "gfx942", "float16"))


def test_launches_go_to_the_current_stream_of_the_tensors_device(monkeypatch):
    current, calls = [torch.device("cuda", 0)], []

    @contextlib.contextmanager
    def device(chosen):
        current.append(chosen)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda chosen: SimpleNamespace(cuda_stream=700 + chosen.index))
    tensor = torch.zeros(3)
    launch = lambda *arguments: calls.append((current[-1].index, arguments))  # noqa: E731
    FlyDSLRowKernels()._launch(launch, torch.device("cuda", 1), (tensor, None), (5, 1.0))
    assert calls == [(1, (tensor.data_ptr(), 0, 5, 1.0, 701))] and len(current) == 1


def test_compiling_prints_no_error(capfd):
    """FlyDSL reports a call without a library function as `error:` on stderr and carries on."""
    flydsl_compile.launcher.cache_clear()
    flydsl_compile.launcher(Variant("gradient", "gfx942", "bfloat16", True, True, True, True))
    printed = capfd.readouterr()
    assert "error" not in printed.err.lower() + printed.out.lower()
