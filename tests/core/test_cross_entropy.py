"""``loongforge.cross_entropy`` on existing logits, against the float64 oracle (whose weight is the identity)."""

from functools import partial

import pytest
import torch

import loongforge
from loongforge import LossOptions
from loongforge.kernels.reference import reference_loss
from tests.helpers import eager, relative, upstream

TOKENS, VOCAB = 13, 57
OPTIONS = {
    "mean": {},
    "none": {"reduction": "none"},
    "sum": {"reduction": "sum"},
    "smoothing": {"label_smoothing": 0.1, "reduction": "none"},
    "megatron smoothing": {"label_smoothing": 0.1, "label_smoothing_formula": "megatron"},
    "z-loss": {"z_loss_weight": 0.01, "reduction": "none"},
    "softcap": {"softcap": 2.0, "logit_scale": -1.5, "reduction": "none"},
    "padded vocabulary": {"vocab_size": 50},
}


def make(dtype, **options):
    generator = torch.Generator().manual_seed(4)
    logits = (3 * torch.randn(TOKENS, VOCAB, generator=generator, dtype=torch.float64)).to(dtype)
    target = torch.randint(0, options.get("vocab_size") or VOCAB, (TOKENS,), generator=generator)
    target[::4] = -100
    return logits, target


def with_gradient(loss_of, logits, dtype=None):
    """Loss and the gradient of the logits, under a non-uniform upstream gradient."""
    leaf = logits.detach().clone().to(dtype or logits.dtype).requires_grad_()
    loss = loss_of(leaf)
    (grad,) = torch.autograd.grad(loss, leaf, upstream(loss.shape).to(loss))
    return loss.detach(), grad


def expected(logits, target, class_weight=None, **options):
    """Truth in float64, and torch's own error in the dtype of the logits: identity weights make logits of hidden."""
    built = LossOptions(**options)
    eye = torch.eye(VOCAB, dtype=torch.float64)
    truth = with_gradient(
        lambda x: reference_loss(x, eye, target, built, class_weight=class_weight), logits, torch.float64
    )
    baseline = with_gradient(lambda x: eager(built, class_weight)(x, eye.to(logits.dtype), target), logits)
    return truth, baseline


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_against_the_oracle(name, dtype):
    options = OPTIONS[name]
    logits, target = make(dtype, **options)
    found = with_gradient(lambda x: loongforge.cross_entropy(x, target, **options), logits)
    truth, baseline = expected(logits, target, **options)
    assert found[1].dtype == dtype and found[0].dtype == torch.promote_types(dtype, torch.float32)
    for ours, theirs, true in zip(found, baseline, truth, strict=True):
        assert relative(ours, true) <= 2 * relative(theirs, true) + 1e-6
    assert (found[1][::4] == 0).all()


def test_class_weights_and_normalizer():
    logits, target = make(torch.float32)
    class_weight = torch.rand(VOCAB, generator=torch.Generator().manual_seed(1)) + 0.1
    for options in ({}, {"label_smoothing": 0.2, "reduction": "none"}):
        weighted = partial(loongforge.cross_entropy, target=target, class_weight=class_weight, **options)
        found = with_gradient(weighted, logits)
        truth, _ = expected(logits, target, class_weight, **options)
        assert all(relative(ours, true) < 1e-6 for ours, true in zip(found, truth, strict=True))
    by_four = loongforge.cross_entropy(logits, target, normalizer=4)
    assert relative(by_four, loongforge.cross_entropy(logits, target, reduction="sum") / 4) < 1e-7


def test_shapes_and_strides():
    logits, target = make(torch.float32)
    wide = torch.zeros(TOKENS, VOCAB + 6)
    wide[:, 3 : VOCAB + 3] = logits
    truth = with_gradient(lambda x: loongforge.cross_entropy(x, target, reduction="none"), logits)
    for view in (wide[:, 3 : VOCAB + 3], logits.t().contiguous().t()):
        found = with_gradient(lambda x, view=view: loongforge.cross_entropy(x, target, reduction="none"), view)
        assert torch.equal(found[0], truth[0]) and torch.equal(found[1], truth[1])
    batched = loongforge.cross_entropy(logits.view(13, 1, VOCAB), target.view(13, 1), reduction="none")
    assert batched.shape == (13, 1) and torch.equal(batched.view(-1), truth[0])


def test_backward_in_place_writes_over_the_logits_and_says_so():
    logits, target = make(torch.float32)
    truth = with_gradient(lambda x: loongforge.cross_entropy(x, target), logits)
    leaf = logits.clone().requires_grad_()
    product = leaf * 1.0
    loongforge.cross_entropy(product, target, inplace_backward=True).backward(upstream(()).float())
    assert torch.equal(leaf.grad, truth[1]) and torch.equal(product, leaf.grad)

    product = leaf * 1.0
    other = product.square().sum()  # saved the same logits
    loss = loongforge.cross_entropy(product, target, inplace_backward=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


def test_labels_out_of_range_and_no_valid_token():
    logits, target = make(torch.float32)
    target[2] = VOCAB
    loss, grad = with_gradient(lambda x: loongforge.cross_entropy(x, target, reduction="none"), logits)
    assert loss[2].isnan() and grad[2].isnan().all() and loss[3:].isfinite().all()
    loss, grad = with_gradient(lambda x: loongforge.cross_entropy(x, torch.full((TOKENS,), -100)), logits)
    assert loss == 0 and (grad == 0).all()
    assert loongforge.cross_entropy(logits[:0], target[:0]) == 0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logits": torch.zeros(3, 4, dtype=torch.int32)}, TypeError, "logits must be bfloat16"),
        ({"target": torch.zeros(3, 4)}, TypeError, "class probabilities are not supported"),
        ({"target": torch.zeros(4, dtype=torch.int64)}, ValueError, r"got \[3, 4\] and \[4\]"),
        ({"sequence_parallel": True, "tp_group": object()}, (ValueError, TypeError), "sequence_parallel|group"),
        ({"logits_budget_mb": 3}, ValueError, "logits_budget_mb has no meaning for logits that exist"),
        ({"class_weight": torch.ones(5)}, ValueError, r"float tensor of shape \[4\]"),
        ({"normalizer": 2, "reduction": "sum"}, ValueError, "normalizer needs reduction='mean'"),
        ({"smoothing": 0.1}, TypeError, "did you mean label_smoothing"),
        ({"logits": torch.zeros(3, 4, requires_grad=True), "inplace_backward": True}, ValueError, "leaf's own data"),
        ({"logits": torch.zeros(4, 3).t(), "inplace_backward": True}, ValueError, r"strides \[1, 3\]"),
        ({"logits": torch.zeros(4).expand(3, 4), "inplace_backward": True}, ValueError, r"share no .*\[0, 1\]"),
        ({"logits": torch.zeros(6).unfold(0, 4, 1), "inplace_backward": True}, ValueError, r"share no .*\[1, 1\]"),
        ({"logits": torch.zeros(1).expand(3, 1), "inplace_backward": True}, ValueError, r"share no .*\[0, 1\]"),
        ({"vocab_size": 5}, ValueError, "logits have 4 columns on each of 1 .*fewer in all than vocab_size = 5"),
        (
            {"logits": torch.zeros(3, 1), "label_smoothing": 0.1, "label_smoothing_formula": "megatron"},
            ValueError,
            "needs a vocabulary of at least 2",
        ),
    ],
)
def test_bad_input(change, error, message):
    arguments = {"logits": torch.zeros(3, 4), "target": torch.zeros(3, dtype=torch.int64), **change}
    with pytest.raises(error, match=message):
        loongforge.cross_entropy(**arguments)
