"""Bugs that users of fused output layers reported, each as a case that any implementation must pass.

A case takes ``loss``, a callable like :func:`loongforge.linear_cross_entropy`, and asserts.  ``test_reports.py`` runs
them; ``test_mutants.py`` shows that each seeded bug is caught.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from loongforge import LossOptions
from tests.helpers import (
    Inputs,
    assert_honest,
    eager,
    loss_and_gradients,
    make_inputs,
    oracle,
    relative,
    upstream,
)

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 6e-3, torch.float16: 2e-3}


@dataclass(frozen=True)
class Case:
    name: str
    reports: str
    run: Callable


CASES: dict[str, Case] = {}


def case(reports: str) -> Callable:
    """Register a case under its function's name."""

    def register(function: Callable) -> Callable:
        CASES[function.__name__] = Case(function.__name__, reports, function)
        return function

    return register


def check(loss, inputs: Inputs, gradient: torch.Tensor | None = None, tolerance: float | None = None, **options):
    """Loss and every gradient against float64 by relative norm; an absolute tolerance would pass a zero gradient."""
    tolerance = tolerance or TOLERANCE[inputs.hidden.dtype]
    class_weight = options.pop("class_weight", None)
    extra = {} if class_weight is None else {"class_weight": class_weight}
    ours = loss_and_gradients(lambda *args, **kw: loss(*args, **kw, **extra, **options), inputs.leaves(), gradient)
    truth = loss_and_gradients(oracle(LossOptions(**options), **extra), inputs.leaves(torch.float64), gradient)
    for name, mine, true in zip(("loss", "grad_hidden", "grad_weight", "grad_bias"), ours, truth, strict=False):
        error = relative(mine, true)
        assert error < tolerance, f"{name}: relative error {error:.1e}"
    return ours


@case("Megatron-LM test tolerances")
def every_reduction(loss):
    for reduction in ("mean", "sum", "none"):
        check(loss, make_inputs(), reduction=reduction)
        check(loss, make_inputs(dtype=torch.bfloat16), reduction=reduction)
        check(loss, make_inputs(dtype=torch.float16), reduction=reduction)


@case("Liger #1298 #968 #678, TransformerEngine #2139, ROCm-TE #336")
def upstream_gradient_differs_per_token(loss):
    inputs = make_inputs()
    inputs.target[0] = -100
    check(loss, inputs, upstream(37), reduction="none")


@case("TransformerEngine #2139: a shortcut for an upstream gradient of 1; Megatron-LM #1750")
def loss_is_squared(loss):
    for reduction in ("mean", "none"):
        inputs, double = make_inputs().leaves(), make_inputs().leaves(torch.float64)
        loss(inputs.hidden, inputs.weight, inputs.target, reduction=reduction).square().sum().backward()
        oracle(LossOptions(reduction=reduction))(double.hidden, double.weight, double.target).square().sum().backward()
        assert relative(inputs.hidden.grad, double.hidden.grad) < 2e-5
        assert relative(inputs.weight.grad, double.weight.grad) < 2e-5


@case("TransformerEngine #2402, ROCm-TE #623, QuACK #126")
def upstream_gradient_is_expanded_or_strided(loss):
    inputs = make_inputs(64, ignored=0.0)
    # In the loss's own dtype: a cast would make them contiguous.
    for gradient in (torch.tensor(0.7).expand(64), upstream((64, 2)).float()[:, 1]):
        assert not gradient.is_contiguous()
        check(loss, inputs, gradient.to(loss.device), reduction="none")


@case("labels, bias or weights that are columns of a wider tensor")
def vectors_are_strided(loss):
    inputs = make_inputs(bias=True)
    for option in ({}, {"class_weight": torch.rand(101, 2)[:, 1] + 0.5, "label_smoothing": 0.1}):
        wide_target, wide_bias = (torch.stack([vector] * 3, 1) for vector in (inputs.target, inputs.bias))
        strided = Inputs(inputs.hidden, inputs.weight, wide_target[:, 1], inputs.bias)
        assert not strided.target.is_contiguous()
        check(loss, strided, upstream(37), reduction="none", **option)
        tensors = [inputs.hidden, inputs.weight, strided.target]
        assert torch.equal(loss(*tensors, bias=wide_bias[:, 1], **option), loss(*tensors, bias=inputs.bias, **option))


