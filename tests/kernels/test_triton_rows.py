"""The Triton row kernels against float64 truth, on a GPU or under Triton's interpreter.

The interpreter has to be chosen (TRITON_INTERPRET=1) before triton is first imported, and changes triton for the whole
process.  So without a GPU these tests skip in an ordinary run, and ``test_triton_interpreter.py`` runs this file in a
process of its own.
"""

import math
import os

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs triton (pip install 'loongforge[triton]')")

from loongforge.kernels import triton_rows  # noqa: E402
from loongforge.kernels.interface import LogitTransform, RowCoefficients, RowStats  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if HAS_GPU else "cpu"
pytestmark = pytest.mark.skipif(
    not (HAS_GPU or INTERPRETED), reason="no GPU here; test_triton_interpreter.py runs this file under the interpreter"
)
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU: the interpreter has no streams, graphs or compilation")

KERNELS = triton_rows.TritonRowKernels()
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# Relative error of the stored gradient.  The interpreter truncates float32 to bfloat16, GPUs round to nearest.
ROUNDING = {
    torch.float64: 1e-14,
    torch.float32: 3e-7,
    torch.float16: 2**-11,
    torch.bfloat16: 2**-7 if INTERPRETED else 2**-8,
}
IDENTITY = LogitTransform()
SCALE = LogitTransform(logit_scale=0.3)
NEGATIVE_SCALE = LogitTransform(logit_scale=-1.25)
SOFTCAP = LogitTransform(logit_scale=-1.7, softcap=3.1)
TRANSFORMS = pytest.mark.parametrize("transform", (IDENTITY, SCALE, SOFTCAP), ids=("identity", "scale", "softcap"))


def stat_dtype(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def relative(actual, expected):
    expected = expected.double()
    scale = expected.norm()
    return ((actual.double() - expected).norm() / (scale if scale > 0 else 1.0)).item()


def assert_close(actual, expected, bar):
    """Relative norm of the error; NaN and infinities must be in the same places."""
    expected = expected.double()
    finite = expected.isfinite()
    torch.testing.assert_close(actual.double()[~finite], expected[~finite], equal_nan=True)
    error = relative(actual[finite], expected[finite])
    assert error <= bar, f"relative error {error:.2e} exceeds {bar:.2e}"


class Rows:
    """A [T, C] view, at an odd address and row stride unless ``aligned``, inside a guarded buffer."""

    def __init__(self, values_TC, aligned=False):
        num_tokens, num_classes = values_TC.shape
        before, after = (8, -num_classes % 8 + 8) if aligned else (3, 4 + num_classes % 2)
        self.buffer = torch.full((num_tokens, before + num_classes + after), 77.0, device=DEVICE, dtype=values_TC.dtype)
        self.logits = self.buffer[:, before : before + num_classes]
        self.logits.copy_(values_TC)
        self.columns = before, num_classes

    def assert_guards_untouched(self):
        before, num_classes = self.columns
        assert (self.buffer[:, :before] == 77.0).all() and (self.buffer[:, before + num_classes :] == 77.0).all()


def random_logits(num_tokens, num_classes, dtype, seed=0, spread=2.0):
    generator = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(num_tokens, num_classes, generator=generator, dtype=torch.float64)).to(dtype).to(DEVICE)


def random_labels(num_tokens, num_classes, seed=1):
    """Every kind: first, last and random class, ignored."""
    label_T = torch.randint(0, num_classes, (num_tokens,), generator=torch.Generator().manual_seed(seed))
    label_T[0], label_T[1], label_T[2] = -1, 0, num_classes - 1
    return label_T.to(DEVICE)


def random_vector(size, dtype, seed):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype).to(DEVICE)


def new_stats(num_tokens, dtype, weighted=False):
    def full(value):
        return torch.full((num_tokens,), value, device=DEVICE, dtype=stat_dtype(dtype))

    return RowStats(full(-math.inf), full(0.0), full(0.0), full(0.0) if weighted else None)


def x_of(z_TC, transform):
    x_TC = transform.logit_scale * z_TC.double()
    return x_TC if transform.softcap is None else transform.softcap * torch.tanh(x_TC / transform.softcap)


