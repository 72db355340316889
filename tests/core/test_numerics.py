"""Where implementations lose digits or meet infinities: shifted logits, -inf, float16 ranges, accumulation, garbage."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from loongforge import LossOptions, chunks, linear_cross_entropy
from tests.helpers import Inputs, assert_honest, eager, loss_and_gradients, make_inputs, oracle, relative

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def set_widths(monkeypatch, width):
    monkeypatch.setenv("LCE_FWD_VOCAB_SPLIT_SIZE", str(width))
    monkeypatch.setenv("LCE_BWD_VOCAB_SPLIT_SIZE", str(width))


def with_options(**options):
    return lambda *args, **kwargs: linear_cross_entropy(*args, **kwargs, **options)


@pytest.mark.parametrize("shift", (-30.0, 2000.0))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("smoothing", (0.0, 0.1))
def test_shifted_logits(shift, dtype, smoothing, monkeypatch):
    """All logits near -30 (padding counted as 0 would win) or near 2000 (lse - x would lose its digits)."""
    set_widths(monkeypatch, 32)
    inputs = make_inputs(dtype=dtype, ignored=0.0)
    if dtype == torch.float32 and shift > 0:
        inputs.bias = torch.full((101,), shift)  # gradients stay free of cancellation
    else:
        inputs.hidden[:, 0], inputs.weight[:, 0] = 1.0, shift
    options = {"reduction": "none", "label_smoothing": smoothing}
    built = LossOptions(**options)
    assert_honest(
        loss_and_gradients(with_options(**options), inputs.leaves()),
        loss_and_gradients(eager(built), inputs.leaves()),
        loss_and_gradients(oracle(built), inputs.leaves(torch.float64)),
    )


def masked_bias(mask: str) -> torch.Tensor:
    bias = torch.linspace(-1.0, 1.0, 101)
    if mask == "one class":
        bias[17] = -torch.inf
    elif mask == "first chunk":
        bias[:32] = -torch.inf
    elif mask == "middle and last chunk":
        bias[32:64] = bias[96:] = -torch.inf
    elif mask == "all but one class":
        bias[:100] = -torch.inf
    return bias


@pytest.mark.parametrize("budget", (0, "all"))
@pytest.mark.parametrize("mask", ("one class", "first chunk", "middle and last chunk", "all but one class"))
def test_masked_classes_as_in_torch(mask, budget, monkeypatch):
    """Labels on a masked class included: loss inf and finite gradients, as in torch."""
    set_widths(monkeypatch, 32)
    inputs = make_inputs(tokens=64)
    inputs.bias = masked_bias(mask)
    inputs.target[3] = 17
    ours = loss_and_gradients(with_options(reduction="none", logits_budget_mb=budget), inputs.leaves())
    truth = loss_and_gradients(oracle(LossOptions(reduction="none")), inputs.leaves(torch.float64))
    assert torch.equal(ours[0].isinf(), truth[0].isinf())
    finite = truth[0].isfinite()
    assert relative(ours[0][finite], truth[0][finite]) < 1e-6
    for mine, true in zip(ours[1:], truth[1:], strict=True):
        assert true.isfinite().all()
        assert relative(mine, true) < 2e-5


def test_a_row_of_minus_infinity_is_nan_as_in_torch(monkeypatch):
    set_widths(monkeypatch, 32)
    inputs = make_inputs(tokens=8, ignored=0.0)
    inputs.weight[:, 0] = -1.0
    inputs.hidden[:, 0] = 0.0
    inputs.hidden[2, 0] = torch.inf  # logits of row 2 are all -inf
    inputs.target[5] = -100
    inputs.hidden[5, 0] = torch.inf  # as are those of an ignored row
    leaves = inputs.leaves()
    value = linear_cross_entropy(leaves.hidden, leaves.weight, leaves.target, reduction="none")
    value.sum().backward()
    expected = F.cross_entropy(F.linear(inputs.hidden, inputs.weight), inputs.target, reduction="none")
    assert torch.equal(value.isnan(), expected.isnan()) and value.isnan().tolist() == [i == 2 for i in range(8)]
    assert leaves.hidden.grad[2].isnan().all()
    assert torch.equal(leaves.hidden.grad[5], torch.zeros(24)), "an ignored row must be an exact zero"
    others = [i for i in range(8) if i not in (2, 5)]
    double = inputs.leaves(torch.float64)
    clean = F.linear(double.hidden[others], double.weight)
    F.cross_entropy(clean, inputs.target[others], reduction="sum").backward()
    assert relative(leaves.hidden.grad[others], double.hidden.grad[others]) < 2e-5


@pytest.mark.parametrize("options", ({}, {"z_loss_weight": 0.1}, {"label_smoothing": 0.1}, {"softcap": 3.0}), ids=str)
@pytest.mark.parametrize("poison", (torch.nan, -torch.inf))
def test_an_ignored_row_of_poisoned_logits_changes_nothing(options, poison):
    inputs = make_inputs(bias=True)
    inputs.hidden[4], inputs.target[4] = poison, -100
    clean = make_inputs(bias=True)
    clean.target[4] = -100
    loss = with_options(reduction="none", **options)
    actual, expected = (loss_and_gradients(loss, i.leaves()) for i in (inputs, clean))
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])
    assert torch.equal(actual[3], expected[3])
    # 0 * NaN inside the weight gradient's GEMM is the caller's own NaN; with a masked bias instead it stays clean:
    clean.bias, clean.target = torch.full_like(clean.bias, poison), torch.full_like(clean.target, -100)
    for gradient in loss_and_gradients(loss, clean.leaves())[1:]:
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("bad", (torch.inf, torch.nan))
def test_plus_infinity_and_nan_reach_the_loss(bad):
    inputs = make_inputs(ignored=0.0, bias=True)
    inputs.bias[60] = bad
    assert linear_cross_entropy(*inputs.tensors[:2], inputs.target, bias=inputs.bias, reduction="none").isnan().all()


@pytest.mark.parametrize("budget", (0, "all"))
def test_float16_with_loss_scale_65536_and_a_mean_over_16384_tokens(budget, monkeypatch):
    """1 / 16384 underflows and 65536 overflows float16; only their quotient is a float16 number."""
    set_widths(monkeypatch, 50)
    inputs = make_inputs(16384, 8, 120, torch.float16, ignored=0.1, bias=True)
    scale = torch.tensor(65536.0, dtype=torch.float64)
    ours = loss_and_gradients(with_options(logits_budget_mb=budget), inputs.leaves(), scale)
    truth = loss_and_gradients(oracle(LossOptions()), inputs.leaves(torch.float64), scale)
    # The honest baseline keeps its logits' gradient in float32: torch in float16 loses most of it.
    for mine, true, name in zip(ours, truth, ("loss", "grad_hidden", "grad_weight", "grad_bias"), strict=True):
        assert mine.isfinite().all()
        assert relative(mine, true) < 2e-3, name


@pytest.mark.parametrize("budget", (0, "all"))
@pytest.mark.parametrize(("size", "gradient"), ((1e-2, 524288.0), (300.0, 1e-6)), ids=("overflow", "underflow"))
def test_float16_logit_gradients_beyond_its_range(size, gradient, budget):
    """524288 * p overflows and 1e-6 * p underflows, while grad_weight and the like are ordinary numbers."""
    inputs = make_inputs(24, 8, 120, torch.float16, ignored=0.0)
    inputs.hidden, inputs.weight = inputs.hidden * size, inputs.weight / size if size > 1 else inputs.weight * size
    upstream = torch.tensor(gradient, dtype=torch.float64)
    ours = loss_and_gradients(with_options(reduction="sum", logits_budget_mb=budget), inputs.leaves(), upstream)
    truth = loss_and_gradients(oracle(LossOptions(reduction="sum")), inputs.leaves(torch.float64), upstream)
    for mine, true in zip(ours, truth, strict=True):
        assert relative(mine, true.half()) < 3e-3


def test_float16_keeps_tokens_of_very_different_upstream_gradients():
    inputs = make_inputs(dtype=torch.float16, ignored=0.0)
    gradient = torch.logspace(-3, 3, 37, dtype=torch.float64)
    ours = loss_and_gradients(with_options(reduction="none"), inputs.leaves(), gradient)
    truth = loss_and_gradients(oracle(LossOptions(reduction="none")), inputs.leaves(torch.float64), gradient)
    per_row = (ours[1].double() - truth[1].double()).norm(dim=1) / truth[1].double().norm(dim=1)
    assert per_row.max() < 4e-3


def test_bf16_grad_hidden_over_1_and_over_50_chunks(monkeypatch):
    inputs = make_inputs(64, 48, 5000, torch.bfloat16, ignored=0.0)
    truth = loss_and_gradients(oracle(LossOptions()), inputs.leaves(torch.float64))[1]
    errors = {}
    for chunk_count in (1, 50):
        set_widths(monkeypatch, 5000 // chunk_count)
        errors[chunk_count] = relative(loss_and_gradients(with_options(), inputs.leaves())[1], truth)
    assert errors[50] < 1.05 * errors[1] < 4e-3


@pytest.mark.parametrize("budget", (0, 1, "all"))
def test_bf16_grad_hidden_under_autocast_over_a_float32_weight(budget, monkeypatch):
    """The weight is cast chunk by chunk: kept logits too must be multiplied in one float32 sum."""
    set_widths(monkeypatch, 100)
    inputs = make_inputs(64, 48, 5000, ignored=0.0)
    leaves = inputs.leaves()
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(leaves.hidden.bfloat16(), leaves.weight, leaves.target, logits_budget_mb=budget)
    rounded = Inputs(inputs.hidden.bfloat16(), inputs.weight.bfloat16(), inputs.target).leaves(torch.float64)
    truth = torch.autograd.grad(oracle(LossOptions())(*rounded.tensors, rounded.target), rounded.tensors)
    gradients = torch.autograd.grad(loss, leaves.tensors)
    assert [g.dtype for g in gradients] == [torch.float32, torch.float32]
    assert all(relative(a, b) < 4e-3 for a, b in zip(gradients, truth, strict=True))


@pytest.mark.parametrize("width", (7, 100, 4096))
def test_float32_within_1e_5_of_the_unfused_loss(width, monkeypatch):
    set_widths(monkeypatch, width)
    inputs = make_inputs(300, 64, 997, bias=True)
    ours = loss_and_gradients(with_options(), inputs.leaves())
    for mine, theirs in zip(ours, loss_and_gradients(eager(LossOptions()), inputs.leaves()), strict=True):
        assert relative(mine, theirs) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", ({}, {"vocab_size": 90}, {"label_smoothing": 0.1, "z_loss_weight": 0.01}), ids=str)
def test_uninitialised_memory_is_never_read(options, dtype, monkeypatch):
    set_widths(monkeypatch, 32)
    inputs = make_inputs(dtype=dtype, bias=True)
    inputs.target.clamp_(max=89)

    def run(budget):
        return loss_and_gradients(with_options(logits_budget_mb=budget, **options), inputs.leaves())

    expected = [run(budget) for budget in (0, "all")]
    poisoned = []
    fill, mode = torch.utils.deterministic.fill_uninitialized_memory, torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3).isnan().all()
        poisoned = [run(budget) for budget in (0, "all")]
    finally:
        torch.use_deterministic_algorithms(mode)
        torch.utils.deterministic.fill_uninitialized_memory = fill
    for clean, dirty in zip(expected, poisoned, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))


def test_small_pieces_of_upcast_operands_change_nothing_but_rounding(monkeypatch):
    """bf16 products on a CPU run in float32 pieces; their size is a matter of memory only."""
    inputs = make_inputs(50, 40, 301, torch.bfloat16, bias=True)
    truth = loss_and_gradients(oracle(LossOptions()), inputs.leaves(torch.float64))
    for piece in (1000, 1 << 22):
        monkeypatch.setattr("loongforge.matmul.PIECE_ELEMENTS", piece)
        monkeypatch.setattr("loongforge.kernels.generic.BLOCK_ELEMENTS", piece)
        for mine, true in zip(loss_and_gradients(with_options(), inputs.leaves()), truth, strict=True):
            assert relative(mine, true) < 6e-3


def test_kept_logits_are_dropped_not_read_twice(monkeypatch):
    """A kernel that sees each chunk of logits knows when it gets a gradient instead."""
    seen = []
    original = chunks._to_gradient

    def spy(head, logits_TC, start, stop, coefficients):
        seen.append((start, stop, float(logits_TC.sum())))
        original(head, logits_TC, start, stop, coefficients)

    monkeypatch.setattr(chunks, "_to_gradient", spy)
    set_widths(monkeypatch, 101)
    leaves = make_inputs(ignored=0.0).leaves()
    loss = linear_cross_entropy(leaves.hidden, leaves.weight, leaves.target, logits_budget_mb="all")
    first = torch.autograd.grad(loss, leaves.tensors, retain_graph=True)
    second = torch.autograd.grad(loss, leaves.tensors)
    assert seen[0] == pytest.approx(seen[1])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
