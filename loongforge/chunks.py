"""The chunk loop: forward folds logits into statistics, backward turns rebuilt logits into gradients.

Only one chunk of logits exists at a time, in one reused buffer; the part that the plan keeps is a second buffer.
Nothing here knows of groups, reductions or Megatron, only that hidden states may arrive in pieces and that
grad_hidden is wanted before the weight gradient: whoever calls can let collectives run beside the products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from loongforge.budget import KeptLogits
from loongforge.kernels.interface import Chunk, LogitTransform, RowCoefficients, RowKernels, RowStats, TileKernels
from loongforge.matmul import column_sums_, product_, project_
from loongforge.parallel import Tokens
from loongforge.plan import ChunkPlan


@dataclass(frozen=True)
class Head:
    """One output layer on one rank: what both directions of the loop read.

    tokens [T, H] and weight_VH [V, H] may differ in dtype (autocast over float32 weights): each chunk of the
    weight is cast to hidden's dtype as it is used, so that no second copy of the weight exists.  With a frozen
    ``base_VH`` (an adapter) a chunk of the weight is ``[base | weight]``, joined as it is used; tokens are as wide.
    """

    tokens: Tokens  # hidden states, of which other ranks' may still be on their way
    weight_VH: torch.Tensor
    bias_V: torch.Tensor | None
    label_T: torch.Tensor
    class_weight_V: torch.Tensor | None
    transform: LogitTransform
    kernels: RowKernels
    tiles: TileKernels | None  # take the chunks that are not kept, where they exist
    plan: ChunkPlan
    logits_dtype: torch.dtype
    fp32_grad_hidden: bool  # handed over in the statistics' dtype also by the only product there is
    base_VH: torch.Tensor | None = None

    @property
    def hidden_TH(self) -> torch.Tensor:
        """All hidden states, waited for where they are still on their way."""
        return self.tokens.wait()

    @property
    def statistics_dtype(self) -> torch.dtype:
        """float32, or float64 for float64 inputs."""
        return torch.promote_types(self.tokens.dtype, torch.float32)

    def weight_rows(self, start: int, stop: int) -> torch.Tensor:
        """[stop - start, H] in the dtype of hidden."""
        weight_CH = self.weight_VH[start:stop].to(self.tokens.dtype)
        return weight_CH if self.base_VH is None else torch.cat([self.base_VH[start:stop].to(weight_CH), weight_CH], 1)

    def trained_hidden(self) -> torch.Tensor:
        """The columns of hidden that multiply ``weight_VH``: all, or those behind the base's."""
        return self.hidden_TH if self.base_VH is None else self.hidden_TH[:, self.base_VH.shape[1] :]

    def bias_rows(self, start: int, stop: int) -> torch.Tensor | None:
        """[stop - start] in the dtype of hidden."""
        return None if self.bias_V is None else self.bias_V[start:stop].to(self.tokens.dtype)

    def compute_logits(self, start: int, stop: int, out_TC: torch.Tensor) -> torch.Tensor:
        """Logits of vocabulary rows ``[start, stop)``."""
        weight_CH, bias_C = self.weight_rows(start, stop), self.bias_rows(start, stop)
        for rows, hidden_TH in self.tokens.pieces():
            project_(out_TC[rows], hidden_TH, weight_CH, bias_C)
        return out_TC

    def chunk(self, start: int, stop: int) -> Chunk:
        """What the kernels need to know of vocabulary rows ``[start, stop)``."""
        weight_C = None if self.class_weight_V is None else self.class_weight_V[start:stop]
        return Chunk(self.label_T, start, self.transform, weight_C)


@dataclass
class WeightGrad:
    """Where the weight gradient goes: ``buffer_VH`` [V, H] of any float dtype, overwritten or added into."""

    buffer_VH: torch.Tensor
    accumulate: bool


def forward(head: Head, with_weighted_sum: bool, keep: bool) -> tuple[RowStats, torch.Tensor | None]:
    """Statistics over all vocabulary rows of this rank, and the logits [T, kept_rows] that the plan keeps."""
    kept_rows = head.plan.kept_rows if keep else 0
    all_in_tiles = head.tiles is not None and kept_rows == 0 and head.plan.vocab_rows > 0
    stats = _new_stats(head, with_weighted_sum, empty=not all_in_tiles)
    kept = None
    if kept_rows:
        kept = head.tokens.new_empty((head.plan.num_tokens, kept_rows), head.logits_dtype)
        for start, stop in head.plan.kept_ranges(kept_rows):
            head.compute_logits(start, stop, kept[:, start:stop])
        _accumulate(head, kept, 0, kept_rows, stats)
    if head.tiles is not None:
        if kept_rows < head.plan.vocab_rows:
            _accumulate_tiles(head, kept_rows, head.plan.vocab_rows, stats, first=all_in_tiles)
        return stats, kept
    buffer = _Buffer(head, head.plan.forward_width, kept_rows, head.logits_dtype)
    for start, stop in head.plan.forward_chunks(kept_rows):
        _accumulate(head, head.compute_logits(start, stop, buffer.chunk(stop - start)), start, stop, stats)
    return stats, kept


