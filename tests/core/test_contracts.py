"""The contracts of the operation: normalisers, labels, padding, autograd, autocast, layouts, a gradient sink."""

from __future__ import annotations

import importlib

import pytest
import torch

from loongforge import (
    LossOptions,
    TeacherHead,
    TeacherTopK,
    cross_entropy,
    linear_cross_entropy,
    linear_distillation,
    linear_logprobs,
)
from loongforge.budget import logits_budget
from loongforge.call import Labels
from loongforge.kernels.generic import GenericRowKernels
from tests.helpers import loss_and_gradients, make_inputs, oracle, relative, upstream

HALF_OF_THE_LOGITS = 1  # MiB, for 512 tokens and 1024 float32 classes


@pytest.fixture(autouse=True)
def narrow_chunks(monkeypatch):
    monkeypatch.setenv("LCE_GENERIC_FWD_VOCAB_SPLIT_SIZE", "48")
    monkeypatch.setenv("LCE_GENERIC_BWD_VOCAB_SPLIT_SIZE", "48")


# What an implementation may take over


class _WithTokenLosses(GenericRowKernels):
    def __init__(self):
        self.num_calls = 0

    def token_losses(self, target_T, stats, num_classes, ignore_index):
        self.num_calls += 1
        labels = Labels.among(target_T, num_classes, ignore_index)
        loss_T = stats.sum_exp_T.log() - (stats.label_logit_T - stats.max_T)
        return labels.mark_(loss_T), labels.ignored_T, labels.no_class_T


@pytest.mark.parametrize("way", ("one head", "gradients in forward", "given logits"))
@pytest.mark.parametrize("options", ({}, {"label_smoothing": 0.1}, {"z_loss_weight": 1e-2}, {"softcap": 3.0}), ids=str)
@pytest.mark.parametrize("weighted", (False, True), ids=("", "class weights"))
def test_kernels_make_the_losses_of_tokens_where_the_formula_is_plain(way, options, weighted, monkeypatch):
    inputs = make_inputs(dtype=torch.float64).leaves()
    options = options | {"reduction": "sum" if way == "gradients in forward" else "none"}
    if way == "gradients in forward":
        options["logits_budget_mb"] = HALF_OF_THE_LOGITS
    if weighted:
        options["class_weight"] = torch.rand(len(inputs.weight), dtype=torch.float64) + 0.5

    def loss_and_gradient():
        if way == "given logits":
            loss = cross_entropy(inputs.hidden @ inputs.weight.t(), inputs.target, **options)
        else:
            loss = linear_cross_entropy(inputs.hidden, inputs.weight, inputs.target, **options)
        return loss, torch.autograd.grad(loss.sum(), inputs.hidden)[0]

    expected, kernels = loss_and_gradient(), _WithTokenLosses()
    for module in ("call", "cross_entropy"):
        monkeypatch.setattr(importlib.import_module(f"loongforge.{module}"), "row_kernels", lambda *_: kernels)
    assert all(torch.equal(a, b) for a, b in zip(loss_and_gradient(), expected, strict=True))
    assert (kernels.num_calls > 0) == (not weighted and not {"label_smoothing", "z_loss_weight"} & options.keys())


# Normalisers


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32, torch.float64), ids=str)
def test_the_loss_is_float32_or_float64_in_every_reduction(dtype):
    inputs = make_inputs(dtype=dtype)
    for reduction in ("mean", "sum", "none"):
        loss = linear_cross_entropy(inputs.hidden, inputs.weight, inputs.target, reduction=reduction)
        assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert loss.shape == (inputs.target.shape if reduction == "none" else ())


@pytest.mark.parametrize("number", (7, 3.3, torch.tensor(3.3), torch.tensor([3.3]), torch.tensor(12)), ids=str)
def test_normalizer_replaces_the_count(number):
    inputs = make_inputs(dtype=torch.float64).leaves()
    total = linear_cross_entropy(inputs.hidden, inputs.weight, inputs.target, reduction="sum")
    loss = linear_cross_entropy(inputs.hidden, inputs.weight, inputs.target, normalizer=number)
    assert loss.shape == () and loss.dtype == torch.float64
    assert relative(loss, total / float(number)) < 1e-15
    (gradient,) = torch.autograd.grad(loss, inputs.hidden)
    assert relative(gradient, torch.autograd.grad(total, inputs.hidden)[0] / float(number)) < 1e-14


