"""Out of memory inside the output layer: the error says which setting would have fitted."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from dataclasses import replace

import torch

from loongforge.budget import KeptLogits, Reservation, logits_budget
from loongforge.plan import KEPT_MULTIPLE, ChunkPlan

_MIB = 1 << 20


@contextlib.contextmanager
def explained(
    plan: ChunkPlan, device: torch.device, own: Reservation | None, kept: KeptLogits | None = None
) -> Iterator[None]:
    """Add :func:`advice` to an out-of-memory error raised inside.

    ``own`` is this call's share of the budget, ``kept`` what backward finds and may not have taken yet.
    """
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        traceback.clear_frames(error.__traceback__)  # what the call itself had allocated counts as there
        there = _free(device) + (kept.num_bytes if kept is not None else 0)
        others = logits_budget.bytes_in_use - (own.num_bytes if own is not None else 0)
        of_gradients = own.gradient_bytes if own is not None else 0
        raise type(error)(f"{error}\n{advice(plan, there, others, of_gradients)}") from error


def advice(plan: ChunkPlan, there: int, others: int = 0, gradient_bytes: int = 0) -> str:
    """What to set so that a call of this plan fits into ``there`` bytes; other calls hold ``others`` of the budget.

    ``gradient_bytes``: from which budget on gradients would be computed in forward, 0 where none does that.
    """
    needed = (
        f"loongforge: the output layer over {plan.num_tokens} tokens, hidden size {plan.hidden_size} and "
        f"{plan.vocab_rows} vocabulary rows needs {_mib(plan.peak_bytes)} above its inputs "
        f"({plan.explain()}) and had {_mib(there)}. "
    )
    budget = budget_that_fits(plan, there, others, gradient_bytes)
    keeps = plan.kept_rows > 0 or plan.tokens_per_chunk > 0
    if plan.peak_bytes <= there:
        return needed + (
            "That should have fitted: the free memory is in pieces. Set PYTORCH_CUDA_ALLOC_CONF="
            "expandable_segments:True, or lower LCE_LOGITS_BUDGET_MB."
        )
    if budget is not None and keeps:
        return needed + f"LCE_LOGITS_BUDGET_MB={budget} (option logits_budget_mb) would fit; 0 keeps no logits."
    width = width_that_fits(plan, there)
    first = "LCE_LOGITS_BUDGET_MB=0 and " if keeps else "LCE_LOGITS_BUDGET_MB is 0 in effect: no logits are kept. "
    if width is not None:
        return (
            needed
            + first
            + (
                f"chunks of at most {width} rows (LCE_FWD_VOCAB_SPLIT_SIZE={width} LCE_BWD_VOCAB_SPLIT_SIZE={width}) "
                "would fit."
            )
        )
    least = replace(plan, kept_rows=0, tokens_per_chunk=0, forward_width=KEPT_MULTIPLE, backward_width=KEPT_MULTIPLE)
    return needed + (
        f"Even LCE_LOGITS_BUDGET_MB=0 with chunks of {KEPT_MULTIPLE} rows needs {_mib(least.peak_bytes)}: use fewer "
        "tokens a call (micro-batch size), more tensor-parallel ranks, or recompute activations."
    )


def budget_that_fits(plan: ChunkPlan, there: int, others: int = 0, gradient_bytes: int = 0) -> int | None:
    """The budget in MiB, with ``others`` added, that keeps most within ``there`` bytes; None where not even 0 fits.

    Of several the smallest.  Those that compute gradients in forward (see :func:`advice`) are not named.
    """
    plain = replace(plan, kept_rows=0, withheld_rows=0, tokens_per_chunk=0)
    most, best = -1, None
    for rows in [*range(0, plan.vocab_rows, KEPT_MULTIPLE), plan.vocab_rows]:
        budget = replace(plain, kept_rows=rows).kept_bytes + others
        budget = -(-budget // _MIB) if rows == plan.vocab_rows else budget // _MIB
        free = max(0, budget * _MIB - others)
        if gradient_bytes and gradient_bytes <= free < plan.unfused_bytes:
            continue
        granted = plain.keeping(free)
        if granted.kept_rows > most and granted.peak_bytes <= there:
            most, best = granted.kept_rows, budget
    return best


def width_that_fits(plan: ChunkPlan, there: int) -> int | None:
    """Widest chunks, narrower than the plan's, that fit with nothing kept; None where none do."""
    widest = min(max(plan.forward_width, plan.backward_width), plan.vocab_rows)
    for width in range(widest // KEPT_MULTIPLE * KEPT_MULTIPLE, 0, -KEPT_MULTIPLE):
        narrow = replace(plan, kept_rows=0, tokens_per_chunk=0, forward_width=width, backward_width=width)
        if narrow.peak_bytes <= there:
            return width
    return None


def _free(device: torch.device) -> int:
    """Bytes that the allocator could hand out: the device's free memory and its own unused blocks."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:.0f} MiB"
