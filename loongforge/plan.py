"""Chunk widths and the dial between memory and recomputation -> :class:`ChunkPlan`, which can explain itself.

Floating-point work is ``(8 - 2 * kept / V) * T * H * V``: with every logit kept backward does not recompute, with
none kept it costs one more GEMM.  How much is kept is granted by :mod:`loongforge.budget`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from loongforge import env
from loongforge.matmul import PIECE_ELEMENTS

GENERIC_VOCAB_SPLIT_SIZE = 3072
KEPT_MULTIPLE = 256
"""A partly kept vocabulary is cut at a multiple of this, so that the rest starts aligned."""
DEFAULT_WIDTH, LEAST_WIDTH, FEW_CHUNKS = 33 * 256, 4096, 3
"""Rows of a chunk on a GPU, the fewest that are chosen, and the number of chunks that may be narrower.

33 tiles of 256 rows times 4 blocks of 128 tokens: one for each of Hopper's 132 multiprocessors, which no chunk of
512 or more tokens leaves idle.
"""
IN_FORWARD_BELOW = 0.75
"""Share of the logits below which keeping them is slower than gradients in forward (measured: 0.69 to 0.91).

Recomputation against the passes over a float32 grad_weight: with chunks of so many tokens both grow with T, H and V.
"""
PER_TOKEN_BYTES = 128
"""Labels, statistics and coefficients of one token in both directions."""
_MIB = 1 << 20


@dataclass(frozen=True)
class ChunkPlan:
    """How one call walks its vocabulary rows: the first ``kept_rows`` once, the rest in chunks."""

    num_tokens: int
    hidden_size: int
    vocab_rows: int
    itemsize: int
    """Bytes of one stored logit."""
    operand_itemsize: int
    """Bytes of one element of hidden and weight: fewer where low-precision operands give float32 logits."""
    forward_width: int
    backward_width: int
    kept_rows: int = 0
    tokens_per_chunk: int = 0
    """Not 0: gradients are computed in forward, this many tokens at a time over the whole vocabulary."""
    withheld_rows: int = 0
    """Rows that the budget holds as well, but with which the peak would be at least that of all: :meth:`keeping`."""
    kept_in_chunks: bool = False
    """Casts or an adapter would make copies, so what is kept is multiplied chunk by chunk too."""
    in_tiles: bool = False
    """What is not kept is never written in forward, and in backward as a gradient in the operands' dtype."""
    scaled: bool = False
    """float16: every product is divided by a scale in float32."""
    ranks_add_rounded: bool = False
    """Other ranks' shares are added to grad_hidden, which is rounded for that beside the last chunk."""
    ranks_add_float32: bool = False
    """They are added to the float32 grad_hidden."""
    frozen_weight: bool = False
    """No gradient of the weight is computed, or only an adapter's."""

    def kept_ranges(self, kept_rows: int) -> list[tuple[int, int]]:
        """Row ranges of kept logits, a product each."""
        return list(_ranges(0, kept_rows, self.forward_width if self.kept_in_chunks else max(1, kept_rows)))

    def forward_chunks(self, kept_rows: int) -> Iterator[tuple[int, int]]:
        """Row ranges ``[start, stop)`` whose logits live in the reused buffer when ``kept_rows`` have their own."""
        return _ranges(kept_rows, self.vocab_rows, self.forward_width)

    def backward_chunks(self, kept_rows: int) -> list[tuple[int, int]]:
        """Row ranges whose logits backward recomputes when ``kept_rows`` of them are still there.

        No range crosses the plan's own ``kept_rows``: the two sides saw different roundings in forward.
        """
        lost = _ranges(kept_rows, self.kept_rows, self.backward_width)
        return [*lost, *_ranges(max(kept_rows, self.kept_rows), self.vocab_rows, self.backward_width)]

    @property
    def num_products(self) -> int:
        """Products that grad_hidden is the sum of."""
        of_kept = -(-self.kept_rows // self.forward_width) if self.kept_in_chunks else self.kept_rows > 0
        return of_kept + -(-(self.vocab_rows - self.kept_rows) // self.backward_width)

    @property
    def unfused_bytes(self) -> int:
        """One copy of the logits, which unfused training holds several times."""
        return self._logits_bytes(self.vocab_rows)

    @property
    def kept_bytes(self) -> int:
        """Logits that stay between forward and backward."""
        return self._logits_bytes(self.kept_rows)

    @property
    def buffer_bytes(self) -> int:
        """The largest reused chunk of logits."""
        return self._logits_bytes(min(max(self.forward_width, self.backward_width), self.vocab_rows - self.kept_rows))

    def _logits_bytes(self, rows: int) -> int:
        return self.num_tokens * rows * self.itemsize

    @property
    def tensor_bytes(self) -> int:
        """Most bytes of logits and gradients alive at any moment of forward and backward.

        Backward lets the kept logits go before it recomputes a chunk, and rounds grad_hidden after the last one.
        """
        return self._most_bytes(0)

    @property
    def peak_bytes(self) -> int:
        """Most bytes above the inputs at any moment of forward and backward, gradients and kept logits included.

        Holds for contiguous hidden and weight of the plan's dtype.  On top come: under sequence parallelism the
        gathered hidden states and this rank's slice of their gradient; the gradients of padded rows and of an adapter;
        where autocast casts the weight, one chunk of its rows, and its gradient is wider; in code of
        ``torch.compile``, which holds the kept logits until the end of backward, these.
        """
        hidden, rows, wide = self.hidden_size, self.vocab_rows, self._wide
        tokens = self.tokens_per_chunk or self.num_tokens
        width = max(self.kept_rows, min(max(self.forward_width, self.backward_width), rows - self.kept_rows))
        width = rows if self.tokens_per_chunk else width
        scratch = 3 * wide * min(PIECE_ELEMENTS, max(tokens * width, tokens * hidden, width * hidden))
        bias = rows * (2 * wide if self.tokens_per_chunk else self.operand_itemsize)
        return self._most_bytes(scratch) + bias + (self.num_tokens + self.tokens_per_chunk) * PER_TOKEN_BYTES

    @property
    def _wide(self) -> int:
        """Bytes of one element of sums and statistics."""
        return max(self.itemsize, 4)

    def _most_bytes(self, scratch: int) -> int:
        """The largest moment: forward at a chunk; backward over what is kept, at a chunk, and as it rounds grad_hidden.

        A product may take ``scratch`` on a CPU.
        """
        if self.tokens_per_chunk:
            return self._most_bytes_with_gradients_in_forward(scratch)
        elements, operand, wide = self.num_tokens * self.hidden_size, self.operand_itemsize, self._wide
        is_whole = self.num_products == 1 and not (self.scaled or self.ranks_add_float32)
        sum_hidden = elements * (operand if is_whole else wide)
        rounded = elements * operand if not is_whole and operand < wide else 0
        left = self.vocab_rows - self.kept_rows
        width, itemsize = min(self.backward_width, left), operand if self.in_tiles else self.itemsize
        chunk = self.num_tokens * width * itemsize + self._product_bytes(width, itemsize)
        kept_width = min(self.kept_rows, self.forward_width) if self.kept_in_chunks else self.kept_rows
        kept = self.kept_bytes + self._product_bytes(kept_width, self.itemsize)
        if self.ranks_add_rounded:
            kept, chunk = (kept, chunk + rounded) if left else (kept + rounded, chunk)
        forward = self.kept_bytes + (0 if self.in_tiles else self._logits_bytes(min(self.forward_width, left)))
        backward = sum_hidden + max(max(kept, chunk) + scratch, rounded)
        grad_weight = 0 if self.frozen_weight else self.vocab_rows * self.hidden_size * operand
        return max(forward + scratch, backward + grad_weight)

    def _product_bytes(self, rows: int, itemsize: int) -> int:
        """What the products of logit gradients [T, rows] take beside these."""
        rounded = self.num_tokens * rows * self.operand_itemsize if self.operand_itemsize < itemsize else 0
        return rounded + (rows * self.hidden_size * self._wide if self.scaled and not self.frozen_weight else 0)

    def _most_bytes_with_gradients_in_forward(self, scratch: int) -> int:
        """A chunk of tokens, with all of its logits, beside the gradients' sums, or the gradients beside these."""
        weight = 0 if self.frozen_weight else self.vocab_rows * self.hidden_size
        tokens_TH = self.num_tokens * self.hidden_size
        chunk = replace(self, num_tokens=self.tokens_per_chunk, tokens_per_chunk=0, kept_rows=self.vocab_rows)
        in_chunk = chunk._most_bytes(scratch) - weight * self.operand_itemsize  # into the sum instead
        sums = weight * self._wide + tokens_TH * (self._wide if self.scaled else self.operand_itemsize)
        return sums + max(in_chunk, (weight + tokens_TH) * self.operand_itemsize)

    def keeping(self, num_bytes: int) -> ChunkPlan:
        """This plan with the logits kept that ``num_bytes`` hold, unless keeping all takes no more at the peak.

        Then only what costs nothing at the peak is kept: with more of it all logits would be both less memory and
        less time.
        """
        fit = rows_that_fit(num_bytes, self.num_tokens, self.vocab_rows, self.itemsize)
        wanted = replace(self, kept_rows=fit)
        if fit in (0, self.vocab_rows) or wanted.tensor_bytes < self._tensor_bytes_keeping(self.vocab_rows):
            return wanted
        nothing, steps = self._tensor_bytes_keeping(0), range(KEPT_MULTIPLE, fit + 1, KEPT_MULTIPLE)
        # More kept is a shorter last chunk: what is kept grows with it only beside chunks that take next to nothing.
        beside_none = replace(self, backward_width=1)
        rows = KEPT_MULTIPLE * bisect_right(steps, nothing, key=beside_none._tensor_bytes_keeping)
        rows = rows if self._tensor_bytes_keeping(rows) <= nothing else 0
        return replace(self, kept_rows=rows, withheld_rows=fit - rows)

    def _tensor_bytes_keeping(self, rows: int) -> int:
        return replace(self, kept_rows=rows).tensor_bytes

    @property
    def flops(self) -> int:
        """Floating-point operations of forward plus backward."""
        products = 6 * self.vocab_rows if self.tokens_per_chunk else 8 * self.vocab_rows - 2 * self.kept_rows
        return products * self.num_tokens * self.hidden_size

    def explain(self) -> str:
        """One line for people."""
        if self.tokens_per_chunk:
            return (
                f"gradients in forward over chunks of {self.tokens_per_chunk} of {self.num_tokens} tokens: the budget "
                f"holds the gradients but less than {IN_FORWARD_BELOW:.0%} of the logits ({_mib(self.unfused_bytes)})"
            )
        kept = f"{self.kept_rows} of {self.vocab_rows} vocabulary rows kept ({_mib(self.kept_bytes)})"
        text = (
            f"{kept}, the rest in chunks of {self.forward_width} forward and {self.backward_width} backward "
            f"({_mib(self.buffer_bytes)} buffer); one copy of the logits would be {_mib(self.unfused_bytes)}"
        )
        if self.withheld_rows:
            some = self._tensor_bytes_keeping(self.kept_rows + self.withheld_rows)
            everything = self._tensor_bytes_keeping(self.vocab_rows)
            text += (
                f"; the budget holds {self.withheld_rows} rows more, but with them the peak would be {_mib(some)}, and "
                f"with all rows kept {_mib(everything)}: a budget of {-(-self.unfused_bytes // _MIB)} MiB keeps all"
            )
        return text


def plan_chunks(
    impl: str,
    num_tokens: int,
    hidden_size: int,
    vocab_rows: int,
    itemsize: int,
    kept_bytes: int = 0,
    gradients_in_forward: bool = False,
    operand_itemsize: int | None = None,
    **traits: bool,
) -> ChunkPlan:
    """Plan for ``num_tokens`` x ``vocab_rows`` logits of ``itemsize`` bytes, ``kept_bytes`` of which may stay.

    ``traits`` are the fields of :class:`ChunkPlan` that are true or false.
    """
    plan = ChunkPlan(
        num_tokens=num_tokens,
        hidden_size=hidden_size,
        vocab_rows=vocab_rows,
        itemsize=itemsize,
        operand_itemsize=operand_itemsize or itemsize,
        forward_width=GENERIC_VOCAB_SPLIT_SIZE,
        backward_width=GENERIC_VOCAB_SPLIT_SIZE,
        **traits,
    )
    if impl != "generic":
        plan = _in_planned_chunks(plan)
    forward, backward = env.vocab_split_size(impl, "FWD"), env.vocab_split_size(impl, "BWD")
    if forward or backward:
        forward, backward = forward or plan.forward_width, backward or plan.backward_width
        plan = replace(plan, forward_width=forward, backward_width=backward)
    if gradients_in_forward:
        return replace(plan, tokens_per_chunk=tokens_per_chunk(impl, num_tokens, hidden_size, vocab_rows))
    return plan.keeping(kept_bytes) if kept_bytes else plan


@lru_cache(maxsize=256)  # the host computes it before the first product is under way
def _in_planned_chunks(plan: ChunkPlan) -> ChunkPlan:
    """With the chunk width for a GPU (measured on an H200, ``docs/performance.md``).

    8448 rows, and more where tokens are few: a GEMM with fewer than 2**26 results leaves a large GPU idle.  Where
    that makes few chunks, narrower ones add few passes over grad_hidden: they are then no wider than what rounding
    it takes at the end.  One chunk for the whole vocabulary needs no float32 grad_hidden, so it is taken where the
    peak is no higher for it.
    """
    by_tokens = (1 << 26) // max(1, plan.num_tokens) // KEPT_MULTIPLE * KEPT_MULTIPLE
    width = max(DEFAULT_WIDTH, by_tokens)
    if plan.vocab_rows <= FEW_CHUNKS * DEFAULT_WIDTH and plan.operand_itemsize < 4:
        rounding = plan.hidden_size * plan.operand_itemsize // plan.itemsize // KEPT_MULTIPLE * KEPT_MULTIPLE
        width = min(width, max(LEAST_WIDTH, by_tokens, rounding))
    chunks, whole = (replace(plan, forward_width=w, backward_width=w) for w in (width, max(1, plan.vocab_rows)))
    return whole if whole.tensor_bytes <= chunks.tensor_bytes else chunks


def tokens_per_chunk(impl: str, num_tokens: int, hidden_size: int, vocab_rows: int) -> int:
    """Tokens of one chunk where gradients are computed in forward.

    PyTorch's aspect-ratio rule keeps the logits of a chunk about as large as hidden.  With a GPU's matrix rate each
    chunk must hold some thousand tokens, else adding to the float32 grad_weight [V, H] costs more than the products.
    """
    by_ratio = -(-num_tokens // max(1, -(-vocab_rows // hidden_size)))
    power = 1 << max(0, by_ratio - 1).bit_length()
    return min(max(1, num_tokens), max(4096, power) if impl == "triton" else power)


def rows_that_fit(num_bytes: int, num_tokens: int, vocab_rows: int, itemsize: int) -> int:
    """Vocabulary rows of logits that ``num_bytes`` hold: all, or a multiple of :data:`KEPT_MULTIPLE`."""
    fit = num_bytes // max(1, num_tokens * itemsize)
    return vocab_rows if fit >= vocab_rows else fit // KEPT_MULTIPLE * KEPT_MULTIPLE


def _ranges(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    for first in range(start, stop, step):
        yield first, min(first + step, stop)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:.1f} MiB"
