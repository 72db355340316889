"""What the tests of the Triton row kernels share: float64 truth, guarded buffers, labels of every kind."""

import math
import os

import pytest
import torch

pytest.importorskip("triton", reason="needs triton (pip install 'loongforge[triton]')")

from loongforge.kernels.interface import Chunk, LogitTransform, RowCoefficients, RowStats  # noqa: E402
from loongforge.kernels.triton_rows import TritonRowKernels  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if HAS_GPU else "cpu"
KERNELS = TritonRowKernels()
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
    normal = torch.randn(num_tokens, num_classes, generator=generator, dtype=torch.float64)
    return (spread * normal).to(dtype).to(DEVICE)


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
        KERNELS.accumulate(rows.logits, Chunk(label_T, first, transform, weight_C), stats)
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
        terms_T = (weight_C * x_TC).abs().sum(1)  # of both signs: the error is measured against their sizes
        assert (error_T <= bar * terms_T).all()
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
    KERNELS.gradient_(rows.logits, Chunk(label_T, first_class, transform, class_weight_C), coefficients)
    rows.assert_guards_untouched()
    bar = ROUNDING[rows_TC.dtype] + (0 if rows_TC.dtype == torch.float64 else 5e-7)
    assert_close(rows.logits, expected_TC, bar)
