"""Triton's row kernels of the outputs against float64: entropy, first maximum, two heads, largest logits.

On a GPU these launch real kernels; without one test_triton_interpreter.py runs this file under TRITON_INTERPRET=1.
"""

import math

import pytest
import torch

from loongforge import TeacherHead, linear_distillation, linear_logprobs
from loongforge.kernels import triton_top_k
from loongforge.kernels.generic import GenericRowKernels
from loongforge.kernels.interface import (
    NO_CLASS,
    Chunk,
    LogitTransform,
    PairCoefficients,
    PairStats,
    RowCoefficients,
    RowStats,
)
from tests.helpers import Inputs
from tests.kernels.triton_cases import (
    DEVICE,
    HAS_GPU,
    IDENTITY,
    INTERPRETED,
    NEGATIVE_SCALE,
    ROUNDING,
    SOFTCAP,
    Rows,
    assert_close,
    new_stats,
    random_labels,
    random_logits,
    random_vector,
    stat_dtype,
    x_of,
)
from tests.outputs.oracle import make_case

pytestmark = pytest.mark.skipif(
    not (HAS_GPU or INTERPRETED), reason="no GPU here; test_triton_interpreter.py runs this file under the interpreter"
)

from loongforge.kernels.triton_output_kernels import TritonOutputKernels  # noqa: E402

KERNELS = TritonOutputKernels()
# Every pair of dtype, transform, size and alignment; more on a GPU, where it costs nothing.
SIZES, DTYPES = ((1, 1), (7, 7), (1003, 500), (2600, 2600)), (torch.float64, torch.float32, torch.bfloat16)
TRANSFORMS = (IDENTITY, NEGATIVE_SCALE, SOFTCAP)
CASES = [
    (*SIZES[i], dtype, TRANSFORMS[(i + j) % 3], (i + j) % 2 == 0)
    for i in range(len(SIZES))
    for j, dtype in enumerate(DTYPES)
    if HAS_GPU or dtype != torch.float64 or i == 2
]


def output_stats(num_tokens: int, dtype: torch.dtype) -> RowStats:
    stats = new_stats(num_tokens, dtype)
    stats.relative_sum_T = torch.zeros_like(stats.sum_exp_T)
    stats.argmax_T = torch.zeros(num_tokens, device=DEVICE, dtype=torch.int64)
    return stats


def accumulate(rows_TC, label_T, transform, aligned, chunk) -> RowStats:
    stats = output_stats(rows_TC.shape[0], rows_TC.dtype)
    for first in range(0, rows_TC.shape[1], chunk):
        rows = Rows(rows_TC[:, first : first + chunk], aligned)
        KERNELS.accumulate(rows.logits, Chunk(label_T, first, transform), stats)
        assert torch.equal(rows.logits.nan_to_num(), rows_TC[:, first : first + chunk].nan_to_num()), "only read"
        rows.assert_guards_untouched()
    return stats


def weighted(log_weight_TC, value_TC):
    """Sum of exp(log_weight) * value, 0 where the weight is."""
    weight_TC = log_weight_TC.exp()
    return torch.where(weight_TC == 0, 0.0, weight_TC * value_TC).sum(1)


def bar(dtype) -> float:
    return 1e-13 if dtype == torch.float64 else 2e-6