def expected_gradient(z_TC, label_T, first_class, softmax_T, onehot_T, uniform_T, class_weight_C, transform, lse_T):
    """The formula of interface.py in float64; ``softmax_T`` multiplies probabilities with the given ``lse_T``."""
    x_TC = x_of(z_TC, transform)
    column_C = torch.arange(x_TC.shape[1], device=DEVICE) + first_class
    grad_TC = softmax_T.double()[:, None] * torch.exp(x_TC - lse_T.double()[:, None])
    grad_TC = grad_TC - torch.where(column_C == label_T[:, None], onehot_T.double()[:, None], 0.0)
    if uniform_T is not None:
        weight_C = torch.ones(1, device=DEVICE) if class_weight_C is None else class_weight_C
        grad_TC = grad_TC - uniform_T.double()[:, None] * weight_C.double()
    slope = transform.logit_scale
    if transform.softcap is not None:
        slope = transform.logit_scale * (1.0 - (x_TC / transform.softcap) ** 2)
    inactive_T = (softmax_T == 0) & (onehot_T == 0)
    if uniform_T is not None:
        inactive_T &= uniform_T == 0
    return torch.where(inactive_T[:, None], 0.0, grad_TC * slope)


def check_accumulate(rows_TC, label_T, transform, class_weight_C, weighted, aligned, chunk=None):
    """Fold the columns of ``rows_TC`` chunk by chunk and compare every statistic with the whole row's."""
    num_tokens, num_classes = rows_TC.shape
    dtype = rows_TC.dtype
    stats = new_stats(num_tokens, dtype, weighted)
    for first in range(0, num_classes, chunk or num_classes):
        piece = slice(first, min(num_classes, first + (chunk or num_classes)))
        rows = Rows(rows_TC[:, piece], aligned)
        weight_C = None if class_weight_C is None else class_weight_C[piece].contiguous()
        KERNELS.accumulate(rows.logits, label_T, first, stats, transform, weight_C)
        assert torch.equal(rows.logits, rows_TC[:, piece]), "accumulate must only read the logits"
        rows.assert_guards_untouched()
    bar = 1e-14 if dtype == torch.float64 else 1e-6
    x_TC = x_of(rows_TC, transform)
    assert_close(stats.max_T, x_TC.amax(1), bar)
    assert_close(stats.sum_exp_T, torch.exp(x_TC - stats.max_T.double()[:, None]).sum(1), bar)
    label_logit_T = torch.where(label_T >= 0, x_TC.gather(1, label_T.clamp_min(0)[:, None])[:, 0], 0.0)
    assert_close(stats.label_logit_T, label_logit_T, bar)
    if weighted:
        weight_C = 1.0 if class_weight_C is None else class_weight_C.double()
        error_T = (stats.weighted_sum_T.double() - (weight_C * x_TC).sum(1)).abs()
        assert (error_T <= bar * (weight_C * x_TC).abs().sum(1)).all()  # a sum of both signs: measured against its terms
    return stats


def check_gradient(rows_TC, label_T, first_class, stats, transform, uniform_T, class_weight_C, aligned):
    num_tokens = rows_TC.shape[0]
    statistic = stat_dtype(rows_TC.dtype)
    softmax_T, onehot_T = (random_vector(num_tokens, statistic, seed) for seed in (5, 6))
    lse_T = stats.max_T.double() + stats.sum_exp_T.double().log()
    args = (label_T, first_class, softmax_T, onehot_T, uniform_T, class_weight_C, transform, lse_T)
    expected_TC = expected_gradient(rows_TC, *args)
    rows = Rows(rows_TC, aligned)
    coefficients = RowCoefficients(stats.max_T, softmax_T / stats.sum_exp_T, onehot_T, uniform_T)
    KERNELS.gradient_(rows.logits, label_T, first_class, coefficients, transform, class_weight_C)
    rows.assert_guards_untouched()
    bar = ROUNDING[rows_TC.dtype] + (0 if rows_TC.dtype == torch.float64 else 5e-7)
    assert_close(rows.logits, expected_TC, bar)


