"""``linear_distillation`` against float64 autograd, for teachers given by a head and by their most probable classes."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
import torch

from loongforge import TeacherHead, TeacherTopK, linear_distillation, linear_logprobs, linear_top_k
from loongforge.budget import logits_budget
from tests.core.test_no_sync import Forbidden
from tests.helpers import LOW_PRECISION, poison_memory, record_allocations, relative, upstream
from tests.outputs import oracle
from tests.outputs.oracle import HIDDEN, TEMPERATURE, TOKENS, TRUE_VOCAB, VOCAB, make_case

KINDS = {
    "forward head": ("forward", "head"),
    "reverse head": ("reverse", "head"),
    "forward top": ("forward", "bucket"),
    "reverse top": ("reverse", "bucket"),
    "forward renormalized": ("forward", "renormalize"),
}
kinds = pytest.mark.parametrize(("divergence", "given"), KINDS.values(), ids=KINDS)
OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 2.5},
    "logit_scale": {"logit_scale": -0.4},
    "temperature": {"temperature": TEMPERATURE},
    "vocab_size": {"vocab_size": TRUE_VOCAB},
    "ignored_class": {"ignore_index": 7},
    "bias": {"bias": True},
    "kept": {"logits_budget_mb": "all"},
}
PAIRS = [{**OPTIONS[a], **OPTIONS[b]} for a, b in itertools.combinations([n for n in OPTIONS if n != "plain"], 2)]
EVERYTHING = {name: value for options in OPTIONS.values() for name, value in options.items()}
K = 9


def teacher_of(case, given: str, options: dict) -> TeacherHead | TeacherTopK:
    if given == "head":
        return case.head
    shared = {name: options[name] for name in ("vocab_size", "temperature") if name in options}
    return case.top_k(K, given, **shared)


def results(function, inputs, *args, **kwargs):
    """Divergence per token, then the gradients of the student for a non-uniform upstream gradient."""
    value_T = function(inputs, *args, **kwargs)
    return [value_T.detach(), *torch.autograd.grad(value_T, inputs.tensors, upstream(value_T.shape).to(value_T))]


def ours(inputs, teacher, divergence, **options):
    return linear_distillation(
        inputs.hidden, inputs.weight, teacher, divergence=divergence, target=inputs.target, bias=inputs.bias,
        reduction="none", **options,
    )  # fmt: skip


def compare(options, divergence, given, dtype=torch.float64, change=None):
    """Ours, the same in torch with this dtype, and the float64 truth of the same numbers."""
    options = dict(options)
    case = make_case(dtype, bias=options.pop("bias", False), ignore_index=options.get("ignore_index", -100))
    if change is not None:
        change(case)
    teacher = teacher_of(case, given, options)
    mine = results(ours, case.inputs.leaves(), teacher, divergence, **options)
    eager = results(oracle.divergence, case.inputs.leaves(), teacher, divergence, **options)
    truth = results(oracle.divergence, case.inputs.leaves(torch.float64), teacher, divergence, **options)
    return mine, eager, truth


@kinds
@pytest.mark.parametrize("options", [*OPTIONS.values(), *PAIRS, EVERYTHING], ids=str)
def test_options_alone_and_in_pairs_in_float64(options, divergence, given):
    mine, _, truth = compare(options, divergence, given)
    for a, b in zip(mine, truth, strict=True):
        assert a.dtype == torch.float64 and relative(a, b) < 1e-11


@kinds
@pytest.mark.parametrize("dtype", (torch.float32, *LOW_PRECISION), ids=str)
@pytest.mark.parametrize("options", ({}, {"logits_budget_mb": "all"}, EVERYTHING), ids=("plain", "kept", "all"))
def test_no_worse_than_twice_torchs_own_error(options, dtype, divergence, given):
    mine, eager, truth = compare(options, divergence, given, dtype)
    assert mine[0].dtype == torch.float32 and all(gradient.dtype == dtype for gradient in mine[1:])
    for a, b, true in zip(mine, eager, truth, strict=True):
        assert relative(a, true) <= 2 * relative(b, true) + 5e-6


@kinds
def test_fp32_logits_are_more_exact(divergence, given):
    rounded, _, truth = compare({}, divergence, given, torch.bfloat16)
    exact, *_ = compare({"fp32_logits": True}, divergence, given, torch.bfloat16)
    assert relative(exact[0], truth[0]) < 1e-5 < relative(rounded[0], truth[0])


@kinds
def test_gradcheck(divergence, given, monkeypatch):
    for direction in ("FWD", "BWD"):
        monkeypatch.setenv(f"LCE_{direction}_VOCAB_SPLIT_SIZE", "8")
    case = make_case(tokens=3, vocab=19, hidden=4)
    case.inputs.target.fill_(0)
    inputs, teacher = case.inputs.leaves(), teacher_of(case, given, {"temperature": 1.3})
    options = {"divergence": divergence, "softcap": 4.0, "temperature": 1.3, "reduction": "none"}
    assert torch.autograd.gradcheck(
        lambda hidden, weight, bias: linear_distillation(hidden, weight, teacher, bias=bias, **options), inputs.tensors
    )


@kinds
@pytest.mark.parametrize("reduction", ("mean", "sum"))
def test_reductions(reduction, divergence, given):
    case = make_case()
    teacher = teacher_of(case, given, {})
    value_T = oracle.divergence(case.inputs, teacher, divergence)
    loss = linear_distillation(
        case.inputs.hidden, case.inputs.weight, teacher, divergence=divergence, target=case.inputs.target,
        bias=case.inputs.bias, reduction=reduction,
    )  # fmt: skip
    num_valid = (case.inputs.target >= 0).sum()
    assert relative(loss, value_T.sum() / (num_valid if reduction == "mean" else 1)) < 1e-12
    everyone = linear_distillation(
        case.inputs.hidden, case.inputs.weight, teacher, divergence=divergence, bias=case.inputs.bias,
        reduction=reduction, **({"normalizer": 5} if reduction == "mean" else {}),
    )  # fmt: skip
    case.inputs.target.clamp_(min=0)
    value_T = oracle.divergence(case.inputs, teacher, divergence)
    assert relative(everyone, value_T.sum() / (5 if reduction == "mean" else 1)) < 1e-12


@kinds
@pytest.mark.parametrize("budget", (0, 1, "all"))
def test_second_backward_over_one_graph(budget, divergence, given):
    case = make_case(torch.float32)
    inputs, teacher = case.inputs.leaves(), teacher_of(case, given, {})
    loss = ours(inputs, teacher, divergence, logits_budget_mb=budget).sum()
    first, second = (torch.autograd.grad(loss, inputs.tensors, retain_graph=True) for _ in range(2))
    assert all(relative(a, b) < 2e-6 for a, b in zip(first, second, strict=True))
    del loss
    assert logits_budget.bytes_in_use == 0


@kinds
def test_the_divergence_of_equals_is_zero(divergence, given):
    case = make_case()
    inputs = case.inputs
    if given == "head":
        teacher = TeacherHead(inputs.hidden, inputs.weight, inputs.bias)
    else:
        top = linear_top_k(inputs.hidden, inputs.weight, 100 if given == "renormalize" else K, bias=inputs.bias)
        teacher = TeacherTopK(top.logprobs, top.ids, given)
    mine = results(ours, inputs.leaves(), teacher, divergence)
    if given != "renormalize":
        assert all(value.abs().max() < 1e-13 for value in mine)


def test_the_bucket_is_a_lower_bound_that_grows_with_k():
    case = make_case()
    whole = {d: oracle.divergence(case.inputs, case.head, d) for d in ("forward", "reverse")}
    for divergence, full_T in whole.items():
        before_T = torch.zeros_like(full_T)
        for k in (1, 5, 40, 100):
            value_T = ours(case.inputs, case.top_k(k), divergence)
            assert (value_T >= before_T - 1e-12).all() and (value_T <= full_T + 1e-12).all()
            before_T = value_T


@pytest.mark.parametrize("softcap", (None, 2.5))
@pytest.mark.parametrize("divergence", ("forward", "reverse"))
def test_all_classes_named(divergence, softcap):
    """k = V: nothing is left for the bucket, which is the whole divergence."""
    case = make_case(vocab=60)
    teacher = case.top_k(60)
    options = {} if softcap is None else {"softcap": softcap}
    mine = results(ours, case.inputs.leaves(), teacher, divergence, **options)
    truth = results(oracle.divergence, case.inputs.leaves(), case.head, divergence, **options)
    for a, b in zip(mine, truth, strict=True):
        assert a.isfinite().all() and relative(a, b) < 1e-10


@pytest.mark.parametrize("divergence", ("forward", "reverse"))
@pytest.mark.parametrize("given", ("head", "bucket"))
def test_classes_that_the_student_masks(divergence, given):
    """Where the teacher masks them too the divergence is finite, else the forward one is infinite."""

    def change(case):
        case.inputs.bias[30:] = -torch.inf
        case.inputs.target = torch.where(case.inputs.target >= 0, 0, case.inputs.target)
        case.head = replace(case.head, softcap=None)  # a capped logit is never -inf
        case.head.bias[30:] = -torch.inf

    mine, _, truth = compare({"bias": True}, divergence, given, change=change)
    for a, b in zip(mine, truth, strict=True):
        assert a.isfinite().all() and relative(a, b) < 1e-11
    case = make_case()
    case.inputs.bias[5:] = -torch.inf
    value_T = ours(case.inputs, teacher_of(case, given, {}), "forward")
    assert torch.equal(value_T == torch.inf, case.inputs.target >= 0)


@kinds
@pytest.mark.parametrize("shift", (-30.0, 2000.0))
def test_a_common_offset_of_the_logits(shift, divergence, given):
    def change(case):
        for hidden, weight in ((case.inputs.hidden, case.inputs.weight), (case.head.hidden, case.head.weight)):
            hidden[:, 0], weight[:, 0] = 1.0, shift
        case.head = replace(case.head, softcap=None)

    mine, eager, truth = compare({}, divergence, given, torch.float32, change)
    for a, b, true in zip(mine, eager, truth, strict=True):
        assert relative(a, true) <= 2 * relative(b, true) + 5e-6


@kinds
def test_float16_gradients_neither_underflow_nor_overflow(divergence, given):
    case = make_case(torch.float16, tokens=2048)
    teacher = teacher_of(case, given, {})
    for scale in (1.0, 65536.0):
        found = []
        for function, inputs in (
            (ours, case.inputs.leaves()),
            (oracle.divergence, case.inputs.leaves(torch.float64)),
        ):
            total = function(inputs, teacher, divergence).sum() * (scale / 2048)
            found.append(torch.autograd.grad(total, inputs.tensors))
        assert all(relative(a, b) < 1e-2 for a, b in list(zip(*found, strict=True))[1:])


@kinds
@pytest.mark.parametrize("budget", (0, "all"))
def test_ignored_tokens_give_exact_zeros_over_poisoned_memory(budget, divergence, given, monkeypatch):
    case = make_case(torch.float32)
    teacher = teacher_of(case, given, {})
    case.inputs.hidden[::5] = torch.nan
    if given != "head":
        teacher.ids[::5] = -7
    inputs = case.inputs.leaves()
    poison_memory(monkeypatch)
    value_T = linear_distillation(
        inputs.hidden, inputs.weight.detach(), teacher, divergence=divergence, target=inputs.target,
        reduction="none", logits_budget_mb=budget,
    )  # fmt: skip
    value_T.sum().backward()
    for value in (value_T, inputs.hidden.grad):
        assert value.isfinite().all() and (value[::5] == 0).all()


@kinds
@pytest.mark.parametrize("tokens", (0, 3))
def test_without_a_token_that_counts(tokens, divergence, given):
    case = make_case(torch.float32, tokens=tokens)
    case.inputs.target.fill_(-100)
    inputs = case.inputs.leaves()
    loss = linear_distillation(
        inputs.hidden, inputs.weight, teacher_of(case, given, {}), divergence=divergence, target=inputs.target
    )
    loss.backward()
    assert float(loss) == 0 and not inputs.hidden.grad.any() and not inputs.weight.grad.any()


@kinds
def test_the_teacher_gets_no_gradient(divergence, given):
    case = make_case()
    teacher = teacher_of(case, given, {})
    first = "hidden" if given == "head" else "logprobs"
    teacher = replace(teacher, **{first: getattr(teacher, first).requires_grad_()})
    inputs = case.inputs.leaves()
    ours(inputs, teacher, divergence).sum().backward()
    assert getattr(teacher, first).grad is None and inputs.hidden.grad.any()


BAD_TOP_K = {
    "named twice": lambda logprobs, ids: ids[4, 1:3].fill_(5),
    "negative": lambda logprobs, ids: ids[4, 0].fill_(-1),
    "beyond the vocabulary": lambda logprobs, ids: ids[4, 0].fill_(VOCAB),
    "above 1": lambda logprobs, ids: logprobs[4, 0].fill_(0.5),
}


@pytest.mark.parametrize("spoil", BAD_TOP_K.values(), ids=BAD_TOP_K)
def test_a_token_that_is_no_distribution(spoil, monkeypatch):
    case = make_case(torch.float32)
    teacher, inputs = case.top_k(K), case.inputs.leaves()
    spoil(teacher.logprobs, teacher.ids)
    value_T = ours(inputs, teacher, "forward")
    assert value_T.isnan().tolist() == [t == 4 for t in range(TOKENS)]
    value_T.sum().backward()
    assert inputs.hidden.grad.isnan().any(1).tolist() == [t == 4 for t in range(TOKENS)]
    monkeypatch.setenv("LCE_CHECK_LABELS", "1")
    with pytest.raises(ValueError, match=r"token 4 of the teacher has ids .* different numbers in \[0, 101\)"):
        ours(inputs, teacher, "forward")


def bad_input_table():
    case = make_case(torch.float32)
    head, top = case.head, case.top_k(K)
    return (
        (head, {"divergence": "jsd"}, ValueError, "divergence must be one of 'forward', 'reverse', got 'jsd'"),
        (torch.ones(3), {}, TypeError, "teacher must be a TeacherHead or a TeacherTopK, got Tensor"),
        (replace(head, weight=head.weight[:90]), {}, ValueError, "teacher.weight has 90 rows and weight 101"),
        (replace(head, hidden=head.hidden[:, :3]), {}, ValueError, r"teacher.weight must be \[V, 3\]"),
        (replace(head, hidden=head.hidden[:5]), {}, ValueError, r"teacher.hidden must be \[37\] \+ \[H_teacher\]"),
        (replace(head, hidden=head.hidden.double()), {}, TypeError, "hidden is torch.float32 and teacher.hidden is"),
        (replace(head, bias=head.bias[:3]), {}, ValueError, r"teacher.bias must have shape \[101\], got \[3\]"),
        (replace(head, weight=None), {}, TypeError, "teacher.weight must be a torch.Tensor, got NoneType"),
        (replace(head, softcap=-1.0), {}, ValueError, "^teacher.softcap must be"),
        (replace(top, rest="drop"), {}, ValueError, "rest must be one of 'bucket', 'renormalize', got 'drop'"),
        (replace(top, rest="renormalize"), {"divergence": "reverse"}, ValueError, "is infinite: use rest='bucket'"),
        (replace(top, ids=top.ids.float()), {}, TypeError, "teacher.ids int64 or int32"),
        (replace(top, ids=top.ids[:, :3]), {}, ValueError, "teacher.logprobs and teacher.ids must be"),
        (replace(top, ids=top.ids[:5], logprobs=top.logprobs[:5]), {}, ValueError, r"must be \[37\] \+ \[k\]"),
        (top, {"label_smoothing": 0.1}, NotImplementedError, "linear_distillation has no option label_smoothing"),
        (top, {"temperature": 0}, ValueError, "temperature must be"),
        (top, {"normalizer": 3, "reduction": "sum"}, ValueError, "normalizer needs reduction='mean'"),
        (head, {"impl": "triton"}, RuntimeError, "impl='triton' was asked for"),
    )  # fmt: skip


@pytest.mark.parametrize(("teacher", "options", "error", "message"), bad_input_table())
def test_bad_input(teacher, options, error, message):
    inputs = make_case(torch.float32).inputs
    with pytest.raises(error, match=message):
        linear_distillation(inputs.hidden, inputs.weight, teacher, target=inputs.target, **options)


@kinds
def test_never_synchronises(divergence, given):
    case = make_case(torch.bfloat16)
    teacher, inputs = teacher_of(case, given, {}), case.inputs.leaves()
    with Forbidden():
        value_T = ours(inputs, teacher, divergence)
        torch.autograd.grad(value_T, inputs.tensors, torch.ones_like(value_T))


@kinds
def test_memory_is_that_of_a_few_chunks(divergence, given):
    tokens, vocab = 700, 6000
    case = make_case(torch.float32, tokens=tokens, vocab=vocab)
    teacher, inputs = teacher_of(case, given, {}), case.inputs.leaves()
    measured = record_allocations(lambda: ours(inputs, teacher, divergence).sum().backward())
    assert measured.largest <= 4 * vocab * HIDDEN
    assert measured.peak <= 4 * (5 * vocab * HIDDEN + 300 * tokens) < 4 * tokens * vocab


@pytest.mark.parametrize("field", ("head.hidden", "head.weight", "head.bias", "known.logprobs", "known.ids"))
def test_a_released_teacher_is_refused(field):
    """FSDP keeps a parameter and frees its storage, which torch would read all the same."""
    case = make_case()
    given, name = field.split(".")
    teacher = case.head if given == "head" else TeacherTopK(*linear_top_k(case.head.hidden, case.head.weight, k=3)[:2])
    released = getattr(teacher, name).clone()
    released.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=rf"teacher.{name} .* has no storage"):
        linear_distillation(case.inputs.hidden, case.inputs.weight, replace(teacher, **{name: released}))


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize("divergence", ("forward", "reverse"))
def test_a_confident_teacher_leaves_a_rest_below_its_precision_and_not_nothing(divergence, dtype):
    """The k probabilities of float32 add up to 1; the bucket must stay a lower bound of the whole divergence."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 8, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(50, 8, generator=generator, dtype=dtype).requires_grad_()
    bias = torch.zeros(50, dtype=dtype)
    bias[3] = 45.0
    top = linear_top_k(torch.zeros(3, 8, dtype=dtype), torch.zeros(50, 8, dtype=dtype), 4, bias=bias)
    loss = linear_distillation(
        hidden, weight, TeacherTopK(top.logprobs, top.ids), divergence=divergence, reduction="none"
    )
    grads = torch.autograd.grad(loss.sum(), (hidden, weight))
    assert all(grad.isfinite().all() for grad in grads)
    log_p, log_q = (hidden @ weight.t()).double().log_softmax(1), bias.double().log_softmax(0).expand(3, 50)
    a, b = (log_q, log_p) if divergence == "forward" else (log_p, log_q)
    whole_T = (a.exp() * (a - b)).sum(1)
    assert (loss <= whole_T + 1e-5).all() and (loss > 0).all()


@pytest.mark.parametrize("which", ("weight", "teacher.weight", "top k", "logprobs"))
def test_a_weight_released_before_backward_is_named(which):
    """As sharded training releases it, which torch reports as an address."""
    hidden, weight = torch.randn(3, 8, requires_grad=True), torch.randn(20, 8)
    of_teacher = torch.randn(20, 8)
    if which == "logprobs":
        loss = linear_logprobs(hidden, weight, torch.arange(3)).logprobs.sum()
    elif which == "top k":
        teacher = TeacherTopK(torch.full((3, 2), -1.0), torch.arange(2).expand(3, 2))
        loss = linear_distillation(hidden, weight, teacher)
    else:
        loss = linear_distillation(hidden, weight, TeacherHead(torch.randn(3, 8), of_teacher))
    released, name = (of_teacher, "teacher.weight") if which == "teacher.weight" else (weight, "weight")
    released.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=rf"^{re.escape(name)} had shape .* was released before backward"):
        loss.backward()
