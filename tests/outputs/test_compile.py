"""``torch.compile(fullgraph=True)`` of the outputs: equal to eager, and no graph per batch."""

from __future__ import annotations

import shutil
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from loongforge import TeacherHead, TeacherTopK, linear_distillation, linear_logprobs, linear_top_k
from loongforge.operators import encoded
from loongforge.options import OPTION_NAMES, LossOptions
from loongforge.outputs import logprobs, teacher_head, teacher_top_k, top_k
from tests.helpers import Inputs, relative
from tests.outputs.oracle import make_case

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def step_logprobs(i: Inputs, case, **options):
    out = linear_logprobs(torch.tanh(i.hidden), i.weight, i.target, bias=i.bias, **options)
    return [value for value in out if value is not None]


def step_head(i: Inputs, case, **options):
    """The teacher's layer as a dataclass that is made in the trace."""
    h = case.head
    teacher = TeacherHead(h.hidden[:, :7].tanh(), h.weight[:, :7], h.bias, softcap=h.softcap, logit_scale=0.5)
    return [linear_distillation(torch.tanh(i.hidden), i.weight, teacher, target=i.target, bias=i.bias, **options)]


def step_top_k(i: Inputs, case, **options):
    return [linear_distillation(torch.tanh(i.hidden), i.weight, case.known, target=i.target, bias=i.bias, **options)]


def step_largest(i: Inputs, case, **options):
    return list(linear_top_k(torch.tanh(i.hidden), i.weight, 5, bias=i.bias, **options))


# name: (step, dtype, bias, options)
CASES = {
    "logprobs": (step_logprobs, FP32, False, {}),
    "logprobs, entropy and kept logits": (
        step_logprobs, FP32, True,
        {"entropy": True, "softcap": 2.5, "temperature": 0.7, "ignore_index": 3, "logits_budget_mb": "all"},
    ),
    "logprobs, everything": (
        step_logprobs, BF16, True,
        {"entropy": True, "predictions": True, "z_loss_weight": 0.1, "logit_scale": -0.4, "vocab_size": 95,
         "fp32_logits": True},
    ),
    "logprobs, a bound": (step_logprobs, FP32, True, {"entropy": True, "predictions": True, "compact_tokens": 60}),
    "head": (step_head, FP32, True, {"reduction": "none", "temperature": 0.7, "softcap": 3.0}),
    "head, reverse": (
        step_head, BF16, False, {"divergence": "reverse", "logit_scale": 0.6, "logits_budget_mb": "all"},
    ),
    "top-k": (step_top_k, FP32, True, {"reduction": "none", "softcap": 2.5, "logits_budget_mb": "all"}),
    "top-k, reverse": (step_top_k, BF16, False, {"divergence": "reverse", "normalizer": 20.0, "temperature": 1.3}),
    "largest": (step_largest, BF16, True, {"softcap": 2.5, "temperature": 0.7, "vocab_size": 95}),
}  # fmt: skip


def case_of(tokens: int, dtype: torch.dtype, bias: bool, options: dict):
    """Inputs with ignored rows and teachers; the graph's dimensions beside the tokens stay."""
    case = make_case(dtype, tokens=tokens, bias=bias, seed=tokens, ignore_index=options.get("ignore_index", -100))
    case.known = case.top_k(9)
    return case


def results(run, inputs: Inputs):
    """Values and, of a weighted sum of those that have one, gradients."""
    values = run(inputs)
    total = sum(
        (value * torch.linspace(-1, 2, value.numel()).view(value.shape)).sum()
        for value in values
        if value.requires_grad
    )
    grads = torch.autograd.grad(total, inputs.tensors) if isinstance(total, torch.Tensor) else ()
    return [value.detach() for value in values] + list(grads)


def assert_equal(mine, right, tolerance=0.0):
    """Bit for bit, or nearly."""
    for place, (a, b) in enumerate(zip(mine, right, strict=True)):
        assert a.dtype == b.dtype and (torch.equal(a, b) or relative(a, b) <= tolerance), (place, relative(a, b))


@pytest.mark.parametrize("name", CASES)
def test_equal_to_eager_without_recompilation(name):
    """Two sizes make the graph and its dynamic successor; whatever comes later must fit."""
    step, dtype, bias, options = CASES[name]
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for count, tokens in enumerate((30, 37, 37, 50, 64)):
        case = case_of(tokens, dtype, bias, options)
        right = results(lambda i: step(i, case, **options), case.inputs.leaves())  # noqa: B023
        torch.compiler.set_stance("fail_on_recompile" if count > 1 else "default")
        try:
            mine = results(lambda i: compiled(i, case, **options), case.inputs.leaves())  # noqa: B023
        finally:
            torch.compiler.set_stance("default")
        assert right[-1].any()
        assert_equal(mine, right)