@TRANSFORMS
@pytest.mark.parametrize("aligned", (True, False), ids=("aligned", "misaligned"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_classes", (1, 7, 1003, 2049))
def test_both_kernels(num_classes, dtype, aligned, transform):
    rows_TC = random_logits(5, num_classes, dtype)
    label_T = random_labels(5, num_classes)
    stats = check_accumulate(rows_TC, label_T, transform, None, False, aligned)
    check_gradient(rows_TC, label_T, 0, stats, transform, None, None, aligned)


@pytest.mark.parametrize("aligned", (True, False), ids=("aligned", "misaligned"))
@pytest.mark.parametrize("num_classes", (8191, 8192, 8193, 16385, 32000, 65537, 128256))
def test_wide_rows(num_classes, aligned):
    """Several full tiles, with and without a partial tile and edges."""
    rows_TC = random_logits(3, num_classes, torch.bfloat16)
    label_T = random_labels(3, num_classes)
    stats = check_accumulate(rows_TC, label_T, IDENTITY, None, False, aligned)
    check_gradient(rows_TC, label_T, 0, stats, IDENTITY, None, None, aligned)


@TRANSFORMS
@pytest.mark.parametrize("with_class_weight", (True, False))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_label_smoothing_terms(dtype, with_class_weight, transform):
    num_classes = 9001
    rows_TC = random_logits(4, num_classes, dtype)
    label_T = random_labels(4, num_classes)
    class_weight_C = random_vector(num_classes, stat_dtype(dtype), 7).abs() if with_class_weight else None
    uniform_T = random_vector(4, stat_dtype(dtype), 8) * 1e-3
    stats = check_accumulate(rows_TC, label_T, transform, class_weight_C, True, False)
    check_gradient(rows_TC, label_T, 0, stats, transform, uniform_T, class_weight_C, False)


@pytest.mark.parametrize("chunk", (1, 5, 1000, 1003))
def test_chunks_fold_into_the_whole_row(chunk):
    num_classes = 17 if chunk < 100 else 2500
    rows_TC = random_logits(6, num_classes, torch.float32)
    label_T = random_labels(6, num_classes)
    class_weight_C = random_vector(num_classes, torch.float32, 7).abs()
    check_accumulate(rows_TC, label_T, NEGATIVE_SCALE, class_weight_C, True, False, chunk=chunk)


def test_gradient_of_a_later_chunk_uses_global_statistics():
    rows_TC = random_logits(6, 3000, torch.float32)
    label_T = random_labels(6, 3000)
    stats = check_accumulate(rows_TC, label_T, IDENTITY, None, False, False)
    check_gradient(rows_TC[:, 2049:], label_T, 2049, stats, IDENTITY, None, None, False)


@pytest.mark.parametrize("offset", (-30.0, 2000.0, -2000.0))
@pytest.mark.parametrize("num_classes", (101, 127, 9001))
def test_common_offset_of_the_logits(num_classes, offset):
    """Columns beyond the row must not enter as exp(0); near 2000 exp(x - max) must not lose the difference's digits."""
    rows_TC = random_logits(4, num_classes, torch.float32) + offset
    label_T = random_labels(4, num_classes)
    stats = check_accumulate(rows_TC, label_T, IDENTITY, None, False, False)
    check_gradient(rows_TC, label_T, 0, stats, IDENTITY, None, None, False)


def test_widely_spread_half_precision_logits():
    rows_TC = -torch.linspace(0, 60, 4099, device=DEVICE).to(torch.float16).expand(4, -1)
    rows_TC = torch.cat([rows_TC, 1000 * rows_TC], 1)
    label_T = random_labels(4, rows_TC.shape[1])
    stats = check_accumulate(rows_TC, label_T, IDENTITY, None, False, False)
    check_gradient(rows_TC, label_T, 0, stats, IDENTITY, None, None, False)


def test_half_precision_gradients_neither_underflow_nor_overflow():
    """A probability below fp16's normal range is kept as a subnormal, a coefficient of 60000 is not infinite."""
    rows_TC = torch.tensor([[0.0, -16.0, -9.0]], device=DEVICE, dtype=torch.float16)
    label_T = torch.tensor([-1], device=DEVICE)
    stats = new_stats(1, torch.float16)
    KERNELS.accumulate(rows_TC, label_T, 0, stats, IDENTITY)
    for coefficient in (1.0, 60000.0):
        logits = rows_TC.clone()
        softmax_T = torch.tensor([coefficient], device=DEVICE)
        zero_T = torch.zeros(1, device=DEVICE)
        KERNELS.gradient_(logits, label_T, 0, RowCoefficients(stats.max_T, softmax_T / stats.sum_exp_T, zero_T, None), IDENTITY)
        torch.testing.assert_close(logits.double(), coefficient * rows_TC.double().softmax(1), rtol=1e-3, atol=2**-24)


@pytest.mark.parametrize("num_classes", (7, 1003, 9001))
def test_minus_infinity(num_classes):
    """Masked classes, a chunk of nothing but -inf before and after finite ones, and a row that never has a finite logit."""
    rows_TC = random_logits(4, num_classes, torch.float32)
    rows_TC[0, :: 2] = -math.inf
    rows_TC[1] = -math.inf
    label_T = torch.tensor([1, 2, 3, 4], device=DEVICE)
    nothing_TC = torch.full_like(rows_TC, -math.inf)
    stats = new_stats(4, torch.float32)
    for logits, first_class in ((nothing_TC, 10**6), (rows_TC, 0), (nothing_TC, 2 * 10**6)):
        KERNELS.accumulate(Rows(logits).logits, label_T, first_class, stats, IDENTITY)
    assert_close(stats.max_T, rows_TC.double().amax(1), 0.0)
    assert stats.sum_exp_T[1] == 0.0
    live = [0, 2, 3]
    assert_close(stats.sum_exp_T[live], torch.exp(rows_TC.double() - rows_TC.double().amax(1, keepdim=True))[live].sum(1), 1e-6)
    check_gradient(rows_TC[live], label_T[live], 0, RowStats(stats.max_T[live], stats.sum_exp_T[live], None, None),
                   IDENTITY, None, None, False)  # fmt: skip


@pytest.mark.parametrize("poison", (math.inf, math.nan))
@pytest.mark.parametrize("column", (0, 5, 1500, 3000), ids="column{}".format)
def test_infinity_and_nan_end_in_nan(column, poison):
    rows_TC = random_logits(3, 3001, torch.float32)
    clean_TC = rows_TC.clone()
    rows_TC[1, column] = poison
    label_T = random_labels(3, 3001)
    stats, clean = new_stats(3, torch.float32), new_stats(3, torch.float32)
    for values_TC, into in ((rows_TC, stats), (clean_TC, clean)):
        for first in (0, 2000):
            KERNELS.accumulate(Rows(values_TC[:, first : first + 2000]).logits, label_T, first, into, IDENTITY)
    assert stats.sum_exp_T.isnan().tolist() == [False, True, False]
    assert torch.equal(stats.sum_exp_T[::2], clean.sum_exp_T[::2]), "a NaN must stay in its row"
    one_T = torch.ones(3, device=DEVICE)
    KERNELS.gradient_(rows_TC, label_T, 0, RowCoefficients(stats.max_T, one_T / stats.sum_exp_T, one_T, None), IDENTITY)
    assert rows_TC[1].isnan().all() and rows_TC[::2].isfinite().all()


@pytest.mark.parametrize("with_uniform", (True, False))
@pytest.mark.parametrize("num_classes", (7, 9001, 20000))
def test_inactive_rows_are_exact_zeros_and_nan_coefficients_spread(num_classes, with_uniform):
    rows_TC = random_logits(5, num_classes, torch.bfloat16)
    rows_TC[0] = math.nan
    rows_TC[1] = math.inf
    rows_TC[2] = -math.inf
    label_T = torch.tensor([1, -1, 3, 4, 5], device=DEVICE)
    max_T = torch.tensor([math.nan, math.inf, -math.inf, 3.0, 3.0], device=DEVICE)
    softmax_T = torch.tensor([0.0, 0.0, 0.0, math.nan, 1.0], device=DEVICE)
    zero_T, last_T = torch.zeros(5, device=DEVICE), torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0], device=DEVICE)
    rows = Rows(rows_TC)
    coefficients = RowCoefficients(max_T, softmax_T, last_T, zero_T if with_uniform else None)
    KERNELS.gradient_(rows.logits, label_T, 0, coefficients, IDENTITY)
    rows.assert_guards_untouched()
    assert (rows.logits[:3] == 0.0).all()
    assert rows.logits[3].isnan().all()
    assert rows.logits[4].isfinite().all() and (rows.logits[4] != 0.0).any()


