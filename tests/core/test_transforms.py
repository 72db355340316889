"""Function transforms (``torch.func``, ``torch.vmap``): what is refused, and what works outside of them."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from loongforge import LinearCrossEntropy, cross_entropy, linear_cross_entropy
from tests.helpers import make_inputs, relative, worst

VOCAB, HIDDEN = 101, 24


def test_function_transforms_are_refused_by_name():
    inputs = make_inputs(8, HIDDEN, VOCAB).leaves()
    hidden, weight = (t.detach() for t in inputs.tensors)

    def loss(hidden):
        return linear_cross_entropy(hidden, weight, inputs.target)

    for run in (
        lambda: torch.func.grad(loss)(hidden),
        lambda: torch.func.vjp(loss, hidden),
        lambda: torch.func.jvp(loss, (hidden,), (hidden,)),
        lambda: torch.func.jacrev(loss)(hidden),
        lambda: torch.vmap(loss)(hidden.expand(3, -1, -1)),
        lambda: torch.func.hessian(loss)(hidden),
    ):
        with pytest.raises(NotImplementedError, match=r"does not run inside torch.func transforms .*functional_call"):
            run()


@pytest.mark.parametrize("options", ({}, {"compact_tokens": 25}, {"reduction": "sum", "logits_budget_mb": "all"}))
def test_several_upstream_gradients_are_refused_by_name(options):
    """``is_grads_batched`` is a vmap over backward, through every Function; a loop gives what it would."""
    inputs, options = make_inputs(30, HIDDEN, VOCAB).leaves(), {"reduction": "none", **options}
    logits = torch.randn(30, VOCAB, requires_grad=True)
    losses = {
        "fused": (lambda: linear_cross_entropy(*inputs.tensors[:2], inputs.target, **options), inputs.weight),
        "of logits": (lambda: cross_entropy(logits, inputs.target, reduction=options["reduction"]), logits),
    }
    for function, tensor in losses.values():
        loss = function()
        grads = torch.ones(3, *loss.shape)
        grad = functools.partial(torch.autograd.grad, loss, tensor, retain_graph=True)
        for run in (
            functools.partial(grad, grads, is_grads_batched=True),
            functools.partial(torch.vmap(lambda g, grad=grad: grad(g)[0]), grads),
        ):
            with pytest.raises(
                NotImplementedError, match="takes one upstream gradient: .*is_grads_batched=True.*once for"
            ):
                run()
        assert torch.autograd.grad(loss, tensor, grads[0])[0].any()


def test_functional_call():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.loss = nn.Linear(HIDDEN, VOCAB), LinearCrossEntropy()

        def forward(self, hidden, target):
            return self.loss(hidden, self.head.weight, target, bias=self.head.bias)

    inputs, model = make_inputs(30, HIDDEN, VOCAB).leaves(), Model()
    parameters = {name: p.detach().requires_grad_() for name, p in model.named_parameters()}
    loss = torch.func.functional_call(model, parameters, (inputs.hidden, inputs.target))
    ours = torch.autograd.grad(loss, parameters.values())
    theirs = torch.autograd.grad(model(inputs.hidden, inputs.target), list(model.parameters()))
    assert worst(relative(a, b) for a, b in zip(ours, theirs, strict=True)) <= 1e-6
