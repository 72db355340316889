"""The strategy that computes gradients in forward: chosen by the budget alone, exact for any upstream gradient."""

import itertools

import pytest
import torch

from loongforge import LossOptions, linear_cross_entropy
from loongforge import budget as budgets
from loongforge.budget import logits_budget
from loongforge.gradients_in_forward import LossSum, gradient_bytes
from loongforge.kernels.reference import reference_loss
from loongforge.plan import plan_chunks, tokens_per_chunk

NUM_TOKENS, HIDDEN, VOCAB = 397, 6, 101
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}


def relative_error(actual, expected):
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm())


@pytest.fixture(autouse=True)
def budget_in_bytes(monkeypatch):
    """Small shapes need a budget finer than MiB."""
    monkeypatch.setattr(budgets, "_MIB", 1)


@pytest.fixture
def num_forward_gradients(monkeypatch):
    """How often the strategy ran."""
    calls = []
    original = LossSum.forward

    def counted(ctx, *arguments):
        calls.append(1)
        return original(ctx, *arguments)

    monkeypatch.setattr(LossSum, "forward", staticmethod(counted))
    return calls


def make_inputs(dtype):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=generator).to(dtype)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype)
    bias = torch.randn(VOCAB, generator=generator).to(dtype)
    target = torch.randint(0, 90, (NUM_TOKENS,), generator=generator)
    target[::5] = -100
    return (hidden, weight, bias), target


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_option_matches_the_oracle_twice(dtype, num_forward_gradients):
    tensors, target = make_inputs(dtype)
    class_weight = torch.rand(VOCAB, generator=torch.Generator().manual_seed(2)) + 0.5
    grid = itertools.product(("sum", "mean"), (0.0, 0.1), (0.0, 0.01), (None, 3.0), (None, class_weight), (None, 90))
    combinations = list(grid)[:: 1 if dtype == torch.float64 else 3]
    for reduction, smoothing, z_loss, softcap, weights, vocab_size in combinations:
        options = {
            "reduction": reduction,
            "label_smoothing": smoothing,
            "z_loss_weight": z_loss,
            "softcap": softcap,
            "vocab_size": vocab_size,
        }
        weights = None if weights is None else weights[:vocab_size]
        ours = [tensor.clone().requires_grad_() for tensor in tensors]
        truth = [tensor.double().requires_grad_() for tensor in tensors]
        hidden, weight, bias = ours
        loss = linear_cross_entropy(
            hidden, weight, target, bias=bias, class_weight=weights, logits_budget_mb=gradient_bytes(*ours), **options
        )
        expected = reference_loss(
            truth[0], truth[1], target, LossOptions(**options), bias=truth[2], class_weight=weights
        )
        first = torch.autograd.grad(loss * 3.3, ours, retain_graph=True)
        second = torch.autograd.grad(loss * 3.3, ours)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), "saved gradients were changed"
        reference = torch.autograd.grad(expected * 3.3, truth)
        assert relative_error(loss, expected) < TOLERANCE[dtype], options
        for actual, correct in zip(first, reference, strict=True):
            assert relative_error(actual, correct) < TOLERANCE[dtype], options
    assert len(num_forward_gradients) == len(combinations)


def test_the_upstream_gradient_is_not_rounded_to_bfloat16(num_forward_gradients):
    """A factor such as 1/3 loses 0.2% in bfloat16, and with it the whole gradient."""
    (hidden, weight, _), target = make_inputs(torch.bfloat16)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    loss = linear_cross_entropy(
        hidden, weight, target, reduction="sum", logits_budget_mb=gradient_bytes(hidden, weight, None)
    )
    one = torch.autograd.grad(loss, (hidden, weight), torch.tensor(1.0), retain_graph=True)
    third = torch.autograd.grad(loss, (hidden, weight), torch.tensor(1 / 3))
    assert num_forward_gradients
    for whole, part in zip(one, third, strict=True):
        assert abs(3 * part.double().norm() / whole.double().norm() - 1) < 1e-3


