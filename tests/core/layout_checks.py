"""Tensor-parallel groups as parts of a larger world, beside data, context and pipeline parallelism: 8 processes."""

from __future__ import annotations

import torch
import torch.distributed as dist

from loongforge import LossOptions, linear_cross_entropy
from tests.core.sharding import counted_collectives, errors, shard, sizes
from tests.core.worlds import registry
from tests.helpers import Inputs, loss_and_gradients, make_inputs, oracle, relative, worst

CHECKS, check = registry()
TOKENS, HIDDEN, VOCAB = 24, 16, 136


def inputs(seed: int = 0, tokens: int = TOKENS) -> Inputs:
    return make_inputs(tokens, HIDDEN, VOCAB, torch.float64, seed=seed, bias=True)


@check
def tp_1_2_4_and_8_next_to_each_other_and_strided(world):
    assert sorted(set(sizes(world).values())) == [1, 2, 4, 8]
    for group in world.groups:
        for sequence_parallel in (False, True):
            for budget in (0, "all"):
                found = errors(world, group, inputs(), sequence_parallel, reduction="none", logits_budget_mb=budget)
                assert worst(found) < 1e-12, (group, sequence_parallel, budget, found)


def step_with_tokens_split(world, tp: str, others: str, mine: torch.Tensor, whole: Inputs, sequence_parallel: bool):
    """This rank's tokens, the mean over everyone's, and weight gradients added over ``others``; against the dense."""
    part = Inputs(whole.hidden[mine], whole.weight, whole.target[mine], whole.bias)
    count = (part.target != -100).sum()
    dist.all_reduce(count, group=world.groups[others][0])
    local = shard(world, tp, part, sequence_parallel)
    loss, grad_hidden, *grads = loss_and_gradients(
        lambda *args, **bias: linear_cross_entropy(
            *args, **bias, normalizer=count, tp_group=world.groups[tp][0], sequence_parallel=sequence_parallel
        ),
        local,
        torch.tensor(1.0, dtype=torch.float64),
    )
    for tensor in (loss, *grads):
        dist.all_reduce(tensor, group=world.groups[others][0])
    dense = loss_and_gradients(oracle(LossOptions()), whole.leaves(), torch.tensor(1.0, dtype=torch.float64))
    ranks = world.groups[tp][1]
    size, place = len(ranks), ranks.index(world.rank)
    true_hidden = dense[1][mine]
    if sequence_parallel:
        true_hidden = true_hidden.chunk(size)[place]
    truth = [dense[0], true_hidden, *(whole_grad.chunk(size)[place] for whole_grad in dense[2:])]
    found = [relative(*pair) for pair in zip((loss, grad_hidden, *grads), truth, strict=True)]
    assert worst(found) < 1e-12, (tp, others, sequence_parallel, found)


@check
def data_parallel_times_tensor_parallel(world):
    for tp, others in (("pairs", "fours strided"), ("fours", "pairs across")):
        size, place = len(world.groups[others][1]), world.groups[others][1].index(world.rank)
        mine = torch.arange(size * TOKENS).chunk(size)[place]
        for sequence_parallel in (False, True):
            step_with_tokens_split(world, tp, others, mine, inputs(tokens=size * TOKENS), sequence_parallel)


@check
def context_parallel_times_tensor_parallel(world):
    """Each rank has two pieces of the sequence, the n-th and the n-th from the end, as Megatron cuts it."""
    tp, cp = "pairs", "fours strided"
    size, place = len(world.groups[cp][1]), world.groups[cp][1].index(world.rank)
    pieces = torch.arange(size * TOKENS).chunk(2 * size)
    mine = torch.cat([pieces[place], pieces[-1 - place]])
    for sequence_parallel in (False, True):
        step_with_tokens_split(world, tp, cp, mine, inputs(tokens=size * TOKENS), sequence_parallel)


@check
def only_the_last_pipeline_stage_has_a_loss(world):
    """Nothing reaches beyond the tensor-parallel group: the first stage does not take part."""
    if world.rank >= 4:
        for sequence_parallel in (False, True):
            with counted_collectives() as counts:
                assert worst(errors(world, "pairs", inputs(seed=world.rank // 2), sequence_parallel)) < 1e-12
            assert counts["gather"] + counts["all_reduce SUM"] + counts["reduce_scatter"] in (2, 4), counts
    dist.barrier()