@case("padded or forbidden classes masked by the most negative number of a dtype")
def classes_masked_by_large_finite_numbers(loss):
    for dtype in (torch.float32, torch.bfloat16):
        inputs = make_inputs(dtype=dtype, bias=True)
        inputs.bias[:60], inputs.bias[60] = torch.finfo(dtype).min, -1e10
        inputs.target[(inputs.target >= 0) & (inputs.target <= 60)] = 77
        _, _, grad_weight, _ = check(loss, inputs, upstream(37), reduction="none")
        assert (grad_weight[:61] == 0).all()


@case("verl #2656 #2899 #5349")
def ragged_vocabulary_under_low_logits(loss):
    for vocab in (101, 125, 127, 145):
        per_token, *_ = check(loss, make_inputs(vocab=vocab, shift=-30.0), reduction="none", tolerance=1e-4)
        assert (per_token >= 0).all(), "a log-probability above 0"


@case("Megatron-LM #2739 #3076")
def grad_hidden_over_many_chunks_of_bf16(loss):
    check(loss, make_inputs(64, 64, 6000, torch.bfloat16, ignored=0.0), tolerance=4e-3)


@case("axolotl #1601, OLMo-core #370, Liger #1391, torchtune")
def grad_weight_over_many_tokens_of_bf16(loss):
    check(loss, make_inputs(6000, 32, 300, torch.bfloat16, ignored=0.0), tolerance=4e-3)


@case("ml-cross-entropy #14 #18")
def classifier_with_few_classes(loss):
    check(loss, make_inputs(2047, 128, 32, torch.bfloat16))


@case("Automodel #3803 #3804, TransformerEngine #2476, ROCm-TE #409")
def most_tokens_ignored(loss):
    inputs = make_inputs(512, ignored=0.0)
    inputs.target[:300] = -100
    total = check(loss, inputs, reduction="sum")[0]
    mean = check(loss, inputs, reduction="mean")[0]
    check(loss, inputs, reduction="none")
    assert relative(mean, total / 212) < 1e-6


@case("unsloth #5230")
def only_the_last_tokens_count(loss):
    inputs = make_inputs(500, ignored=0.0)
    inputs.target[:-5] = -100
    _, grad_hidden, _ = check(loss, inputs)
    assert not grad_hidden[:-5].any() and (grad_hidden[-5:].abs().sum(1) > 0).all()


@case("Liger #177, unsloth #10892 #7677, TRL #6842 #6859, Megatron-LM #1764, Automodel #1985")
def every_token_ignored(loss):
    inputs = make_inputs(ignored=1.0, bias=True)
    for reduction in ("none", "sum", "mean"):
        leaves = inputs.leaves()
        value = loss(leaves.hidden, leaves.weight, leaves.target, bias=leaves.bias, reduction=reduction)
        assert value.requires_grad and not value.any(), "detached or not 0: data parallelism would hang"
        value.sum().backward()
        for leaf in leaves.tensors:
            assert torch.equal(leaf.grad, torch.zeros_like(leaf))


@case("TRL #5826")
def empty_micro_batch(loss):
    for reduction in ("none", "sum", "mean"):
        leaves = make_inputs(0).leaves()
        value = loss(leaves.hidden, leaves.weight, leaves.target, reduction=reduction)
        value.sum().backward()
        assert not value.any() and torch.equal(leaves.weight.grad, torch.zeros_like(leaves.weight))
        assert leaves.hidden.grad.shape == (0, 24)


@case("Paddle #28622, pytorch #63004, x-transformers #305")
def ignore_index_is_a_class_or_minus_one(loss):
    for ignore_index in (4, 100, -1):
        inputs = make_inputs(ignored=0.0)
        inputs.target[:9] = ignore_index
        for reduction in ("mean", "none"):
            check(loss, inputs, reduction=reduction, ignore_index=ignore_index)


