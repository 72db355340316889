"""Weights that FSDP2 and tensor-parallel plans shard, over gloo (run by ``test_sharded.py``)."""

from __future__ import annotations

import copy
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional

from loongforge import LinearCrossEntropy, LossOptions, linear_cross_entropy
from loongforge.kernels.reference import reference_loss
from tests.core.worlds import registry
from tests.helpers import loss_and_gradients, make_inputs, oracle, relative, upstream, worst

CHECKS, check = registry()
TOKENS, HIDDEN, VOCAB = 12, 16, 52


class Model(nn.Module):
    """Embedding, one layer, and an output layer whose weight the loss reads, or a layer that computes the loss."""

    def __init__(self, fused: bool, tied: bool = False) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB)
        if tied:
            self.head.weight = self.embedding.weight
        self.loss, self.fused = LinearCrossEntropy(), fused

    def forward(self, tokens, labels):
        hidden = torch.tanh(self.body(self.embedding(tokens)))
        if not self.fused:
            return functional.cross_entropy(self.head(hidden).float(), labels)
        return self.loss(hidden, self.head.weight, labels, bias=self.head.bias)


def batch(rank: int, step: int):
    generator = torch.Generator().manual_seed(10 * rank + step)
    return torch.randint(0, VOCAB, (2, TOKENS), generator=generator).unbind()


def unsharded_gradients(model: Model, size: int, step: int) -> dict[str, torch.Tensor]:
    """Mean over the ranks' batches, unfused."""
    model = copy.deepcopy(model).double()
    model.fused = False
    for rank in range(size):
        (model(*batch(rank, step)) / size).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def fsdp_error(world, model: Model, sharded: Model, step: int) -> float:
    truth = unsharded_gradients(model, world.size, step)
    sharded.zero_grad()
    sharded(*batch(world.rank, step)).backward()
    found = {name: parameter.grad.full_tensor() for name, parameter in sharded.named_parameters()}
    return worst(relative(found[name], truth[name]) for name in truth)


@check
def fsdp2_around_the_model(world):
    """The loss is inside the root's forward: two steps, freed or kept between forward and backward."""
    for tied in (False, True):
        for options in ({}, {"reshard_after_forward": True}, {"reshard_after_forward": False}):
            for budget in (0, "all"):
                torch.manual_seed(0)
                model = Model(fused=True, tied=tied)
                model.loss = LinearCrossEntropy(logits_budget_mb=budget)
                sharded = fully_shard(copy.deepcopy(model), **options)
                for step in range(2):
                    assert fsdp_error(world, model, sharded, step) < 1e-5, (tied, options, budget, step)


@check
def fsdp2_with_mixed_precision(world):
    torch.manual_seed(0)
    model = Model(fused=True)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    errors = []
    for fused in (True, False):
        sharded = fully_shard(copy.deepcopy(model), mp_policy=policy)
        sharded.fused = fused
        errors.append(fsdp_error(world, model, sharded, 0))
    assert errors[0] < 2 * errors[1] + 1e-4, errors


class Head(nn.Linear):
    """An output layer that computes the loss in its own forward."""

    def forward(self, hidden, labels):
        return linear_cross_entropy(hidden, self.weight, labels, bias=self.bias)


class ModelWithHead(Model):
    def __init__(self) -> None:
        super().__init__(fused=True)
        self.head = Head(HIDDEN, VOCAB)

    def forward(self, tokens, labels):
        hidden = torch.tanh(self.body(self.embedding(tokens)))
        if not self.fused:
            return functional.cross_entropy(functional.linear(hidden, self.head.weight, self.head.bias), labels)
        return self.head(hidden, labels)


@check
def fsdp2_around_the_output_layer_itself(world):
    """Right where the layer computes the loss; refused by name where someone else reads its weight."""
    torch.manual_seed(0)
    model = ModelWithHead()
    sharded = copy.deepcopy(model)
    fully_shard(sharded.head)
    fully_shard(sharded)
    assert fsdp_error(world, model, sharded, 0) < 1e-5
    reading = Model(fused=True)
    fully_shard(reading.head)
    fully_shard(reading)
    with pytest.raises(TypeError, match=r"weight is a DTensor .*FSDP2.*inside the forward of the module that owns it"):
        reading(*batch(world.rank, 0))


@check
def fsdp2_outside_of_any_forward(world):
    sharded = fully_shard(Model(fused=True))
    tokens, labels = batch(world.rank, 0)
    hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    for _ in range(2):
        with pytest.raises(TypeError, match=r"weight is a DTensor with placements \(Shard\(dim=0\),\)"):
            linear_cross_entropy(hidden, sharded.head.weight, labels)
        sharded(tokens, labels).backward()


@check
def a_tensor_parallel_plan(world):
    """weight Shard(0), hidden Replicate or Shard(0): the values of torch's own loss_parallel, and of float64."""
    mesh = init_device_mesh("cpu", (world.size,))
    inputs = make_inputs(TOKENS, HIDDEN, 2 * VOCAB, torch.float64, bias=True)
    truth = loss_and_gradients(oracle(LossOptions()), inputs.leaves())
    for placement in (Replicate(), Shard(0)):
        hidden = distribute_tensor(inputs.hidden, mesh, [placement]).requires_grad_()
        weight, bias = (distribute_tensor(t, mesh, [Shard(0)]).requires_grad_() for t in (inputs.weight, inputs.bias))
        for target in (inputs.target, distribute_tensor(inputs.target, mesh, [Replicate()])):
            hidden.grad = weight.grad = bias.grad = None
            loss = linear_cross_entropy(hidden, weight, target, bias=bias)
            loss.backward(upstream(()))
            assert hidden.grad.placements == (placement,) and weight.grad.placements == (Shard(0),)
            found = [loss.detach(), *(t.grad.full_tensor() for t in (hidden, weight, bias))]
            assert worst(relative(a, b) for a, b in zip(found, truth, strict=True)) < 1e-12, placement
    inputs.target.clamp_(min=0)
    with loss_parallel():
        theirs = functional.cross_entropy(
            distribute_tensor(inputs.hidden, mesh, [Replicate()])
            @ distribute_tensor(inputs.weight, mesh, [Shard(0)]).t(),
            inputs.target,
        )
    replicated = distribute_tensor(inputs.hidden, mesh, [Replicate()])
    ours = linear_cross_entropy(replicated, distribute_tensor(inputs.weight, mesh, [Shard(0)]), inputs.target)
    assert relative(ours, theirs.to_local()) < 1e-12


