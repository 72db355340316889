"""The Triton row kernels against float64 truth, on a GPU or under Triton's interpreter.

The interpreter has to be chosen (TRITON_INTERPRET=1) before triton is first imported, and changes triton for the whole
process.  So without a GPU these tests skip in an ordinary run, and ``test_triton_interpreter.py`` runs this file in a
process of its own.
"""

import math

import pytest
import torch

from loongforge.call import Labels
from loongforge.formula import Formula
from loongforge.kernels.interface import Chunk, LogitTransform, RowCoefficients, RowStats
from loongforge.options import LossOptions
from tests.kernels.triton_cases import (
    DEVICE,
    DTYPES,
    HAS_GPU,
    IDENTITY,
    INTERPRETED,
    KERNELS,
    NEGATIVE_SCALE,
    ROUNDING,
    SCALE,
    SOFTCAP,
    Rows,
    assert_close,
    check_accumulate,
    check_gradient,
    expected_gradient,
    new_stats,
    random_labels,
    random_logits,
    random_vector,
    stat_dtype,
    x_of,
)

pytestmark = pytest.mark.skipif(
    not (HAS_GPU or INTERPRETED), reason="no GPU here; test_triton_interpreter.py runs this file under the interpreter"
)
TRANSFORMS = pytest.mark.parametrize("transform", (IDENTITY, SCALE, SOFTCAP), ids=("identity", "scale", "softcap"))


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
    KERNELS.accumulate(rows_TC, Chunk(label_T, 0, IDENTITY), stats)
    for coefficient in (1.0, 60000.0):
        logits = rows_TC.clone()
        softmax_T = torch.tensor([coefficient], device=DEVICE)
        zero_T = torch.zeros(1, device=DEVICE)
        coefficients = RowCoefficients(stats.max_T, softmax_T / stats.sum_exp_T, zero_T, None)
        KERNELS.gradient_(logits, Chunk(label_T, 0, IDENTITY), coefficients)
        torch.testing.assert_close(logits.double(), coefficient * rows_TC.double().softmax(1), rtol=1e-3, atol=2**-24)


@pytest.mark.parametrize("ignore_index", (-100, 3, 10**12))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize("num_tokens", (0, 1, 255, 256, 1003))
def test_losses_of_tokens(num_tokens, dtype, ignore_index):
    """Those of the formula's torch operations, labels of every kind and statistics at the ends of their range."""
    num_classes = 1003
    target_T = torch.arange(num_tokens, device=DEVICE) % 17
    for place, label in enumerate((-1, -100, num_classes - 1, num_classes, 10**12, -(2**63), 2**63 - 1)):
        target_T[place::11] = label
    stats = RowStats(*(random_vector(num_tokens, dtype, seed) * 30 for seed in (1, 2, 3)), None)
    stats.sum_exp_T.abs_()
    for place, (maximum, total) in enumerate(((-math.inf, 0.0), (math.inf, math.nan), (2.0**20, 1.0), (0.0, 1e-30))):
        stats.max_T[place::13], stats.sum_exp_T[place::13] = maximum, total
    labels = Labels.among(target_T, num_classes, ignore_index)
    expected_T = labels.mark_(Formula.of(LossOptions(), num_classes, target_T, None).loss(stats))
    loss_T, ignored_T, no_class_T = KERNELS.token_losses(target_T, stats, num_classes, ignore_index)
    assert torch.equal(ignored_T, labels.ignored_T) and torch.equal(no_class_T, labels.no_class_T)
    assert loss_T.dtype == dtype
    torch.testing.assert_close(loss_T, expected_T, rtol=4 * torch.finfo(dtype).eps, atol=0, equal_nan=True)


def test_losses_of_tokens_from_strided_statistics():
    columns = random_vector(3 * 40, torch.float32, 5).abs().view(40, 3)
    target_T = torch.arange(80, device=DEVICE)[::2]
    stats = RowStats(*columns.unbind(1), None)
    loss_T, *_ = KERNELS.token_losses(target_T, stats, 80, -100)
    torch.testing.assert_close(loss_T, columns[:, 1].log() - (columns[:, 2] - columns[:, 0]))