def test_normalizer_makes_the_mean_over_data_parallel_ranks():
    """10 valid tokens here and 90 there are not two equal halves (Megatron-LM #7452)."""
    inputs = make_inputs(100, dtype=torch.float64, ignored=0.0)
    whole = linear_cross_entropy(inputs.hidden, inputs.weight, inputs.target)
    count = torch.tensor(100)
    parts = [
        linear_cross_entropy(inputs.hidden[rows], inputs.weight, inputs.target[rows], normalizer=count)
        for rows in (slice(0, 10), slice(10, 100))
    ]
    assert relative(sum(parts), whole) < 1e-14


def test_no_valid_token_is_zero_whatever_the_normalizer():
    inputs = make_inputs(ignored=1.0).leaves()
    class_weight = torch.ones(101)
    for extra in ({}, {"normalizer": 0}, {"normalizer": torch.tensor(0)}, {"normalizer": 5}):
        loss = linear_cross_entropy(inputs.hidden, inputs.weight, inputs.target, class_weight=class_weight, **extra)
        gradients = torch.autograd.grad(loss, inputs.tensors)
        assert not loss.any() and all(torch.equal(g, torch.zeros_like(g)) for g in gradients)


def test_class_weights_of_one_are_no_class_weights():
    inputs = make_inputs()
    for reduction in ("mean", "sum", "none"):
        plain = linear_cross_entropy(*inputs.tensors, inputs.target, reduction=reduction)
        ones = linear_cross_entropy(*inputs.tensors, inputs.target, reduction=reduction, class_weight=torch.ones(101))
        assert torch.equal(plain, ones)


@pytest.mark.parametrize("tokens", (40, 5000))
def test_the_mean_does_not_depend_on_chunk_widths(tokens, monkeypatch):
    """A mean of chunk means, or a sum of them, shows only where there are several chunks (Automodel #3803)."""
    inputs = make_inputs(tokens, 16, 500)
    truth = oracle(LossOptions())(*inputs.tensors, inputs.target)
    for width in (1, 32, 499, 500, 5000) if tokens < 100 else (32, 5000):
        monkeypatch.setenv("LCE_GENERIC_FWD_VOCAB_SPLIT_SIZE", str(width))
        assert relative(linear_cross_entropy(*inputs.tensors, inputs.target), truth) < 1e-6


# Labels


@pytest.mark.parametrize("budget", (0, "all"))
def test_a_label_out_of_range_is_nan_even_without_upstream_gradient(budget):
    leaves = make_inputs(ignored=0.0, bias=True).leaves()
    leaves.target[5] = 101
    loss = linear_cross_entropy(
        leaves.hidden, leaves.weight, leaves.target, bias=leaves.bias, reduction="none", logits_budget_mb=budget
    )
    grad_hidden, grad_weight, grad_bias = torch.autograd.grad(loss, leaves.tensors, torch.zeros(37))
    assert grad_hidden[5].isnan().all() and not grad_hidden[torch.arange(37) != 5].any()
    assert grad_weight.isnan().all() and grad_bias.isnan().all()


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_a_label_out_of_range_leaves_other_rows_of_grad_hidden_alone(dtype):
    leaves = make_inputs(dtype=dtype, ignored=0.0).leaves()
    clean = torch.autograd.grad(linear_cross_entropy(*leaves.tensors, leaves.target, reduction="sum"), leaves.hidden)[0]
    leaves.target[5] = -7
    loss = linear_cross_entropy(*leaves.tensors, leaves.target, reduction="sum")
    assert loss.isnan()
    (gradient,) = torch.autograd.grad(loss, leaves.hidden)
    others = torch.arange(37) != 5
    assert gradient[5].isnan().all() and relative(gradient[others], clean[others]) < 1e-2


