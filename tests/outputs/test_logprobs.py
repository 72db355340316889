"""``linear_logprobs`` against float64 autograd: each output alone and all together, options alone and in pairs."""

from __future__ import annotations

import itertools

import pytest
import torch

from loongforge import linear_logprobs
from loongforge.budget import logits_budget
from loongforge.kernels.generic import GenericRowKernels
from tests.core.test_no_sync import Forbidden
from tests.helpers import LOW_PRECISION, Inputs, make_inputs, poison_memory, record_allocations, relative
from tests.outputs import oracle
from tests.outputs.oracle import HIDDEN, TEMPERATURE, TOKENS, TRUE_VOCAB, VOCAB, make_case

NAMES = ("logprobs", "log_sum_exp", "entropy", "z_loss")
OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 2.5},
    "logit_scale": {"logit_scale": -0.4},
    "temperature": {"temperature": TEMPERATURE},
    "vocab_size": {"vocab_size": TRUE_VOCAB},
    "ignored_class": {"ignore_index": 7},
    "bias": {"bias": True},
    "compact": {"compact_tokens": True},
    "kept": {"logits_budget_mb": "all"},
}
PAIRS = {
    f"{a}+{b}": {**OPTIONS[a], **OPTIONS[b]}
    for a, b in itertools.combinations([name for name in OPTIONS if name != "plain"], 2)
}
EVERYTHING = {"all": {name: value for options in OPTIONS.values() for name, value in options.items()}}


def upstreams(num_tokens: int = TOKENS) -> dict[str, torch.Tensor]:
    """A non-uniform gradient per token for each output, 0 somewhere."""
    generator = torch.Generator().manual_seed(4)
    found = {name: torch.randn(num_tokens, generator=generator, dtype=torch.float64) for name in NAMES}
    for number, gradient in enumerate(found.values()):
        gradient[number::6] = 0.0
    return found


def gradients(values: dict[str, torch.Tensor], wanted, inputs: Inputs) -> list[torch.Tensor]:
    given = upstreams(values["logprobs"].numel())
    total = sum((values[name].flatten() * given[name].to(values[name].dtype)).sum() for name in wanted)
    return list(torch.autograd.grad(total, inputs.tensors))


def ours(inputs: Inputs, wanted=NAMES, **options):
    weight = {"z_loss_weight": 0.01} if "z_loss" in wanted else {}
    out = linear_logprobs(
        inputs.hidden, inputs.weight, inputs.target, bias=inputs.bias, entropy="entropy" in wanted, **weight, **options
    )
    values = {name: getattr(out, name) for name in wanted}
    return [value.detach() for value in values.values()], gradients(values, wanted, inputs)


def truth(inputs: Inputs, wanted=NAMES, **options):
    values = oracle.logprobs(inputs, z_loss_weight=0.01, **options)
    return [values[name].detach() for name in wanted], gradients(values, wanted, inputs)


def flat(results) -> list[torch.Tensor]:
    return [*results[0], *results[1]]


def case_of(options: dict, dtype=torch.float64):
    options = dict(options)
    inputs = make_case(dtype, bias=options.pop("bias", False), ignore_index=options.get("ignore_index", -100)).inputs
    return inputs, options


@pytest.mark.parametrize("options", [*OPTIONS.values(), *PAIRS.values(), *EVERYTHING.values()], ids=str)
def test_all_outputs_together_in_float64(options):
    inputs, options = case_of(options)
    mine = flat(ours(inputs.leaves(), **options))
    for a, b in zip(mine, flat(truth(inputs.leaves(), **options)), strict=True):
        assert a.dtype == torch.float64 and relative(a, b) < 1e-12


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_each_output_alone(name, options):
    """The others exist and carry no gradient: their coefficients must vanish."""
    inputs, options = case_of(options)
    leaves = inputs.leaves()
    out = linear_logprobs(
        leaves.hidden, leaves.weight, leaves.target, bias=leaves.bias, entropy=True, z_loss_weight=0.01, **options
    )
    found = gradients({"logprobs": out.logprobs, name: getattr(out, name)}, [name], leaves)
    for a, b in zip(found, truth(inputs.leaves(), [name], **options)[1], strict=True):
        assert relative(a, b) < 1e-12