@pytest.mark.parametrize("num_classes, chunk, dtype, transform, aligned", CASES)
def test_entropy_and_first_maximum(num_classes, chunk, dtype, transform, aligned):
    rows_TC, label_T = random_logits(5, num_classes, dtype), random_labels(5, num_classes)
    stats = accumulate(rows_TC, label_T, transform, aligned, chunk)
    x_TC = x_of(rows_TC, transform)
    distance_TC = x_TC - x_TC.amax(1, keepdim=True)
    assert_close(stats.max_T, x_TC.amax(1), bar(dtype))
    assert_close(stats.sum_exp_T, distance_TC.exp().sum(1), bar(dtype))
    assert_close(stats.relative_sum_T, weighted(distance_TC, distance_TC), bar(dtype))
    label_logit_T = torch.where(label_T >= 0, x_TC.gather(1, label_T.clamp_min(0)[:, None])[:, 0], 0.0)
    assert_close(stats.label_logit_T, label_logit_T, bar(dtype))
    if transform is not SOFTCAP:  # whose rounding makes and breaks ties
        assert torch.equal(stats.argmax_T, x_TC.argmax(1))

    softmax_T, onehot_T, relative_T = (random_vector(5, stat_dtype(dtype), seed) for seed in (5, 6, 7))
    softmax_T[3] = onehot_T[3] = relative_T[3] = 0.0
    softmax_T[4] = onehot_T[4] = 0.0
    lse_T = stats.max_T.double() + stats.sum_exp_T.double().log()
    weight_TC = softmax_T.double()[:, None] + relative_T.double()[:, None] * (x_TC - stats.max_T.double()[:, None])
    expected_TC = weight_TC * torch.exp(x_TC - lse_T[:, None])
    here = torch.arange(num_classes, device=DEVICE) == label_T[:, None]
    expected_TC = slope_of(x_TC, transform) * (expected_TC - torch.where(here, onehot_T.double()[:, None], 0.0))
    rows = Rows(rows_TC, aligned)
    over_sum = [coefficient_T / stats.sum_exp_T for coefficient_T in (softmax_T, relative_T)]
    KERNELS.gradient_(
        rows.logits,
        Chunk(label_T, 0, transform),
        RowCoefficients(stats.max_T, over_sum[0], onehot_T, None, over_sum[1]),
    )
    rows.assert_guards_untouched()
    assert (rows.logits[3] == 0).all()
    assert_close(rows.logits, expected_TC, ROUNDING[dtype] + bar(dtype))


def slope_of(x_TC, transform):
    if transform.softcap is None:
        return transform.logit_scale
    return transform.logit_scale * (1.0 - (x_TC / transform.softcap) ** 2)


def new_pair(num_tokens: int, dtype: torch.dtype) -> PairStats:
    def full(value):
        return torch.full((num_tokens,), value, device=DEVICE, dtype=stat_dtype(dtype))

    return PairStats(full(-math.inf), full(0.0), full(-math.inf), full(0.0), full(0.0))


@pytest.mark.parametrize("b_aligned", (True, False))
@pytest.mark.parametrize("num_classes, chunk, dtype, transform, aligned", CASES)
def test_two_heads(num_classes, chunk, dtype, transform, aligned, b_aligned):
    if not HAS_GPU and num_classes > 1003 and aligned != b_aligned:
        pytest.skip("only on a GPU: the interpreter is slow, and knows no alignment")
    layouts = aligned, b_aligned
    a_TC, b_TC = random_logits(5, num_classes, dtype, seed=1), random_logits(5, num_classes, dtype, seed=2)
    other = LogitTransform(logit_scale=0.7)
    stats = new_pair(5, dtype)
    for first in range(0, num_classes, chunk):
        a, b = (Rows(x[:, first : first + chunk], aligned) for x, aligned in zip((a_TC, b_TC), layouts, strict=True))
        KERNELS.accumulate_pair(a.logits, b.logits, stats, transform, other)
        assert torch.equal(a.logits, a_TC[:, first : first + chunk]), "only read"
        assert torch.equal(b.logits, b_TC[:, first : first + chunk]), "only read"
    x_TC, y_TC = x_of(a_TC, transform), x_of(b_TC, other)
    distance_TC, other_TC = x_TC - x_TC.amax(1, keepdim=True), y_TC - y_TC.amax(1, keepdim=True)
    assert_close(stats.sum_exp_a_T, distance_TC.exp().sum(1), bar(dtype))
    assert_close(stats.sum_exp_b_T, other_TC.exp().sum(1), bar(dtype))
    terms_T = weighted(distance_TC, (distance_TC - other_TC).abs())
    error_T = (stats.gap_sum_T.double() - weighted(distance_TC, distance_TC - other_TC)).abs()
    assert (error_T <= bar(dtype) * (1 + terms_T)).all()

    softmax_T, gap_T, teacher_T = (random_vector(5, stat_dtype(dtype), seed) for seed in (5, 6, 7))
    for of_gap, of_teacher in ((gap_T, None), (None, teacher_T), (gap_T, teacher_T)):
        pair = PairCoefficients(stats.max_a_T, stats.max_b_T, softmax_T, of_gap, of_teacher)
        expected_TC = softmax_T.double()[:, None]
        if of_gap is not None:
            expected_TC = expected_TC + gap_T.double()[:, None] * (distance_TC - other_TC)
        expected_TC = expected_TC * distance_TC.exp()
        if of_teacher is not None:
            expected_TC = expected_TC - teacher_T.double()[:, None] * other_TC.exp()
        student, teacher = (Rows(x, aligned) for x, aligned in zip((a_TC, b_TC), layouts, strict=True))
        KERNELS.pair_gradient_(student.logits, teacher.logits, pair, transform, other)
        student.assert_guards_untouched()
        assert torch.equal(teacher.logits, b_TC)
        assert_close(student.logits, expected_TC * slope_of(x_TC, transform), ROUNDING[dtype] + 2 * bar(dtype))


