"""Compaction, weights per token, float32 logits, adapters and compiled graphs over the ranks of a group."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from loongforge import LossOptions, linear_cross_entropy
from loongforge.kernels.reference import reference_loss
from tests.core.sharding import HIDDEN, TOKENS, VOCAB, counted_collectives, errors, labels, run, shard, sharded_truth
from tests.core.worlds import World, registry
from tests.helpers import loss_and_gradients, make_inputs, oracle, relative, upstream, worst

CHECKS, check = registry()
BOTH_LAYOUTS = (False, True)


@check
def compaction_equals_the_dense_loss(world: World):
    """Each rank holds all tokens, or a slice: the same tokens stay on every rank."""
    for sequence_parallel in BOTH_LAYOUTS:
        for reduction in ("none", "mean", "sum"):
            for compact in (True, TOKENS - 3, TOKENS):
                for budget in (0, "all"):
                    inputs = labels(make_inputs(TOKENS, HIDDEN, VOCAB, torch.float64, bias=True), "mixed", world.size)
                    found = errors(
                        world, "world", inputs, sequence_parallel,
                        reduction=reduction, compact_tokens=compact, logits_budget_mb=budget, label_smoothing=0.1,
                    )  # fmt: skip
                    assert worst(found) < 1e-12, (sequence_parallel, reduction, compact, budget, found)


@check
def a_rank_whose_tokens_are_all_ignored(world: World):
    inputs = make_inputs(TOKENS, HIDDEN, VOCAB, torch.float64, ignored=0.0)
    inputs.target[: TOKENS // world.size] = -100
    inputs.hidden[0] = torch.nan
    for compact in (True, TOKENS):
        loss, grad_hidden, grad_weight = run(world, "world", inputs, True, compact_tokens=compact)
        assert loss.isfinite() and grad_weight.isfinite().all()
        assert grad_hidden.any() == (world.rank > 0)
    inputs.target[:] = -100
    for compact in (True, 4):
        loss, *gradients = run(world, "world", inputs, True, compact_tokens=compact)
        assert not loss.any() and not any(gradient.any() for gradient in gradients)


@check
def a_bound_that_is_too_low_is_nan_on_every_rank(world: World):
    inputs = make_inputs(TOKENS, HIDDEN, VOCAB, ignored=0.0)
    for sequence_parallel in BOTH_LAYOUTS:
        loss, _, grad_weight = run(world, "world", inputs, sequence_parallel, compact_tokens=TOKENS - 1)
        assert loss.isnan() and grad_weight.isnan().all()


@check
def compaction_sends_only_what_it_keeps(world: World):
    """Under sequence parallelism one gather, in forward; grad_hidden of the kept tokens is added up."""
    group = world.groups["world"][0]
    local = shard(world, "world", make_inputs(TOKENS, HIDDEN, VOCAB), True)

    def step():
        linear_cross_entropy(
            local.hidden, local.weight, local.target, tp_group=group, sequence_parallel=True, compact_tokens=True
        ).backward()

    step()  # the first call of a group compares what its ranks were given
    with counted_collectives() as counts:
        step()
    assert counts == {"gather": 2, "all_reduce SUM": 1}, counts


@check
def weights_per_token(world: World):
    inputs = make_inputs(TOKENS, HIDDEN, VOCAB, torch.float64)
    weights = torch.randn(TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    weights[::3] = 0
    double = inputs.leaves()
    loss_T = reference_loss(*double.tensors, inputs.target, LossOptions(reduction="none")) * weights
    for reduction, truth in (("none", loss_T), ("sum", loss_T.sum())):
        gradient = upstream(truth.shape).to(truth)
        dense = [truth.detach(), *torch.autograd.grad(truth, double.tensors, gradient, retain_graph=True)]
        for sequence_parallel in BOTH_LAYOUTS:
            for compact in (False, True):
                ours = run(
                    world, "world", inputs, sequence_parallel,
                    token_weight=weights, reduction=reduction, compact_tokens=compact,
                )  # fmt: skip
                expected = sharded_truth(world, "world", inputs, dense, sequence_parallel)
                assert worst(relative(a, b) for a, b in zip(ours, expected, strict=True)) < 1e-12


@check
def float32_logits(world: World):
    inputs = make_inputs(TOKENS, HIDDEN, VOCAB, torch.bfloat16, spread=3.0)
    dense = loss_and_gradients(oracle(LossOptions()), inputs.leaves(torch.float64))
    for sequence_parallel in BOTH_LAYOUTS:
        for budget in (0, "all"):
            ours = run(world, "world", inputs, sequence_parallel, fp32_logits=True, logits_budget_mb=budget)
            expected = sharded_truth(world, "world", inputs, dense, sequence_parallel)
            assert relative(ours[0], expected[0]) < 1e-6
            assert worst(relative(a, b) for a, b in zip(ours[1:], expected[1:], strict=True)) < 1e-2


@check
def low_rank_adapter(world: World):
    """Rows of ``up`` are sharded like the weight's; the gradient of ``low_rank`` is complete on every rank."""
    inputs = make_inputs(TOKENS, HIDDEN, VOCAB, torch.float64)
    generator = torch.Generator().manual_seed(3)
    low = torch.randn(TOKENS, 3, dtype=torch.float64, generator=generator).requires_grad_()
    up = torch.randn(VOCAB, 3, dtype=torch.float64, generator=generator).requires_grad_()
    hidden = inputs.hidden.clone().requires_grad_()
    truth = reference_loss(
        torch.cat([hidden, low], 1), torch.cat([inputs.weight, up], 1), inputs.target, LossOptions()
    )  # fmt: skip
    dense = torch.autograd.grad(truth, (hidden, low, up))
    for sequence_parallel in BOTH_LAYOUTS:
        local = shard(world, "world", inputs, sequence_parallel)
        mine = low.chunk(world.size)[world.rank] if sequence_parallel else low
        mine, rows = (t.detach().clone().requires_grad_() for t in (mine, up.chunk(world.size)[world.rank]))
        for compact in (False, True):
            loss = linear_cross_entropy(
                local.hidden, local.weight.detach(), local.target, adapter=(mine, rows), compact_tokens=compact,
                tp_group=world.groups["world"][0], sequence_parallel=sequence_parallel,
            )  # fmt: skip
            found = torch.autograd.grad(loss, (local.hidden, mine, rows))
            expected = list(dense)
            if sequence_parallel:
                expected[:2] = [gradient.chunk(world.size)[world.rank] for gradient in dense[:2]]
            expected[2] = dense[2].chunk(world.size)[world.rank]
            assert relative(loss, truth) < 1e-12
            assert worst(relative(a, b) for a, b in zip(found, expected, strict=True)) < 1e-12


