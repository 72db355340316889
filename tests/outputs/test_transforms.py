"""Autocast, checkpointing, evaluation and torch.func around the outputs; test_compile.py compiles them."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from loongforge import cross_entropy, linear_distillation, linear_logprobs, linear_top_k
from loongforge.budget import logits_budget
from tests.helpers import Inputs, relative
from tests.outputs.oracle import make_case


def functions(case):
    """Each output of an inputs object as one number per token."""
    return {
        "logprobs": lambda i: sum(
            linear_logprobs(i.hidden, i.weight, i.target, bias=i.bias, entropy=True, logits_budget_mb="all")[:3:2]
        ),
        "head": lambda i: linear_distillation(
            i.hidden, i.weight, case.head, target=i.target, bias=i.bias, reduction="none", logits_budget_mb="all"
        ),
        "top_k": lambda i: linear_distillation(
            i.hidden, i.weight, case.top_k(9), target=i.target, bias=i.bias, divergence="reverse", reduction="none"
        ),
    }


NAMES = pytest.mark.parametrize("name", ("logprobs", "head", "top_k"))


def results(function, inputs: Inputs):
    value_T = function(inputs)
    return [value_T.detach(), *torch.autograd.grad(value_T.sum(), inputs.tensors)]


@NAMES
def test_autocast_is_bf16_operands(name):
    """Over float32 parameters, whose gradients are float32."""
    case, low = make_case(torch.float32), make_case(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        mine = results(functions(case)[name], case.inputs.leaves())
    right = results(functions(low)[name], low.inputs.leaves())
    assert [value.dtype for value in mine] == [torch.float32] * 4
    for a, b in zip(mine, right, strict=True):
        assert relative(a, b) < 1e-2


@NAMES
def test_activation_checkpointing(name):
    case = make_case()
    function, inputs = functions(case)[name], case.inputs.leaves()

    def rerun(hidden, weight, bias):
        return function(Inputs(hidden, weight, inputs.target, bias))

    value_T = checkpoint(rerun, *inputs.tensors, use_reentrant=False)
    assert logits_budget.bytes_in_use == 0  # nothing is kept for a forward that runs again
    mine = [value_T.detach(), *torch.autograd.grad(value_T.sum(), inputs.tensors)]
    for a, b in zip(mine, results(function, case.inputs.leaves()), strict=True):
        assert relative(a, b) < 1e-13


@NAMES
@pytest.mark.parametrize("context", (torch.no_grad, torch.inference_mode))
def test_evaluation(name, context):
    case = make_case()
    with context():
        value_T = functions(case)[name](case.inputs.leaves())
    assert not value_T.requires_grad and logits_budget.bytes_in_use == 0
    assert relative(value_T.clone(), functions(case)[name](case.inputs)) < 1e-13


@NAMES
def test_several_upstream_gradients_are_refused(name):
    case = make_case()
    inputs = case.inputs.leaves()
    value_T = functions(case)[name](inputs)
    for grads, run in (
        (torch.ones(3, 37), lambda g: torch.autograd.grad(value_T, inputs.bias, g, is_grads_batched=True)),
        (None, lambda _: torch.autograd.functional.jacobian(
            lambda h: functions(case)[name](Inputs(h, inputs.weight, inputs.target, inputs.bias)),
            inputs.hidden, vectorize=True,
        )),
    ):  # fmt: skip
        with pytest.raises(NotImplementedError, match="takes one upstream gradient: .*is_grads_batched=True"):
            run(grads)


def test_function_transforms_are_refused():
    case = make_case()
    i = case.inputs
    for function in (
        lambda hidden: linear_logprobs(hidden, i.weight, i.target).logprobs.sum(),
        lambda hidden: linear_top_k(hidden, i.weight, 3).logprobs.sum(),
        lambda hidden: linear_distillation(hidden, i.weight, case.head),
        lambda hidden: cross_entropy(hidden @ i.weight.t(), i.target),
    ):
        with pytest.raises(NotImplementedError, match="torch.func transforms"):
            torch.func.grad(function)(i.hidden)
