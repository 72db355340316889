"""The contract of ``weight.main_grad`` (see also the matrix rows with gradient accumulation fusion)."""

from __future__ import annotations

import pytest
import torch

from loongforge.megatron.main_grad import MainGradSink, main_grad_sink
from tests.megatron.matrix import Row
from tests.megatron.small import batch, build, relative_error, run, upstream

FUSION = Row(accumulation_fusion=True)


@pytest.fixture
def expected() -> torch.Tensor:
    return run(build(linear=False))[1]["output_layer.weight"]


def with_main_grad(dtype: torch.dtype = torch.float32, value: float = 0.0, **config):
    model = build(FUSION, **config)
    for parameter in model.parameters():
        parameter.main_grad = torch.full(parameter.shape, value, dtype=dtype)
        parameter.grad_added_to_main_grad = False
    return model


@pytest.mark.usefixtures("hook")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 6e-3)])
def test_main_grad_is_added_to_in_its_own_dtype(expected, dtype, tolerance):
    model = with_main_grad(dtype, value=0.25)
    weight = model.output_layer.weight
    run(model)
    assert weight.grad_added_to_main_grad is True
    assert weight.grad is not None and weight.grad.shape == weight.shape
    assert weight.main_grad.dtype == dtype
    assert relative_error(weight.main_grad.float(), 0.25 + expected) < tolerance
    model.zero_grad()
    run(model)
    assert relative_error(weight.main_grad.float(), 0.25 + 2 * expected) < 2 * tolerance


@pytest.mark.usefixtures("hook")
def test_main_grad_is_taken_at_forward_and_attached_again_at_backward(expected):
    model = with_main_grad()
    weight = model.output_layer.weight
    first = weight.main_grad
    loss = model(**batch())
    weight.main_grad = torch.full_like(first, torch.nan)
    loss.backward(upstream())
    assert weight.main_grad is first
    assert relative_error(first, expected) < 1e-5


@pytest.mark.usefixtures("hook")
def test_a_frozen_weight_gets_nothing(expected):
    model = with_main_grad()
    weight = model.output_layer.weight.requires_grad_(False)
    run(model)
    assert weight.grad is None and not weight.main_grad.any() and weight.grad_added_to_main_grad is False


@pytest.mark.usefixtures("hook")
def test_evaluation_touches_no_main_grad():
    model = with_main_grad()
    with torch.no_grad():
        model.eval()(**batch())
    assert not model.output_layer.weight.main_grad.any()


@pytest.mark.usefixtures("hook")
def test_without_main_grad_the_gradient_is_autograds(expected):
    model = build(FUSION)
    for name, parameter in model.named_parameters():
        if name != "output_layer.weight":
            parameter.main_grad = torch.zeros_like(parameter)
    assert relative_error(run(model)[1]["output_layer.weight"], expected) < 1e-5


@pytest.mark.usefixtures("hook")
def test_a_sharded_main_grad_is_refused():
    model = with_main_grad()
    model.output_layer.weight.main_grad = torch.zeros(3)
    with pytest.raises(ValueError, match=r"main_grad must have the weight's shape \[512, 32\], got \[3\]"):
        model(**batch())


@pytest.mark.parametrize(
    ("attributes", "zeros"),
    [
        ({"grad_added_to_main_grad": False}, False),
        ({"grad_added_to_main_grad": False, "zero_out_wgrad": True}, True),
        ({}, True),  # nobody would know that the gradient went elsewhere
    ],
)
def test_what_autograd_gets_instead(monkeypatch, attributes, zeros):
    weight = torch.nn.Parameter(torch.randn(5, 3, dtype=torch.bfloat16))
    weight.main_grad = torch.zeros(5, 3)
    for name, value in attributes.items():
        setattr(weight, name, value)
    sink = MainGradSink(weight)
    assert sink.open() == (weight.main_grad, True)
    monkeypatch.setattr(
        torch, "empty_like", lambda tensor, **_: torch.full(tensor.shape, torch.nan, dtype=tensor.dtype)
    )
    stand_in = sink.close()
    assert stand_in.shape == weight.shape and stand_in.dtype == weight.dtype and not stand_in.requires_grad
    assert bool((stand_in == 0).all()) == zeros


def test_no_sink_without_the_fusion():
    layer = torch.nn.Module()
    layer.gradient_accumulation_fusion = False
    weight = torch.nn.Parameter(torch.randn(5, 3))
    weight.main_grad = torch.zeros(5, 3)
    assert main_grad_sink(layer, weight) is None
    layer.gradient_accumulation_fusion = True
    assert isinstance(main_grad_sink(layer, weight), MainGradSink)
    assert main_grad_sink(layer, weight.detach()) is None  # mtp_detach_heads
