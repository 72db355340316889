"""Work not done: tokens without loss, weights per token, frozen tensors and adapters."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from loongforge import LossOptions, chunks, linear_cross_entropy
from loongforge.kernels.reference import reference_loss
from tests.core.test_no_sync import Forbidden
from tests.helpers import (
    assert_honest,
    eager,
    loss_and_gradients,
    make_inputs,
    oracle,
    record_allocations,
    relative,
    upstream,
)

ALL_OPTIONS = {"label_smoothing": 0.1, "z_loss_weight": 0.01, "softcap": 6.0, "logit_scale": 0.7, "vocab_size": 90}


def gradients_of(loss, tensors):
    return [loss.detach(), *torch.autograd.grad(loss, tensors, upstream(loss.shape).to(loss))]


def assert_equal(actual, expected, tolerance=1e-12):
    for mine, true in zip(actual, expected, strict=True):
        assert relative(mine, true) < tolerance


@pytest.fixture
def products(monkeypatch):
    """Rows and columns of every product of the chunk loop."""
    seen: Counter = Counter()

    def record(name, rows_of):
        original = getattr(chunks, name)

        def recorded(*args, **kwargs):
            seen[rows_of(*args)] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(chunks, name, recorded)

    record("project_", lambda out, hidden, weight, bias: ("logits", len(hidden)))
    # The product with the weight has the tokens in its rows, the one for the weight in its depth.
    record("product_", lambda out, a, b: ("grad_weight", a.shape[1]) if a.stride(0) == 1 else ("grad_hidden", len(a)))
    return seen


# ---------------------------------------------------------------- compact_tokens


@pytest.mark.parametrize("budget", (0, "all"))
@pytest.mark.parametrize("compact", (True, "exact", 30, 10**6), ids=str)
@pytest.mark.parametrize("reduction", ("none", "mean", "sum"))
def test_compaction_changes_nothing(loss, reduction, compact, budget):
    inputs = make_inputs(dtype=torch.float32, bias=True, ignored=0.6)
    inputs.target.clamp_(max=89)
    count = int((inputs.target != -100).sum())
    assert 0 < count < 30
    options = LossOptions(reduction=reduction, **ALL_OPTIONS)
    truth = loss_and_gradients(oracle(options), inputs.leaves(torch.float64))
    ours = loss_and_gradients(
        lambda hidden, weight, target, bias: loss(
            hidden, weight, target, bias=bias, reduction=reduction, logits_budget_mb=budget,
            compact_tokens=count if compact == "exact" else compact, **ALL_OPTIONS,
        ),
        inputs.leaves(),
    )  # fmt: skip
    assert_honest(ours, loss_and_gradients(eager(options), inputs.leaves()), truth)
    assert not ours[1][inputs.target == -100].any()


@pytest.mark.parametrize("ignored, tokens", ((1.0, 37), (0.0, 37), (0.5, 0), (0.5, 1)))
@pytest.mark.parametrize("compact", (True, 40))
@pytest.mark.parametrize("reduction", ("none", "mean"))
def test_none_all_and_no_tokens(ignored, tokens, compact, reduction):
    inputs = make_inputs(tokens, dtype=torch.float64, ignored=ignored).leaves()
    plain = gradients_of(linear_cross_entropy(*inputs.tensors, inputs.target, reduction=reduction), inputs.tensors)
    ours = linear_cross_entropy(*inputs.tensors, inputs.target, reduction=reduction, compact_tokens=compact)
    assert_equal(gradients_of(ours, inputs.tensors), plain, 1e-14)


def test_shapes_and_strides_of_hidden():
    inputs = make_inputs(36, dtype=torch.float64)
    hidden = inputs.hidden.view(4, 9, -1).transpose(0, 1).requires_grad_()
    target = inputs.target.view(4, 9).t()
    weight = inputs.weight.requires_grad_()
    for compact in (True, 30):
        losses = [
            linear_cross_entropy(hidden, weight, target, reduction="none", compact_tokens=c) for c in (False, compact)
        ]
        assert losses[1].shape == (9, 4)
        assert_equal(*[gradients_of(one, (hidden, weight)) for one in losses], 1e-14)


def test_only_tokens_with_a_loss_enter_the_products(products):
    inputs = make_inputs(200, vocab=500, ignored=0.8).leaves()
    count = int((inputs.target != -100).sum())
    linear_cross_entropy(*inputs.tensors, inputs.target, compact_tokens=True).backward()
    assert products == {("logits", count): 2, ("grad_hidden", count): 1, ("grad_weight", count): 1}
    products.clear()
    linear_cross_entropy(*inputs.tensors, inputs.target, compact_tokens=64).backward()
    assert {rows for _, rows in products} == {64}


@pytest.mark.parametrize("compact", (True, 30))
def test_what_an_ignored_token_holds_does_not_matter(compact):
    inputs = make_inputs(dtype=torch.float64, ignored=0.5)
    inputs.target[-1] = -100
    expected = loss_and_gradients(oracle(LossOptions()), inputs.leaves())
    inputs.hidden[inputs.target == -100] = torch.nan
    ours = loss_and_gradients(
        lambda hidden, weight, target: linear_cross_entropy(hidden, weight, target, compact_tokens=compact),
        inputs.leaves(),
    )
    assert_equal(ours, expected)


@pytest.mark.parametrize("compact", (True, 2000, False))
def test_compaction_of_gradients_in_forward(compact, monkeypatch):
    monkeypatch.setenv("LCE_CHECK_LABELS", "1")
    inputs = make_inputs(4000, 8, 600, torch.float64, ignored=0.7).leaves()
    weights = torch.rand(4000, dtype=torch.float64)
    weights[::5] = 0
    truth = (reference_loss(*inputs.tensors, inputs.target, LossOptions(reduction="none")) * weights).sum()
    expected = gradients_of(truth / weights[inputs.target != -100].sum(), inputs.tensors)

    def run():
        return linear_cross_entropy(
            *inputs.tensors, inputs.target, token_weight=weights, compact_tokens=compact, logits_budget_mb=2
        )

    assert_equal(gradients_of(run(), inputs.tensors), expected)
    assert "LossSumBackward" in _names_of(run().grad_fn)


def _names_of(node):
    """Of the node and of all behind it."""
    if node is None:
        return []
    return [type(node).__name__, *(name for behind, _ in node.next_functions for name in _names_of(behind))]


def test_a_bound_never_synchronises_and_true_does_once():
    inputs = make_inputs().leaves()
    for reduction in ("mean", "none"):
        with Forbidden():
            loss = linear_cross_entropy(*inputs.tensors, inputs.target, reduction=reduction, compact_tokens=30)
            torch.autograd.grad(loss.sum(), inputs.tensors)
    with pytest.raises(AssertionError, match="_local_scalar_dense synchronises"), Forbidden():
        linear_cross_entropy(*inputs.tensors, inputs.target, compact_tokens=True)


@pytest.mark.parametrize("reduction", ("none", "mean", "sum"))
def test_more_tokens_than_the_bound_are_never_lost_silently(reduction, monkeypatch):
    inputs = make_inputs(ignored=0.3).leaves()
    count = int((inputs.target != -100).sum())

    def run():
        return linear_cross_entropy(*inputs.tensors, inputs.target, reduction=reduction, compact_tokens=count - 1)

    loss = run()
    grad_hidden, grad_weight = torch.autograd.grad(loss.sum(), inputs.tensors)
    assert loss.isnan().all() and grad_weight.isnan().all() and grad_hidden.isnan().any()
    monkeypatch.setenv("LCE_CHECK_LABELS", "1")
    with pytest.raises(ValueError, match=f"{count} tokens carry a loss, more than compact_tokens={count - 1}"):
        run()


def test_true_is_refused_under_graph_capture(monkeypatch):
    from loongforge.checks import refuse_under_graph_capture

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="compact_tokens=True synchronises .*give a bound"):
        refuse_under_graph_capture("compact_tokens=True", torch.device("cuda"), "give a bound")


# ---------------------------------------------------------------- token_weight


@pytest.mark.parametrize("weighted_classes", (False, True))
@pytest.mark.parametrize("compact", (False, True))
@pytest.mark.parametrize("reduction", ("none", "mean", "sum"))
def test_weights_per_token(loss, reduction, compact, weighted_classes):
    inputs = make_inputs(dtype=torch.float32).leaves()
    generator = torch.Generator().manual_seed(5)
    weights = torch.randn(37, generator=generator)
    weights[::4] = 0
    class_weight = torch.rand(101, generator=generator) if weighted_classes else None
    double = inputs.leaves(torch.float64)
    loss_T = reference_loss(*double.tensors, inputs.target, LossOptions(reduction="none"), class_weight=class_weight)
    truth = loss_T * weights
    if reduction == "mean":
        valid = inputs.target != -100
        count = weights[valid] if class_weight is None else weights[valid] * class_weight[inputs.target[valid]]
        truth = truth.sum() / count.sum().double()
    truth = truth.sum() if reduction == "sum" else truth
    extra = {} if class_weight is None else {"class_weight": class_weight}
    ours = loss(
        *inputs.tensors, inputs.target, token_weight=weights, reduction=reduction, compact_tokens=compact, **extra
    )
    assert_equal(gradients_of(ours, inputs.tensors), gradients_of(truth, double.tensors), 2e-5)


def test_a_loss_mask_is_ignore_index():
    """Bool and integer masks; what a masked token holds or is labelled does not matter."""
    inputs = make_inputs(dtype=torch.float64, ignored=0.0)
    mask = torch.rand(37, generator=torch.Generator().manual_seed(1)) < 0.5
    masked = inputs.leaves()
    masked.target = inputs.target.masked_fill(~mask, -100)
    for reduction in ("none", "mean", "sum"):
        loss = linear_cross_entropy(*masked.tensors, masked.target, reduction=reduction)
        expected = gradients_of(loss, masked.tensors)
        ours = inputs.leaves()
        target = inputs.target.masked_fill(~mask, 10**6)
        for one in (mask, mask.long(), mask.double()):
            loss = linear_cross_entropy(*ours.tensors, target, reduction=reduction, token_weight=one)
            assert_equal(gradients_of(loss, ours.tensors), expected, 1e-14)


@pytest.mark.parametrize("value", (torch.inf, torch.nan))
def test_the_weight_of_an_ignored_token_does_not_matter(value):
    inputs = make_inputs(dtype=torch.float64).leaves()
    weights = torch.rand(37, dtype=torch.float64)
    results = []
    for weight in (0.5, value):
        weights[inputs.target == -100] = weight
        given = weights.clone().requires_grad_()
        for reduction in ("none", "mean", "sum"):
            loss = linear_cross_entropy(*inputs.tensors, inputs.target, token_weight=given, reduction=reduction)
            results.append(gradients_of(loss, (*inputs.tensors, given)))
    for finite, other in zip(results[:3], results[3:], strict=True):
        assert_equal(other, finite, 1e-14)


def test_gradient_of_the_weights():
    inputs = make_inputs(dtype=torch.float64).leaves()
    weights = torch.randn(37, dtype=torch.float64, requires_grad=True)
    loss_T = linear_cross_entropy(*inputs.tensors, inputs.target, reduction="none").detach()
    for compact in (False, True, 36):
        loss = linear_cross_entropy(
            *inputs.tensors, inputs.target, reduction="sum", token_weight=weights, compact_tokens=compact,
            logits_budget_mb=1,
        )  # fmt: skip
        (grad,) = torch.autograd.grad(loss, weights)
        assert relative(grad, loss_T) < 1e-14


def test_gradcheck():
    inputs = make_inputs(7, 5, 11, torch.float64, bias=True).leaves()
    low, up = torch.randn(7, 2, dtype=torch.float64), torch.randn(11, 2, dtype=torch.float64)
    weights = torch.rand(7, dtype=torch.float64)

    def run(hidden, bias, weights, low, up):
        return linear_cross_entropy(
            hidden, inputs.weight.detach(), inputs.target, bias=bias, token_weight=weights, adapter=(low, up),
            compact_tokens=6, softcap=5.0, reduction="none",
        )  # fmt: skip

    leaves = [tensor.detach().requires_grad_() for tensor in (inputs.hidden, inputs.bias, weights, low, up)]
    assert torch.autograd.gradcheck(run, leaves)


# ---------------------------------------------------------------- frozen tensors and adapters


@pytest.mark.parametrize("budget", (0, "all"))
def test_frozen_tensors_cost_no_product(products, budget):
    recomputed = 1 if budget == 0 else 0
    for hidden_frozen, weight_frozen in ((False, True), (True, False)):
        inputs = make_inputs(bias=True).leaves()
        inputs.hidden.requires_grad_(not hidden_frozen)
        inputs.weight.requires_grad_(not weight_frozen)
        products.clear()
        linear_cross_entropy(*inputs.tensors[:2], inputs.target, logits_budget_mb=budget).backward()
        kind = "grad_weight" if hidden_frozen else "grad_hidden"
        assert products == {("logits", 37): 1 + recomputed, (kind, 37): 1}
    inputs = make_inputs(bias=True).leaves()
    products.clear()
    linear_cross_entropy(
        inputs.hidden.detach(), inputs.weight.detach(), inputs.target, bias=inputs.bias, logits_budget_mb=budget
    ).backward()
    assert products == {("logits", 37): 1 + recomputed}


@pytest.mark.parametrize("compact", (False, True))
@pytest.mark.parametrize("budget", (0, 1, "all"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_low_rank_adapter(dtype, budget, compact, monkeypatch):
    """LoRA: hidden @ (weight + scale * b @ a).T, of which a and b train."""
    for direction in ("FWD", "BWD"):
        monkeypatch.setenv(f"LCE_{direction}_VOCAB_SPLIT_SIZE", "48")
    inputs = make_inputs(dtype=dtype, bias=True)
    generator = torch.Generator().manual_seed(7)
    a, b = torch.randn(3, 24, generator=generator).to(dtype), torch.randn(101, 3, generator=generator).to(dtype)

    def run(fused, dtype):
        hidden, bias, a_, b_ = (t.detach().to(dtype).requires_grad_() for t in (inputs.hidden, inputs.bias, a, b))
        weight = inputs.weight.to(dtype)
        if fused:
            loss = linear_cross_entropy(
                hidden, weight, inputs.target, bias=bias, adapter=(0.5 * hidden @ a_.t(), b_), reduction="none",
                logits_budget_mb=budget, compact_tokens=compact,
            )  # fmt: skip
        else:
            logits = hidden @ weight.t() + bias + (0.5 * hidden @ a_.t()) @ b_.t()
            wide = torch.promote_types(dtype, torch.float32)
            loss = torch.nn.functional.cross_entropy(logits.to(wide), inputs.target, reduction="none")
        return gradients_of(loss, (hidden, a_, b_, bias))

    ours, baseline, truth = run(True, dtype), run(False, dtype), run(False, torch.float64)
    assert_honest(ours[:4], baseline[:4], truth[:4], slack=1e-6 if dtype == torch.float32 else 2e-3)
    assert relative(ours[4], truth[4]) < 2 * relative(baseline[4], truth[4]) + 1e-6


def test_an_adapter_under_autocast_and_in_forward():
    inputs = make_inputs(3000, 16, 700, ignored=0.3)
    hidden, base = inputs.hidden.requires_grad_(), inputs.weight
    a, b = torch.randn(2, 16).requires_grad_(), torch.randn(700, 2).requires_grad_()
    results = []
    for budget in (0, 1, "all"):
        loss = linear_cross_entropy(hidden, base, inputs.target, adapter=(hidden @ a.t(), b), logits_budget_mb=budget)
        results.append(gradients_of(loss, (hidden, a, b)))
    assert_equal(results[1], results[0], 1e-5)
    assert_equal(results[2], results[0], 1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, base, inputs.target, adapter=(hidden @ a.t(), b))
        assert_equal(gradients_of(loss, (hidden, a, b)), results[0], 3e-2)


def test_an_adapter_makes_nothing_of_the_size_of_the_base():
    tokens, hidden, vocab = 20, 64, 9000
    inputs = make_inputs(tokens, hidden, vocab)
    low, up = torch.randn(tokens, 4, requires_grad=True), torch.randn(vocab, 4, requires_grad=True)

    def step():
        linear_cross_entropy(inputs.hidden, inputs.weight, inputs.target, adapter=(low, up)).backward()

    measured = record_allocations(step)
    assert inputs.weight.grad is None and up.grad.shape == (vocab, 4)
    assert measured.largest < vocab * hidden * 4 / 2
    trained = record_allocations(
        lambda: linear_cross_entropy(inputs.hidden, inputs.weight.requires_grad_(), inputs.target).backward()
    )
    assert trained.largest == vocab * hidden * 4