@pytest.mark.parametrize("dtype", (torch.float32, *LOW_PRECISION), ids=str)
@pytest.mark.parametrize("options", [*OPTIONS.values(), *EVERYTHING.values()], ids=str)
def test_no_worse_than_twice_torchs_own_error(options, dtype):
    inputs, options = case_of(options, dtype)
    mine, right = ours(inputs.leaves(), **options), truth(inputs.leaves(torch.float64), **options)
    eager = truth(inputs.leaves(), **options)
    assert all(value.dtype == torch.float32 for value in mine[0])
    assert all(gradient.dtype == dtype for gradient in mine[1])
    for name, a, b, true in zip((*NAMES, "h", "w", "b"), flat(mine), flat(eager), flat(right), strict=False):
        assert relative(a, true) <= 2 * relative(b, true) + 2e-6, name


@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
def test_fp32_logits_are_more_exact(dtype):
    inputs = make_case(dtype).inputs
    right = truth(inputs.leaves(torch.float64))[0]
    rounded, exact = (ours(inputs.leaves(), fp32_logits=wide)[0] for wide in (False, True))
    for a, b, true in zip(rounded, exact, right, strict=True):
        assert relative(b, true) < 2e-6 and (dtype == torch.float16 or relative(a, true) > 1e-4)


@pytest.mark.parametrize("shift", (-30.0, 2000.0))
def test_a_common_offset_of_the_logits(shift):
    inputs = make_inputs(TOKENS, HIDDEN, VOCAB, torch.float32, shift=shift, ignored=0.2)
    right, eager = truth(inputs.leaves(torch.float64)), truth(inputs.leaves())
    for a, b, true in zip(flat(ours(inputs.leaves())), flat(eager), flat(right), strict=True):
        assert relative(a, true) <= 2 * relative(b, true) + 2e-6


def test_float16_gradients_neither_underflow_nor_overflow():
    inputs = make_case(torch.float16, tokens=4096).inputs
    for scale in (1.0, 65536.0):
        leaves = inputs.leaves()
        out = linear_logprobs(leaves.hidden, leaves.weight, leaves.target, bias=leaves.bias, entropy=True)
        total = (out.logprobs + 0.3 * out.entropy).sum() * (scale / 4096)
        found = torch.autograd.grad(total, leaves.tensors)
        right = inputs.leaves(torch.float64)
        values = oracle.logprobs(right)
        total = (values["logprobs"] + 0.3 * values["entropy"]).sum() * (scale / 4096)
        expected = torch.autograd.grad(total, right.tensors)
        assert relative(found[1], expected[1]) < 5e-3 and relative(found[2], expected[2]) < 5e-3


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_predictions_and_accuracy(options):
    inputs, options = case_of(options, torch.float32)
    out = linear_logprobs(inputs.hidden, inputs.weight, inputs.target, bias=inputs.bias, predictions=True, **options)
    expected = oracle.predictions(inputs, **options)
    assert torch.equal(out.predictions, expected)
    valid = inputs.target != options.get("ignore_index", -100)
    assert float(out.accuracy) == pytest.approx(float((expected == inputs.target)[valid].float().mean()))
    assert not out.predictions.requires_grad and not out.accuracy.requires_grad and out.entropy is None


def test_of_equal_logits_the_smallest_class_is_predicted():
    """Within a chunk and across chunks; bf16 logits are often equal."""
    hidden, weight = torch.ones(3, 4), torch.zeros(VOCAB, 4)
    weight[[60, 70, 99]] = 1.0
    target = torch.tensor([60, 70, 99])
    out = linear_logprobs(hidden, weight, target, predictions=True)
    assert out.predictions.tolist() == [60, 60, 60] and float(out.accuracy) == pytest.approx(1 / 3)


def test_gradcheck(monkeypatch):
    for direction in ("FWD", "BWD"):
        monkeypatch.setenv(f"LCE_{direction}_VOCAB_SPLIT_SIZE", "8")
    inputs = make_case(tokens=4, vocab=19, hidden=4).inputs.leaves()

    def outputs(hidden, weight, bias):
        out = linear_logprobs(
            hidden, weight, inputs.target, bias=bias, entropy=True, z_loss_weight=0.1, softcap=4.0, temperature=1.3
        )
        return out.logprobs, out.entropy, out.z_loss

    assert torch.autograd.gradcheck(outputs, inputs.tensors)


@pytest.mark.parametrize("budget", (0, "all"))
def test_second_backward_over_one_graph(budget):
    inputs = make_case().inputs.leaves()
    out = linear_logprobs(
        inputs.hidden, inputs.weight, inputs.target, bias=inputs.bias, entropy=True, logits_budget_mb=budget
    )
    values = {"logprobs": out.logprobs, "entropy": out.entropy}
    given = upstreams()
    total = sum((values[name] * given[name]).sum() for name in values)
    first, second = (torch.autograd.grad(total, inputs.tensors, retain_graph=True) for _ in range(2))
    assert all(relative(a, b) < 1e-13 for a, b in zip(first, second, strict=True))
    del out, values, total
    assert logits_budget.bytes_in_use == 0


