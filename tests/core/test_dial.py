"""The dial: kept logits are gone before anything is recomputed, and no setting is beaten by another one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from loongforge import LossOptions, chunks, linear_cross_entropy, linear_logprobs
from loongforge.bench.shapes import SHAPES
from loongforge.budget import KeptLogits, LogitsBudget, logits_budget
from loongforge.plan import DEFAULT_WIDTH, KEPT_MULTIPLE, ChunkPlan, plan_chunks
from tests.helpers import make_inputs, record_allocations

MIB = 1 << 20

# Kept logits in backward


@pytest.fixture
def kept_when_recomputing(monkeypatch):
    """For each buffer of chunks that backward allocates: whether the logits taken before are still in memory."""
    taken, alive = [], []

    class Watched(chunks._Buffer):
        def __init__(self, head, width, first_row, dtype):
            if taken:
                alive.append(not taken[-1].expired())
            super().__init__(head, width, first_row, dtype)

    def take(self, original=KeptLogits.take):
        logits = original(self)
        taken.append(StorageWeakRef(logits.untyped_storage()))
        return logits

    monkeypatch.setattr(chunks, "_Buffer", Watched)
    monkeypatch.setattr(KeptLogits, "take", take)
    return alive


def scalar_loss(inputs, **options):
    loss = linear_cross_entropy(*inputs.tensors, inputs.target, logits_budget_mb=1, **options)
    return loss.sum()


def some_logprobs(inputs):
    return linear_logprobs(*inputs.tensors, inputs.target, logits_budget_mb=1).logprobs.sum()


CASES = {
    "per token": (torch.float32, {"reduction": "none"}),
    "mean": (torch.float32, {}),
    "sum": (torch.bfloat16, {"reduction": "sum", "z_loss_weight": 1e-4}),
    "float16": (torch.float16, {"reduction": "none"}),
    "rounded copies": (torch.bfloat16, {"reduction": "none", "fp32_logits": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_kept_logits_are_gone_when_the_first_chunk_is_recomputed(case, kept_when_recomputing):
    dtype, options = CASES[case]
    inputs = make_inputs(256, 64, 5000, dtype).leaves()
    scalar_loss(inputs, **options).backward()
    assert kept_when_recomputing == [False]


def test_kept_logits_of_an_output_are_gone_too(kept_when_recomputing):
    inputs = make_inputs(256, 64, 5000).leaves()
    some_logprobs(inputs).backward()
    assert kept_when_recomputing == [False]


def test_a_graph_that_is_retained_does_not_hold_them(kept_when_recomputing):
    """The second backward takes nothing: it recomputes all, and its gradients are the first one's."""
    inputs = make_inputs(256, 64, 5000).leaves()
    loss = scalar_loss(inputs, reduction="none")
    first, second = (torch.autograd.grad(loss, inputs.tensors, retain_graph=True) for _ in range(2))
    assert kept_when_recomputing == [False, False]
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_second_derivatives_asked_for_do_not_hold_them(kept_when_recomputing):
    inputs = make_inputs(256, 64, 5000).leaves()
    torch.autograd.grad(scalar_loss(inputs, reduction="none"), inputs.hidden, create_graph=True)
    assert kept_when_recomputing == [False]


def test_their_share_of_the_budget_lasts_until_backward_has_run(monkeypatch):
    inputs = make_inputs(256, 64, 5000).leaves()
    loss, seen = scalar_loss(inputs, reduction="none"), []
    granted = logits_budget.bytes_in_use

    def record(*given, original=chunks._weight_rows_grad):
        seen.append(logits_budget.bytes_in_use)
        original(*given)

    monkeypatch.setattr(chunks, "_weight_rows_grad", record)
    loss.backward()
    assert granted > 0 and seen == [granted] * 3 and logits_budget.bytes_in_use == 0