@pytest.mark.parametrize("which", ("softmax_over_sum", "onehot", "uniform"))
def test_each_coefficient_alone_makes_a_row_active(which):
    rows_TC = random_logits(1, 12, torch.float32)
    value = {name: torch.zeros(1, device=DEVICE) for name in ("softmax_over_sum", "onehot", "uniform")}
    value[which] += 1e-30
    zero_T = torch.zeros(1, device=DEVICE)
    KERNELS.gradient_(rows_TC, zero_T.long() + 3, 0, RowCoefficients(zero_T, *value.values()), IDENTITY)
    assert rows_TC[0, 3] != 0.0


def test_labels_elsewhere_leave_the_label_logit_alone():
    """-1, another rank's and another chunk's labels; 64-bit class numbers."""
    first_class = 2**31 + 5
    rows_TC = random_logits(6, 12, torch.float32)
    label_T = torch.tensor([-1, 0, first_class - 1, first_class + 12, first_class, first_class + 11], device=DEVICE)
    stats = new_stats(6, torch.float32)
    stats.label_logit_T.fill_(5.0)
    KERNELS.accumulate(rows_TC, label_T, first_class, stats, IDENTITY)
    assert stats.label_logit_T.tolist() == [5.0] * 4 + [rows_TC[4, 0].item(), rows_TC[5, 11].item()]
    one_T = torch.ones(6, device=DEVICE)
    before = rows_TC.clone()
    KERNELS.gradient_(rows_TC, label_T, first_class, RowCoefficients(stats.max_T, 0 * one_T, one_T, None), IDENTITY)
    hits = torch.zeros_like(before)
    hits[4, 0] = hits[5, 11] = -1.0
    assert torch.equal(rows_TC, hits)