def test_second_derivatives_are_refused():
    inputs = make_case().inputs.leaves()
    out = linear_logprobs(inputs.hidden, inputs.weight, inputs.target, bias=inputs.bias, entropy=True)
    (gradient,) = torch.autograd.grad(out.entropy.sum(), inputs.hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


def test_more_tokens_than_the_bound_are_never_lost_silently():
    """A token that did not fit would read as one of probability 1, and as a wrong prediction."""
    inputs = make_case().inputs.leaves()
    count = int((inputs.target != -100).sum())
    everything = {"entropy": True, "predictions": True, "z_loss_weight": 0.1}
    out = linear_logprobs(inputs.hidden, inputs.weight, inputs.target, compact_tokens=count - 1, **everything)
    for name in ("logprobs", "log_sum_exp", "entropy", "z_loss", "accuracy"):
        assert getattr(out, name).isnan().all(), name
    grad_hidden, grad_weight = torch.autograd.grad(out.logprobs.sum(), (inputs.hidden, inputs.weight))
    assert grad_weight.isnan().all() and grad_hidden.isnan().any()
    fits = linear_logprobs(inputs.hidden, inputs.weight, inputs.target, compact_tokens=count, **everything)
    whole = linear_logprobs(inputs.hidden, inputs.weight, inputs.target, **everything)
    assert fits.accuracy == whole.accuracy and torch.equal(fits.predictions, whole.predictions)


@pytest.mark.parametrize("frozen", ("hidden", "weight", "bias"))
def test_a_frozen_tensor_gets_no_gradient(frozen):
    inputs = make_case().inputs.leaves()
    getattr(inputs, frozen).requires_grad_(False)
    out = linear_logprobs(inputs.hidden, inputs.weight, inputs.target, bias=inputs.bias, entropy=True)
    (out.logprobs + out.entropy).sum().backward()
    for name in ("hidden", "weight", "bias"):
        assert (getattr(inputs, name).grad is None) == (name == frozen)


def test_shapes_follow_target():
    inputs = make_case(tokens=36).inputs
    hidden, target = inputs.hidden.view(4, 9, HIDDEN), inputs.target.view(4, 9)
    out = linear_logprobs(hidden, inputs.weight, target, entropy=True, predictions=True, z_loss_weight=0.1)
    for value in (out.logprobs, out.log_sum_exp, out.entropy, out.predictions, out.z_loss):
        assert value.shape == (4, 9)
    assert out.accuracy.shape == ()


@pytest.mark.parametrize("budget", (0, "all"))
def test_ignored_tokens_give_exact_zeros_over_poisoned_memory(budget, monkeypatch):
    inputs = make_case(torch.float32).inputs
    inputs.hidden[::5] = torch.nan
    leaves = inputs.leaves()
    poison_memory(monkeypatch)
    out = linear_logprobs(
        leaves.hidden, leaves.weight.detach(), leaves.target, entropy=True, predictions=True, logits_budget_mb=budget
    )
    (out.logprobs.sum() + out.entropy.sum() + out.log_sum_exp.sum()).backward()
    for value in (out.logprobs, out.entropy, out.log_sum_exp, leaves.hidden.grad):
        assert value.isfinite().all() and (value[::5] == 0).all()
    assert (out.predictions[::5] == -1).all()


@pytest.mark.parametrize("tokens", (0, 3))
def test_without_a_valid_token(tokens):
    inputs = make_case(torch.float32, tokens=tokens).inputs
    inputs.target.fill_(-100)
    leaves = inputs.leaves()
    out = linear_logprobs(leaves.hidden, leaves.weight, leaves.target, entropy=True, predictions=True)
    (out.logprobs.sum() + out.entropy.sum()).backward()
    assert float(out.accuracy) == 0 and not out.logprobs.any() and not out.entropy.any()
    assert not leaves.hidden.grad.any() and not leaves.weight.grad.any()


def test_one_valid_token():
    inputs = make_case().inputs
    inputs.target.fill_(-100)
    inputs.target[20] = 3
    for a, b in zip(flat(ours(inputs.leaves())), flat(truth(inputs.leaves())), strict=True):
        assert relative(a, b) < 1e-12


def test_masked_classes():
    """-inf by bias, a whole chunk of them too: probability 0, entropy term 0, gradient 0."""
    inputs = make_case().inputs
    inputs.bias[::3] = -torch.inf
    inputs.bias[:50] = -torch.inf
    inputs.target = torch.where(inputs.target >= 0, 50 + inputs.target % 2 * 2, inputs.target)
    mine, right = ours(inputs.leaves()), truth(inputs.leaves())
    for a, b in zip(flat(mine), flat(right), strict=True):
        assert a.isfinite().all() and relative(a, b) < 1e-12


@pytest.mark.parametrize("label", (VOCAB, -3))
def test_a_label_out_of_range(label, monkeypatch):
    inputs = make_case(torch.float32).inputs.leaves()
    inputs.target[4] = label
    out = linear_logprobs(inputs.hidden, inputs.weight, inputs.target, entropy=True)
    for value in (out.logprobs, out.entropy, out.log_sum_exp):
        assert value.isnan().tolist() == [t == 4 for t in range(TOKENS)]
    (out.logprobs * 0).sum().backward()
    assert inputs.hidden.grad.isnan().any(1).tolist() == [t == 4 for t in range(TOKENS)]
    assert inputs.weight.grad.isnan().all()
    monkeypatch.setenv("LCE_CHECK_LABELS", "1")
    with pytest.raises(IndexError, match=rf"target\[4\] is {label}: labels must be in \[0, {VOCAB}\)"):
        linear_logprobs(inputs.hidden, inputs.weight, inputs.target)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    (
        ({"temperature": 0.0}, ValueError, "temperature must be finite and between"),
        ({"temperature": torch.ones(())}, TypeError, "temperature must be a number"),
        ({"entropy": 1}, TypeError, "entropy must be True or False, got 1"),
        ({"predictions": "yes"}, TypeError, "predictions must be True or False"),
        ({"reduction": "mean"}, NotImplementedError, "linear_logprobs has no option reduction: its options are ignore"),
        ({"label_smoothing": 0.1}, NotImplementedError, "no option label_smoothing"),
        ({"entropie": True}, TypeError, "unknown option 'entropie'"),
        ({"impl": "triton", "entropy": True}, RuntimeError, "impl='triton' was asked for"),
        ({"bias": torch.ones(3)}, ValueError, "bias must have shape"),
    ),
)
def test_bad_input(options, error, message):
    inputs = make_case(torch.float32, bias=False).inputs
    with pytest.raises(error, match=message):
        linear_logprobs(inputs.hidden, inputs.weight, inputs.target, **options)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("options", ({}, {"predictions": True}, {"logits_budget_mb": "all"}), ids=str)
