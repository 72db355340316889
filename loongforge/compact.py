"""Tokens that carry no loss are left out before the products: ``compact_tokens``.

In supervised fine-tuning most labels may be ``ignore_index``.  The rows of hidden that count are copied to the front
([N, H], the only extra memory between forward and backward), everything else works on N tokens, and losses and
grad_hidden go back to their places; the rest is exact zeros.  What an ignored token holds, NaN included, enters no
product.  N is read from the device (one synchronisation), or is a bound that the caller gives, of which the part that
is not needed becomes ignored tokens with hidden states of 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from loongforge import checks, env
from loongforge.parallel import VocabParallel


@dataclass(frozen=True)
class CarriedTokens:
    """Which of ``num_tokens`` tokens carry a loss."""

    index_N: torch.Tensor
    """Their positions, ascending; ``num_tokens`` where a bound has more places than there are tokens to fill them."""
    num_tokens: int
    nan_if_too_many: torch.Tensor | None
    """With a bound: 1, or NaN where more tokens carry a loss than it allows."""

    @classmethod
    def of(cls, valid_T: torch.Tensor, compact_tokens: bool | int) -> CarriedTokens:
        """Find them in ``valid_T`` [T] bool; only ``compact_tokens=True`` synchronises with the host."""
        num_tokens = valid_T.shape[0]
        seen_T = valid_T.cumsum(0)
        if compact_tokens is True:
            if torch.compiler.is_compiling():
                raise NotImplementedError(
                    "compact_tokens=True reads a number on the host, which a graph cannot: give a bound"
                )
            checks.refuse_under_graph_capture("compact_tokens=True", valid_T.device, "give a bound: compact_tokens=N")
            size = int(seen_T[-1]) if num_tokens else 0
        else:
            size = min(compact_tokens, num_tokens)
        # The n-th valid token is the first one at which n have been seen.
        index_N = torch.searchsorted(seen_T, torch.arange(1, size + 1, device=valid_T.device))
        if compact_tokens is True or num_tokens == 0:
            return cls(index_N, num_tokens, None)
        too_many = seen_T[-1] > compact_tokens
        if not torch.compiler.is_compiling() and env.check_labels():
            checks.check_number_of_tokens(seen_T[-1], compact_tokens)
        return cls(index_N, num_tokens, torch.where(too_many, torch.nan, 1.0))

    def hidden(self, hidden: torch.Tensor, parallel: VocabParallel) -> torch.Tensor:
        """[N, H] of hidden [..., H], differentiable; under sequence parallelism gathered first."""
        if not torch.compiler.is_compiling():
            return _SelectRows.apply(hidden, self.index_N, parallel)
        if parallel.sequence_parallel:
            raise NotImplementedError("compact_tokens and sequence_parallel do not go into one graph: drop one of them")
        return _selected_rows(hidden.reshape(-1, hidden.shape[-1]), self.index_N)

    def values(self, value_T: torch.Tensor, fill: Any) -> torch.Tensor:
        """[N] of [T], differentiable; ``fill`` in the places that no token takes."""
        padded = torch.nn.functional.pad(value_T, (0, 1), value=fill)
        return padded[self.index_N]

    def losses(self, loss_N: torch.Tensor) -> torch.Tensor:
        """[T] of [N], differentiable; 0 where no loss is carried."""
        return loss_N.new_zeros(self.num_tokens + 1).index_copy(0, self.index_N, loss_N)[:-1]

    def marked(self, loss: torch.Tensor) -> torch.Tensor:
        """``loss`` itself, or NaN (so are all gradients) where tokens did not fit the bound."""
        return loss if self.nan_if_too_many is None else loss * self.nan_if_too_many.to(loss.dtype)


def _selected_rows(hidden_TH: torch.Tensor, index_N: torch.Tensor) -> torch.Tensor:
    """[N, H]; zeros where the index is T."""
    num_tokens = hidden_TH.shape[0]
    selected_NH = hidden_TH.index_select(0, index_N.clamp(max=max(0, num_tokens - 1)))
    return selected_NH.masked_fill_((index_N == num_tokens)[:, None], 0.0)


class _SelectRows(torch.autograd.Function):
    """(hidden [..., H], index [N]) -> [N, H], with a backward that needs no atomic additions."""

    @staticmethod
    def forward(ctx, hidden, index_N, parallel: VocabParallel):  # noqa: D102
        hidden_TH = parallel.gather_tokens(hidden).wait()
        ctx.save_for_backward(index_N)
        ctx.shape = hidden.shape
        ctx.first = parallel.rank * hidden.shape[:-1].numel() if parallel.sequence_parallel else 0
        return _selected_rows(hidden_TH, index_N)

    @staticmethod
    def backward(ctx, grad_NH):  # noqa: D102
        (index_N,) = ctx.saved_tensors
        num_local = ctx.shape[:-1].numel()
        # One row more than there are tokens takes what belongs to other ranks and to no token.
        row_N = torch.where((index_N >= ctx.first) & (index_N < ctx.first + num_local), index_N - ctx.first, num_local)
        grad_TH = grad_NH.new_zeros(num_local + 1, ctx.shape[-1]).index_copy_(0, row_N, grad_NH)
        return grad_TH[:num_local].view(ctx.shape), None, None