def test_a_label_in_the_padding_is_out_of_range():
    inputs = make_inputs(ignored=0.0)
    inputs.target.clamp_(max=89)
    inputs.target[2] = 90
    loss = linear_cross_entropy(*inputs.tensors, inputs.target, vocab_size=90, reduction="none")
    assert loss.isnan().tolist() == [i == 2 for i in range(37)]


@pytest.mark.parametrize("vocab_size", (96, 90, 3))
def test_padded_vocabulary_rows_stay_out_and_get_zero_gradients(vocab_size):
    inputs = make_inputs(dtype=torch.float64, bias=True)
    inputs.weight[vocab_size:] = 50.0  # would dominate every softmax
    valid = inputs.target != -100
    inputs.target[valid] %= vocab_size
    short = make_inputs(dtype=torch.float64, bias=True)
    short.target = inputs.target
    short.weight, short.bias = inputs.weight[:vocab_size], inputs.bias[:vocab_size]
    for options in ({}, {"label_smoothing": 0.1}):
        padded = loss_and_gradients(
            lambda *a, **k: linear_cross_entropy(*a, **k, vocab_size=vocab_size, **options),  # noqa: B023
            inputs.leaves(),
        )
        expected = loss_and_gradients(oracle(LossOptions(**options)), short.leaves())
        assert relative(padded[0], expected[0]) < 1e-12 and relative(padded[1], expected[1]) < 1e-12
        assert relative(padded[2][:vocab_size], expected[2]) < 1e-12 and not padded[2][vocab_size:].any()
        assert relative(padded[3][:vocab_size], expected[3]) < 1e-12 and not padded[3][vocab_size:].any()


# Autograd


@pytest.mark.parametrize("budget", (0, HALF_OF_THE_LOGITS, "all"))
def test_two_backwards_over_one_graph(budget):
    """The first backward turns kept logits into gradients in place; the second must not take those for logits."""
    inputs = make_inputs(512, 16, 1024, bias=True).leaves()
    double = make_inputs(512, 16, 1024, bias=True).leaves(torch.float64)
    loss = linear_cross_entropy(
        inputs.hidden, inputs.weight, inputs.target, bias=inputs.bias, reduction="none", logits_budget_mb=budget
    )
    assert logits_budget.bytes_in_use == {0: 0, 1: 1 << 20, "all": 1 << 21}[budget]
    truth = oracle(LossOptions(reduction="none"))(double.hidden, double.weight, double.target, double.bias)
    for seed, retain in ((1, True), (2, True), (3, False)):
        gradient = upstream(512, seed)
        ours = torch.autograd.grad(loss, inputs.tensors, gradient.float(), retain_graph=retain)
        expected = torch.autograd.grad(truth, double.tensors, gradient, retain_graph=True)
        assert all(relative(a, b) < 2e-5 for a, b in zip(ours, expected, strict=True))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, inputs.tensors, gradient.float())


def test_a_second_derivative_is_refused():
    inputs = make_inputs(bias=True).leaves()
    loss = linear_cross_entropy(inputs.hidden, inputs.weight, inputs.target)
    gradients = torch.autograd.grad(loss, inputs.tensors[:2], create_graph=True)
    expected = torch.autograd.grad(
        linear_cross_entropy(inputs.hidden, inputs.weight, inputs.target), inputs.tensors[:2]
    )
    for gradient, wanted in zip(gradients, expected, strict=True):
        assert torch.equal(gradient, wanted)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            gradient.sum().backward()


TWICE = {
    "loss": lambda h, w, t: linear_cross_entropy(h, w, t),
    "gradients in forward": lambda h, w, t: linear_cross_entropy(h, w, t, logits_budget_mb=1),
    "logits kept": lambda h, w, t: linear_cross_entropy(h, w, t, reduction="none", logits_budget_mb="all").sum(),
    "compaction": lambda h, w, t: linear_cross_entropy(h, w, t, compact_tokens=True),
    "adapter": lambda h, w, t: linear_cross_entropy(h, w.detach(), t, adapter=(h, w)),
    "checkpoint": lambda h, w, t: torch.utils.checkpoint.checkpoint(linear_cross_entropy, h, w, t, use_reentrant=False),
    "logits": lambda h, w, t: cross_entropy(h @ w.t(), t),
    "log-probabilities": lambda h, w, t: linear_logprobs(h, w, t).logprobs.sum(),
    "teacher's head": lambda h, w, t: linear_distillation(h, w, TeacherHead(h.detach(), w.detach() + 1)),
    "teacher's classes": lambda h, w, t: linear_distillation(
        h, w, TeacherTopK(torch.full((len(t), 2), -2.0), torch.tensor([[1, 2]] * len(t)))
    ),
}