@case("pytorch #195829 #106467, axolotl #3767, RL-Kernel #234")
def label_out_of_range_is_nan_in_its_row(loss):
    for label in (101, 108, -5, 2**40):
        leaves = make_inputs(ignored=0.0).leaves()
        leaves.target[3] = label
        value = loss(leaves.hidden, leaves.weight, leaves.target, reduction="none")
        assert value[3].isnan() and value.isnan().sum() == 1
        value.sum().backward()
        assert leaves.hidden.grad[3].isnan().all() and leaves.hidden.grad.isnan().any(1).sum() == 1
        assert leaves.weight.grad.isnan().all()


@case("pytorch #195829")
def narrow_label_dtypes(loss):
    inputs = make_inputs()
    expected = loss(inputs.hidden, inputs.weight, inputs.target)
    for dtype in (torch.int32, torch.int16, torch.int8):
        assert torch.equal(loss(inputs.hidden, inputs.weight, inputs.target.to(dtype)), expected)


@case("Liger #272 #343 #1251, Megatron-LM #1594, Megatron-Bridge #5947, ms-swift #10130, unsloth #5002")
def inputs_are_never_written(loss):
    for budget in (0, "all"):
        inputs = make_inputs(bias=True).leaves()
        tensors = [*inputs.tensors, inputs.target]
        before = [(t.detach().clone(), t._version) for t in tensors]
        loss(inputs.hidden, inputs.weight, inputs.target, bias=inputs.bias, logits_budget_mb=budget).backward()
        for tensor, (copy, version) in zip(tensors, before, strict=True):
            assert torch.equal(tensor.detach(), copy) and tensor._version == version


@case("multi-token prediction: Automodel #2694, Megatron-Bridge #5947")
def several_losses_on_one_weight(loss):
    inputs, double = make_inputs().leaves(), make_inputs().leaves(torch.float64)
    for leaves, function in ((inputs, loss), (double, oracle(LossOptions()))):
        first = function(leaves.hidden, leaves.weight, leaves.target)
        second = function(leaves.hidden.roll(1, 0), leaves.weight, leaves.target)
        (first + 0.3 * second).backward()
    assert relative(inputs.weight.grad, double.weight.grad) < 2e-5
    assert relative(inputs.hidden.grad, double.hidden.grad) < 2e-5


@case("Liger #237 #1441, prime-rl #3011, fla #1253")
def frozen_hidden_or_weight(loss):
    for frozen in ("hidden", "weight"):
        inputs, double = make_inputs().leaves(), make_inputs().leaves(torch.float64)
        getattr(inputs, frozen).requires_grad_(False)
        loss(inputs.hidden, inputs.weight, inputs.target).backward()
        oracle(LossOptions())(double.hidden, double.weight, double.target).backward()
        trained = "weight" if frozen == "hidden" else "hidden"
        assert getattr(inputs, frozen).grad is None
        assert relative(getattr(inputs, trained).grad, getattr(double, trained).grad) < 2e-5


@case("Liger #930 #507")
def without_gradients(loss):
    inputs = make_inputs()
    expected = oracle(LossOptions())(inputs.hidden, inputs.weight, inputs.target)
    assert relative(loss(inputs.hidden, inputs.weight, inputs.target), expected) < 2e-5
    leaves = inputs.leaves()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            value = loss(leaves.hidden, leaves.weight, leaves.target)
            assert not value.requires_grad and relative(value, expected) < 2e-5


@case("ml-cross-entropy #53, Liger #160")
def bias_and_its_gradient(loss):
    for dtype in (torch.float32, torch.bfloat16):
        check(loss, make_inputs(dtype=dtype, bias=True), reduction="none")


@case("Liger #81 #420, pytorch #69339 #91383 #104776, Megatron-LM #737")
def label_smoothing_with_class_weights(loss):
    class_weight = torch.rand(101, generator=torch.Generator().manual_seed(5)) + 0.5
    for reduction in ("mean", "none"):
        check(loss, make_inputs(), label_smoothing=0.1, reduction=reduction)
        check(loss, make_inputs(), label_smoothing=0.1, label_smoothing_formula="megatron", reduction=reduction)
        check(loss, make_inputs(), class_weight=class_weight, reduction=reduction)
        check(loss, make_inputs(), class_weight=class_weight, label_smoothing=0.1, reduction=reduction)


