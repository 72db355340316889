"""torch.compile, custom operators and CUDA graphs."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from loongforge import LinearCrossEntropy, LossOptions, linear_cross_entropy, operators
from loongforge import budget as budgets
from tests.helpers import make_inputs, oracle, relative, upstream

VOCAB, HIDDEN = 101, 24
CASES = {
    "token": {"reduction": "none"},
    "all kept": {"reduction": "none", "logits_budget_mb": "all"},
    "some kept": {"reduction": "sum", "logits_budget_mb": 37 * 48 * 4},
    "every option": {
        "label_smoothing": 0.1, "label_smoothing_formula": "megatron", "z_loss_weight": 0.1, "softcap": 5.0,
        "logit_scale": 0.7, "vocab_size": 95, "ignore_index": 3, "fp32_logits": True, "logits_budget_mb": "all",
    },
    "bound": {"reduction": "none", "compact_tokens": 55},
}  # fmt: skip


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def tokens_of(number, dtype=torch.float32, **sizes):
    inputs = make_inputs(number, HIDDEN, VOCAB, dtype, seed=number, bias=True, **sizes)
    inputs.target.clamp_(max=94)
    return inputs.leaves()


def results(function, tensors):
    loss = function()
    return [loss.detach(), *torch.autograd.grad(loss, tensors, upstream(loss.shape).to(loss))]


def assert_same(actual, expected, tolerance=1e-6):
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.dtype == theirs.dtype and relative(mine, theirs) <= tolerance


class Model(nn.Module):
    """An output layer with its loss, as people compile it."""

    def __init__(self, options):
        super().__init__()
        self.head = nn.Linear(HIDDEN, VOCAB)
        self.loss = LinearCrossEntropy(**options)

    def forward(self, hidden, target, **tensors):
        return self.loss(2 * hidden, self.head.weight, target, bias=self.head.bias, **tensors) * 3


@pytest.mark.parametrize("name", CASES)
def test_equal_to_eager_without_recompilation(name, monkeypatch):
    """Two sizes make the graph and its dynamic successor; whatever comes later must fit."""
    monkeypatch.setattr(budgets, "_MIB", 1)
    monkeypatch.setattr("loongforge.plan.KEPT_MULTIPLE", 16)
    if name == "some kept":
        assert [budgets.rows_kept_by(37 * 48 * 4, tokens, VOCAB, 4) for tokens in (30, 37, 64)] == [48, 48, 16]
    model = Model(CASES[name])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for count, tokens in enumerate((30, 37, 37, 50, 64)):
        inputs = tokens_of(tokens, ignored=0.3)
        inputs.target[inputs.target == -100] = model.loss.options.ignore_index
        tensors = [inputs.hidden, *model.parameters()]
        expected = results(lambda: model(inputs.hidden, inputs.target), tensors)  # noqa: B023
        torch.compiler.set_stance("fail_on_recompile" if count > 1 else "default")
        try:
            actual = results(lambda: compiled(inputs.hidden, inputs.target), tensors)  # noqa: B023
        finally:
            torch.compiler.set_stance("default")
        assert_same(actual, expected, 1e-5 if CASES[name].get("logits_budget_mb") else 1e-6)


@pytest.mark.parametrize("budget", [0, "all"])
def test_vocabularies_of_several_sizes(budget):
    """Dynamo makes variables of a weight's sizes that differ between calls; a vocabulary selects another graph."""

    def run(hidden, weight, target):
        return linear_cross_entropy(hidden, weight, target, reduction="none", logits_budget_mb=budget)

    for dynamic, vocabularies in ((None, (VOCAB, 57, 33)), (True, (VOCAB,))):
        torch.compiler.reset()
        compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        for vocab in vocabularies:
            inputs = make_inputs(30, HIDDEN, vocab, torch.float32, seed=vocab, bias=False).leaves()
            tensors = inputs.hidden, inputs.weight
            expected = results(lambda: run(*tensors, inputs.target), tensors)  # noqa: B023
            assert_same(results(lambda: compiled(*tensors, inputs.target), tensors), expected, 1e-5)  # noqa: B023


def test_weights_of_tokens_and_classes_and_a_changing_normalizer():
    model = Model({})
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for count, tokens in enumerate((30, 37, 50)):
        inputs = tokens_of(tokens)
        given = {"token_weight": torch.rand(tokens), "normalizer": torch.tensor(float(tokens))}
        tensors = [inputs.hidden, *model.parameters()]
        torch.compiler.set_stance("fail_on_recompile" if count > 1 else "default")
        try:
            actual = results(lambda: compiled(inputs.hidden, inputs.target, **given), tensors)  # noqa: B023
        finally:
            torch.compiler.set_stance("default")
        assert_same(actual, results(lambda: model(inputs.hidden, inputs.target, **given), tensors))  # noqa: B023


