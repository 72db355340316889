"""Liger's names and orders give Liger's formulas: against a float64 reference of what its kernel documents."""

import inspect
import itertools

import pytest
import torch

from loongforge.integrations import liger
from tests.helpers import make_inputs

IGNORED = 7
"""A valid class as ignore_index."""


def reference(hidden, weight, target, bias=None, ce_weight=None, ignore_index=-100, lse_square_scale=0.0,
              label_smoothing=0.0, reduction="mean", softcap=None, use_token_scaling=False):  # fmt: skip
    """The comments of ``liger_cross_entropy_kernel``, term by term, in plain torch."""
    logits = hidden @ weight.T
    if bias is not None:
        logits = logits + bias
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    valid = target != ignore_index
    label = target.where(valid, 0)[:, None]
    lse = logits.logsumexp(-1)
    loss = lse - logits.gather(1, label)[:, 0]
    ce = torch.ones(weight.shape[0], dtype=logits.dtype) if ce_weight is None else ce_weight.to(logits.dtype)
    label_weight = ce[label[:, 0]]
    eps = label_smoothing / weight.shape[0]
    smooth = (-eps * logits * ce).sum(-1) + eps * lse * ce.sum()
    loss = label_weight * loss * (1 - label_smoothing) + smooth
    z_loss = lse_square_scale * lse * lse
    if reduction == "mean":
        loss = loss / (label_weight * valid).sum()
        z_loss = z_loss / valid.sum()
    loss = loss + z_loss
    if use_token_scaling:
        loss = loss * logits.softmax(-1).gather(1, label)[:, 0].detach()
    loss = loss.where(valid, 0.0)
    return loss if reduction == "none" else loss.sum()


# fmt: off
CASES = {
    "plain": {},
    "ignore_index": {"ignore_index": IGNORED},
    "z": {"lse_square_scale": 1e-2},
    "smoothing": {"label_smoothing": 0.2},
    "softcap": {"softcap": 3.0},
    "accum_dtype": {"accum_dtype": torch.float32},
    "ce_weight": {"ce_weight": True},
    "ce_weight and smoothing": {"ce_weight": True, "label_smoothing": 0.1},
    "token scaling": {"use_token_scaling": True},
    "ce_weight and z": {"ce_weight": True, "lse_square_scale": 1e-2},
    "token scaling and the rest": {"use_token_scaling": True, "ce_weight": True, "lse_square_scale": 1e-2,
                                   "label_smoothing": 0.1},
    "token scaling and softcap": {"use_token_scaling": True, "softcap": 2.0, "ignore_index": IGNORED},
    "all": {"lse_square_scale": 1e-3, "label_smoothing": 0.1, "softcap": 5.0, "ignore_index": IGNORED},
}
# fmt: on
REDUCTIONS = ("mean", "sum", "none")


def prepare(options, bias):
    """Inputs whose labels use the case's ignore_index, and the case's options with a real class weight."""
    inputs = make_inputs(53, 24, 101, bias=bias)
    options = dict(options)
    ignore_index = options.get("ignore_index", -100)
    inputs.target[inputs.target == -100] = ignore_index
    if "ce_weight" in options:
        options["ce_weight"] = torch.rand(101, generator=torch.Generator().manual_seed(1)) + 0.5
    return inputs, options


def check(loss_of, inputs, options, reduction):
    ours, exact = inputs.leaves(), inputs.leaves(torch.float64)
    known = {name: value for name, value in options.items() if name != "accum_dtype"}
    expected = reference(exact.hidden, exact.weight, exact.target, exact.bias, reduction=reduction, **known)
    actual = loss_of(ours)
    assert actual.shape == expected.shape and actual.dtype == torch.float32
    upstream = torch.rand(expected.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64) + 0.5
    grads = torch.autograd.grad(actual, ours.tensors, upstream.float())
    truth = torch.autograd.grad(expected, exact.tensors, upstream)
    for value, right in zip((actual, *grads), (expected, *truth), strict=True):
        assert (value.double() - right).norm() <= 3e-6 * right.norm()