def test_a_mean_is_rounded_as_often_as_where_logits_are_kept(num_forward_gradients):
    """grad_hidden is saved in bfloat16 for the upstream gradient that a mean of 317 tokens brings; times 1/317 it would
    be rounded a second time, and its error 1.4 times as large.
    """
    (hidden, weight, _), target = make_inputs(torch.bfloat16)
    inputs, errors = (hidden.requires_grad_(), weight.requires_grad_()), []
    truth = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = torch.autograd.grad(reference_loss(*truth, target, LossOptions()), truth)
    for budget in ("all", gradient_bytes(*inputs, None)):
        for upstream in (1.0, 0.25, 65536.0):
            loss = linear_cross_entropy(*inputs, target, logits_budget_mb=budget)
            grads = torch.autograd.grad(loss, inputs, torch.tensor(upstream))
            errors.append([relative_error(g / upstream, e) for g, e in zip(grads, expected, strict=True)])
    assert len(num_forward_gradients) == 3
    for kept, in_forward in zip(errors[:3], errors[3:], strict=True):
        assert in_forward == pytest.approx(kept, rel=0.1)


@pytest.mark.parametrize("normalizer", (0.0, float("inf"), -7.0, 1e-42, 1e38, torch.tensor(float("nan"))))
def test_a_denominator_of_any_kind(normalizer, num_forward_gradients):
    (hidden, weight, _), target = make_inputs(torch.float32)
    inputs, results = (hidden.requires_grad_(), weight.requires_grad_()), []
    for budget in ("all", gradient_bytes(*inputs, None)):
        loss = linear_cross_entropy(*inputs, target, normalizer=normalizer, logits_budget_mb=budget)
        results.append([loss, *torch.autograd.grad(loss, inputs)])
    assert len(num_forward_gradients) == 1
    for kept, in_forward in zip(*results, strict=True):
        assert not in_forward[~kept.isfinite()].isfinite().any(), "no such number is replaced by another"
        if kept.isfinite().all():
            assert relative_error(in_forward, kept) < 1e-6 or torch.equal(in_forward, kept)


@pytest.mark.parametrize("budget, runs", [(0, False), ("enough", True), ("all", False)])
def test_the_budget_decides(budget, runs, num_forward_gradients):
    (hidden, weight, _), target = make_inputs(torch.float32)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    budget = gradient_bytes(hidden, weight, None) if budget == "enough" else budget
    loss = linear_cross_entropy(hidden, weight, target, logits_budget_mb=budget)
    assert bool(num_forward_gradients) == runs
    held = logits_budget.bytes_in_use
    assert (held > 0) == (budget != 0)
    loss.backward()
    del loss
    assert logits_budget.bytes_in_use == 0


def test_per_token_losses_never_use_it(num_forward_gradients):
    (hidden, weight, _), target = make_inputs(torch.float32)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    budget = gradient_bytes(hidden, weight, None)
    linear_cross_entropy(hidden, weight, target, reduction="none", logits_budget_mb=budget).sum().backward()
    assert not num_forward_gradients


def test_frozen_inputs_are_not_counted():
    (hidden, weight, bias), _ = make_inputs(torch.bfloat16)
    assert gradient_bytes(hidden, weight.requires_grad_(), bias) == weight.numel() * 4
    assert gradient_bytes(hidden.requires_grad_(), weight.detach(), None) == hidden.numel() * 2


def test_label_out_of_range_is_nan_for_any_upstream_gradient(num_forward_gradients):
    (hidden, weight, _), target = make_inputs(torch.float32)
    target[7] = VOCAB
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, target, logits_budget_mb=gradient_bytes(hidden, weight, None))
    loss.backward(torch.tensor(0.0))
    assert num_forward_gradients and loss.isnan()
    assert hidden.grad[7].isnan().all() and weight.grad.isnan().all()
    assert hidden.grad[:7].isfinite().all()


@pytest.mark.parametrize(
    "impl, shape, expected",
    [
        ("generic", (8192, 2048, 128256), 256),
        ("flydsl", (8192, 2048, 128256), 256),
        ("triton", (8192, 2048, 128256), 4096),
    ],
)
def test_tokens_per_chunk(impl, shape, expected):
    assert tokens_per_chunk(impl, *shape) == expected


def test_the_plan_explains_itself():
    plan = plan_chunks("generic", 8192, 64, 32000, 2, gradients_in_forward=True)
    assert plan.flops == 6 * 8192 * 64 * 32000
    assert "gradients in forward" in plan.explain() and "8192 tokens" in plan.explain()