def test_options_that_change_compile_anew_and_stay_right():
    """Dynamo makes variables of numbers that differ between calls; here they select another graph."""
    inputs = tokens_of(30)

    def run(scale, ignored):
        return linear_cross_entropy(
            *inputs.tensors[:2], inputs.target, logit_scale=scale, ignore_index=ignored, class_weight=classes
        )

    classes = torch.rand(VOCAB)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for scale, ignored in ((1.0, -100), (0.5, 3), (0.25, 4), (2.0, -100)):
        truth = oracle(LossOptions(logit_scale=scale, ignore_index=ignored), class_weight=classes.double())
        inputs.target[inputs.target == -100] = 5
        double = inputs.leaves(torch.float64)
        expected = truth(double.hidden, double.weight, inputs.target)
        assert relative(compiled(scale, ignored), expected) < 1e-5


@pytest.mark.parametrize("name", CASES)
def test_every_number_dynamic_from_the_first_call(name):
    """``dynamic=True``: numbers among the arguments and among the defaults are checked while they are symbols."""

    def run(hidden, weight, target, normalizer, options):
        return linear_cross_entropy(hidden, weight, target, normalizer=normalizer, **options)

    normalizer = None if "reduction" in CASES[name] else 12.5
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (30, 37):
        inputs = tokens_of(tokens)
        inputs.target[inputs.target == -100] = CASES[name].get("ignore_index", -100)
        tensors, last = (inputs.hidden, inputs.weight), (inputs.target, normalizer, CASES[name])
        actual = results(lambda: compiled(*tensors, *last), tensors)  # noqa: B023
        assert_same(actual, results(lambda: run(*tensors, *last), tensors), 1e-5)  # noqa: B023


def test_an_adapter():
    inputs, up = tokens_of(30), torch.randn(VOCAB, 2, requires_grad=True)
    down, base = torch.randn(2, HIDDEN, requires_grad=True), inputs.weight.detach()

    def run():
        return linear_cross_entropy(
            inputs.hidden, base, inputs.target, adapter=(inputs.hidden @ down.t(), up), logits_budget_mb="all"
        )

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    tensors = (inputs.hidden, down, up)
    assert_same(results(compiled, tensors), results(run, tensors), 1e-5)


@pytest.mark.parametrize("budget", (0, "all"))
def test_backward_twice(budget):
    """Kept logits are an output of the operator: what a first backward overwrites is a copy."""
    inputs = tokens_of(30)
    saved = torch.ops.loongforge.loss(
        *inputs.tensors, inputs.target, None, None, *_settings(LossOptions()), VOCAB if budget == "all" else 0
    )
    before = saved[3].clone()
    first = torch.autograd.grad(saved[0].sum(), inputs.tensors, retain_graph=True)
    second = torch.autograd.grad(saved[0].sum(), inputs.tensors)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)) and torch.equal(saved[3], before)


def _settings(options, dtype=torch.float32):
    values = vars(options)
    return operators.encoded((), (), tuple(values), tuple(values.values())), dtype


@pytest.mark.parametrize("kept_rows", (0, VOCAB))
def test_operators_hold_what_torch_asks_of_them(kept_rows):
    inputs = tokens_of(12)
    settings = _settings(LossOptions(softcap=5.0))
    arguments = (*inputs.tensors, inputs.target, None, None, *settings, kept_rows)
    torch.library.opcheck(torch.ops.loongforge.loss.default, arguments)
    detached = [t.detach() for t in inputs.tensors]
    loss, max_T, sum_exp_T, kept = (t.detach() for t in torch.ops.loongforge.loss(*arguments))
    for needs in ([True, True, True], [False, True, False]):
        torch.library.opcheck(
            torch.ops.loongforge.loss_gradients.default,
            (*detached, inputs.target, None, None, torch.ones_like(loss), max_T, sum_exp_T, kept, *settings, needs),
        )


def test_autocast_over_a_float32_head():
    inputs, model = tokens_of(30), Model({"reduction": "none"})

    def run(function):
        with torch.autocast("cpu", torch.bfloat16):
            return function(inputs.hidden, inputs.target)

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    tensors = [inputs.hidden, *model.parameters()]
    assert_same(results(lambda: run(compiled), tensors), results(lambda: run(model), tensors))


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
def test_without_gradients(mode):
    inputs, model = tokens_of(30), Model({"logits_budget_mb": "all"})
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected = model(inputs.hidden, inputs.target)
    with mode():
        for one in (model, compiled):
            loss = one(inputs.hidden, inputs.target)
            assert relative(loss, expected) < 1e-6 and not loss.requires_grad


@pytest.mark.parametrize("reentrant", (False, True))
def test_activation_checkpointing_inside_a_graph(reentrant):
    inputs, model = tokens_of(30), Model({"logits_budget_mb": "all"})

    def run(hidden, target):
        return torch.utils.checkpoint.checkpoint(model, hidden, target, use_reentrant=reentrant)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    tensors = [inputs.hidden, *model.parameters()]
    actual = [loss := compiled(inputs.hidden, inputs.target)]
    loss.backward()
    actual += [tensor.grad for tensor in tensors]
    expected = model(inputs.hidden, inputs.target)
    assert_same([actual[0].detach(), *actual[1:]], [expected.detach(), *torch.autograd.grad(expected, tensors)], 1e-5)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++; the other tests run its graphs without it")