@pytest.mark.parametrize(("case", "reduction"), list(itertools.product(CASES, REDUCTIONS)))
def test_module(case, reduction):
    inputs, options = prepare(CASES[case], bias=True)
    module = liger.LigerFusedLinearCrossEntropyLoss(reduction=reduction, **options)
    check(lambda x: module(x.weight, x.hidden, x.target, x.bias), inputs, options, reduction)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_function_and_functional_by_place(reduction):
    inputs, options = prepare({"label_smoothing": 0.1, "softcap": 4.0, "ce_weight": True}, bias=False)
    places = (None, options["ce_weight"], -100, 0.0, 0.1, reduction, 4.0, False, None, False, False, False)
    function = liger.LigerFusedLinearCrossEntropyFunction.apply
    check(
        lambda x: liger.liger_fused_linear_cross_entropy(x.hidden, x.weight, x.target, *places),
        inputs,
        options,
        reduction,
    )
    check(
        lambda x: liger.liger_fused_linear_cross_entropy(x.hidden, x.weight, x.target, *places, 4),
        inputs,
        options,
        reduction,
    )
    for more in ((), (None, None, 2)):
        results = function(inputs.hidden, inputs.weight, inputs.target, *places, *more)
        assert len(results) == 4 and results[1:] == (None, None, None)
        check(
            lambda x, more=more: function(x.hidden, x.weight, x.target, *places, *more)[0], inputs, options, reduction
        )


RETURNED = {"return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True}


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("case", ("z", "all", "ce_weight and z", "token scaling and the rest"))
def test_returned_values(case, reduction):
    inputs, options = prepare(CASES[case], bias=True)
    inputs.target[::5] = (inputs.hidden @ inputs.weight.T + inputs.bias).argmax(1)[::5]  # some are predicted
    ignore_index = options.get("ignore_index", -100)
    module = liger.LigerFusedLinearCrossEntropyLoss(reduction=reduction, **options, **RETURNED)
    check(lambda x: module(x.weight, x.hidden, x.target, x.bias).loss, inputs, options, reduction)
    output = module(inputs.weight, inputs.hidden, inputs.target, inputs.bias)
    exact = inputs.leaves(torch.float64)

    def total(scale):
        changed = {**options, "lse_square_scale": scale}
        return reference(exact.hidden, exact.weight, exact.target, exact.bias, reduction=reduction, **changed)

    z_loss = total(options["lse_square_scale"]) - total(0.0)
    assert (output.z_loss.double() - z_loss).norm() <= 1e-5 * z_loss.norm() and not output.z_loss.requires_grad
    logits = exact.hidden @ exact.weight.T + exact.bias
    valid = exact.target != ignore_index
    assert torch.equal(output.predicted_tokens, logits.argmax(1).where(valid, -1))
    hits = ((logits.argmax(1) == exact.target) & valid).float()
    assert hits.any() and output.token_accuracy.dtype == torch.float32
    torch.testing.assert_close(output.token_accuracy, hits if reduction == "none" else hits.sum() / valid.sum())


def test_compiled_in_one_graph():
    inputs = make_inputs(9, 8, 11)
    module = liger.LigerFusedLinearCrossEntropyLoss(softcap=2.0)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    tensors = (inputs.weight, inputs.hidden, inputs.target)
    assert torch.allclose(compiled(*tensors), module(*tensors), rtol=1e-6)


def test_only_what_is_asked_for_comes_back():
    inputs = make_inputs(9, 8, 11)
    places = (None, None, -100, 0.1, 0.0, "mean", None)
    assert isinstance(
        liger.liger_fused_linear_cross_entropy(inputs.hidden, inputs.weight, inputs.target, *places), torch.Tensor
    )
    for name in RETURNED:
        output = liger.liger_fused_linear_cross_entropy(
            inputs.hidden, inputs.weight, inputs.target, *places, **{name: True}
        )
        present = {field for field, value in vars(output).items() if value is not None}
        assert present == {"loss", name.removeprefix("return_")}
    function = liger.LigerFusedLinearCrossEntropyFunction.apply
    results = function(inputs.hidden, inputs.weight, inputs.target, *places, True, None, False, False, True)
    assert [value is None for value in results] == [False, False, True, False]


def test_no_valid_token_is_zero():
    inputs = make_inputs(9, 8, 11).leaves()
    inputs.target.fill_(-100)
    for more in ({}, {"use_token_scaling": True}, {**RETURNED, "lse_square_scale": 0.1}):
        output = liger.LigerFusedLinearCrossEntropyLoss(**more)(inputs.weight, inputs.hidden, inputs.target)
        loss = getattr(output, "loss", output)
        assert loss.item() == 0.0
        if "return_z_loss" in more:
            assert output.z_loss == output.token_accuracy == 0 and (output.predicted_tokens == -1).all()
        assert not any(grad.any() for grad in torch.autograd.grad(loss, [inputs.weight, inputs.hidden]))


def test_a_label_out_of_range_is_nan_on_every_path():
    inputs = make_inputs(9, 8, 11)
    inputs.target[2] = 500
    for more in ({}, {"ce_weight": torch.ones(11), "lse_square_scale": 0.1}, {"use_token_scaling": True}):
        loss = liger.liger_fused_linear_cross_entropy(inputs.hidden, inputs.weight, inputs.target, **more)
        assert loss.isnan()


@pytest.mark.parametrize("dtype", (torch.int32, torch.int16, torch.uint8))
def test_narrow_labels_mean_what_wide_ones_do(dtype):
    """uint8 holds 156, which is -100 there, and indexes like a mask."""
    inputs = make_inputs(9, 8, 201)
    inputs.target = torch.tensor([156, 0, 7, 100, 90, 30, 12, 1, 120])
    for more in (
        RETURNED,
        {"ce_weight": torch.rand(201), "lse_square_scale": 0.1},
        {"use_token_scaling": True, "label_smoothing": 0.1},
    ):
        wide, narrow = (
            liger.liger_fused_linear_cross_entropy(inputs.hidden, inputs.weight, target, **more)
            for target in (inputs.target, inputs.target.to(dtype))
        )
        assert torch.equal(getattr(wide, "loss", wide), getattr(narrow, "loss", narrow))
        assert getattr(wide, "token_accuracy", 0) == getattr(narrow, "token_accuracy", 0)


def test_what_is_missing_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="accum_dtype=torch.bfloat16: loongforge accumulates in float32"):
        liger.LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.bfloat16)


