"""CCE's names give what CCE documents: ``F.cross_entropy`` of ``e @ c.T``, shifted by one label where asked."""

import enum

import pytest
import torch
from torch.nn import functional

from loongforge.integrations.cut_cross_entropy import LinearCrossEntropy, linear_cross_entropy

OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 2.0, "filter_eps": None},
    "shift": {"shift": True},
    "all": {"shift": True, "softcap": 3.0, "ignore_index": 5, "filter_eps": "auto", "impl": "cce"},
}


def inputs():
    generator = torch.Generator().manual_seed(0)
    e, c = (torch.randn(*size, generator=generator, dtype=torch.float64) for size in ((3, 11, 16), (37, 16)))
    targets = torch.randint(0, 37, (3, 11), generator=generator)
    targets[0, 4:] = targets[2, 2] = -100
    targets[1, 3] = targets[1, 7] = 5
    return e, c, targets


def documented(e, c, targets, ignore_index=-100, softcap=None, reduction="mean", shift=False, **_):
    if shift:
        e, targets = e[..., :-1, :], targets[..., 1:]
    logits = e @ c.T
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    loss = functional.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), ignore_index=ignore_index, reduction=reduction
    )
    return loss.view(targets.shape) if reduction == "none" else loss


@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
@pytest.mark.parametrize("name", OPTIONS)
def test_function_and_module(name, reduction):
    e, c, targets = inputs()
    options = OPTIONS[name]
    if options.get("ignore_index") == 5:
        targets[targets == -100] = 5
    for loss_of in (linear_cross_entropy, LinearCrossEntropy(reduction=reduction, **options)):
        exact = [tensor.clone().requires_grad_() for tensor in (e, c)]
        ours = [tensor.float().requires_grad_() for tensor in (e, c)]
        more = {} if isinstance(loss_of, torch.nn.Module) else {"reduction": reduction, **options}
        expected, actual = documented(*exact, targets, reduction=reduction, **options), loss_of(*ours, targets, **more)
        assert actual.shape == expected.shape and actual.dtype == torch.float32
        upstream = torch.rand(expected.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64) + 0.5
        truth = torch.autograd.grad(expected, exact, upstream)
        grads = torch.autograd.grad(actual, ours, upstream.float())
        for value, right in zip((actual, *grads), (expected, *truth), strict=True):
            assert (value.double() - right).norm() <= 2e-6 * right.norm()


def test_orders_are_cces():
    e, c, targets = inputs()
    places = (-100, 2.0, "sum", True, "high", "cce")
    by_place, by_name = (
        linear_cross_entropy(e, c, targets, *places),
        linear_cross_entropy(e, c, targets, softcap=2.0, reduction="sum", shift=True),
    )
    module = LinearCrossEntropy(-100, 2.0, "sum", "high", True)
    assert by_place == by_name == module(e, c, targets)


class _Impl(enum.IntEnum):
    CCE = 1
    TORCH_COMPILE = 2


def test_what_is_missing_is_refused():
    e, c, targets = inputs()
    assert linear_cross_entropy(e, c, targets, impl=_Impl.CCE) == linear_cross_entropy(e, c, targets)
    for impl in ("torch_compile", _Impl.TORCH_COMPILE):
        with pytest.raises(NotImplementedError, match="chosen by LCE_IMPL"):
            linear_cross_entropy(e, c, targets, impl=impl)
    with pytest.raises(NotImplementedError, match="chosen by LCE_IMPL"):
        linear_cross_entropy(e, c, targets, impl=None)
    for shift in (2, -1):  # newer versions of CCE shift by any number
        with pytest.raises(NotImplementedError, match=f"shift={shift}: only False and True"):
            linear_cross_entropy(e, c, targets, shift=shift)
    with pytest.raises(TypeError, match="the options are ignore_index"):
        LinearCrossEntropy(smoothing=0.1)
    with pytest.raises(TypeError, match="the options are ignore_index"):
        LinearCrossEntropy(*range(7))
    with pytest.raises(ValueError, match="filter_eps must be 'auto', 'high'"):
        linear_cross_entropy(e, c, targets, filter_eps="low")
    with pytest.raises(TypeError, match="once each"):
        LinearCrossEntropy(-100, ignore_index=5)


@pytest.mark.parametrize("change", ({"softcap": 2.0}, {"reduction": "sum"}, {"shift": True}, {"ignore_index": 5}))
def test_attributes_that_are_set_later_are_in_force(change):
    e, c, targets = inputs()
    targets[targets == -100] = 5
    loss = LinearCrossEntropy()
    before = loss(e, c, targets)
    ((name, value),) = change.items()
    assert getattr(loss, name) != value
    setattr(loss, name, value)
    assert loss(e, c, targets) == linear_cross_entropy(e, c, targets, **change) != before
    loss.impl = "torch_compile"
    with pytest.raises(NotImplementedError, match="chosen by LCE_IMPL"):
        loss(e, c, targets)
