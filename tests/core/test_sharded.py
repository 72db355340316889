"""Weights that something else shards: right, or refused by name; never a shard read as if it were the whole."""

from __future__ import annotations

from enum import Enum
from functools import cache

import pytest
import torch
from torch import nn

from loongforge import LossOptions, linear_cross_entropy
from tests.core import sharded_checks
from tests.core.worlds import run_world
from tests.helpers import loss_and_gradients, make_inputs, oracle, relative, worst

results = cache(run_world)


@pytest.mark.parametrize("check", sharded_checks.CHECKS)
def test_world(check):
    failures = results(4, sharded_checks.__name__)[check]
    assert not failures, failures


class Status(Enum):
    """The states of deepspeed.runtime.zero.partition_parameters.ZeroParamStatus."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class Zero3:
    """What DeepSpeed does to a parameter: its data are taken away between uses and put back."""

    def __init__(self, whole: torch.Tensor) -> None:
        self.whole, self.weight = whole, nn.Parameter(whole.clone())
        self.weight.ds_id, self.weight.ds_shape = 7, whole.shape
        self.release()

    def gather(self) -> None:
        self.weight.data, self.weight.ds_status = self.whole.clone(), Status.AVAILABLE

    def release(self) -> None:
        self.weight.data, self.weight.ds_status = torch.empty(0, dtype=self.whole.dtype), Status.NOT_AVAILABLE


@pytest.fixture
def inputs():
    return make_inputs(dtype=torch.float64)


def test_zero3_without_its_gather_is_refused(inputs):
    zero3 = Zero3(inputs.weight)
    match = (
        rf"weight is a DeepSpeed ZeRO-3 parameter of shape \[{len(inputs.weight)}, .*NOT_AVAILABLE.*GatheredParameters"
    )
    with pytest.raises(ValueError, match=match):
        linear_cross_entropy(inputs.hidden, zero3.weight, inputs.target)
    zero3.gather()
    zero3.weight.ds_status = Status.INFLIGHT
    with pytest.raises(ValueError, match="INFLIGHT"):
        linear_cross_entropy(inputs.hidden, zero3.weight, inputs.target)


@pytest.mark.parametrize("budget", (0, "all"))
def test_zero3_gathered_for_forward_and_backward(inputs, budget):
    truth = loss_and_gradients(oracle(LossOptions(reduction="sum")), inputs.leaves(), torch.tensor(1.0))
    zero3, hidden = Zero3(inputs.weight), inputs.hidden.clone().requires_grad_()
    zero3.gather()
    loss = linear_cross_entropy(hidden, zero3.weight, inputs.target, reduction="none", logits_budget_mb=budget).sum()
    zero3.release()
    with pytest.raises(RuntimeError, match="weight had shape .* in forward and was released before backward.*ZeRO-3"):
        torch.autograd.grad(loss, [hidden, zero3.weight], retain_graph=True)
    zero3.gather()
    grads = torch.autograd.grad(loss, [hidden, zero3.weight])
    assert worst(relative(a, b) for a, b in zip((loss.detach(), *grads), truth, strict=True)) < 1e-12


@pytest.mark.parametrize("budget", (0, "all"))
def test_released_storage_is_refused_in_both_directions(inputs, budget):
    """FSDP and Megatron-FSDP keep the tensor and resize its storage to nothing."""
    weight = nn.Parameter(inputs.weight.clone())
    loss = linear_cross_entropy(inputs.hidden, weight, inputs.target, reduction="none", logits_budget_mb=budget)
    weight.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="weight .* has no storage: whoever shards it .* released it"):
        linear_cross_entropy(inputs.hidden, weight, inputs.target)
    with pytest.raises(RuntimeError, match="weight had shape .* 0 bytes"):
        loss.sum().backward()


@pytest.mark.parametrize("name", ("low_rank", "up", "token_weight", "class_weight", "bias"))
def test_whatever_was_released_is_refused(inputs, name):
    tokens, rows = inputs.hidden.shape[0], inputs.weight.shape[0]
    tensors = {
        "low_rank": torch.ones(tokens, 2), "up": torch.ones(rows, 2), "token_weight": torch.ones(tokens),
        "class_weight": torch.ones(rows), "bias": torch.ones(rows),
    }  # fmt: skip
    tensors = {key: tensor.double() for key, tensor in tensors.items()}
    tensors[name].untyped_storage().resize_(0)
    adapter = tensors.pop("low_rank"), tensors.pop("up")
    shown = {"low_rank": r"adapter\[0\]", "up": r"adapter\[1\]"}.get(name, name)
    with pytest.raises(ValueError, match=f"{shown} .* has no storage: whoever shards it .* released it"):
        linear_cross_entropy(inputs.hidden.detach(), inputs.weight.detach(), inputs.target, adapter=adapter, **tensors)