def test_never_synchronises(options, dtype):
    inputs = make_case(dtype).inputs.leaves()
    with Forbidden():
        out = linear_logprobs(inputs.hidden, inputs.weight, inputs.target, bias=inputs.bias, entropy=True, **options)
        ones = torch.ones_like(out.logprobs)
        torch.autograd.grad([out.logprobs, out.entropy], inputs.tensors, [ones, ones])


def test_an_entropy_without_gradient_uses_the_loss_kernels(monkeypatch):
    """What is not differentiated costs backward nothing: no coefficient reaches the kernels."""
    seen = []
    original = GenericRowKernels.gradient_
    monkeypatch.setattr(
        GenericRowKernels, "gradient_", lambda self, *args: seen.append(args[-1]) or original(self, *args)
    )
    inputs = make_case().inputs.leaves()
    for of_entropy in (False, True):
        seen.clear()
        out = linear_logprobs(inputs.hidden, inputs.weight, inputs.target, entropy=True)
        (out.logprobs.sum() + (out.entropy.sum() if of_entropy else 0)).backward()
        assert seen and all((c.relative_over_sum_T is not None) == of_entropy for c in seen)


def test_memory_is_that_of_a_few_chunks():
    """Nothing of T * V; the bound would not pass one float32 copy of the logits."""
    tokens, vocab = 700, 6000
    inputs = make_case(torch.float32, tokens=tokens, vocab=vocab).inputs.leaves()

    def call():
        out = linear_logprobs(
            inputs.hidden, inputs.weight, inputs.target, bias=inputs.bias, entropy=True, predictions=True
        )
        (out.logprobs.sum() + out.entropy.sum()).backward()

    measured = record_allocations(call)
    assert measured.largest <= 4 * vocab * HIDDEN
    assert measured.peak <= 4 * (4 * vocab * HIDDEN + 60 * tokens) < 4 * tokens * vocab