@check
def what_one_rank_of_a_plan_refuses_reaches_the_others(world):
    """Before its group is known from the mesh, and after."""
    os.environ["LCE_CHECK_RANKS"] = "1"
    odd, mesh = world.rank == 1, init_device_mesh("cpu", (world.size,))
    whole = distribute_tensor(torch.randn(TOKENS, HIDDEN), mesh, [Replicate()])
    rows = distribute_tensor(torch.randn(VOCAB, HIDDEN), mesh, [Shard(0)])
    for bad in ({"label_smoothing": 1.5}, {"normalizer": "two"}):
        with pytest.raises((ValueError, TypeError), match="must be" if odd else f"rank 1: .*{next(iter(bad))} must be"):
            linear_cross_entropy(whole, rows, torch.zeros(TOKENS).long(), **(bad if odd else {}))


class ParallelHead(nn.Module):
    """An output layer of a tensor-parallel plan, with its loss."""

    def __init__(self, weight: DTensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, hidden, labels):
        hidden = DTensor.from_local(hidden, self.weight.device_mesh, [Replicate()])
        return linear_cross_entropy(hidden, self.weight, labels)


@check
def fsdp2_times_tensor_parallel(world):
    """Rows over one dimension of the mesh, and each rank's rows over the other, where every rank has other tokens."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    batches = [make_inputs(TOKENS, HIDDEN, 2 * VOCAB, torch.float64, seed=replica) for replica in range(2)]
    weight, mine = batches[0].weight, batches[mesh.get_local_rank("dp")]
    head = ParallelHead(distribute_tensor(weight, mesh["tp"], [Shard(0)]))
    fully_shard(head, mesh=mesh["dp"])
    hidden = mine.hidden.clone().requires_grad_()
    loss = head(hidden, mine.target)
    loss.backward()
    truth = torch.zeros_like(weight)
    for one in batches:
        leaf = weight.clone().requires_grad_()
        (reference_loss(one.hidden, leaf, one.target, LossOptions()) / 2).backward()
        truth += leaf.grad
    assert relative(head.weight.grad.full_tensor(), truth) < 1e-12
    assert relative(loss, reference_loss(mine.hidden, weight, mine.target, LossOptions())) < 1e-12
    with pytest.raises(TypeError, match="weight is a DTensor"):
        linear_cross_entropy(mine.hidden, head.weight, mine.target)


@check
def placements_that_are_refused(world):
    mesh = init_device_mesh("cpu", (world.size,))
    hidden, weight, target = torch.randn(TOKENS, HIDDEN), torch.randn(VOCAB, HIDDEN), torch.zeros(TOKENS).long()
    rows = distribute_tensor(weight, mesh, [Shard(0)])
    whole = distribute_tensor(hidden, mesh, [Replicate()])
    cases = [
        (distribute_tensor(hidden, mesh, [Shard(1)]), rows, target, r"hidden is a DTensor .*Shard\(dim=1\).*redistrib"),
        (DTensor.from_local(hidden, mesh, [Partial()]), rows, target, "hidden is a DTensor .*Partial"),
        (whole, distribute_tensor(weight, mesh, [Shard(1)]), target, r"weight is a DTensor .*Shard\(dim=1\)"),
        (whole, distribute_tensor(weight, mesh, [Replicate()]), target, "weight is a DTensor .*Replicate"),
        (whole, rows, distribute_tensor(target, mesh, [Shard(0)]), "target is a DTensor .*Shard"),
        (whole, distribute_tensor(weight[:-1], mesh, [Shard(0)]), target, "must split evenly along dim 0 over 4 ranks"),
    ]
    for one_hidden, one_weight, one_target, pattern in cases:
        with pytest.raises(ValueError, match=pattern):
            linear_cross_entropy(one_hidden, one_weight, one_target)
    with pytest.raises(TypeError, match=r"weight is a DTensor .*not both.*tp_group=mesh.get_group"):
        linear_cross_entropy(hidden, rows, target)
    with pytest.raises(TypeError, match="hidden is a DTensor .*not both"):
        linear_cross_entropy(whole, weight, target)
    for name, size in (("normalizer", 1), ("class_weight", VOCAB), ("token_weight", TOKENS)):
        given = distribute_tensor(torch.ones(size), mesh, [Replicate()])
        with pytest.raises(TypeError, match=f"{name} is a DTensor with placements .*Replicate"):
            linear_cross_entropy(whole, rows, target, **{name: given})
    with pytest.raises(ValueError, match="another group than the mesh's"):
        linear_cross_entropy(whole, rows, target, tp_group=dist.new_group())
    assert linear_cross_entropy(hidden, rows.to_local(), target, tp_group=mesh.get_group()).isfinite()
