"""Chunk widths and the dial between memory and recomputation -> :class:`ChunkPlan`, which can explain itself.

Floating-point work is ``(8 - 2 * kept / V) * T * H * V``: with every logit kept backward does not recompute, with
none kept it costs one more GEMM.  What may be kept is a budget shared by all live calls of the process.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from loongforge import env
from loongforge.matmul import PIECE_ELEMENTS
from loongforge.options import LossOptions

GENERIC_VOCAB_SPLIT_SIZE = 3072
KEPT_MULTIPLE = 256
"""A partly kept vocabulary is cut at a multiple of this, so that the rest starts aligned."""
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
    def unfused_bytes(self) -> int:
        """One copy of the logits, which unfused training holds several times."""
        return self.num_tokens * self.vocab_rows * self.itemsize

    @property
    def kept_bytes(self) -> int:
        """Logits that stay between forward and backward."""
        return self.num_tokens * self.kept_rows * self.itemsize

    @property
    def buffer_bytes(self) -> int:
        """The largest reused chunk of logits."""
        return self.num_tokens * min(self._widest_chunk, self.vocab_rows - self.kept_rows) * self.itemsize

    @property
    def _widest_chunk(self) -> int:
        return min(max(self.forward_width, self.backward_width), self.vocab_rows)

    @property
    def peak_bytes(self) -> int:
        """Most bytes above the inputs at any moment of forward and backward, gradients and kept logits included.

        Holds for contiguous hidden and weight of the plan's dtype.  On top come: under tensor parallelism the rounded
        grad_hidden that travels beside the last chunk; under sequence parallelism also the gathered hidden states and
        this rank's slice of their gradient; in float16, or where autocast casts the weight, one chunk of weight rows
        in float32.
        """
        tokens, hidden, rows = self.num_tokens, self.hidden_size, self.vocab_rows
        wide = max(self.itemsize, 4)
        if self.tokens_per_chunk:
            return self._peak_bytes_of_gradients_in_forward(wide)
        width = max(self.kept_rows, min(max(self.forward_width, self.backward_width), rows - self.kept_rows))
        scratch = 3 * wide * min(PIECE_ELEMENTS, max(tokens * width, tokens * hidden, width * hidden))
        operand = self.operand_itemsize
        rounded_grad_hidden = tokens * hidden * operand if operand < wide else 0
        rounded_chunk = tokens * self._widest_chunk * operand if operand < self.itemsize else 0
        gradients = tokens * hidden * wide + rows * (hidden + 1) * operand
        return (
            self.kept_bytes
            + max(self.buffer_bytes + rounded_chunk + scratch, rounded_grad_hidden)
            + gradients
            + tokens * PER_TOKEN_BYTES
        )

    def _peak_bytes_of_gradients_in_forward(self, wide: int) -> int:
        tokens, hidden, rows, chunk = self.num_tokens, self.hidden_size, self.vocab_rows, self.tokens_per_chunk
        operand = self.operand_itemsize
        saved = rows * (hidden + 1) * wide + tokens * hidden * operand
        scratch = 3 * wide * min(PIECE_ELEMENTS, max(chunk * rows, chunk * hidden, rows * hidden))
        rounded_chunk = chunk * self._widest_chunk * operand if operand < self.itemsize else 0
        one_chunk = chunk * (rows * self.itemsize + hidden * wide + PER_TOKEN_BYTES) + rows * wide + scratch
        one_chunk += rounded_chunk
        gradients = (rows * (hidden + 1) + tokens * hidden) * operand
        return saved + max(one_chunk, gradients) + tokens * PER_TOKEN_BYTES

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
                f"holds the gradients but not the logits ({_mib(self.unfused_bytes)})"
            )
        kept = f"{self.kept_rows} of {self.vocab_rows} vocabulary rows kept ({_mib(self.kept_bytes)})"
        return (
            f"{kept}, the rest in chunks of {self.forward_width} forward and {self.backward_width} backward "
            f"({_mib(self.buffer_bytes)} buffer); one copy of the logits would be {_mib(self.unfused_bytes)}"
        )


def plan_chunks(
    impl: str,
    num_tokens: int,
    hidden_size: int,
    vocab_rows: int,
    itemsize: int,
    kept_bytes: int = 0,
    gradients_in_forward: bool = False,
    operand_itemsize: int | None = None,
) -> ChunkPlan:
    """Plan for ``num_tokens`` x ``vocab_rows`` logits of ``itemsize`` bytes, ``kept_bytes`` of which may stay."""
    operand_itemsize = operand_itemsize or itemsize
    planned = GENERIC_VOCAB_SPLIT_SIZE
    if impl != "generic":
        planned = _planned_width(num_tokens, hidden_size, vocab_rows, operand_itemsize)
    return ChunkPlan(
        num_tokens=num_tokens,
        hidden_size=hidden_size,
        vocab_rows=vocab_rows,
        itemsize=itemsize,
        operand_itemsize=operand_itemsize,
        forward_width=env.vocab_split_size(impl, "FWD") or planned,
        backward_width=env.vocab_split_size(impl, "BWD") or planned,
        kept_rows=rows_that_fit(kept_bytes, num_tokens, vocab_rows, itemsize),
        tokens_per_chunk=tokens_per_chunk(impl, num_tokens, hidden_size, vocab_rows) if gradients_in_forward else 0,
    )


def _planned_width(num_tokens: int, hidden_size: int, vocab_rows: int, itemsize: int) -> int:
    """Chunk width on a GPU (measured on an H200, ``docs/performance.md``).

    8192 rows, and more where tokens are few: a GEMM with fewer than 2**26 results leaves a large GPU idle.  One
    chunk for the whole vocabulary needs no float32 grad_hidden, so it is taken where it costs no more than that.
    """
    width = max(8192, (1 << 26) // max(1, num_tokens) // KEPT_MULTIPLE * KEPT_MULTIPLE)
    accumulator = hidden_size * 4 if itemsize < 4 else 0
    return vocab_rows if vocab_rows * itemsize <= width * itemsize + accumulator else width


def tokens_per_chunk(impl: str, num_tokens: int, hidden_size: int, vocab_rows: int) -> int:
    """Tokens of one chunk where gradients are computed in forward.

    PyTorch's aspect-ratio rule keeps the logits of a chunk about as large as hidden.  With a GPU's matrix rate each
    chunk must hold some thousand tokens, else adding to the float32 grad_weight [V, H] costs more than the products.
    """
    by_ratio = -(-num_tokens // max(1, -(-vocab_rows // hidden_size)))
    power = 1 << max(0, by_ratio - 1).bit_length()
    return min(max(1, num_tokens), max(4096, power) if impl == "triton" else power)


def rows_kept_by(budget: int | str, num_tokens: int, vocab_rows: int, itemsize: int) -> int:
    """Vocabulary rows of logits that a budget of MiB, or ``"all"``, keeps."""
    return vocab_rows if budget == "all" else rows_that_fit(int(budget) * _MIB, num_tokens, vocab_rows, itemsize)


def rows_that_fit(num_bytes: int, num_tokens: int, vocab_rows: int, itemsize: int) -> int:
    """Vocabulary rows of logits that ``num_bytes`` hold: all, or a multiple of :data:`KEPT_MULTIPLE`."""
    fit = num_bytes // max(1, num_tokens * itemsize)
    return vocab_rows if fit >= vocab_rows else fit // KEPT_MULTIPLE * KEPT_MULTIPLE


def _ranges(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    for first in range(start, stop, step):
        yield first, min(first + step, stop)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:.1f} MiB"


class Reservation:
    """Bytes granted to one call, for logits or for gradients; given back when the last reference to it goes."""

    def __init__(self, budget: LogitsBudget, num_bytes: int, for_gradients: bool = False) -> None:
        self._budget = budget
        self.num_bytes = num_bytes
        self.for_gradients = for_gradients

    @property
    def logits_bytes(self) -> int:
        """Bytes of kept logits."""
        return 0 if self.for_gradients else self.num_bytes

    def __del__(self) -> None:
        self._budget.release(self.num_bytes)


class LogitsBudget:
    """Bytes of kept logits over all live calls of the process; a call that finds none left recomputes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._granted = 0
        self._returned: deque[int] = deque()

    @property
    def bytes_in_use(self) -> int:
        """Bytes granted and not yet given back."""
        with self._lock:
            return self._settle()

    def _settle(self) -> int:
        while self._returned:
            self._granted -= self._returned.popleft()
        return self._granted

    def reserve(
        self,
        options: LossOptions,
        num_tokens: int,
        vocab_rows: int,
        itemsize: int,
        gradient_bytes: int | None = None,
    ) -> Reservation:
        """Grant what makes the call fastest within the budget of ``options`` or the environment.

        All logits (6THV operations in all); else ``gradient_bytes`` for gradients computed in forward (also 6THV;
        None: not possible in this call); else as many whole vocabulary rows of logits as fit (6THV to 8THV).
        """
        limit = options.logits_budget_mb if options.logits_budget_mb is not None else env.logits_budget_mb()
        wanted = num_tokens * vocab_rows * itemsize
        with self._lock:
            in_use = self._settle()
            free = wanted if limit == "all" else max(0, int(limit) * _MIB - in_use)
            if free < wanted and gradient_bytes is not None and gradient_bytes <= free:
                reservation = Reservation(self, gradient_bytes, for_gradients=True)
            else:
                rows = rows_that_fit(min(wanted, free), num_tokens, vocab_rows, itemsize)
                reservation = Reservation(self, rows * num_tokens * itemsize)
            self._granted += reservation.num_bytes
        return reservation

    def release(self, num_bytes: int) -> None:
        """Called by :class:`Reservation` from ``__del__``, which a garbage collection may run anywhere: no lock."""
        self._returned.append(num_bytes)


logits_budget = LogitsBudget()
