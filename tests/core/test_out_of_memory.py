"""Out of memory inside the output layer names the setting that would fit."""

from __future__ import annotations

import gc
import re
from dataclasses import replace

import pytest
import torch

from loongforge import LossOptions, chunks, linear_cross_entropy, out_of_memory
from loongforge.budget import LogitsBudget
from loongforge.out_of_memory import advice, budget_that_fits, width_that_fits
from loongforge.plan import ChunkPlan, plan_chunks

MIB = 1 << 20
PLAN = ChunkPlan(
    num_tokens=8192, hidden_size=4096, vocab_rows=128256, itemsize=2, operand_itemsize=2,
    forward_width=8192, backward_width=8192, kept_rows=128256,
)  # fmt: skip
NOTHING_KEPT = replace(PLAN, kept_rows=0)


def suggested(text: str, name: str) -> int:
    return int(re.search(rf"{name}=(\d+)", text).group(1))


@pytest.mark.parametrize("there", [1800 * MIB, 2500 * MIB, 3000 * MIB])
def test_the_budget_that_is_named_fits_and_is_nearly_the_largest(there):
    budget = suggested(advice(PLAN, there), "LCE_LOGITS_BUDGET_MB")
    rows = budget * MIB // (PLAN.num_tokens * PLAN.itemsize) // 256 * 256
    assert 0 < rows < PLAN.vocab_rows
    assert replace(PLAN, kept_rows=rows).peak_bytes <= there
    assert replace(PLAN, kept_rows=rows + 512).peak_bytes > there


def test_other_calls_share_of_the_budget_is_added():
    there = 2500 * MIB
    alone = suggested(advice(PLAN, there), "LCE_LOGITS_BUDGET_MB")
    assert suggested(advice(PLAN, there, others=64 * MIB), "LCE_LOGITS_BUDGET_MB") == alone + 64


@pytest.mark.parametrize("plan", [PLAN, NOTHING_KEPT])
def test_where_nothing_may_be_kept_narrower_chunks_are_named(plan):
    there = NOTHING_KEPT.peak_bytes - 32 * MIB
    assert budget_that_fits(plan, there) is None
    text = advice(plan, there)
    width = suggested(text, "LCE_FWD_VOCAB_SPLIT_SIZE")
    assert width == suggested(text, "LCE_BWD_VOCAB_SPLIT_SIZE") == width_that_fits(plan, there) < 8192
    assert replace(NOTHING_KEPT, forward_width=width, backward_width=width).peak_bytes <= there
    assert "LCE_LOGITS_BUDGET_MB" in text


def test_what_cannot_fit_at_all_says_so():
    text = advice(PLAN, 64 * MIB)
    assert "Even LCE_LOGITS_BUDGET_MB=0 with chunks of 256 rows needs" in text and "fewer tokens" in text


def test_enough_memory_in_pieces_is_called_that():
    assert "expandable_segments:True" in advice(PLAN, PLAN.peak_bytes)


def test_gradients_in_forward_fall_back_to_a_budget():
    plan = replace(PLAN, kept_rows=0, tokens_per_chunk=4096)
    budget = suggested(advice(plan, 2500 * MIB), "LCE_LOGITS_BUDGET_MB")
    assert 0 < budget < plan.unfused_bytes // MIB


@pytest.mark.parametrize("others", (0, 5 * MIB + 12345))
@pytest.mark.parametrize(("impl", "sizes", "first", "share"), [
    ("generic", (16384, 4096, 3100), 90, 0.88),  # all logits, which no whole number of MiB is, take less than some
    ("generic", (8192, 7168, 8449), 33, 0.93),  # as many rows as fit would be withheld
    ("triton", (8192, 1024, 25344), 359, 0.93),  # gradients in forward do not fit, and a lower budget asks for them too
    ("triton", (8192, 256, 50304), "all", 0.43),  # all logits do not, nor gradients in forward
])  # fmt: skip
def test_a_call_with_the_budget_that_is_named_takes_no_more_than_there_is(impl, sizes, first, share, others):
    tokens, hidden, vocab = sizes
    plan, in_forward = (plan_chunks(impl, *sizes, 2, gradients_in_forward=x) for x in (False, True))
    in_forward, saved = (in_forward, 4 * vocab * hidden + 2 * tokens * hidden) if impl == "triton" else (None, 0)

    def reserve(limit):
        budget = LogitsBudget()
        budget.release(-others)  # live calls elsewhere hold them
        return budget.reserve(LossOptions(logits_budget_mb=limit), plan, in_forward, saved)

    failed = reserve(first)
    there = int(share * failed.plan.peak_bytes)
    text = advice(failed.plan, there, others, failed.gradient_bytes)
    assert "(option logits_budget_mb) would fit" in text and there < failed.plan.peak_bytes
    assert reserve(suggested(text, "LCE_LOGITS_BUDGET_MB")).plan.peak_bytes <= there


@pytest.mark.parametrize(("direction", "options"), [
    ("forward", {"reduction": "none", "logits_budget_mb": "all"}),
    ("backward", {"reduction": "none", "logits_budget_mb": "all"}),
    ("forward", {"reduction": "mean", "logits_budget_mb": 1}),
])  # fmt: skip
def test_the_error_of_the_allocator_carries_the_advice(monkeypatch, direction, options):
    hidden = torch.randn(512, 64, requires_grad=True)
    weight = torch.randn(2048, 64, requires_grad=True)
    loss = None
    if direction == "backward":
        loss = linear_cross_entropy(hidden, weight, torch.randint(0, 2048, (512,)), **options)

    def no_memory(*args, **kwargs):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 MiB")

    monkeypatch.setattr(chunks, direction, no_memory)
    monkeypatch.setattr(out_of_memory, "_free", lambda device: 3 * MIB)
    with pytest.raises(torch.cuda.OutOfMemoryError) as raised:
        if loss is None:
            linear_cross_entropy(hidden, weight, torch.randint(0, 2048, (512,)), **options)
        else:
            loss.sum().backward()
    assert "Tried to allocate 4.00 MiB\nloongforge: the output layer over 512 tokens" in str(raised.value)
    assert "LCE_LOGITS_BUDGET_MB" in str(raised.value) and "had 3 MiB" in str(raised.value) or direction == "backward"


def test_kept_logits_that_are_gone_already_are_not_counted_twice(monkeypatch):
    """Backward lets them go before it asks for the buffer of a chunk: then they are part of what is free."""
    hidden, weight = torch.randn(512, 64, requires_grad=True), torch.randn(4096, 64, requires_grad=True)
    target = torch.randint(0, 4096, (512,))

    def no_memory(*args, **kwargs):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 6.00 MiB")

    monkeypatch.setattr(out_of_memory, "_free", lambda device: 3 * MIB)
    for name, there in (("_Buffer", 3), ("_HiddenGrad", 4)):
        gc.collect()  # errors of earlier calls hold their graphs, and these the budget
        loss = linear_cross_entropy(hidden, weight, target, reduction="none", logits_budget_mb=1)
        with monkeypatch.context() as patch, pytest.raises(torch.cuda.OutOfMemoryError, match=f"had {there} MiB"):
            patch.setattr(chunks, name, no_memory)
            loss.sum().backward()