@pytest.mark.parametrize("num_classes", (7, 1003))
def test_minus_infinity(num_classes):
    """Masked classes count for nothing; a row and a chunk of nothing else, before and after the rest, do no harm."""
    rows_TC = random_logits(4, num_classes, torch.float32)
    rows_TC[0, ::2] = -math.inf
    rows_TC[1] = -math.inf
    nothing_TC, label_T = torch.full_like(rows_TC, -math.inf), random_labels(4, num_classes)
    stats = output_stats(4, torch.float32)
    for logits, first_class in ((nothing_TC, 10**6), (rows_TC, 0), (nothing_TC, 2 * 10**6)):
        KERNELS.accumulate(Rows(logits).logits, Chunk(label_T, first_class, IDENTITY), stats)
    x_TC = rows_TC.double()
    distance_TC = x_TC - x_TC.amax(1, keepdim=True)
    live = [0, 2, 3]
    assert_close(stats.relative_sum_T[live], weighted(distance_TC, distance_TC)[live], 2e-6)
    assert stats.sum_exp_T[1] == 0 and stats.relative_sum_T[1] == 0
    assert torch.equal(stats.argmax_T[live], x_TC.argmax(1)[live]) and stats.argmax_T[1] == 0
    one_T = torch.ones(4, device=DEVICE)
    KERNELS.gradient_(
        rows_TC,
        Chunk(label_T, 0, IDENTITY),
        RowCoefficients(stats.max_T, one_T / stats.sum_exp_T, 0 * one_T, None, one_T),
    )
    assert rows_TC[live].isfinite().all() and (rows_TC[0, ::2] == 0).all()


def test_two_heads_of_masked_classes():
    """A class that only b masks makes the divergence infinite; one that a masks costs nothing."""
    a_TC, b_TC = random_logits(3, 1003, torch.float32, seed=1), random_logits(3, 1003, torch.float32, seed=2)
    a_TC[0, ::2] = b_TC[0, ::4] = -math.inf
    b_TC[1, 5] = -math.inf
    stats = new_pair(3, torch.float32)
    for first in (0, 500):
        KERNELS.accumulate_pair(a_TC[:, first : first + 500], b_TC[:, first : first + 500], stats, IDENTITY, IDENTITY)
    KERNELS.accumulate_pair(a_TC[:, 1000:], b_TC[:, 1000:], stats, IDENTITY, IDENTITY)
    assert stats.gap_sum_T.isinf().tolist() == [False, True, False]
    log_p, log_q = (x.double().log_softmax(1) for x in (a_TC, b_TC))
    expected_T = weighted(log_p, log_p - log_q)
    actual_T = stats.gap_sum_T / stats.sum_exp_a_T - stats.sum_exp_a_T.log() + stats.sum_exp_b_T.log()
    assert_close(actual_T[[0, 2]], expected_T[[0, 2]], 2e-6)