@case("unsloth #11277, unsloth-zoo #930, Fast-LLM #228, NeMo-RL #935")
def logit_scale(loss):
    for scale in (0.0625, 1 / 0.7, -0.5):
        check(loss, make_inputs(spread=4.0), logit_scale=scale)


@case("ml-cross-entropy #48")
def softcap_changes_the_loss(loss):
    plain = check(loss, make_inputs(spread=8.0))[0]
    capped = check(loss, make_inputs(spread=8.0), softcap=5.0)[0]
    assert abs(float(capped / plain) - 1.0) > 0.01


@case("Liger #527 #239, TransformerEngine #2707, OLMo-core #264")
def z_loss(loss):
    for reduction in ("mean", "none"):
        check(loss, make_inputs(), z_loss_weight=1e-2, reduction=reduction)


@case("Automodel #1097 #2615")
def odd_shapes(loss):
    for tokens, hidden, vocab in (
        (1, 24, 101),
        (15, 65, 125),
        (33, 1, 3),
        (2, 7, 1),
        (3, 5, 48),
        (3, 5, 49),
        (3, 5, 96),
    ):
        check(loss, make_inputs(tokens, hidden, vocab, ignored=0.0), reduction="sum", tolerance=1e-4)
    inputs = make_inputs(24)
    flat = loss(inputs.hidden, inputs.weight, inputs.target, reduction="none")
    for shape in ((1, 24), (24, 1), (4, 6), (2, 3, 4)):
        shaped = loss(inputs.hidden.view(*shape, 24), inputs.weight, inputs.target.view(shape), reduction="none")
        assert shaped.shape == shape and torch.equal(shaped.flatten(), flat)


@case("Liger #767 #1353, TRL #6372")
def weight_without_rows(loss):
    inputs = make_inputs()
    with pytest.raises(ValueError, match="not gathered|was not"):
        loss(inputs.hidden, inputs.weight[:0], inputs.target)


@case("pytorch #195829, RL-Kernel #332, Megatron-LM #5718")
def results_repeat_bit_for_bit(loss):
    inputs = make_inputs(300, vocab=900, dtype=torch.bfloat16, bias=True)
    for budget in (0, "all"):
        first, second = (
            loss_and_gradients(lambda *a, **k: loss(*a, **k, logits_budget_mb=budget), inputs.leaves())  # noqa: B023
            for _ in range(2)
        )
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@case("pytorch #187053 #176338, torch-xpu-ops #5045")
def float16_with_widely_spread_logits(loss):
    for reduction in ("sum", "none"):
        options = LossOptions(reduction=reduction)
        for inputs in (
            make_inputs(128, 64, 301, torch.float16, spread=12.0, ignored=0.0),
            make_inputs(128, 64, 301, torch.float16, shift=-30.0, ignored=0.0),
        ):
            ours = loss_and_gradients(lambda *a: loss(*a, reduction=reduction), inputs.leaves())  # noqa: B023
            baseline = loss_and_gradients(eager(options), inputs.leaves())
            assert_honest(ours, baseline, loss_and_gradients(oracle(options), inputs.leaves(torch.float64)))


@case("Megatron-LM #2206")
def a_quarter_million_classes(loss):
    inputs = make_inputs(5, 8, 262144 + 37, ignored=0.0)
    leaves = inputs.leaves()
    value = loss(leaves.hidden, leaves.weight, leaves.target, reduction="none")
    assert relative(value, oracle(LossOptions(reduction="none"))(*inputs.tensors, inputs.target)) < 1e-6


@case("pytorch #195829: a log-sum-exp near 2000 holds no digits after the third")
def logits_near_two_thousand(loss):
    """Integer operands make the logits exact, so that only the loss itself can round."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randint(-2, 3, (40, 16), generator=generator).float()
    weight = torch.randint(-1, 2, (101, 16), generator=generator).float()
    target = torch.randint(0, 101, (40,), generator=generator)
    for shift in (2000.0, -30.0):
        inputs = Inputs(hidden, weight, target, torch.full((101,), shift))
        check(loss, inputs, reduction="none", tolerance=1e-6)
        check(loss, inputs, reduction="none", tolerance=1e-5, label_smoothing=0.1)