def backward(
    head: Head,
    coefficients: RowCoefficients,
    kept: KeptLogits | None,
    take_grad_hidden: Callable[[torch.Tensor], None] | None,
    weight_grad: WeightGrad | None,
    needs_bias: bool,
    scale: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Gradients of the sum over tokens that ``coefficients`` stand for; returns grad_bias [V] where it is asked for.

    ``kept`` is taken, overwritten and let go before anything is recomputed.  ``scale`` (a device scalar) says that the
    coefficients were multiplied by it, so that float16 logit gradients neither underflow nor overflow; it is divided
    out of each product in float32.
    ``take_grad_hidden`` gets grad_hidden [T, H] once, before the last product of the weight gradient, in the
    statistics' dtype, or in hidden's where one product gives it whole and ``fp32_grad_hidden`` does not ask otherwise.
    """
    kept_rows = 0 if kept is None else kept.num_rows
    num_recomputed = len(head.plan.backward_chunks(kept_rows))
    kept_ranges = head.plan.kept_ranges(kept_rows)
    grad_hidden = grad_bias = None
    if take_grad_hidden is not None:
        grad_hidden = _HiddenGrad(head, len(kept_ranges) + num_recomputed, scale, take_grad_hidden)
    if needs_bias and head.bias_V is not None:
        grad_bias = head.bias_V.new_zeros(head.bias_V.shape, dtype=head.statistics_dtype)
    for logits_TC, start, stop in _gradients_of_logits(head, coefficients, kept, kept_ranges):
        logits_TC = logits_TC.to(head.tokens.dtype)  # the products take operands of one dtype
        if grad_hidden is not None:
            grad_hidden.add(logits_TC, head.weight_rows(start, stop))
        if weight_grad is not None:
            _weight_rows_grad(weight_grad, logits_TC, head.trained_hidden(), start, stop, scale)
        if grad_bias is not None:
            rows_C = column_sums_(grad_bias[start:stop], logits_TC)
            if scale is not None:
                rows_C.div_(scale)
        del logits_TC  # the last view of what is kept, for which there is no room beside the next chunk
    head.tokens.wait()  # where nothing needed them, other ranks may have
    return grad_bias


def _gradients_of_logits(
    head: Head,
    coefficients: RowCoefficients,
    kept: KeptLogits | None,
    kept_ranges: list[tuple[int, int]],
) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Chunk by chunk the gradient of the logits [T, stop - start] and its rows, each valid until the next."""
    kept_rows = 0 if kept is None else kept.num_rows
    if kept is not None:
        logits_TK = kept.take()
        _to_gradient(head, logits_TK, 0, kept_rows, coefficients)
        for start, stop in kept_ranges:
            yield logits_TK[:, start:stop], start, stop
        del logits_TK  # its memory is there for the buffer
    in_tiles = head.tiles is not None and kept_rows >= head.plan.kept_rows
    buffer = _Buffer(head, head.plan.backward_width, kept_rows, head.tokens.dtype if in_tiles else head.logits_dtype)
    for start, stop in head.plan.backward_chunks(kept_rows):
        if head.tiles is not None and start >= head.plan.kept_rows:
            logits_TC = buffer.chunk(stop - start, head.tokens.dtype)
            _tiles_to_gradient(head, logits_TC, start, stop, coefficients)
        else:
            logits_TC = head.compute_logits(start, stop, buffer.chunk(stop - start))
            _to_gradient(head, logits_TC, start, stop, coefficients)
        yield logits_TC, start, stop


def _new_stats(head: Head, with_weighted_sum: bool, empty: bool) -> RowStats:
    """Statistics of no logits, or memory that will be overwritten."""
    empty_T = partial(head.tokens.new_empty, (head.plan.num_tokens,), head.statistics_dtype)
    stats = RowStats(empty_T(), empty_T(), empty_T(), empty_T() if with_weighted_sum else None)
    if empty:
        for value_T in (stats.sum_exp_T, stats.label_logit_T, stats.weighted_sum_T):
            if value_T is not None:
                value_T.zero_()
        stats.max_T.fill_(-torch.inf)
    return stats


def _accumulate(head: Head, logits_TC: torch.Tensor, start: int, stop: int, stats: RowStats) -> None:
    if head.plan.num_tokens:
        head.kernels.accumulate(logits_TC, head.chunk(start, stop), stats)


def _accumulate_tiles(head: Head, start: int, stop: int, stats: RowStats, first: bool) -> None:
    assert head.tiles is not None
    weight_CH, bias_C, chunk = head.weight_rows(start, stop), head.bias_rows(start, stop), head.chunk(start, stop)
    for rows, hidden_TH in head.tokens.pieces():
        head.tiles.accumulate(hidden_TH, weight_CH, bias_C, chunk.of(rows), stats.of(rows), first)


def _tiles_to_gradient(head: Head, out_TC: torch.Tensor, start: int, stop: int, coefficients: RowCoefficients) -> None:
    assert head.tiles is not None
    weight_CH, bias_C, chunk = head.weight_rows(start, stop), head.bias_rows(start, stop), head.chunk(start, stop)
    for rows, hidden_TH in head.tokens.pieces():
        head.tiles.gradient(hidden_TH, weight_CH, bias_C, chunk.of(rows), coefficients.of(rows), out_TC[rows])


def _to_gradient(head: Head, logits_TC: torch.Tensor, start: int, stop: int, coefficients: RowCoefficients) -> None:
    if head.plan.num_tokens:
        head.kernels.gradient_(logits_TC, head.chunk(start, stop), coefficients)


def _weight_rows_grad(
    grad: WeightGrad,
    logits_TC: torch.Tensor,
    hidden_TH: torch.Tensor,
    start: int,
    stop: int,
    scale: torch.Tensor | None,
) -> None:
    rows_CH = grad.buffer_VH[start:stop]
    if scale is None:
        product_(rows_CH, logits_TC.t(), hidden_TH, accumulate=grad.accumulate)
        return
    scaled_CH = rows_CH.new_empty(rows_CH.shape, dtype=torch.float32)
    product_(scaled_CH, logits_TC.t(), hidden_TH).div_(scale)
    rows_CH.copy_(scaled_CH.add_(rows_CH) if grad.accumulate else scaled_CH)


class _Buffer:
    """One allocation that every chunk of a direction reuses; a ragged last chunk is a smaller view of it."""

    def __init__(self, head: Head, width: int, first_row: int, dtype: torch.dtype) -> None:
        self._num_tokens = head.plan.num_tokens
        # Tile kernels store whole 16-byte vectors, so their rows start at multiples of one.
        self._multiple = 1 if head.tiles is None else 16 // head.tokens.dtype.itemsize
        widest = self._stride(min(width, head.plan.vocab_rows - first_row))
        self._flat = head.tokens.new_empty((self._num_tokens * widest,), dtype)

    def chunk(self, width: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """[T, width] of the buffer's dtype, or of a narrower one."""
        stride, flat = self._stride(width), self._flat if dtype is None else self._flat.view(dtype)
        return flat[: self._num_tokens * stride].view(self._num_tokens, stride)[:, :width]

    def _stride(self, width: int) -> int:
        return -(-width // self._multiple) * self._multiple


class _HiddenGrad:
    """grad_hidden summed over chunks in the statistics' dtype, or written by the only product there is."""

    def __init__(
        self, head: Head, num_chunks: int, scale: torch.Tensor | None, take: Callable[[torch.Tensor], None]
    ) -> None:
        self._num_chunks, self._scale, self._take = num_chunks, scale, take
        is_whole = num_chunks == 1 and scale is None and not head.fp32_grad_hidden
        dtype = head.tokens.dtype if is_whole else head.statistics_dtype
        self._sum_TH = head.tokens.new_empty((head.plan.num_tokens, head.plan.hidden_size), dtype)
        self._num_added = 0
        if num_chunks == 0:
            self._give(self._sum_TH.zero_())

    def add(self, logits_TC: torch.Tensor, weight_CH: torch.Tensor) -> None:
        product_(self._sum_TH, logits_TC, weight_CH, accumulate=self._num_added > 0)
        self._num_added += 1
        if self._num_added == self._num_chunks:
            self._give(self._sum_TH if self._scale is None else self._sum_TH.div_(self._scale))

    def _give(self, sum_TH: torch.Tensor) -> None:
        del self._sum_TH  # whoever takes it may round it and let it go
        self._take(sum_TH)