@check
def compiled_graphs(world: World):
    """The process group is a constant of the graph; the collectives run inside the operators."""
    group = world.groups["world"][0]
    inputs = make_inputs(TOKENS, HIDDEN, VOCAB, torch.float64)
    dense = loss_and_gradients(oracle(LossOptions()), inputs.leaves())
    for sequence_parallel in BOTH_LAYOUTS:
        for budget in (0, "all"):

            def loss_of(hidden, weight, target, sequence_parallel=sequence_parallel, budget=budget):
                return linear_cross_entropy(
                    hidden, weight, target, tp_group=group, sequence_parallel=sequence_parallel, logits_budget_mb=budget
                )

            compiled = torch.compile(loss_of, backend="aot_eager", fullgraph=True)
            ours = loss_and_gradients(compiled, shard(world, "world", inputs, sequence_parallel))
            expected = sharded_truth(world, "world", inputs, dense, sequence_parallel)
            assert worst(relative(a, b) for a, b in zip(ours, expected, strict=True)) < 1e-12


@check
def a_graph_is_of_one_group(world: World):
    """The same code over another group is another graph, also where the first group is gone."""
    inputs = make_inputs(TOKENS, HIDDEN, VOCAB, torch.float64)

    def loss_of(hidden, weight, target, group):
        return linear_cross_entropy(hidden, weight, target, tp_group=group)

    compiled = torch.compile(loss_of, backend="aot_eager", fullgraph=True)
    for name in ("world", "alone", "world", None, None):
        group = dist.new_group() if name is None else world.groups[name][0]
        rows = inputs.weight if name == "alone" else inputs.weight.chunk(world.size)[world.rank]
        loss = compiled(inputs.hidden, rows, inputs.target, group)
        assert relative(loss, oracle(LossOptions())(*inputs.tensors, inputs.target)) < 1e-12, name
        # The same shapes, so that nothing but the group tells the two graphs apart.
        if name == "alone":
            rows = inputs.weight.chunk(world.size)[world.rank]
            mine = (inputs.target % rows.shape[0]).where(inputs.target >= 0, -100)
            dense = oracle(LossOptions())(inputs.hidden, rows, mine)
            assert relative(compiled(inputs.hidden, rows, mine, group), dense) < 1e-12
        if name is None:
            dist.destroy_process_group(group)


