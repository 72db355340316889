"""Every option alone and in pairs, every dtype and shape: against float64, no worse than twice torch's own error."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from loongforge import LinearCrossEntropy, LossOptions, linear_cross_entropy
from loongforge.kernels.reference import reference_loss
from tests.helpers import assert_honest, eager, loss_and_gradients, make_inputs, oracle, relative

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
VOCAB, TRUE_VOCAB = 101, 90
OPTIONS = {
    "plain": {},
    "label_smoothing": {"label_smoothing": 0.1},
    "megatron_smoothing": {"label_smoothing": 0.1, "label_smoothing_formula": "megatron"},
    "z_loss": {"z_loss_weight": 1e-2},
    "softcap": {"softcap": 2.5},
    "logit_scale": {"logit_scale": -0.4},
    "class_weight": {"class_weight": True},
    "vocab_size": {"vocab_size": TRUE_VOCAB},
    "ignored_class": {"ignore_index": 7},
    "bias": {"bias": True},
}
PAIRS = {
    f"{a}+{b}": {**OPTIONS[a], **OPTIONS[b]}
    for a, b in itertools.combinations([name for name in OPTIONS if name != "plain"], 2)
    if {a, b} != {"label_smoothing", "megatron_smoothing"}
}
ALL_AT_ONCE = {"all": {k: v for options in OPTIONS.values() for k, v in options.items()}}


def compare(options: dict, dtype: torch.dtype, budget=0, seed: int = 0, tokens: int = 37, hidden: int = 24):
    options = dict(options)
    with_bias, with_weights = options.pop("bias", False), options.pop("class_weight", False)
    inputs = make_inputs(tokens, hidden, VOCAB, dtype, seed=seed, bias=with_bias, ignored=0.0)
    inputs.target.remainder_(TRUE_VOCAB)
    inputs.target[::5] = options.get("ignore_index", -100)
    class_weight = None
    if with_weights:
        num_classes = options.get("vocab_size", VOCAB)
        class_weight = torch.rand(num_classes, generator=torch.Generator().manual_seed(9)) + 0.5
    built = LossOptions(**options)

    def ours(*args, **kwargs):
        return linear_cross_entropy(*args, **kwargs, class_weight=class_weight, logits_budget_mb=budget, **options)

    mine = loss_and_gradients(ours, inputs.leaves())
    truth = loss_and_gradients(oracle(built, class_weight=class_weight), inputs.leaves(torch.float64))
    assert mine[0].dtype == torch.promote_types(dtype, torch.float32)
    assert [g.dtype for g in mine[1:]] == [dtype] * (3 if with_bias else 2)
    if dtype == torch.float64:
        assert all(relative(a, b) < 1e-12 for a, b in zip(mine, truth, strict=True))
    else:
        assert_honest(mine, loss_and_gradients(eager(built, class_weight), inputs.leaves()), truth)


@pytest.fixture(autouse=True)
def narrow_chunks(monkeypatch):
    monkeypatch.setenv("LCE_GENERIC_FWD_VOCAB_SPLIT_SIZE", "32")
    monkeypatch.setenv("LCE_GENERIC_BWD_VOCAB_SPLIT_SIZE", "27")


@pytest.mark.parametrize("dtype", (torch.float64, *DTYPES), ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_one_option(options, dtype):
    for reduction in ("mean", "sum", "none"):
        for budget in (0, "all"):
            compare({**options, "reduction": reduction}, dtype, budget)


@pytest.mark.parametrize("options", (*PAIRS.values(), *ALL_AT_ONCE.values()), ids=(*PAIRS, *ALL_AT_ONCE))
def test_pairs_of_options(options):
    for dtype in (torch.float64, *DTYPES):
        compare({**options, "reduction": "none"}, dtype)
        compare({**options, "reduction": "mean"}, dtype, "all", seed=1)


@pytest.mark.parametrize("options", (*OPTIONS.values(), *ALL_AT_ONCE.values()), ids=(*OPTIONS, *ALL_AT_ONCE))
def test_gradcheck(options):
    options = dict(options)
    options.pop("vocab_size", None)
    with_weights = options.pop("class_weight", False)
    inputs = make_inputs(4, 3, 40, torch.float64, bias=options.pop("bias", False))
    leaves = inputs.leaves()
    class_weight = torch.linspace(0.5, 1.5, 40).double() if with_weights else None
    for reduction in ("none", "mean"):

        def loss(hidden, weight, bias=None):
            return linear_cross_entropy(
                hidden,
                weight,
                leaves.target,
                bias=bias,
                class_weight=class_weight,
                reduction=reduction,  # noqa: B023
                **options,
            )

        assert torch.autograd.gradcheck(loss, tuple(leaves.tensors), nondet_tol=0.0)


@given(
    tokens=st.integers(1, 40),
    hidden=st.integers(1, 33),
    vocab=st.integers(2, 150),
    forward=st.integers(1, 160),
    backward=st.integers(1, 160),
    dtype=st.sampled_from((torch.float64, *DTYPES)),
    reduction=st.sampled_from(("mean", "sum", "none")),
    budget=st.sampled_from((0, "all")),
    smoothing=st.sampled_from((0.0, 0.2)),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_shape_dtype_and_chunk_width(
    tokens, hidden, vocab, forward, backward, dtype, reduction, budget, smoothing, seed
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LCE_FWD_VOCAB_SPLIT_SIZE", str(forward))
        patch.setenv("LCE_BWD_VOCAB_SPLIT_SIZE", str(backward))
        patch.delenv("LCE_GENERIC_FWD_VOCAB_SPLIT_SIZE")
        patch.delenv("LCE_GENERIC_BWD_VOCAB_SPLIT_SIZE")
        options = {"reduction": reduction, "label_smoothing": smoothing}
        inputs = make_inputs(tokens, hidden, vocab, dtype, seed=seed, bias=bool(seed % 2))
        mine = loss_and_gradients(
            lambda *args, **kwargs: linear_cross_entropy(*args, **kwargs, logits_budget_mb=budget, **options),
            inputs.leaves(),
        )
    built = LossOptions(**options)
    truth = loss_and_gradients(oracle(built), inputs.leaves(torch.float64))
    # With a handful of numbers the baseline may be right by luck: two roundings of the dtype are always allowed.
    slack = 1e-12 if dtype == torch.float64 else max(1e-6, 2 * torch.finfo(dtype).eps)
    assert_honest(mine, loss_and_gradients(eager(built), inputs.leaves()), truth, slack=slack)


@pytest.mark.parametrize("smoothing", (0.0, 0.15))
@pytest.mark.parametrize("with_weights", (False, True))
@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
def test_the_oracle_itself_equals_torch(smoothing, with_weights, reduction):
    inputs = make_inputs(dtype=torch.float64, bias=True)
    class_weight = torch.linspace(0.2, 2.0, VOCAB, dtype=torch.float64) if with_weights else None
    expected = F.cross_entropy(
        F.linear(inputs.hidden, inputs.weight, inputs.bias),
        inputs.target,
        weight=class_weight,
        label_smoothing=smoothing,
        reduction=reduction,
    )
    options = LossOptions(label_smoothing=smoothing, reduction=reduction)
    actual = reference_loss(*inputs.tensors[:2], inputs.target, options, bias=inputs.bias, class_weight=class_weight)
    assert relative(actual, expected) < 1e-13


def test_megatron_smoothing_keeps_one_minus_eps_at_the_label():
    """megatron/core/tensor_parallel/cross_entropy.py: (1 - eps - eps / K) * nll + eps * K / (K - 1) * mean(-log p)."""
    inputs = make_inputs(dtype=torch.float64, ignored=0.0)
    log_p = F.linear(inputs.hidden, inputs.weight).log_softmax(1)
    eps, num_classes = 0.1, VOCAB
    smoothing = eps * num_classes / (num_classes - 1)
    nll = -log_p.gather(1, inputs.target[:, None])[:, 0]
    expected = (1 - smoothing) * nll - smoothing * log_p.mean(1)
    options = {"label_smoothing": eps, "label_smoothing_formula": "megatron", "reduction": "none"}
    assert relative(linear_cross_entropy(*inputs.tensors, inputs.target, **options), expected) < 1e-13


def test_module_equals_function():
    inputs = make_inputs(bias=True)
    class_weight = torch.linspace(0.5, 1.5, VOCAB)
    options = {"reduction": "sum", "label_smoothing": 0.1, "softcap": 5.0}
    module = LinearCrossEntropy(class_weight=class_weight, **options)
    arguments = (inputs.hidden, inputs.weight, inputs.target)
    expected = linear_cross_entropy(*arguments, bias=inputs.bias, class_weight=class_weight, **options)
    assert torch.equal(module(*arguments, bias=inputs.bias), expected)
    assert repr(module) == "LinearCrossEntropy(reduction='sum', label_smoothing=0.1, softcap=5.0)"
