"""The budget for kept logits that all live calls of the process share, and what one call keeps of it."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import torch

from loongforge import env
from loongforge.options import LossOptions
from loongforge.plan import IN_FORWARD_BELOW, ChunkPlan, rows_that_fit

_MIB = 1 << 20


def rows_kept_by(budget: int | str, num_tokens: int, vocab_rows: int, itemsize: int) -> int:
    """Vocabulary rows of logits that a budget of MiB, or ``"all"``, keeps."""
    return vocab_rows if budget == "all" else rows_that_fit(int(budget) * _MIB, num_tokens, vocab_rows, itemsize)


class Reservation:
    """Bytes granted to one call, for logits or for gradients; given back when the last reference to it goes."""

    def __init__(self, budget: LogitsBudget, num_bytes: int, plan: ChunkPlan, gradient_bytes: int) -> None:
        self._budget, self.num_bytes = budget, num_bytes
        self.plan, self.gradient_bytes = plan, gradient_bytes
        """What these bytes make of the plan that was asked for, and how many gradients in forward take (0: none)."""

    def __del__(self) -> None:
        self._budget.release(self.num_bytes)


@dataclass
class KeptLogits:
    """Logits [T, kept rows] that stay between forward and backward, and their share of the budget.

    Backward takes the logits out and is then the only one to hold them, so that they are gone as soon as it has used
    them up; the share is given back with the last reference to this object.
    """

    logits: torch.Tensor | None
    reservation: Reservation | None = None

    @classmethod
    def of(cls, logits: torch.Tensor | None, reservation: Reservation | None) -> KeptLogits | None:
        """None where nothing is kept."""
        return None if logits is None or reservation is None else cls(logits, reservation)

    @property
    def num_rows(self) -> int:
        """Vocabulary rows, 0 once they are taken."""
        return 0 if self.logits is None else self.logits.shape[1]

    @property
    def num_bytes(self) -> int:
        """What this object keeps alive."""
        return 0 if self.logits is None else self.logits.nbytes

    def take(self) -> torch.Tensor:
        """Once."""
        logits, self.logits = self.logits, None
        assert logits is not None
        return logits


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
        self, options: LossOptions, plan: ChunkPlan, in_forward: ChunkPlan | None = None, gradient_bytes: int = 0
    ) -> Reservation:
        """Grant what makes the call fastest within the budget of ``options`` or the environment.

        All logits (6THV operations in all); else as many whole vocabulary rows of logits as fit (6THV to 8THV), except
        where :meth:`ChunkPlan.keeping` leaves some out; where that is less than :data:`IN_FORWARD_BELOW` of them, or no
        gradient of the weight is computed, ``gradient_bytes`` for gradients computed in forward (also 6THV), if there
        is a plan for them that takes less memory than all logits.
        """
        limit = options.logits_budget_mb if options.logits_budget_mb is not None else env.logits_budget_mb()
        wanted = plan.unfused_bytes
        with self._lock:
            in_use = self._settle()
            free = wanted if limit == "all" else max(0, int(limit) * _MIB - in_use)
            granted = plan.keeping(free)
            num_bytes = granted.kept_bytes
            few = plan.frozen_weight or granted.kept_rows < IN_FORWARD_BELOW * plan.vocab_rows
            other = in_forward if few and gradient_bytes <= free < wanted else None
            if other is not None and other.tensor_bytes < plan.keeping(wanted).tensor_bytes:
                granted, num_bytes = other, gradient_bytes
            reservation = Reservation(self, num_bytes, granted, gradient_bytes if in_forward is not None else 0)
            self._granted += num_bytes
        return reservation

    def release(self, num_bytes: int) -> None:
        """Called by :class:`Reservation` from ``__del__``, which a garbage collection may run anywhere: no lock."""
        self._returned.append(num_bytes)


logits_budget = LogitsBudget()