def test_inductor():
    inputs, model = tokens_of(30), Model({"reduction": "none"})
    compiled = torch.compile(model, fullgraph=True)
    tensors = [inputs.hidden, *model.parameters()]
    assert_same(
        results(lambda: compiled(inputs.hidden, inputs.target), tensors),
        results(lambda: model(inputs.hidden, inputs.target), tensors),
    )


def test_no_graph_reduces_booleans():
    """On a GPU inductor makes int8 of ``any()``, of which Triton says as a condition that it will refuse it."""
    inputs, seen = tokens_of(30), []

    def record(graph, _):
        seen.extend(str(name) for node in graph.graph.nodes for name in (node.target, *node.args))
        return make_boxed_func(graph.forward)

    weights = {"class_weight": torch.rand(VOCAB), "token_weight": torch.rand(30)}
    for given in ({}, {"normalizer": torch.tensor(9.0)}, weights, {"compact_tokens": 25}):
        torch.compiler.reset()
        run = functools.partial(linear_cross_entropy, *inputs.tensors[:2], inputs.target, **given)
        torch.compile(run, backend=aot_autograd(fw_compiler=record), fullgraph=True)().backward()
    assert seen.count("loongforge.loss.default") == seen.count("loongforge.loss_gradients.default") == 4
    assert "aten.sum.default" in seen and not [name for name in seen if name.startswith(("aten.any", "aten.all"))]


def test_reading_the_count_on_the_host_is_refused_in_a_graph():
    inputs, model = tokens_of(30), Model({"compact_tokens": True})
    with pytest.raises(Exception, match="compact_tokens=True reads a number on the host"):
        torch.compile(model, backend="eager", fullgraph=True)(inputs.hidden, inputs.target)
    torch.compiler.reset()
    loss = torch.compile(model, backend="eager")(inputs.hidden, inputs.target)  # a graph break
    assert relative(loss, model(inputs.hidden, inputs.target)) < 1e-6


@pytest.mark.parametrize("what, text", (("target", "target must have shape"), ("dtype", "hidden is torch.bfloat16")))
def test_bad_input_is_named(what, text):
    inputs, model = tokens_of(30), Model({})
    hidden = inputs.hidden.bfloat16() if what == "dtype" else inputs.hidden
    target = inputs.target[:7] if what == "target" else inputs.target
    with pytest.raises((TypeError, ValueError), match=text):
        torch.compile(model, backend="eager")(hidden, target)


def test_the_compiler_is_not_imported_for_everyone():
    code = "import sys, loongforge; sys.exit('torch._dynamo' in sys.modules or 'torch._inductor' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_several_upstream_gradients_of_a_graph():
    """Backend ``eager`` runs the operators' own backward."""
    inputs, model = tokens_of(30), Model({"reduction": "none"})
    loss = torch.compile(model, backend="eager", fullgraph=True)(inputs.hidden, inputs.target)
    with pytest.raises(NotImplementedError, match="takes one upstream gradient"):
        torch.autograd.grad(loss, inputs.hidden, torch.ones(3, 30), is_grads_batched=True)


# ---------------------------------------------------------------- GPU

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU; without one tests/core/test_no_sync.py holds what a graph needs"
)


@needs_gpu
@pytest.mark.parametrize("options", ({}, {"compact_tokens": 280}, {"fp32_logits": True, "logits_budget_mb": "all"}))
def test_cuda_graph(options):
    inputs = make_inputs(300, 64, 1000, torch.bfloat16).leaves(device="cuda")
    weights = torch.rand(300, device="cuda")

    def step():
        for tensor in inputs.tensors:
            tensor.grad = None
        loss = linear_cross_entropy(*inputs.tensors, inputs.target, token_weight=weights, **options)
        loss.backward()
        return loss

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    found = [captured, *(t.grad for t in inputs.tensors)]
    with torch.no_grad():
        inputs.hidden.copy_(torch.randn_like(inputs.hidden))
        inputs.target.copy_(inputs.target.roll(5))
    graph.replay()
    replayed = [t.clone() for t in found]
    assert replayed[0].isfinite()
    expected = [step(), *(t.grad for t in inputs.tensors)]
    assert_same(replayed, expected, 1e-3)


@needs_gpu
@pytest.mark.parametrize("mode", ("default", "reduce-overhead"))
@pytest.mark.parametrize("budget", (0, "all"))
def test_compiled_on_a_cuda_device(budget, mode):
    inputs = make_inputs(300, 64, 1000, torch.bfloat16).leaves(device="cuda")
    loss = LinearCrossEntropy(reduction="none", logits_budget_mb=budget)

    def run():
        return loss(*inputs.tensors, inputs.target)

    compiled = torch.compile(run, mode=mode, fullgraph=True)
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        assert_same(results(compiled, inputs.tensors), results(run, inputs.tensors), 5e-3)