@pytest.mark.parametrize("offset", (-30.0, 2000.0))
def test_common_offset(offset):
    rows_TC, label_T = random_logits(4, 1003, torch.float32) + offset, random_labels(4, 1003)
    stats = accumulate(rows_TC, label_T, IDENTITY, True, 500)
    log_p = rows_TC.double().log_softmax(1)
    entropy_T = stats.sum_exp_T.log() - stats.relative_sum_T / stats.sum_exp_T
    assert_close(entropy_T, -(log_p.exp() * log_p).sum(1), 2e-6)


@pytest.mark.parametrize("num_classes", (7, 300))
def test_of_equal_logits_the_first(num_classes):
    """Ties within a vector, between lanes, edges and chunks."""
    rows_TC = torch.zeros(6, num_classes, device=DEVICE, dtype=torch.bfloat16)
    for row, columns in enumerate(((0, 1), (1, num_classes - 1), (3, 4), (2, 5), (num_classes - 1,), ())):
        rows_TC[row, list(columns)] = 1.5
    for chunk in (num_classes, 50):
        stats = accumulate(rows_TC, random_labels(6, num_classes), IDENTITY, False, chunk)
        assert torch.equal(stats.argmax_T, rows_TC.argmax(1))


def test_inactive_rows_are_exact_zeros_and_nan_spreads():
    rows_TC = random_logits(4, 1003, torch.bfloat16)
    rows_TC[0], rows_TC[1] = math.nan, math.inf
    zero_T, label_T = torch.zeros(4, device=DEVICE), random_labels(4, 1003)
    some_T = torch.tensor([0.0, 0.0, math.nan, 1.0], device=DEVICE)
    KERNELS.gradient_(rows_TC, Chunk(label_T, 0, IDENTITY), RowCoefficients(zero_T, zero_T, zero_T, None, some_T))
    assert (rows_TC[:2] == 0).all() and rows_TC[2].isnan().all() and rows_TC[3].isfinite().all()
    student_TC, teacher_TC = (random_logits(4, 1003, torch.bfloat16, seed) for seed in (1, 2))
    teacher_TC[0] = student_TC[1] = math.nan
    KERNELS.pair_gradient_(
        student_TC, teacher_TC, PairCoefficients(zero_T, zero_T, zero_T, None, some_T), IDENTITY, IDENTITY
    )
    assert (student_TC[:2] == 0).all() and student_TC[2].isnan().all() and student_TC[3].isfinite().all()


@pytest.mark.parametrize(
    "num_classes, k, chunk, dtype, transform",
    (
        (40, 5, 17, torch.bfloat16, IDENTITY),
        (21, 1, 21, torch.float32, NEGATIVE_SCALE),
        (30, 6, 13, torch.float16, SOFTCAP),
    ),
)
def test_largest_logits(num_classes, k, chunk, dtype, transform, monkeypatch):
    check_top_k(random_logits(3, num_classes, dtype), k, chunk, transform, monkeypatch)


def test_largest_of_ties_zeros_and_infinities(monkeypatch):
    rows_TC = torch.tensor(
        [[0.0, -0.0, 1, 1, 1, -math.inf, 0, 1], [-math.inf] * 8, [math.inf, 3, math.inf, *[0.0] * 5]]
    )
    check_top_k(rows_TC.to(DEVICE), 6, 3, IDENTITY, monkeypatch)


@pytest.mark.skipif(not HAS_GPU, reason="the interpreter sorts 1024 keys in minutes; the small cases run there")
@pytest.mark.parametrize("k", (1, 7, 128))
def test_largest_of_wide_rows(k):
    for dtype in (torch.bfloat16, torch.float32):
        check_top_k(random_logits(64, 50001, dtype), k, 20000, IDENTITY, None)