@pytest.mark.parametrize("budget", (1, 2, 3, 4))
def test_kept_logits_and_chunks_share_memory(budget, monkeypatch):
    """T=256, V=6000: 4 MiB of 6 kept beside a chunk of 2 or 3 would be 6 to 7."""
    for name in ("matmul.PIECE_ELEMENTS", "kernels.generic.BLOCK_ELEMENTS"):
        monkeypatch.setattr(f"loongforge.{name}", 1 << 14)
    monkeypatch.setenv("LCE_FWD_VOCAB_SPLIT_SIZE", "256")  # forward has both
    inputs = make_inputs(256, 16, 6000).leaves()

    def step():
        linear_cross_entropy(*inputs.tensors, inputs.target, reduction="none", logits_budget_mb=budget).sum().backward()

    gradients = 4 * 16 * (256 + 6000)
    larger = 4 * 256 * max(1024 * budget + 256, 3072)
    assert record_allocations(step).peak <= larger + gradients + (1 << 18)  # temporaries of the kernels


# The planner

HEADS = {shape.name: (shape.tokens, shape.hidden, shape.vocab) for shape in SHAPES.values()} | {
    str(sizes): sizes
    for sizes in (
        (16384, 7168, 14336), (16384, 7168, 14592), (8192, 4096, 16032), (8192, 1024, 5000), (8192, 2048, 24576),
        (1024, 1024, 50304), (4096, 5120, 19008), (131072, 2048, 50304), (65536, 256, 32000), (8192, 8192, 4000),
        (300, 64, 1000),
    )
}  # fmt: skip
ONE_OR_TWO_CHUNKS = [str(sizes) for sizes in HEADS.values() if sizes[2] < 2 * DEFAULT_WIDTH or sizes[0] < 8192]
TRAITS = {
    "plain": {},
    "tiles": {"in_tiles": True},
    "float16": {"scaled": True},
    "ranks": {"ranks_add_rounded": True},
    "ranks in float32": {"ranks_add_float32": True},
    "casts": {"kept_in_chunks": True},
}