def test_bad_input_is_refused():
    inputs = make_inputs(5, 4, 11)
    with pytest.raises(TypeError, match="chunked"):
        liger.LigerFusedLinearCrossEntropyLoss(chunked=True)
    with pytest.raises(ValueError, match="reduction must be one of"):
        liger.liger_fused_linear_cross_entropy(inputs.hidden, inputs.weight, inputs.target, reduction="median")
    with pytest.raises(NotImplementedError, match="ce_impl='cutile': the implementation is chosen by LCE_IMPL"):
        liger.LigerFusedLinearCrossEntropyFunction.apply(
            inputs.hidden, inputs.weight, inputs.target, None,
            None, -100, 0.0, 0.0, "mean", None, False, None, False, False, False, "cutile",
        )  # fmt: skip


LATER = (
    {"softcap": 2.0}, {"reduction": "sum"}, {"ignore_index": 5}, {"label_smoothing": 0.1}, {"lse_square_scale": 1.0},
    {"use_token_scaling": True}, {"ce_weight": torch.arange(11.0)},
)  # fmt: skip


@pytest.mark.parametrize("change", LATER, ids=lambda change: next(iter(change)))
def test_attributes_that_are_set_later_are_in_force(change):
    inputs = make_inputs(9, 8, 11)
    inputs.target = torch.tensor([0, 5, 5, 1, 10, 7, 5, 2, 3])
    loss = liger.LigerFusedLinearCrossEntropyLoss()
    before = loss(inputs.weight, inputs.hidden, inputs.target)
    ((name, value),) = change.items()
    setattr(loss, name, value)
    expected = liger.liger_fused_linear_cross_entropy(inputs.hidden, inputs.weight, inputs.target, **change)
    assert loss(inputs.weight, inputs.hidden, inputs.target) == expected != before
    loss.accum_dtype = torch.float16
    with pytest.raises(NotImplementedError, match="accum_dtype=torch.float16"):
        loss(inputs.weight, inputs.hidden, inputs.target)


