"""What is right for a kernel over some vocabulary rows of a head: float32, computed by torch from the definition.

T tokens, H hidden, C vocabulary rows, B a block of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from loongforge.bench.measure import Problem, relative_error
from loongforge.kernels.interface import Chunk, LogitTransform, RowCoefficients, RowStats

BLOCK_TOKENS = 1024
"""Tokens whose float32 logits exist at once in a check."""


@dataclass(frozen=True)
class Rows:
    """Vocabulary rows of a head as kernels see them, and the float32 statistics and coefficients that are right."""

    hidden_TH: torch.Tensor
    weight_CH: torch.Tensor
    label_T: torch.Tensor  # int64 among these rows, -1 for ignored tokens
    logits_TC: torch.Tensor | None  # stored logits, which are then the truth; None: the exact product
    stats: RowStats
    coefficients: RowCoefficients

    @classmethod
    def of(cls, problem: Problem, width: int, logits_TC: torch.Tensor | None = None) -> Rows:
        """The first ``width`` rows; labels of other rows are moved among them."""
        target_T = problem.target_T
        label_T = torch.where(target_T >= 0, target_T % width, -1)
        # Scaled so that gradients of logits are far from the smallest float16.
        onehot_T = torch.where(label_T >= 0, problem.upstream_T * len(target_T), 0.0)
        stats = empty_stats(label_T)
        coefficients = RowCoefficients(stats.max_T, torch.empty_like(onehot_T), onehot_T, None)
        rows = cls(problem.hidden_TH, problem.weight_VH[:width], label_T, logits_TC, stats, coefficients)
        for block, logits_BC in rows.blocks():
            max_B = logits_BC.amax(1)
            stats.max_T[block] = max_B
            stats.sum_exp_T[block] = (logits_BC - max_B[:, None]).exp_().sum(1)
            label_logit_B = logits_BC.gather(1, label_T[block].clamp_min(0)[:, None])[:, 0]
            stats.label_logit_T[block] = torch.where(label_T[block] >= 0, label_logit_B, 0.0)
        torch.div(onehot_T, stats.sum_exp_T, out=coefficients.softmax_over_sum_T)
        return rows

    @property
    def chunk(self) -> Chunk:
        return Chunk(self.label_T, 0, LogitTransform())

    @property
    def width(self) -> int:
        return len(self.weight_CH)

    def blocks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """float32 logits, a block of tokens at a time."""
        weight_CH = self.weight_CH.float() if self.logits_TC is None else None
        for start in range(0, len(self.hidden_TH), BLOCK_TOKENS):
            block = slice(start, start + BLOCK_TOKENS)
            if weight_CH is None:
                assert self.logits_TC is not None
                yield block, self.logits_TC[block].float()
            else:
                yield block, self.hidden_TH[block].float() @ weight_CH.t()

    def statistics_error(self, accumulate: Callable[[RowStats], object]) -> float:
        """Error of the losses that the statistics stand for."""
        stats = empty_stats(self.label_T)
        accumulate(stats)
        return relative_error(loss_of(stats, self.label_T), loss_of(self.stats, self.label_T))

    def logits_error(self, logits_TC: torch.Tensor) -> float:
        return self._error(logits_TC, lambda block, logits_BC: logits_BC)

    def gradient_error(self, grad_TC: torch.Tensor) -> float:
        """Error of what ``coefficients`` make of the logits."""

        def gradient(block: slice, logits_BC: torch.Tensor) -> torch.Tensor:
            c = self.coefficients.of(block)
            grad_BC = (logits_BC - c.max_T[:, None]).exp_() * c.softmax_over_sum_T[:, None]
            return grad_BC.scatter_add_(1, self.label_T[block].clamp_min(0)[:, None], -c.onehot_T[:, None])

        return self._error(grad_TC, gradient)

    def _error(self, actual_TC: torch.Tensor, expected: Callable[[slice, torch.Tensor], torch.Tensor]) -> float:
        """Relative norm over all blocks."""
        wrong = torch.zeros((), dtype=torch.float64, device=actual_TC.device)
        whole = torch.zeros_like(wrong)
        for block, logits_BC in self.blocks():
            expected_BC = expected(block, logits_BC)
            wrong += (actual_TC[block].float() - expected_BC).norm().double().square()
            whole += expected_BC.norm().double().square()
        return (wrong / whole).sqrt().item()


def empty_stats(like_T: torch.Tensor) -> RowStats:
    """Of no logits yet."""
    zeros_T = torch.zeros(like_T.shape, device=like_T.device)
    return RowStats(torch.full_like(zeros_T, -torch.inf), zeros_T, zeros_T.clone(), None)


def loss_of(stats: RowStats, label_T: torch.Tensor) -> torch.Tensor:
    """The loss of each token, 0 where it is ignored."""
    loss_T = stats.sum_exp_T.log() - (stats.label_logit_T - stats.max_T)
    return torch.where(label_T >= 0, loss_T, 0.0)