@pytest.mark.parametrize("name", CASES)
def test_every_number_dynamic_from_the_first_call(name):
    step, dtype, bias, options = CASES[name]
    case = case_of(30, dtype, bias, options)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    right = results(lambda i: step(i, case, **options), case.inputs.leaves())
    assert_equal(results(lambda i: compiled(i, case, **options), case.inputs.leaves()), right)


def test_a_step_of_reinforcement_learning():
    """A ratio of probabilities and an entropy bonus, compiled with what is around them."""
    case = case_of(37, FP32, True, {})
    advantage_T, old_T = torch.randn(37), torch.full((37,), -4.0)

    def step(i):
        out = linear_logprobs(i.hidden, i.weight, i.target, bias=i.bias, temperature=0.8, entropy=True)
        return [-((out.logprobs - old_T).exp() * advantage_T).mean() - 0.01 * out.entropy.mean(), out.entropy.detach()]

    right = results(step, case.inputs.leaves())
    mine = results(torch.compile(step, backend="aot_eager", fullgraph=True), case.inputs.leaves())
    assert_equal(mine, right)


def test_an_entropy_that_is_only_logged_costs_backward_nothing(monkeypatch):
    seen = []
    original = logprobs.RowCoefficients
    monkeypatch.setattr(logprobs, "RowCoefficients", lambda *args: seen.append(args[4]) or original(*args))
    case = case_of(30, FP32, False, {})

    def step(i):
        out = linear_logprobs(i.hidden, i.weight, i.target, entropy=True)
        return [out.logprobs, out.entropy.detach()]

    results(torch.compile(step, backend="aot_eager", fullgraph=True), case.inputs.leaves())
    assert seen == [None]


def test_numbers_that_change_compile_anew_and_stay_right():
    """Dynamo makes variables of them, as of those of the next test; here they select another graph."""
    case, step = case_of(30, FP32, True, {}), step_logprobs
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for temperature, softcap in ((1.0, 5.0), (0.5, 5.0), (0.25, 2.0)):
        options = {"temperature": temperature, "softcap": softcap}
        right = results(partial(step, case=case, **options), case.inputs.leaves())
        assert_equal(results(partial(compiled, case=case, **options), case.inputs.leaves()), right)


def test_k_and_the_numbers_of_a_teacher_change():
    case = case_of(30, FP32, False, {})
    hidden, weight = case.inputs.hidden, case.inputs.weight

    def step(teacher, k, temperature):
        divergence = linear_distillation(hidden, weight, teacher, temperature=temperature)
        return linear_top_k(hidden, weight, k, temperature=temperature).logprobs, divergence

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for scale, k in ((1.0, 3), (0.5, 4), (0.25, 6)):
        teacher = TeacherHead(case.head.hidden, case.head.weight, logit_scale=scale)
        assert_equal(compiled(teacher, k, 2 * scale), step(teacher, k, 2 * scale))


@pytest.mark.parametrize("step", (step_logprobs, step_largest))
def test_autocast_evaluation_and_checkpointing(step):
    case = case_of(30, FP32, True, {})
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)

    def low(function):
        def run(inputs):
            with torch.autocast("cpu", BF16):
                return function(inputs, case)

        return run

    assert_equal(results(low(compiled), case.inputs.leaves()), results(low(step), case.inputs.leaves()))
    with torch.no_grad():
        assert_equal(compiled(case.inputs.leaves(), case), step(case.inputs, case))
    if step is not step_largest:
        again = torch.compile(
            lambda inputs: checkpoint(step, inputs, case, use_reentrant=False), backend="aot_eager", fullgraph=True
        )
        plain = results(partial(step, case=case), case.inputs.leaves())
        assert_equal(results(again, case.inputs.leaves()), plain)


def settings_of(computation, options=None):
    values = vars(options or LossOptions())
    chosen = vars(computation)
    return encoded(tuple(chosen), tuple(chosen.values()), tuple(OPTION_NAMES), tuple(values[n] for n in OPTION_NAMES))