def check_top_k(rows_TC, k, chunk, transform, monkeypatch):
    """Against a stable sort; in small tiles under the interpreter, which is slow at sorting."""
    if monkeypatch is not None and INTERPRETED:
        monkeypatch.setattr(triton_top_k, "BLOCK", 16)
    num_tokens, num_classes = rows_TC.shape
    values_TK = torch.full((num_tokens, k), -math.inf, device=DEVICE)
    classes_TK = torch.full((num_tokens, k), NO_CLASS, device=DEVICE)
    for first in range(0, num_classes, chunk):
        KERNELS.top_k_(rows_TC[:, first : first + chunk], first, values_TK, classes_TK, transform)
    x_TC = x_of(rows_TC, transform)
    expected_TK, class_TK = (t[:, :k] for t in x_TC.sort(dim=1, descending=True, stable=True))
    assert_close(values_TK, expected_TK, 2e-6)
    if transform.softcap is None:
        assert torch.equal(classes_TK, class_TK)
    assert_close(x_TC.gather(1, classes_TK), expected_TK, 2e-6)


@pytest.mark.parametrize("shape", ((0, 5), (3, 0)))
def test_empty_chunks_do_nothing(shape):
    stats, logits_TC = output_stats(shape[0], torch.float32), torch.empty(shape, device=DEVICE)
    label_T = torch.zeros(shape[0], device=DEVICE, dtype=torch.int64)
    KERNELS.accumulate(logits_TC, Chunk(label_T, 0, IDENTITY), stats)
    zero_T = stats.sum_exp_T
    KERNELS.gradient_(
        logits_TC, Chunk(label_T, 0, IDENTITY), RowCoefficients(stats.max_T, zero_T, zero_T, None, zero_T)
    )
    KERNELS.top_k_(logits_TC, 0, torch.zeros(shape[0], 2, device=DEVICE), label_T[:, None].repeat(1, 2), IDENTITY)
    assert (stats.relative_sum_T == 0).all()


@pytest.mark.parametrize("budget", (0, "all"))
def test_the_functions_on_these_kernels(budget, monkeypatch):
    """Chunks of odd widths, logits that are kept and rows that begin anywhere: as the generic kernels' to rounding."""
    for direction in ("FWD", "BWD"):
        monkeypatch.setenv(f"LCE_{direction}_VOCAB_SPLIT_SIZE", "53")
    case = make_case(torch.float32, tokens=5)
    case.inputs = Inputs(*(None if t is None else t.to(DEVICE) for t in vars(case.inputs).values()))
    head = {name: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for name, t in vars(case.head).items()}
    teacher = TeacherHead(**head)

    def results() -> list[torch.Tensor]:
        i = case.inputs.leaves(device=DEVICE)
        out = linear_logprobs(
            i.hidden, i.weight, i.target, bias=i.bias, entropy=True, predictions=True, logits_budget_mb=budget
        )
        total, values = (out.logprobs + 0.3 * out.entropy).sum(), [out.logprobs, out.entropy, out.predictions]
        for divergence in ("forward", "reverse"):
            value_T = linear_distillation(
                i.hidden, i.weight, teacher, divergence=divergence, target=i.target, bias=i.bias,
                reduction="none", logits_budget_mb=budget,
            )  # fmt: skip
            total, values = total + value_T.sum(), [*values, value_T]
        return [*(value.detach() for value in values), *torch.autograd.grad(total, i.tensors)]

    monkeypatch.setattr("loongforge.call.row_kernels", lambda *arguments: GenericRowKernels())
    right = results()
    monkeypatch.setattr("loongforge.call.row_kernels", lambda *arguments: KERNELS)
    for mine, expected in zip(results(), right, strict=True):
        assert_close(mine, expected, 1e-5)