@pytest.mark.parametrize("num_classes", (7, 1003, 9001))
def test_minus_infinity(num_classes):
    """Masked classes, a chunk of nothing but -inf before and after, and a row that never has a finite logit."""
    rows_TC = random_logits(4, num_classes, torch.float32)
    rows_TC[0, ::2] = -math.inf
    rows_TC[1] = -math.inf
    label_T = torch.tensor([1, 2, 3, 4], device=DEVICE)
    nothing_TC = torch.full_like(rows_TC, -math.inf)
    stats = new_stats(4, torch.float32)
    for logits, first_class in ((nothing_TC, 10**6), (rows_TC, 0), (nothing_TC, 2 * 10**6)):
        KERNELS.accumulate(Rows(logits).logits, Chunk(label_T, first_class, IDENTITY), stats)
    assert_close(stats.max_T, rows_TC.double().amax(1), 0.0)
    assert stats.sum_exp_T[1] == 0.0
    live = [0, 2, 3]
    x_TC = rows_TC[live].double()
    assert_close(stats.sum_exp_T[live], torch.exp(x_TC - x_TC.amax(1, keepdim=True)).sum(1), 1e-6)
    live_stats = RowStats(stats.max_T[live], stats.sum_exp_T[live], stats.label_logit_T[live], None)
    check_gradient(rows_TC[live], label_T[live], 0, live_stats, IDENTITY, None, None, False)


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
            KERNELS.accumulate(Rows(values_TC[:, first : first + 2000]).logits, Chunk(label_T, first, IDENTITY), into)
    assert stats.sum_exp_T.isnan().tolist() == [False, True, False]
    assert torch.equal(stats.sum_exp_T[::2], clean.sum_exp_T[::2]), "a NaN must stay in its row"
    one_T = torch.ones(3, device=DEVICE)
    KERNELS.gradient_(
        rows_TC, Chunk(label_T, 0, IDENTITY), RowCoefficients(stats.max_T, one_T / stats.sum_exp_T, one_T, None)
    )
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
    KERNELS.gradient_(rows.logits, Chunk(label_T, 0, IDENTITY), coefficients)
    rows.assert_guards_untouched()
    assert (rows.logits[:3] == 0.0).all()
    assert rows.logits[3].isnan().all()
    assert rows.logits[4].isfinite().all() and (rows.logits[4] != 0.0).any()


@pytest.mark.parametrize("which", (0, 1, 2), ids=("softmax_over_sum", "onehot", "uniform"))
def test_each_coefficient_alone_makes_a_row_active(which):
    """Under a softcap, whose slope depends on the logits, so that they have to be read."""
    rows_TC = random_logits(1, 9001, torch.float32)
    label_T = torch.tensor([3], device=DEVICE)
    zero_T = torch.zeros(1, device=DEVICE)
    values = [zero_T + 1e-3 * (number == which) for number in range(3)]
    lse_T = x_of(rows_TC, SOFTCAP).logsumexp(1)
    expected_TC = expected_gradient(rows_TC, label_T, 0, *values, None, SOFTCAP, lse_T)
    values[0] = (values[0] / torch.exp(lse_T)).float()
    KERNELS.gradient_(rows_TC, Chunk(label_T, 0, SOFTCAP), RowCoefficients(zero_T, *values))
    assert_close(rows_TC, expected_TC, 1e-6)


def test_labels_elsewhere_leave_the_label_logit_alone():
    """-1, another rank's and another chunk's labels; 64-bit class numbers."""
    first_class = 2**31 + 5
    rows_TC = random_logits(7, 12, torch.float32)
    elsewhere = [-1, 0, first_class - 1, first_class + 12, first_class + 2**32 + 3]
    label_T = torch.tensor([*elsewhere, first_class, first_class + 11], device=DEVICE)
    stats = new_stats(7, torch.float32)
    stats.label_logit_T.fill_(5.0)
    KERNELS.accumulate(rows_TC, Chunk(label_T, first_class, IDENTITY), stats)
    assert stats.label_logit_T.tolist() == [5.0] * 5 + [rows_TC[5, 0].item(), rows_TC[6, 11].item()]
    one_T = torch.ones(7, device=DEVICE)
    before = rows_TC.clone()
    KERNELS.gradient_(
        rows_TC, Chunk(label_T, first_class, IDENTITY), RowCoefficients(stats.max_T, 0 * one_T, one_T, None)
    )
    hits = torch.zeros_like(before)
    hits[5, 0] = hits[6, 11] = -1.0
    assert torch.equal(rows_TC, hits)