@check
def a_graph_compares_ranks_and_refuses_shards(world: World):
    """As eager calls do: at the first call of a group, or at every one, and what one rank refuses reaches the other."""
    odd = world.rank == 1
    inputs = make_inputs(TOKENS, HIDDEN, VOCAB)

    def loss_of(weight, group):
        return linear_cross_entropy(inputs.hidden, weight, inputs.target.clamp(max=19), tp_group=group)

    compiled = torch.compile(loss_of, backend="aot_eager", fullgraph=True)
    group, weight = dist.new_group(), torch.randn(20, HIDDEN)
    with pytest.raises(ValueError, match=rf"weight must be equal .* rank 0 has \[20, {HIDDEN}\].*, rank 1 has \[21, "):
        compiled(torch.randn(20 + odd, HIDDEN), group)
    assert compiled(weight, group).isfinite()
    for name in ("LCE_CHECK_RANKS", "LCE_CHECK_LABELS"):
        if odd:
            os.environ[name] = "yes"
        with pytest.raises(ValueError, match=rf"{'^' if odd else 'rank 1: ValueError: '}{name} must be 0 or 1"):
            compiled(weight, dist.new_group())
        os.environ.pop(name, None)
    os.environ["LCE_CHECK_RANKS"] = "1"
    weight = weight.clone()
    if odd:
        weight.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=rf"{'^' if odd else 'rank 1: ValueError: '}weight .* has no storage"):
        compiled(weight, group)


@check
def compaction_in_a_graph(world: World):
    """With all tokens on every rank; the gather of slices has to stay outside of graphs."""
    group = world.groups["world"][0]
    inputs = make_inputs(TOKENS, HIDDEN, VOCAB, torch.float64)
    dense = loss_and_gradients(oracle(LossOptions()), inputs.leaves())

    def loss_of(hidden, weight, target, sequence_parallel=False):
        return linear_cross_entropy(
            hidden, weight, target, tp_group=group, sequence_parallel=sequence_parallel, compact_tokens=TOKENS
        )

    compiled = torch.compile(loss_of, backend="aot_eager", fullgraph=True)
    ours = loss_and_gradients(compiled, shard(world, "world", inputs, False))
    expected = sharded_truth(world, "world", inputs, dense, False)
    assert worst(relative(a, b) for a, b in zip(ours, expected, strict=True)) < 1e-12
    local = shard(world, "world", inputs, True)
    with pytest.raises(Exception, match="compact_tokens and sequence_parallel do not go into one graph"):
        compiled(*local.tensors, local.target, sequence_parallel=True)


@check
def the_bound_is_checked_on_every_rank(world: World):
    os.environ["LCE_CHECK_LABELS"] = "1"
    with pytest.raises(ValueError, match=f"{TOKENS} tokens carry a loss, more than compact_tokens=5"):
        run(world, "world", make_inputs(TOKENS, HIDDEN, VOCAB, ignored=0.0), compact_tokens=5)
