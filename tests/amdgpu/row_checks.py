"""One row-kernel case against the float64 formula of ``loongforge/kernels/interface.py``; any RowKernels object."""

from dataclasses import dataclass, field

import torch

from loongforge.kernels.interface import Chunk, LogitTransform, RowCoefficients, RowKernels, RowStats
from tests.helpers import relative

GUARD = 77.0
ROUNDING = {torch.float32: 5e-7, torch.float16: 2**-11, torch.bfloat16: 2**-8}  # of a stored gradient
STATISTICS = 1e-6  # relative error of a float32 statistic


@dataclass
class RowCase:
    """Inputs of both kernels: logits [T, V] folded in chunks of ``chunk`` columns, labels of every kind."""

    vocab: int
    dtype: torch.dtype
    tokens: int = 4
    chunk: int | None = None
    spread: float = 2.0
    shift: float = 0.0
    transform: LogitTransform = field(default_factory=LogitTransform)
    uniform: bool = False
    class_weighted: bool = False
    first_element: int = 3  # where the first row starts in its buffer: not on 16 bytes
    padding: int = 5  # elements between rows: every row has another alignment

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.vocab)
        z = torch.randn(self.tokens, self.vocab, generator=generator, dtype=torch.float64) * self.spread + self.shift
        self.logits_TV = z.to(self.dtype)
        self.label_T = torch.randint(0, self.vocab, (self.tokens,), generator=generator)
        self.label_T[:3] = torch.tensor([-1, 0, self.vocab - 1])[: self.tokens]
        self.class_weight_V = torch.rand(self.vocab, generator=generator) if self.class_weighted else None
        coefficients = torch.randn(3, self.tokens, generator=generator)  # the upstream gradient differs per token
        coefficients[:, -1] = 0.0  # an inactive row
        self.softmax_T, self.onehot_T, self.uniform_T = coefficients

    @property
    def x_TV(self) -> torch.Tensor:
        """The logits that the loss sees, in float64."""
        x = self.logits_TV.double() * self.transform.logit_scale
        cap = self.transform.softcap
        return x if cap is None else cap * torch.tanh(x / cap)

    def chunks(self):
        """``(first class, guarded copy of those columns, their weights)``."""
        for first in range(0, self.vocab, self.chunk or self.vocab):
            columns = slice(first, min(first + (self.chunk or self.vocab), self.vocab))
            weight = None if self.class_weight_V is None else self.class_weight_V[columns].contiguous()
            yield first, Guarded(self.logits_TV[:, columns], self.first_element, self.padding), weight

    def accumulate(self, kernels: RowKernels) -> RowStats:
        """Statistics over all chunks; asserts that the logits were only read."""
        zeros = torch.zeros(self.tokens)
        stats = RowStats(
            torch.full_like(zeros, -torch.inf), zeros, zeros.clone(), zeros.clone() if self.uniform else None
        )
        for first, rows, weight in self.chunks():
            before = rows.buffer.clone()
            kernels.accumulate(rows.logits, Chunk(self.label_T, first, self.transform, weight), stats)
            assert torch.equal(bits(rows.buffer), bits(before)), "accumulate wrote to the logits"
        return stats

    def gradient(self, kernels: RowKernels, coefficients: RowCoefficients) -> torch.Tensor:
        """The gradient [T, V], made in place chunk by chunk; asserts that nothing around the rows was written."""
        pieces = []
        for first, rows, weight in self.chunks():
            kernels.gradient_(rows.logits, Chunk(self.label_T, first, self.transform, weight), coefficients)
            rows.assert_untouched_around()
            pieces.append(rows.logits.clone())
        return torch.cat(pieces, 1)

    def coefficients(self, max_T: torch.Tensor, sum_exp_T: torch.Tensor) -> RowCoefficients:
        softmax_over_sum_T = torch.where(self.softmax_T == 0, 0.0, self.softmax_T / sum_exp_T).float()
        return RowCoefficients(
            max_T.float(), softmax_over_sum_T, self.onehot_T, self.uniform_T if self.uniform else None
        )

    def expected_gradient(self, coefficients: RowCoefficients) -> torch.Tensor:
        """The formula in float64, for the float32 coefficients that the kernel gets."""
        x = self.x_TV
        probability = torch.exp(x - coefficients.max_T.double()[:, None])
        grad = coefficients.softmax_over_sum_T.double()[:, None] * probability
        at_label = torch.arange(self.vocab) == self.label_T[:, None]
        grad = grad - torch.where(at_label, coefficients.onehot_T.double()[:, None], 0.0)
        if coefficients.uniform_T is not None:
            weight = torch.ones(1) if self.class_weight_V is None else self.class_weight_V
            grad = grad - coefficients.uniform_T.double()[:, None] * weight.double()
        slope = self.transform.logit_scale
        if self.transform.softcap is not None:
            slope = slope * (1.0 - (x / self.transform.softcap) ** 2)
        return grad * slope

    def check(self, kernels: RowKernels) -> None:
        """Both kernels against float64."""
        stats, x = self.accumulate(kernels), self.x_TV
        expected_max_T = x.amax(1)
        expected_sum_T = torch.exp(x - expected_max_T[:, None]).sum(1)
        assert relative(stats.max_T, expected_max_T) <= STATISTICS
        # exp turns an absolute error of the maximum into a relative one of the sum; the pair is what the loss uses
        lse_T = stats.max_T.double() + stats.sum_exp_T.double().log()
        assert relative(lse_T, expected_max_T + expected_sum_T.log()) <= STATISTICS
        drift = (stats.max_T.double() - expected_max_T).exp()
        assert relative(stats.sum_exp_T.double() * drift, expected_sum_T) <= STATISTICS
        label_logit_T = torch.where(self.label_T < 0, 0.0, x.gather(1, self.label_T.clamp_min(0)[:, None])[:, 0])
        assert relative(stats.label_logit_T, label_logit_T) <= STATISTICS
        if self.uniform:
            weighted = x if self.class_weight_V is None else x * self.class_weight_V.double()
            bar = STATISTICS * float(weighted.abs().sum(1).norm() / weighted.sum(1).norm())
            assert relative(stats.weighted_sum_T, weighted.sum(1)) <= bar
        coefficients = self.coefficients(expected_max_T, expected_sum_T)
        actual, expected = self.gradient(kernels, coefficients), self.expected_gradient(coefficients)
        assert (actual[-1] == 0).all(), "an inactive row must be exact zeros"
        assert relative(actual, expected) <= ROUNDING[self.dtype] * (4 if self.transform.softcap else 1)


class Guarded:
    """A [T, C] view whose rows start anywhere in memory, inside a buffer full of guards."""

    def __init__(self, values: torch.Tensor, first_element: int, padding: int) -> None:
        tokens, classes = values.shape
        stride = classes + padding
        self.buffer = torch.full((first_element + tokens * stride,), GUARD, dtype=values.dtype)
        self.logits = self.buffer[first_element:].as_strided((tokens, classes), (stride, 1), first_element)
        self.logits.copy_(values)

    def assert_untouched_around(self) -> None:
        around = self.buffer.clone()
        around.as_strided(self.logits.shape, self.logits.stride(), self.logits.storage_offset()).fill_(GUARD)
        assert (around == GUARD).all(), "the kernel wrote beside its rows"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as bytes: equal also where it holds NaN."""
    return tensor.view(torch.uint8)