def test_tiny_softcapped_logits_keep_their_digits():
    """tanh near 0 in float32: relative to torch's own, not just absolute."""
    rows_TC = (10.0 ** torch.linspace(-9, 0.3, 200, dtype=torch.float64)).float().to(DEVICE)[None, :]
    transform = LogitTransform(logit_scale=1.0, softcap=2.0)
    for column in range(0, 200, 7):
        stats = new_stats(1, torch.float32)
        KERNELS.accumulate(rows_TC, Chunk(torch.tensor([column], device=DEVICE), 0, transform), stats)
        expected = 2.0 * math.tanh(rows_TC[0, column].item() / 2.0)
        assert stats.label_logit_T.item() == pytest.approx(expected, rel=1e-6)


def test_softcap_saturates_at_infinite_logits():
    rows_TC = torch.tensor([[math.inf, -math.inf, 0.5]], device=DEVICE)
    stats = new_stats(1, torch.float32)
    KERNELS.accumulate(rows_TC, Chunk(torch.tensor([1], device=DEVICE), 0, LogitTransform(softcap=3.0)), stats)
    assert stats.max_T.item() == 3.0 and stats.label_logit_T.item() == -3.0
    assert stats.sum_exp_T.item() == pytest.approx(1 + math.exp(-6.0) + math.exp(3 * math.tanh(0.5 / 3) - 3), rel=1e-6)


@pytest.mark.parametrize("shape", ((0, 5), (3, 0), (0, 0)))
def test_empty_chunks_do_nothing(shape):
    stats = new_stats(shape[0], torch.float32)
    logits_TC = torch.empty(shape, device=DEVICE)
    label_T = torch.zeros(shape[0], device=DEVICE, dtype=torch.int64)
    KERNELS.accumulate(logits_TC, Chunk(label_T, 0, IDENTITY), stats)
    KERNELS.gradient_(
        logits_TC, Chunk(label_T, 0, IDENTITY), RowCoefficients(stats.max_T, *[stats.sum_exp_T] * 2, None)
    )
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
    KERNELS.accumulate(logits_TC, Chunk(label_T, 0, IDENTITY), stats)
    assert_close(stats.max_T.double() + stats.sum_exp_T.double().log(), rows_TC.double().logsumexp(1), 1e-6)
    one_T = torch.ones(3, device=DEVICE)
    coefficients = RowCoefficients(stats.max_T, one_T / stats.sum_exp_T, one_T, None)
    KERNELS.gradient_(logits_TC, Chunk(label_T, 0, IDENTITY), coefficients)
    expected_TC = rows_TC.double().softmax(1)
    expected_TC[range(3), label_T] -= 1.0
    assert_close(logits_TC, expected_TC, ROUNDING[torch.bfloat16] + 5e-7)


def test_repeats_bit_for_bit():
    rows_TC = random_logits(4, 9001, torch.bfloat16)
    label_T = random_labels(4, 9001)
    first, second = new_stats(4, torch.bfloat16), new_stats(4, torch.bfloat16)
    for stats in (first, second):
        KERNELS.accumulate(rows_TC, Chunk(label_T, 0, IDENTITY), stats)
    assert torch.equal(first.max_T, second.max_T) and torch.equal(first.sum_exp_T, second.sum_exp_T)


def test_wrong_layouts_are_refused():
    stats, label_T = new_stats(4, torch.float32), torch.zeros(4, device=DEVICE, dtype=torch.int64)
    with pytest.raises(AssertionError, match="unit stride"):
        KERNELS.accumulate(torch.zeros(6, 4, device=DEVICE).t(), Chunk(label_T, 0, IDENTITY), stats)
    with pytest.raises(AssertionError, match="contiguous"):
        KERNELS.accumulate(
            torch.zeros(4, 6, device=DEVICE), Chunk(label_T.repeat_interleave(2)[::2], 0, IDENTITY), stats
        )