def test_tiny_softcapped_logits_keep_their_digits():
    """tanh near 0 in float32: relative to torch's own, not just absolute."""
    rows_TC = (10.0 ** torch.linspace(-9, 0.3, 200, dtype=torch.float64)).float().to(DEVICE)[None, :]
    transform = LogitTransform(logit_scale=1.0, softcap=2.0)
    for column in range(0, 200, 7):
        stats = new_stats(1, torch.float32)
        KERNELS.accumulate(rows_TC, torch.tensor([column], device=DEVICE), 0, stats, transform)
        expected = 2.0 * math.tanh(rows_TC[0, column].item() / 2.0)
        assert stats.label_logit_T.item() == pytest.approx(expected, rel=1e-6)


def test_softcap_saturates_at_infinite_logits():
    rows_TC = torch.tensor([[math.inf, -math.inf, 0.5]], device=DEVICE)
    stats = new_stats(1, torch.float32)
    KERNELS.accumulate(rows_TC, torch.tensor([1], device=DEVICE), 0, stats, LogitTransform(softcap=3.0))
    assert stats.max_T.item() == 3.0 and stats.label_logit_T.item() == -3.0
    assert stats.sum_exp_T.item() == pytest.approx(1 + math.exp(-6.0) + math.exp(3 * math.tanh(0.5 / 3) - 3), rel=1e-6)


@pytest.mark.parametrize("shape", ((0, 5), (3, 0), (0, 0)))
def test_empty_chunks_do_nothing(shape):
    stats = new_stats(shape[0], torch.float32)
    logits_TC = torch.empty(shape, device=DEVICE)
    label_T = torch.zeros(shape[0], device=DEVICE, dtype=torch.int64)
    KERNELS.accumulate(logits_TC, label_T, 0, stats, IDENTITY)
    KERNELS.gradient_(logits_TC, label_T, 0, RowCoefficients(stats.max_T, *[stats.sum_exp_T] * 2, None), IDENTITY)
    assert (stats.sum_exp_T == 0.0).all()


def test_rows_beyond_2_to_the_31_elements():
    """Three rows 2**30 + 1 elements apart: the third begins past 2**31.  Only the pages touched take memory."""
    stride, num_classes = 2**30 + 1, 1003
    buffer = torch.empty(2 * stride + num_classes, device=DEVICE, dtype=torch.bfloat16)
    logits_TC = buffer.as_strided((3, num_classes), (stride, 1))
    rows_TC = random_logits(3, num_classes, torch.bfloat16)
    logits_TC.copy_(rows_TC)
    label_T = torch.tensor([4, 5, 6], device=DEVICE)
    stats = new_stats(3, torch.bfloat16)
    KERNELS.accumulate(logits_TC, label_T, 0, stats, IDENTITY)
    assert_close(stats.max_T.double() + stats.sum_exp_T.double().log(), rows_TC.double().logsumexp(1), 1e-6)
    one_T = torch.ones(3, device=DEVICE)
    KERNELS.gradient_(logits_TC, label_T, 0, RowCoefficients(stats.max_T, one_T / stats.sum_exp_T, one_T, None), IDENTITY)
    expected_TC = rows_TC.double().softmax(1)
    expected_TC[range(3), label_T] -= 1.0
    assert_close(logits_TC, expected_TC, ROUNDING[torch.bfloat16] + 5e-7)


def test_repeats_bit_for_bit():
    rows_TC = random_logits(4, 9001, torch.bfloat16)
    label_T = random_labels(4, 9001)
    first, second = new_stats(4, torch.bfloat16), new_stats(4, torch.bfloat16)
    for stats in (first, second):
        KERNELS.accumulate(rows_TC, label_T, 0, stats, IDENTITY)
    assert torch.equal(first.max_T, second.max_T) and torch.equal(first.sum_exp_T, second.sum_exp_T)


