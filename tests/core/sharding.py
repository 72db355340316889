"""Inputs cut over the ranks of a group, the dense truth cut likewise, and a count of collectives."""

from __future__ import annotations

import contextlib
from collections import Counter
from unittest import mock

import torch
import torch.distributed as dist

from loongforge import LossOptions, linear_cross_entropy
from tests.core.worlds import World
from tests.helpers import Inputs, loss_and_gradients, oracle, relative

TOKENS, HIDDEN, VOCAB = 24, 16, 132
COLLECTIVES = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_into_tensor": "gather",
    "all_gather_single": "gather",  # its name since torch 2.13, as below
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "broadcast": "broadcast",
}


def shard(world: World, group: str, inputs: Inputs, sequence_parallel: bool) -> Inputs:
    """This rank's rows of weight and bias, and its tokens under sequence parallelism; leaves."""
    _, ranks = world.groups[group]
    size, mine = len(ranks), ranks.index(world.rank)
    leaves = inputs.leaves()
    local = [t.detach().chunk(size)[mine].clone().requires_grad_() for t in leaves.tensors]
    if not sequence_parallel:
        local[0] = leaves.hidden
    return Inputs(local[0], local[1], inputs.target, local[2] if inputs.bias is not None else None)


def sharded_truth(world: World, group: str, inputs: Inputs, truth: list, sequence_parallel: bool) -> list:
    _, ranks = world.groups[group]
    size, mine = len(ranks), ranks.index(world.rank)
    loss, grad_hidden, *grads = truth
    if sequence_parallel:
        grad_hidden = grad_hidden.chunk(size)[mine]
    return [loss, grad_hidden, *(g.chunk(size)[mine] for g in grads)]


def run(world: World, group: str, inputs: Inputs, sequence_parallel=False, class_weight=None, gradient=None, **options):
    """Loss and local gradients of the fused operation over ``group``."""
    return loss_and_gradients(
        lambda *args, **kwargs: linear_cross_entropy(
            *args,
            **kwargs,
            class_weight=class_weight,
            tp_group=world.groups[group][0],
            sequence_parallel=sequence_parallel,
            **options,
        ),
        shard(world, group, inputs, sequence_parallel),
        gradient,
    )


def errors(world, group, inputs, sequence_parallel=False, class_weight=None, gradient=None, **options) -> list[float]:
    """Relative errors against the dense float64 loss: loss, grad_hidden, grad_weight and grad_bias of this rank."""
    oracle_options = {name: value for name, value in options.items() if name != "logits_budget_mb"}
    dense = loss_and_gradients(
        oracle(LossOptions(**oracle_options), class_weight=class_weight), inputs.leaves(torch.float64), gradient
    )
    ours = run(world, group, inputs, sequence_parallel, class_weight, gradient, **options)
    truth = sharded_truth(world, group, inputs, dense, sequence_parallel)
    return [relative(mine, true) for mine, true in zip(ours, truth, strict=True)]


def labels(inputs: Inputs, kind: str, size: int) -> Inputs:
    rows = VOCAB // size
    if kind == "edges":
        edges = [edge for rank in range(size) for edge in (rank * rows, (rank + 1) * rows - 1)]
        inputs.target = torch.tensor(edges * TOKENS)[:TOKENS]
    elif kind == "all on the last rank":
        inputs.target = torch.full((TOKENS,), VOCAB - 1)
    inputs.target[::5] = -100
    return inputs


def sizes(world: World) -> dict[str, int]:
    return {name: len(ranks) for name, (_, ranks) in world.groups.items()}


@contextlib.contextmanager
def counted_collectives():
    counts: Counter = Counter()
    with contextlib.ExitStack() as stack:
        for attribute, name in COLLECTIVES.items():
            original = getattr(dist, attribute, None)
            if original is None:
                continue

            def counting(*args, name=name, original=original, **kwargs):
                operation = kwargs.get("op", dist.ReduceOp.SUM) if name == "all_reduce" else ""
                counts[f"{name} {'MAX' if operation == dist.ReduceOp.MAX else operation and 'SUM'}".strip()] += 1
                return original(*args, **kwargs)

            stack.enter_context(mock.patch.object(dist, attribute, counting))
        yield counts
