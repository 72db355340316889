"""Memory, measured by torch's own allocation profile (temporaries inside operations included)."""

from __future__ import annotations

import gc
import shutil

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from loongforge import LossOptions, linear_cross_entropy
from loongforge.budget import LogitsBudget, logits_budget
from loongforge.plan import ChunkPlan, plan_chunks
from tests.helpers import eager, make_inputs, record_allocations

# One where each of [T, C], [T, H] and [V, H] is the largest; C is 3072.
SHAPES = {"chunk": (250, 32, 8000), "hidden": (3000, 200, 150), "weight": (40, 256, 7000)}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def forward_and_backward(inputs, **options):
    def call():
        loss = linear_cross_entropy(inputs.hidden, inputs.weight, inputs.target, bias=inputs.bias, **options)
        if loss.requires_grad:
            loss.backward()

    return call


@shapes
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16), ids=str)
def test_largest_single_allocation_at_the_default_budget(shape, dtype):
    """No block exceeds max(T * min(C, V), T * H, V * H) elements of the accumulation dtype."""
    tokens, hidden, vocab = shape
    inputs = make_inputs(*shape, dtype).leaves()
    measured = record_allocations(forward_and_backward(inputs))
    limit = max(tokens * min(3072, vocab), tokens * hidden, vocab * hidden)
    assert measured.largest <= limit * max(4, dtype.itemsize)
    unfused = record_allocations(lambda: eager(LossOptions())(inputs.hidden, inputs.weight, inputs.target).backward())
    if shape == SHAPES["chunk"]:
        assert unfused.largest > limit * max(4, dtype.itemsize), "the limit would pass the unfused loss"