def test_too_many_arguments_are_refused():
    inputs = make_inputs(5, 4, 11)
    tensors = (inputs.hidden, inputs.weight, inputs.target, None)
    places = (None, -100, 0.0, 0.0, "mean", None, False, None, False, False, False)
    with pytest.raises(TypeError, match="2 arguments after the 11 options by place, expected chunk_mem_const"):
        liger.liger_fused_linear_cross_entropy(*tensors, *places, 1, 2)
    with pytest.raises(TypeError, match="chunk_mem_const"):
        liger.liger_fused_linear_cross_entropy(*tensors, *places, 1, chunk_mem_const=1)
    with pytest.raises(TypeError, match="4 arguments after .* expected ce_impl, ce_mode, chunk_mem_const"):
        liger.LigerFusedLinearCrossEntropyFunction.apply(*tensors, *places, None, None, 1, 2)
    with pytest.raises(TypeError, match="ignore_index"):
        liger.liger_fused_linear_cross_entropy(*tensors, *places, ignore_index=3)


BAD = {
    "reduction": "avg", "label_smoothing": 1.5, "lse_square_scale": -1.0, "softcap": 0.0, "ignore_index": 1.5,
    "return_z_loss": "no", "use_token_scaling": 1,
}  # fmt: skip


@pytest.mark.parametrize("outputs", ({}, {"return_token_accuracy": True}), ids=("loss", "outputs"))
@pytest.mark.parametrize("name", BAD)
def test_bad_options_are_refused_at_once_on_every_path(name, outputs):
    with pytest.raises((TypeError, ValueError), match=name.replace("lse_square_scale", "z_loss_weight")):
        liger.LigerFusedLinearCrossEntropyLoss(**{**outputs, name: BAD[name]})


@pytest.mark.parametrize("outputs", ({}, {"return_token_accuracy": True}), ids=("loss", "outputs"))
def test_class_weights_have_no_gradient_and_no_say_in_the_dtype(outputs):
    inputs = make_inputs(9, 8, 11).leaves()
    ce_weight = torch.rand(11, dtype=torch.float64, requires_grad=True)
    output = liger.LigerFusedLinearCrossEntropyLoss(ce_weight, **outputs)(inputs.weight, inputs.hidden, inputs.target)
    loss = getattr(output, "loss", output)
    loss.backward()
    assert loss.dtype == torch.float32 and ce_weight.grad is None and inputs.weight.grad is not None


LIGER_ORDER = (
    "ce_weight", "ignore_index", "lse_square_scale", "label_smoothing", "reduction", "softcap", "return_z_loss",
    "accum_dtype", "use_token_scaling", "return_token_accuracy", "return_predicted_tokens",
)  # fmt: skip


def test_signatures_are_ligers():
    def names(function):
        return tuple(name for name in inspect.signature(function).parameters if name != "self")

    assert names(liger.LigerFusedLinearCrossEntropyLoss.__init__) == LIGER_ORDER
    assert names(liger.LigerFusedLinearCrossEntropyLoss.forward) == ("lin_weight", "_input", "target", "bias")
    assert names(liger.liger_fused_linear_cross_entropy) == ("input", "weight", "target", "bias", *LIGER_ORDER)
    module = liger.LigerFusedLinearCrossEntropyLoss(None, 3, softcap=2.0)
    assert (module.ignore_index, module.softcap, module.reduction, module.ce_weight) == (3, 2.0, "mean", None)


@pytest.mark.parametrize("outputs", ({}, {"return_token_accuracy": True}), ids=("loss", "outputs"))
@pytest.mark.parametrize("bad", ([1.0] * 101, torch.ones(100), torch.ones(102), torch.ones(101, dtype=torch.int64)))
def test_bad_class_weights_are_refused_on_every_path(bad, outputs):
    inputs = make_inputs(7, 8, 101)
    loss = liger.LigerFusedLinearCrossEntropyLoss(ce_weight=bad, **outputs)
    with pytest.raises((TypeError, ValueError), match="class_weight must be a"):
        loss(inputs.weight, inputs.hidden, inputs.target)