def curve(head: str, impl: str = "triton", itemsize: int = 2, **traits) -> list[ChunkPlan]:
    """Plans of 65 budgets, from nothing kept to everything."""
    tokens, hidden, vocab = HEADS[head]
    everything = tokens * vocab * itemsize
    plan = plan_chunks(impl, tokens, hidden, vocab, itemsize, **traits)
    return [plan.keeping(everything * share // 64) for share in range(65)]


@pytest.mark.parametrize("traits", TRAITS)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("impl", ("triton", "generic"))
def test_no_setting_is_beaten_by_another(head, traits, impl):
    """Peak memory against operations: keeping all beats none that keeps some, a smaller budget none that is larger.

    Where nothing kept takes no less than everything kept (one chunk on a GPU), what is kept between takes no more
    than it.  With at least two whole chunks no setting at all is beaten; with fewer, what is kept shortens the chunk,
    and a larger budget may take less of both.
    """
    plans = curve(head, impl, **TRAITS[traits])
    nothing, *_, everything = plans
    assert everything.kept_rows == everything.vocab_rows and nothing.kept_rows == 0
    assert impl == "generic" or nothing.tensor_bytes <= everything.tensor_bytes
    for plan in plans[1:-1]:
        assert plan.tensor_bytes < everything.tensor_bytes or plan.tensor_bytes <= nothing.tensor_bytes
    for larger, plan in enumerate(plans):
        for other in plans[:larger]:
            assert other.flops >= plan.flops or other.tensor_bytes > plan.tensor_bytes
    if nothing.vocab_rows >= 2 * nothing.backward_width and nothing.tensor_bytes < everything.tensor_bytes:
        for plan in plans:
            assert all(other.flops > plan.flops for other in plans if other.tensor_bytes < plan.tensor_bytes)


@pytest.mark.parametrize("traits", TRAITS)
@pytest.mark.parametrize("head", [head for head in HEADS if head not in ONE_OR_TWO_CHUNKS])
def test_more_budget_is_less_work_and_more_memory_until_all_is_less_of_both(head, traits):
    """Both are monotone in the budget, up to where rows are withheld: there only what is free is kept."""
    *some, _ = curve(head, **TRAITS[traits])
    assert some[0].num_products > 1 or traits == "ranks"
    granted = [plan for plan in some if not plan.withheld_rows]
    assert granted == some[: len(granted)], "once keeping all takes less memory, it does for every larger budget"
    assert [plan.tensor_bytes for plan in granted] == sorted(plan.tensor_bytes for plan in granted)
    assert [plan.flops for plan in granted] == sorted((plan.flops for plan in granted), reverse=True)
    for plan in some[len(granted) :]:
        assert plan.kept_rows % KEPT_MULTIPLE == 0 and "MiB keeps all" in plan.explain()
        one_more = replace(plan, kept_rows=plan.kept_rows + KEPT_MULTIPLE)
        assert plan.tensor_bytes <= some[0].tensor_bytes < one_more.tensor_bytes


def test_a_shard_of_deepseek_v3():
    """In rows of T * 2 bytes: nothing kept takes 3H, everything V + H, and 378 MiB keep the 7168 rows that are free."""
    tokens, hidden, vocab = HEADS["dsv3-tp8"]
    plan = plan_chunks("triton", tokens, hidden, vocab, 2)
    row, weight = 2 * tokens, 2 * hidden * vocab
    assert plan.forward_width == plan.backward_width == hidden
    assert plan.tensor_bytes == 3 * hidden * row + weight
    assert plan.keeping(505 * MIB).tensor_bytes == (vocab + hidden) * row + weight
    assert plan.keeping(252 * MIB).tensor_bytes == (2 * hidden + 7936) * row + weight
    partly = plan.keeping(378 * MIB)
    assert (partly.kept_rows, partly.withheld_rows) == (7168, 12032 - 7168)
    assert partly.tensor_bytes == plan.tensor_bytes
    for text in ("7168 of 16160", "holds 4864 rows more", "1044.9 MiB", "949.9 MiB", "505 MiB keeps all"):
        assert text in partly.explain()
    # Where ranks add up grad_hidden it is rounded beside the last chunk, and a single chunk takes less.
    sharded = plan_chunks("triton", tokens, hidden, vocab, 2, ranks_add_rounded=True)
    assert sharded.backward_width == vocab and sharded.tensor_bytes == (vocab + hidden) * row + weight
    assert sharded.keeping(378 * MIB).kept_rows == 0


def test_chunk_widths_on_a_gpu():
    """8448 rows for large vocabularies, narrower for few chunks, never below 4096 nor below 2**26 logits; one chunk
    where it takes no more; nothing is rounded in float32.
    """

    def width(tokens, hidden, vocab, itemsize=2, **more):
        return plan_chunks("triton", tokens, hidden, vocab, itemsize, **more).backward_width

    assert width(8192, 4096, 128256) == width(16384, 7168, 129280) == width(8192, 4096, 32000) == 8448
    assert width(16384, 7168, 25344) == 7168 and width(16384, 7168, 25345) == 8448
    assert width(16384, 5000, 16384) == 4864 and width(16384, 1024, 16384) == 4096
    assert width(8192, 4096, 16384) == 8192, "fewer than 2**26 logits in 4096 rows"
    assert width(1024, 4096, 128256) == 65536
    assert width(16384, 7168, 14336) == 14336 and width(16384, 7168, 14337) == 7168
    assert width(16384, 7168, 14336, scaled=True) == 7168, "the sum is float32 in any case"
    assert width(16384, 7168, 16160, 4) == 8448 and width(16384, 7168, 8192, 4) == 8192
    assert width(16384, 7168, 16160, 4, operand_itemsize=2) == 4096
    assert width(8192, 2048, 128256, gradients_in_forward=True, kept_in_chunks=True) == 8448, "copies of that many rows"


@pytest.mark.parametrize(("sizes", "pays"), (((8192, 2048, 128256), True), ((6000, 2048, 128256), False)))
def test_gradients_in_forward_take_less_than_all_logits_or_are_not_computed(sizes, pays):
    """4096 tokens of 6000 with all their logits beside the sums are more than the logits of 6000."""
    tokens, hidden, vocab = sizes
    plan, in_forward = (plan_chunks("triton", *sizes, 2, gradients_in_forward=x) for x in (False, True))
    gradient_bytes, taken = 4 * vocab * hidden + 2 * tokens * hidden, set()
    everything = plan.keeping(plan.unfused_bytes)
    for limit in range(0, plan.unfused_bytes // MIB, 32):
        reservation = LogitsBudget().reserve(LossOptions(logits_budget_mb=limit), plan, in_forward, gradient_bytes)
        assert reservation.plan.tensor_bytes < everything.tensor_bytes
        taken.add(reservation.plan.tokens_per_chunk > 0)
        assert reservation.num_bytes in (reservation.plan.kept_bytes, gradient_bytes)
    assert pays in taken and (pays or len(taken) == 1)


@pytest.mark.parametrize("trains_weight", (True, False))
def test_gradients_in_forward_until_three_quarters_of_the_logits_are_kept(trains_weight):
    """With more kept, recomputing the rest is faster; without a gradient of the weight there is no sum that costs."""
    sizes = tokens, hidden, vocab = 8192, 2048, 128256
    frozen = {"frozen_weight": not trains_weight}
    plan, in_forward = (plan_chunks("triton", *sizes, 2, gradients_in_forward=x, **frozen) for x in (False, True))
    gradient_bytes = 4 * vocab * hidden * trains_weight + 2 * tokens * hidden
    for limit in range(-(-gradient_bytes // MIB), plan.unfused_bytes // MIB, 16):
        reservation = LogitsBudget().reserve(LossOptions(logits_budget_mb=limit), plan, in_forward, gradient_bytes)
        few = plan.keeping(limit * MIB).kept_rows < 0.75 * vocab
        assert (reservation.plan.tokens_per_chunk > 0) == (few or not trains_weight), limit
        assert reservation.plan.tokens_per_chunk or reservation.plan.kept_rows >= 0.75 * vocab


@pytest.mark.parametrize("weight", ("frozen", "below an adapter"))
def test_gradients_in_forward_of_a_frozen_weight_take_less_than_all_logits(weight, monkeypatch):
    """T = H: no sum for the gradient of the weight stands beside a chunk of tokens."""
    inputs, plans, reserve = make_inputs(300, 300, 4000).leaves(), [], LogitsBudget.reserve
    low_rank, up = torch.randn(300, 4, requires_grad=True), torch.randn(4000, 4, requires_grad=True)
    inputs.weight.requires_grad_(False)

    def record(*given):
        plans.append(reserve(*given))
        return plans[-1]

    monkeypatch.setattr(LogitsBudget, "reserve", record)

    def step():
        more = {"adapter": (low_rank, up)} if weight == "below an adapter" else {}
        linear_cross_entropy(*inputs.tensors, inputs.target, logits_budget_mb=4, **more).backward()

    for name in ("matmul.PIECE_ELEMENTS", "plan.PIECE_ELEMENTS", "kernels.generic.BLOCK_ELEMENTS"):
        monkeypatch.setattr(f"loongforge.{name}", 1 << 14)
    measured, plan = record_allocations(step).peak, plans.pop().plan
    assert plan.tokens_per_chunk > 0
    if weight != "below an adapter":  # which joins chunks of both weights
        assert measured <= plan.peak_bytes


@pytest.mark.parametrize("limit", (0, 100, 378, 400, 504, 505, 600, "all"))
def test_only_what_is_kept_is_reserved(limit):
    plan = plan_chunks("triton", *HEADS["dsv3-tp8"], 2)
    budget = LogitsBudget()
    reservation = budget.reserve(LossOptions(logits_budget_mb=limit), plan)
    assert budget.bytes_in_use == reservation.num_bytes == reservation.plan.kept_bytes
    assert reservation.plan.keeping(reservation.num_bytes).kept_rows == reservation.plan.kept_rows
    if limit in (378, 400, 504):
        assert reservation.num_bytes == 224 * MIB