@shapes
@pytest.mark.parametrize("budget", (0, 1, "all"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_peak_stays_under_the_stated_sum(shape, budget, dtype):
    inputs = make_inputs(*shape, dtype, bias=True).leaves()

    def call():
        loss = linear_cross_entropy(
            inputs.hidden, inputs.weight, inputs.target, bias=inputs.bias, reduction="none", logits_budget_mb=budget
        )
        loss.sum().backward()

    assert record_allocations(call).peak <= stated_plan(shape, dtype, budget).peak_bytes


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_peak_of_gradients_in_forward_stays_under_the_stated_sum(dtype):
    shape = tokens, hidden, vocab = 3000, 32, 500
    inputs = make_inputs(*shape, dtype, bias=True).leaves()
    plan = plan_chunks("generic", tokens, hidden, vocab, dtype.itemsize, gradients_in_forward=True)
    assert plan.tokens_per_chunk < tokens
    measured = record_allocations(forward_and_backward(inputs, logits_budget_mb=1))
    logits_alive = dtype.itemsize * tokens * vocab
    assert measured.peak <= plan.peak_bytes < logits_alive


@pytest.mark.parametrize(("sizes", "reduction"), (((700, 32, 6000), "none"), ((300, 40, 6144), "sum")))
def test_low_precision_makes_no_wider_copies_on_a_cpu(sizes, reduction, monkeypatch):
    """Neither of a chunk for the sum that is grad_bias, nor of gradients in forward where they are multiplied."""
    for name in ("matmul.PIECE_ELEMENTS", "plan.PIECE_ELEMENTS", "kernels.generic.BLOCK_ELEMENTS"):
        monkeypatch.setattr(f"loongforge.{name}", 1 << 14)
    inputs = make_inputs(*sizes, torch.bfloat16, bias=reduction == "none").leaves()
    plans, reserve = [], LogitsBudget.reserve

    def record(*given):
        plans.append(reserve(*given))
        return plans[-1]

    monkeypatch.setattr(LogitsBudget, "reserve", record)

    def call():
        loss = linear_cross_entropy(
            *inputs.tensors[:2], inputs.target, bias=inputs.bias, reduction=reduction, logits_budget_mb=1
        )
        loss.sum().backward()

    measured = record_allocations(call).peak
    plan = plans.pop().plan
    assert measured <= plan.peak_bytes and (plan.tokens_per_chunk > 0) == (reduction == "sum")


@shapes
@pytest.mark.parametrize("budget", (0, 1, "all"))
def test_the_stated_sum_is_tight(shape, budget, monkeypatch):
    """With the temporaries of bounded size made small, an additional [T, H], [V, H] or chunk would show."""
    for name in ("matmul.PIECE_ELEMENTS", "plan.PIECE_ELEMENTS", "kernels.generic.BLOCK_ELEMENTS"):
        monkeypatch.setattr(f"loongforge.{name}", 1 << 15)
    inputs = make_inputs(*shape, bias=True).leaves()
    stated = stated_plan(shape, torch.float32, budget).peak_bytes

    def call():
        loss = linear_cross_entropy(
            inputs.hidden, inputs.weight, inputs.target, bias=inputs.bias, reduction="none", logits_budget_mb=budget
        )
        loss.backward(torch.ones_like(loss))

    measured = record_allocations(call).peak
    assert 0.9 * stated <= measured <= 1.01 * stated, (measured, stated)


def stated_plan(shape, dtype, budget) -> ChunkPlan:
    tokens, hidden, vocab = shape
    logits_bytes = tokens * vocab * dtype.itemsize
    kept = logits_bytes if budget == "all" else min(logits_bytes, budget << 20)
    return plan_chunks("generic", tokens, hidden, vocab, dtype.itemsize, kept)


def test_peak_does_not_grow_with_the_vocabulary_beyond_its_gradient():
    """Twice the vocabulary adds its grad_weight and nothing of T * V."""
    peaks = [
        record_allocations(forward_and_backward(make_inputs(700, 32, vocab).leaves())).peak for vocab in (6144, 12288)
    ]
    assert peaks[1] - peaks[0] <= 1.1 * 4 * 32 * 6144


@pytest.mark.parametrize("frozen", ("weight", "hidden"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_a_frozen_tensor_costs_nothing(frozen, dtype, monkeypatch):
    """No block of its gradient's size; the other shape is far smaller (Liger #237 #1441, prime-rl #3011)."""
    monkeypatch.setenv("LCE_GENERIC_FWD_VOCAB_SPLIT_SIZE", "16")
    monkeypatch.setenv("LCE_GENERIC_BWD_VOCAB_SPLIT_SIZE", "16")
    shape = (64, 96, 4000) if frozen == "weight" else (4000, 96, 64)
    inputs = make_inputs(*shape, dtype).leaves()
    getattr(inputs, frozen).requires_grad_(False)
    size = getattr(inputs, frozen).numel() * dtype.itemsize
    monkeypatch.setattr("loongforge.matmul.PIECE_ELEMENTS", 1 << 14)
    monkeypatch.setattr("loongforge.kernels.generic.BLOCK_ELEMENTS", 1 << 14)
    assert record_allocations(forward_and_backward(inputs)).largest < size
    getattr(inputs, frozen).requires_grad_(True)
    assert record_allocations(forward_and_backward(inputs)).largest >= size, "the limit would pass an unfrozen one"


@pytest.mark.parametrize("context", (torch.no_grad, torch.inference_mode))
def test_evaluation_takes_the_memory_of_one_chunk(context):
    """Also with the whole budget: there is no backward that could use what it keeps."""
    inputs = make_inputs(600, 64, 8000).leaves()
    with context():
        measured = record_allocations(forward_and_backward(inputs, logits_budget_mb="all"))
    assert measured.peak <= 4 * (600 * 3072 + 3 * (1 << 20) + 600 * 32)
    assert logits_budget.bytes_in_use == 0


@pytest.mark.parametrize("label_smoothing", (0.0, 0.1))
def test_saved_for_backward_is_a_few_numbers_per_token(label_smoothing):
    inputs = make_inputs(600, 64, 8000, bias=True).leaves()
    saved = []
    given = {t.data_ptr() for t in (*inputs.tensors, inputs.target)}
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        linear_cross_entropy(
            inputs.hidden, inputs.weight, inputs.target, bias=inputs.bias, label_smoothing=label_smoothing
        )
    extra = [tensor for tensor in saved if tensor.data_ptr() not in given]
    assert saved and sum(tensor.numel() for tensor in extra) <= 8 * 600


def test_a_ragged_last_chunk_reuses_the_buffer():
    """3072 * 2 + 5 rows: one chunk-sized block in each direction, and none for the rest."""
    inputs = make_inputs(700, 8, 6149).leaves()
    measured = record_allocations(forward_and_backward(inputs))
    buffers = [size for size in measured.events if size == 4 * 700 * 3072]
    assert len(buffers) == 2


# The budget


def call_with_budget(budget, inputs=None, **options):
    inputs = inputs or make_inputs(512, 16, 1024).leaves()
    return linear_cross_entropy(
        inputs.hidden, inputs.weight, inputs.target, reduction="none", logits_budget_mb=budget, **options
    )


@pytest.fixture(autouse=True)
def nothing_reserved():
    gc.collect()
    assert logits_budget.bytes_in_use == 0
    yield
    gc.collect()
    assert logits_budget.bytes_in_use == 0


@pytest.mark.parametrize(("budget", "granted"), ((0, 0), (1, 1 << 20), (2, 2 << 20), (100, 2 << 20), ("all", 2 << 20)))
def test_budget_is_given_back_after_backward(budget, granted):
    loss = call_with_budget(budget)
    assert logits_budget.bytes_in_use == granted
    loss.sum().backward(retain_graph=True)
    assert logits_budget.bytes_in_use == 0
    loss.sum().backward()
    assert logits_budget.bytes_in_use == 0


@pytest.mark.parametrize("reduction", ("mean", "none"))
@pytest.mark.parametrize("budget", (1, 2, "all"))
def test_a_loss_kept_for_logging_does_not_hold_the_budget(budget, reduction):
    inputs = make_inputs(512, 16, 1024).leaves()
    loss = linear_cross_entropy(*inputs.tensors, inputs.target, reduction=reduction, logits_budget_mb=budget)
    assert logits_budget.bytes_in_use > 0
    loss.sum().backward()
    assert logits_budget.bytes_in_use == 0


def test_budget_is_given_back_with_a_dropped_graph():
    loss = call_with_budget("all")
    assert logits_budget.bytes_in_use == 2 << 20
    del loss
    assert logits_budget.bytes_in_use == 0


@pytest.mark.parametrize("where", ("accumulate", "gradient_"))
def test_budget_is_given_back_after_an_exception(where, monkeypatch):
    def fail(self, *args):
        raise ArithmeticError("in the kernel")

    loss = call_with_budget("all") if where == "gradient_" else None
    monkeypatch.setattr(f"loongforge.kernels.generic.GenericRowKernels.{where}", fail)
    with pytest.raises(ArithmeticError):
        (call_with_budget("all") if loss is None else loss).sum().backward()
    assert logits_budget.bytes_in_use == 0


def test_budget_is_shared_by_live_calls():
    """The second head of three finds half, the third nothing; what comes back can be granted again."""
    first, second, third = (call_with_budget(3) for _ in range(3))
    assert logits_budget.bytes_in_use == 3 << 20
    second.sum().backward()
    assert logits_budget.bytes_in_use == 2 << 20
    third.sum().backward()
    first.sum().backward()
    fourth = call_with_budget(3)
    assert logits_budget.bytes_in_use == 2 << 20
    del fourth


def test_budget_from_the_environment(monkeypatch):
    for text, granted in (("0", 0), ("1", 1 << 20), ("all", 2 << 20)):
        monkeypatch.setenv("LCE_LOGITS_BUDGET_MB", text)
        loss = call_with_budget(None)
        assert logits_budget.bytes_in_use == granted
        del loss
    loss = call_with_budget(0)
    assert logits_budget.bytes_in_use == 0
    del loss


def test_no_budget_is_taken_without_gradients():
    inputs = make_inputs(512, 16, 1024)
    loss = call_with_budget("all", inputs)
    with torch.no_grad():
        other = call_with_budget("all", inputs.leaves())
    assert logits_budget.bytes_in_use == 0 and not loss.requires_grad and not other.requires_grad


def test_a_collection_inside_reserve_does_not_deadlock():
    """A graph in a reference cycle may be collected at any allocation, also while the budget is being counted."""
    budget, options = LogitsBudget(), LossOptions(logits_budget_mb="all")
    plan = plan_chunks("generic", 4, 8, 256, 4)

    class Cycle:
        pass

    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(50):
            cycle = Cycle()
            cycle.self, cycle.reservation = cycle, budget.reserve(options, plan)
            del cycle
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert budget.bytes_in_use == 0


# What the plan says of itself


def test_plan_arithmetic():
    plan = plan_chunks("generic", 100, 8, 7000, 2, kept_bytes=100 * 2 * 3000)
    assert plan.kept_rows == 2816 and plan.kept_bytes == 100 * 2 * 2816
    assert list(plan.forward_chunks(2816)) == [(2816, 5888), (5888, 7000)]
    assert plan.backward_chunks(2816) == [(2816, 5888), (5888, 7000)]
    assert plan.backward_chunks(0) == [(0, 2816), (2816, 5888), (5888, 7000)]
    assert plan.buffer_bytes == 100 * 2 * 3072 and plan.unfused_bytes == 100 * 2 * 7000
    assert plan.flops == (8 * 7000 - 2 * 2816) * 100 * 8
    for text in ("2816 of 7000 vocabulary rows kept", "chunks of 3072 forward and 3072 backward", "1.3 MiB"):
        assert text in plan.explain()


@pytest.mark.parametrize("kept", (0, 1, 10**12))
def test_plan_of_nothing(kept):
    for tokens, rows in ((0, 5), (5, 0), (0, 0)):
        plan = plan_chunks("generic", tokens, 8, rows, 4, kept)
        assert plan.peak_bytes >= 0 and plan.kept_bytes == 0 and plan.explain()


@pytest.mark.skipif(
    shutil.which("g++") is None, reason="inductor needs g++; tests/core/test_compile.py runs its graphs"
)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("budget", (2, "all"))
def test_compiled_code_takes_no_more_memory_than_eager_code(budget, dtype, monkeypatch):
    """Kept logits become their gradient in place, with static sizes and with dynamic ones.

    But they are an operator's input, which lives on beside the chunks that are recomputed.
    """
    for name in ("matmul.PIECE_ELEMENTS", "kernels.generic.BLOCK_ELEMENTS"):
        monkeypatch.setattr(f"loongforge.{name}", 1 << 15)
    torch.compiler.reset()

    def step(hidden, weight, target):
        return linear_cross_entropy(hidden, weight, target, reduction="none", logits_budget_mb=budget)

    compiled = torch.compile(step, fullgraph=True)
    for tokens in (250, 300):
        inputs, peaks = make_inputs(tokens, 32, 8000, dtype).leaves(), []
        for function in (compiled, compiled, step):

            def run(function=function, inputs=inputs):
                loss = function(*inputs.tensors, inputs.target)
                loss.backward(torch.ones_like(loss))
                inputs.hidden.grad = inputs.weight.grad = None

            peaks.append(record_allocations(run).peak)
        beside = 0 if budget == "all" else min(budget << 20, 3072 * tokens * dtype.itemsize)  # the smaller of the two
        assert peaks[1] <= 1.01 * peaks[2] + beside, peaks