def operators_of(case):
    """Each pair of operators, its computation and what follows hidden, weight and bias."""
    head, known = case.head, case.known
    target, ignored = case.inputs.target, case.inputs.target == -100
    return {
        "logprobs": (logprobs._LOGPROBS, {"entropy": False, "predictions": False}, (target,)),
        "entropy": (logprobs._LOGPROBS, {"entropy": True, "predictions": True}, (target,)),
        "head": (
            teacher_head.FROM_HEAD,
            {"teacher_logit_scale": 0.5, "teacher_softcap": 6.0, "is_reverse": True},
            (ignored, head.hidden, head.weight, head.bias),
        ),
        "top-k": (
            teacher_top_k.FROM_TOP_K, {"rest": "bucket", "is_reverse": False},
            (ignored, known.logprobs.float(), known.ids),
        ),
        "largest": (top_k._TOP_K, {"k": 5}, (target,)),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kept_rows"),
    (("logprobs", 0), ("entropy", 101), ("head", 101), ("top-k", 101), ("top-k", 0), ("largest", 0)),
)
def test_operators_hold_what_torch_asks_of_them(name, kept_rows):
    case = case_of(12, FP32, True, {})
    operators, settings, rest = operators_of(case)[name]
    text = settings_of(operators.computation(**settings))
    tensors = case.inputs.tensors if name == "largest" else case.inputs.leaves().tensors
    arguments = (*tensors, *rest, text, FP32, kept_rows)
    torch.library.opcheck(operators.forward._opoverload, arguments)
    if name == "largest":
        return
    found = operators.forward(*arguments)
    num_values = len(operators.computation.VALUES)
    values, saved = found[:num_values], [value.detach() for value in found[num_values:]]
    grads = [torch.rand_like(v.detach()) if v.numel() and v.is_floating_point() else None for v in values]
    *saved, kept = saved
    detached = [tensor.detach() for tensor in tensors]
    for needs in ([True, True, True], [False, True, False]):
        given = [(*detached, *rest, *grads, *saved, kept.clone(), text, FP32, needs) for _ in range(3)]
        torch.library.opcheck(operators.gradients._opoverload, given.pop())
        first, second = (operators.gradients(*one) for one in given)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++; the other tests run its graphs without it")
def test_inductor():
    case = case_of(30, FP32, True, {})

    def step(i):
        out = linear_logprobs(i.hidden, i.weight, i.target, bias=i.bias, entropy=True, predictions=True)
        known = linear_distillation(i.hidden, i.weight, case.known, target=i.target, bias=i.bias, reduction="none")
        return [out.logprobs, out.entropy, out.predictions, known]

    right = results(step, case.inputs.leaves())
    mine = results(torch.compile(step, fullgraph=True), case.inputs.leaves())
    for a, b in zip(mine, right, strict=True):
        assert a.dtype == b.dtype and relative(a, b) < 1e-6


BAD = {
    "labels": (lambda h, w, t: linear_logprobs(h, w, t[:7]), ValueError, "target must have shape"),
    "temperature": (lambda h, w, t: linear_logprobs(h, w, t, temperature=0.0), ValueError, "temperature must be"),
    "k": (lambda h, w, t: linear_top_k(h, w, 0), ValueError, "k must be 1 to 128"),
    "rank": (lambda h, w, t: linear_top_k(h[0], w, 3), ValueError, "hidden must be"),
    "teacher": (lambda h, w, t: linear_distillation(h, w, h), TypeError, "teacher must be a TeacherHead"),
    "teacher's ids": (
        lambda h, w, t: linear_distillation(h, w, TeacherTopK(h[:, :3], t)), ValueError, "teacher.ids must be",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    run, exception, text = BAD[name]
    inputs = case_of(30, FP32, False, {}).inputs
    with pytest.raises(exception, match=text):
        torch.compile(run, backend="eager")(inputs.hidden, inputs.weight, inputs.target)


def test_reading_the_count_on_the_host_is_refused_in_a_graph():
    inputs = case_of(30, FP32, False, {}).inputs

    def step(hidden):
        return linear_logprobs(hidden, inputs.weight, inputs.target, compact_tokens=True).logprobs

    with pytest.raises(Exception, match="compact_tokens=True reads a number on the host"):
        torch.compile(step, backend="eager", fullgraph=True)(inputs.hidden)
    torch.compiler.reset()
    assert torch.equal(torch.compile(step, backend="eager")(inputs.hidden), step(inputs.hidden))  # a graph break