def test_wrong_layouts_are_refused():
    stats, label_T = new_stats(4, torch.float32), torch.zeros(4, device=DEVICE, dtype=torch.int64)
    with pytest.raises(AssertionError, match="unit stride"):
        KERNELS.accumulate(torch.zeros(6, 4, device=DEVICE).t(), label_T, 0, stats, IDENTITY)
    with pytest.raises(AssertionError, match="contiguous"):
        KERNELS.accumulate(torch.zeros(4, 6, device=DEVICE), label_T.repeat_interleave(2)[::2], 0, stats, IDENTITY)


@needs_gpu
def test_one_compilation_serves_every_size_stride_and_address():
    def run(num_tokens, num_classes, aligned, first_class):
        rows = Rows(random_logits(num_tokens, num_classes, torch.bfloat16), aligned)
        label_T = torch.zeros(num_tokens + 1, device=DEVICE, dtype=torch.int64)[1:]
        stats = new_stats(num_tokens, torch.bfloat16)
        KERNELS.accumulate(rows.logits, label_T, first_class, stats, LogitTransform(logit_scale=first_class + 0.5))
        coefficients = RowCoefficients(stats.max_T, stats.sum_exp_T, stats.sum_exp_T, None)
        KERNELS.gradient_(rows.logits, label_T, first_class, coefficients, LogitTransform(logit_scale=first_class + 0.5))

    compiled = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **kwargs: compiled.append(kwargs["fn"].name)
    try:
        run(4, 16, True, 0)
        compiled.clear()
        for num_tokens, num_classes, aligned, first_class in ((1, 1, False, 1), (16, 4096, True, 16), (5, 9001, False, 2**33)):
            run(num_tokens, num_classes, aligned, first_class)
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
    assert compiled == []


@needs_gpu
def test_graph_capture_and_replay_with_other_inputs():
    first_TC, second_TC = (random_logits(8, 9001, torch.bfloat16, seed) for seed in (1, 2))
    labels = [random_labels(8, 9001, seed) for seed in (3, 4)]
    logits_TC, label_T = first_TC.clone(), labels[0].clone()
    stats = new_stats(8, torch.bfloat16)
    one_T = torch.ones(8, device=DEVICE)

    def step():
        stats.max_T.fill_(-math.inf), stats.sum_exp_T.zero_(), stats.label_logit_T.zero_()
        KERNELS.accumulate(logits_TC, label_T, 0, stats, IDENTITY)
        KERNELS.gradient_(logits_TC, label_T, 0, RowCoefficients(stats.max_T, one_T / stats.sum_exp_T, one_T, None), IDENTITY)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for values_TC, new_label_T in ((second_TC, labels[1]), (first_TC, labels[0])):
        logits_TC.copy_(values_TC)
        label_T.copy_(new_label_T)
        graph.replay()
        expected_TC = values_TC.double().softmax(1)
        here = new_label_T >= 0
        expected_TC[here.nonzero()[:, 0], new_label_T[here]] -= 1.0
        assert_close(logits_TC, expected_TC, ROUNDING[torch.bfloat16] + 5e-7)


@needs_gpu
def test_neither_kernel_synchronises_with_the_host():
    rows_TC = random_logits(8, 9001, torch.bfloat16)
    label_T = random_labels(8, 9001)
    class_weight_C = random_vector(9001, torch.float32, 7)
    stats = new_stats(8, torch.bfloat16, weighted=True)
    one_T = torch.ones(8, device=DEVICE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        KERNELS.accumulate(rows_TC, label_T, 0, stats, SOFTCAP, class_weight_C)
        KERNELS.gradient_(rows_TC, label_T, 0, RowCoefficients(stats.max_T, *[one_T] * 3), SOFTCAP, class_weight_C)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not HAS_GPU or torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_device_than_the_current_one():
    rows_TC = random_logits(8, 9001, torch.bfloat16).to("cuda:1")
    label_T = random_labels(8, 9001).to("cuda:1")
    stats = RowStats(*(torch.full((8,), value, device="cuda:1") for value in (-math.inf, 0.0, 0.0)), None)
    with torch.cuda.device(0):
        KERNELS.accumulate(rows_TC, label_T, 0, stats, IDENTITY)
        assert torch.cuda.current_device() == 0
    assert_close(stats.max_T.double() + stats.sum_exp_T.double().log(), rows_TC.double().logsumexp(1), 1e-6)