@pytest.mark.parametrize("name", TWICE)
def test_a_penalty_on_a_gradient_is_refused_and_not_left_out(name):
    """By ``torch.autograd.grad`` too, which runs only the nodes on the way to what it is asked for."""
    for count, wanted in enumerate((("hidden",), ("weight",), ("hidden", "weight"))):
        inputs = make_inputs(12, 6, 19).leaves()
        loss = TWICE[name](inputs.hidden, inputs.weight, inputs.target)
        asked = [getattr(inputs, which) for which in wanted]
        gradients = torch.autograd.grad(loss, asked, create_graph=True)
        again = TWICE[name](inputs.hidden, inputs.weight, inputs.target)
        for gradient, right in zip(gradients, torch.autograd.grad(again, asked), strict=True):
            assert torch.equal(gradient, right) and gradient.requires_grad, count
        total = loss + sum(gradient.square().sum() for gradient in gradients)
        for leaf in inputs.tensors:
            with pytest.raises(RuntimeError, match="differentiate twice .*from logits"):
                torch.autograd.grad(total, leaf, retain_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            total.backward()


def test_an_input_changed_between_forward_and_backward_is_an_error():
    inputs = make_inputs().leaves()
    loss = linear_cross_entropy(inputs.hidden * 1.0, inputs.weight, inputs.target)
    with torch.no_grad():
        inputs.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_accumulate_over_micro_batches():
    inputs, double = make_inputs().leaves(), make_inputs().leaves(torch.float64)
    for rows in (slice(0, 20), slice(20, 37)):
        linear_cross_entropy(inputs.hidden[rows], inputs.weight, inputs.target[rows], reduction="sum").backward()
    oracle(LossOptions(reduction="sum"))(double.hidden, double.weight, double.target).backward()
    assert relative(inputs.weight.grad, double.weight.grad) < 2e-5
    assert relative(inputs.hidden.grad, double.hidden.grad) < 2e-5


def test_tied_weight_gets_both_gradients():
    weight = make_inputs().weight.requires_grad_()
    double = weight.detach().double().requires_grad_()
    tokens, target = torch.arange(37) % 101, make_inputs().target
    linear_cross_entropy(weight[tokens], weight, target).backward()
    oracle(LossOptions())(double[tokens], double, target).backward()
    assert relative(weight.grad, double.grad) < 2e-5


@pytest.mark.parametrize("use_reentrant", (False, True))
def test_activation_checkpointing(use_reentrant):
    inputs = make_inputs().leaves()
    expected = torch.autograd.grad(linear_cross_entropy(*inputs.tensors, inputs.target), inputs.tensors)
    loss = torch.utils.checkpoint.checkpoint(
        linear_cross_entropy, *inputs.tensors, inputs.target, use_reentrant=use_reentrant
    )
    loss.backward()
    assert torch.equal(inputs.hidden.grad, expected[0]) and torch.equal(inputs.weight.grad, expected[1])


# Autocast and layouts


@pytest.mark.parametrize("frozen", (False, True))
@pytest.mark.parametrize("hidden_dtype", (torch.bfloat16, torch.float32), ids=str)
def test_autocast_over_a_float32_weight(hidden_dtype, frozen):
    inputs = make_inputs(hidden=32, bias=True)
    leaves = inputs.leaves()
    leaves.hidden = inputs.hidden.to(hidden_dtype).requires_grad_()
    leaves.weight.requires_grad_(not frozen)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(leaves.hidden, leaves.weight, leaves.target, bias=leaves.bias)
        assert loss.dtype == torch.float32
        loss.backward()
    assert leaves.hidden.grad.dtype == hidden_dtype and leaves.bias.grad.dtype == torch.float32
    assert (leaves.weight.grad is None) if frozen else (leaves.weight.grad.dtype == torch.float32)
    double = inputs.leaves(torch.float64)
    truth = oracle(LossOptions())(double.hidden, double.weight, double.target, double.bias)
    truth.backward()
    assert relative(loss, truth) < 4e-3 and relative(leaves.hidden.grad, double.hidden.grad) < 1.5e-2


def test_autocast_leaves_float64_alone():
    inputs = make_inputs(dtype=torch.float64)
    expected = linear_cross_entropy(*inputs.tensors, inputs.target)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(linear_cross_entropy(*inputs.tensors, inputs.target), expected)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_non_contiguous_inputs(dtype):
    inputs = make_inputs(36, dtype=dtype, bias=True)
    expected = loss_and_gradients(linear_cross_entropy, inputs.leaves())
    strided = {
        "transposed": lambda t: t.t().contiguous().t() if t.dim() == 2 else t,
        "every second": lambda t: t.repeat_interleave(2, dim=0)[::2],
        "expanded storage": lambda t: torch.cat([t, t], dim=-1)[..., : t.shape[-1]],
    }
    for name, change in strided.items():
        tensors = [change(t.detach()).requires_grad_() for t in inputs.tensors]
        loss = linear_cross_entropy(tensors[0], tensors[1], change(inputs.target), bias=tensors[2])
        gradients = torch.autograd.grad(loss, tensors, upstream(()).to(loss))
        for actual, wanted in zip((loss, *gradients), expected, strict=True):
            assert actual.shape == wanted.shape and relative(actual, wanted) < 1e-6, name
    # [S, B, H] as a transposed view of [B, S, H], as Megatron and Hugging Face models differ.
    batch_first = inputs.hidden.view(9, 4, 24)
    loss = linear_cross_entropy(
        batch_first.transpose(0, 1), inputs.weight, inputs.target.view(9, 4).t(), bias=inputs.bias
    )
    assert relative(loss, expected[0]) < 1e-6


def test_a_stride_0_hidden_row():
    inputs = make_inputs()
    row = inputs.hidden[:1].clone().requires_grad_()
    linear_cross_entropy(row.expand(37, 24), inputs.weight, inputs.target).backward()
    double = inputs.hidden[:1].double().requires_grad_()
    oracle(LossOptions())(double.expand(37, 24), inputs.weight, inputs.target).backward()
    assert relative(row.grad, double.grad) < 2e-5


# A sink for the weight gradient


class Sink:
    """main_grad of another dtype, added into or overwritten; autograd gets a dummy."""

    def __init__(self, buffer: torch.Tensor, accumulate: bool) -> None:
        self.buffer, self.accumulate, self.calls = buffer, accumulate, []

    def open(self):
        self.calls.append("open")
        return self.buffer, self.accumulate

    def close(self):
        self.calls.append("close")
        return torch.zeros(101, 24)


@pytest.mark.parametrize("vocab_size", (None, 90))
@pytest.mark.parametrize("buffer_dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_weight_gradient_goes_to_a_sink(dtype, buffer_dtype, vocab_size):
    from loongforge.loss import fused_loss

    inputs = make_inputs(dtype=dtype)
    inputs.target.clamp_(max=89)
    double = inputs.leaves(torch.float64)
    options = LossOptions(reduction="sum", vocab_size=vocab_size)
    oracle(options)(double.hidden, double.weight, double.target).backward()
    start = torch.randn(101, 24, generator=torch.Generator().manual_seed(1)).to(buffer_dtype)
    for accumulate in (False, True):
        sink, leaves = Sink(start.clone(), accumulate), inputs.leaves()
        fused_loss(leaves.hidden, leaves.weight, leaves.target, options, weight_grad_sink=sink).backward()
        assert sink.calls == ["open", "close"]
        assert torch.equal(leaves.weight.grad, torch.zeros_like(leaves.weight))
        expected = double.weight.grad + (start.double() if accumulate else 0.0)
        assert relative(sink.buffer, expected) < (2e-5 if {dtype, buffer_dtype} == {torch.float32} else 6e-3)
        if vocab_size:
            assert torch.equal(sink.buffer[90:], start[90:] if accumulate else torch.zeros_like(start[90:]))
