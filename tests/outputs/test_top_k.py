"""``linear_top_k`` against a stable sort of materialised logits."""

from __future__ import annotations

import pytest
import torch

from loongforge import linear_top_k
from tests.core.test_no_sync import Forbidden
from tests.helpers import LOW_PRECISION, record_allocations, relative
from tests.outputs.oracle import HIDDEN, TEMPERATURE, TRUE_VOCAB, VOCAB, logits_of, make_case

OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 2.5},
    "logit_scale": {"logit_scale": -0.4},
    "temperature": {"temperature": TEMPERATURE},
    "vocab_size": {"vocab_size": TRUE_VOCAB},
}
EVERYTHING = {"all": {name: value for options in OPTIONS.values() for name, value in options.items()}}


def expected(inputs, k, **options):
    x = logits_of(inputs.hidden, inputs.weight, inputs.bias, **options)
    values, ids = x.sort(dim=1, descending=True, stable=True)
    lse = x.logsumexp(1)
    return values[:, :k] - lse[:, None], ids[:, :k], lse


@pytest.mark.parametrize("k", (1, 5, 64, 90))
@pytest.mark.parametrize("options", [*OPTIONS.values(), *EVERYTHING.values()], ids=str)
@pytest.mark.parametrize("bias", (False, True))
def test_values_and_classes(options, k, bias):
    """k beyond the width of a chunk, and as large as the vocabulary."""
    inputs = make_case(bias=bias).inputs
    out = linear_top_k(inputs.hidden, inputs.weight, k, bias=inputs.bias, **options)
    logprobs, ids, lse = expected(inputs, k, **options)
    assert torch.equal(out.ids, ids)
    assert relative(out.logprobs, logprobs) < 1e-13 and relative(out.log_sum_exp, lse) < 1e-13
    assert out.logprobs.dtype == torch.float64 and out.ids.dtype == torch.int64


@pytest.mark.parametrize("dtype", (torch.float32, *LOW_PRECISION), ids=str)
def test_low_precision(dtype):
    """The classes are the largest of the rounded logits; their log-probabilities are as exact as torch's."""
    inputs = make_case(dtype).inputs
    out = linear_top_k(inputs.hidden, inputs.weight, 9, bias=inputs.bias)
    logprobs, ids, _ = expected(inputs, 9)
    right = make_case(torch.float64).inputs
    for name in ("hidden", "weight", "bias"):
        setattr(right, name, getattr(inputs, name).double())
    truth = expected(right, VOCAB)[0].gather(1, expected(right, VOCAB)[1].argsort(1)).gather(1, out.ids)
    baseline = expected(right, VOCAB)[0].gather(1, expected(right, VOCAB)[1].argsort(1)).gather(1, ids)
    assert out.logprobs.dtype == torch.float32
    assert relative(out.logprobs, truth) <= 2 * relative(logprobs, baseline) + 2e-6
    if dtype == torch.float32:
        assert torch.equal(out.ids, ids)


def test_ties_go_to_the_smaller_class():
    """Equal logits in one chunk, across chunks, and more of them than k."""
    hidden, weight = torch.ones(1, 4), torch.zeros(VOCAB, 4)
    weight[[3, 47, 48, 90]] = 1.0
    assert linear_top_k(hidden, weight, 3).ids.tolist() == [[3, 47, 48]]
    assert linear_top_k(hidden, weight, 7).ids.tolist() == [[3, 47, 48, 90, 0, 1, 2]]
    assert linear_top_k(hidden, 0 * weight, 100).ids.tolist() == [list(range(100))]


def test_masked_classes_come_last():
    inputs = make_case().inputs
    inputs.bias[10:] = -torch.inf
    out = linear_top_k(inputs.hidden, inputs.weight, 15, bias=inputs.bias)
    assert (out.ids[:, :10] < 10).all() and out.logprobs[:, :10].isfinite().all()
    assert out.ids[:, 10:].tolist() == [[10, 11, 12, 13, 14]] * len(out.ids)
    assert (out.logprobs[:, 10:] == -torch.inf).all()


def test_no_gradient_and_shapes():
    inputs = make_case(torch.float32, tokens=36).inputs.leaves()
    out = linear_top_k(inputs.hidden.view(4, 9, HIDDEN), inputs.weight, 6)
    assert out.logprobs.shape == out.ids.shape == (4, 9, 6) and out.log_sum_exp.shape == (4, 9)
    assert not out.logprobs.requires_grad
    assert linear_top_k(inputs.hidden[:0], inputs.weight, 6).ids.shape == (0, 6)


@pytest.mark.parametrize(
    ("k", "options", "error", "message"),
    (
        (0, {}, ValueError, f"k must be 1 to 128 and at most the vocabulary of {VOCAB}, got 0"),
        (129, {}, ValueError, "k must be 1 to 128"),
        (VOCAB + 1, {}, ValueError, f"vocabulary of {VOCAB}"),
        (91, {"vocab_size": 90}, ValueError, "vocabulary of 90"),
        (5.0, {}, TypeError, "k must be an int, got 5.0"),
        (True, {}, TypeError, "k must be an int"),
        (5, {"ignore_index": 3}, NotImplementedError, "linear_top_k has no option ignore_index"),
        (5, {"logits_budget_mb": 3}, NotImplementedError, "has no option logits_budget_mb"),
        (5, {"temperature": -1.0}, ValueError, "temperature must be"),
        (5, {"impl": "flydsl"}, RuntimeError, "impl='flydsl' was asked for"),
    ),
)
def test_bad_input(k, options, error, message):
    inputs = make_case(torch.float32).inputs
    with pytest.raises(error, match=message):
        linear_top_k(inputs.hidden, inputs.weight, k, **options)
    with pytest.raises(TypeError, match="hidden must be a torch.Tensor, got list"):
        linear_top_k([1.0], inputs.weight, 3)


def test_never_synchronises():
    inputs = make_case(torch.bfloat16).inputs
    with Forbidden():
        linear_top_k(inputs.hidden, inputs.weight, 5, bias=inputs.bias)


def test_memory_is_that_of_a_chunk():
    tokens, vocab = 700, 6000
    inputs = make_case(torch.float32, tokens=tokens, vocab=vocab).inputs
    measured = record_allocations(lambda: linear_top_k(inputs.hidden, inputs.weight, 32))
    assert measured.peak < 4 * tokens * vocab / 3
