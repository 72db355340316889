"""What holds in a world of processes: values, gradients, collectives and refusals (run by ``test_parallel.py``)."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from loongforge import LossOptions, linear_cross_entropy, parallel
from loongforge.kernels.generic import GenericRowKernels
from loongforge.plan import plan_chunks
from tests.core.sharding import (
    HIDDEN,
    TOKENS,
    VOCAB,
    counted_collectives,
    errors,
    labels,
    run,
    shard,
    sharded_truth,
    sizes,
)
from tests.core.worlds import registry
from tests.helpers import eager, loss_and_gradients, make_inputs, oracle, record_allocations, relative, upstream, worst

CHECKS, check = registry()


@check
def dense_parity_in_every_group(world):
    for group, size in sizes(world).items():
        for sequence_parallel in (False, True):
            for kind in ("mixed", "edges", "all on the last rank"):
                for reduction in ("none", "mean"):
                    inputs = make_inputs(TOKENS, HIDDEN, VOCAB, torch.float64, bias=True, spread=1.5)
                    found = errors(world, group, labels(inputs, kind, size), sequence_parallel, reduction=reduction)
                    assert worst(found) < 1e-12, (group, sequence_parallel, kind, reduction, found)


@check
def every_option_alone_and_together(world):
    class_weight = torch.linspace(0.5, 1.5, VOCAB, dtype=torch.float64)
    option_sets = [
        {"label_smoothing": 0.1},
        {"label_smoothing": 0.1, "label_smoothing_formula": "megatron"},
        {"z_loss_weight": 0.01},
        {"softcap": 2.0},
        {"logit_scale": -0.3},
        {"ignore_index": 7},
        {"class_weight": class_weight},
        {"class_weight": class_weight, "label_smoothing": 0.2, "z_loss_weight": 0.01, "softcap": 3.0},
    ]
    for options in option_sets:
        for sequence_parallel in (False, True):
            inputs = make_inputs(TOKENS, HIDDEN, VOCAB, torch.float64, bias=True, ignored=0.0)
            inputs.target[::5] = options.get("ignore_index", -100)
            for reduction in ("mean", "none"):
                found = errors(world, "world", inputs, sequence_parallel, reduction=reduction, **options)
                assert worst(found) < 1e-12, (options, sequence_parallel, reduction, found)


@check
def padded_vocabulary_with_ranks_of_padding_only(world):
    """``vocab_size`` below the first row of the last ranks: they hold no class at all and still take part."""
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN, which a rank without work must not return
    try:
        padded_vocabulary(world)
    finally:
        torch.use_deterministic_algorithms(False)


def padded_vocabulary(world):
    rows = VOCAB // world.size
    for vocab_size in (VOCAB - 1, rows + 1, VOCAB // 2 + 3):
        for options in ({}, {"label_smoothing": 0.1, "label_smoothing_formula": "megatron"}):
            inputs = make_inputs(TOKENS, HIDDEN, VOCAB, torch.float64, bias=True, ignored=0.0)
            inputs.target.remainder_(vocab_size)
            inputs.target[3] = -100
            inputs.weight[vocab_size:] = 30.0
            for budget in (0, "all"):
                for sequence_parallel in (False, True):
                    found = errors(
                        world,
                        "world",
                        inputs,
                        sequence_parallel,
                        vocab_size=vocab_size,
                        logits_budget_mb=budget,
                        **options,
                    )
                    assert worst(found) < 1e-12, (vocab_size, options, budget, found)


@check
def low_precision_is_no_worse_than_torch(world):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for sequence_parallel in (False, True):
            inputs = labels(make_inputs(TOKENS, HIDDEN, VOCAB, dtype), "mixed", world.size)
            baseline = loss_and_gradients(eager(LossOptions()), inputs.leaves())
            truth = loss_and_gradients(oracle(LossOptions()), inputs.leaves(torch.float64))
            found = world.largest(worst(errors(world, "world", inputs, sequence_parallel)))
            bar = 2 * worst(relative(a, b) for a, b in zip(baseline, truth, strict=True)) + 1e-6
            # Each rank rounds its share of grad_hidden once before the sum.
            assert found <= bar * (1 if dtype == torch.float32 else world.size**0.5), (dtype, found, bar)


@check
def float16_loss_scale(world):
    inputs = make_inputs(4096, 8, VOCAB, torch.float16, ignored=0.1)
    scale = torch.tensor(65536.0, dtype=torch.float64)
    assert worst(errors(world, "world", inputs, gradient=scale)) < 4e-3


@check
def hidden_of_sequence_batch_and_width(world):
    """[S / tp, B, H] with labels [S, B], as Megatron has them."""
    inputs = make_inputs(TOKENS, HIDDEN, VOCAB, torch.float64)
    dense = loss_and_gradients(oracle(LossOptions(reduction="none")), inputs.leaves())
    sequence, batch = TOKENS // 3, 3
    local = shard(world, "world", inputs, sequence_parallel=True)
    hidden = local.hidden.detach().view(sequence // world.size, batch, HIDDEN).requires_grad_()
    target = inputs.target.view(sequence, batch)
    loss = linear_cross_entropy(
        hidden,
        local.weight,
        target,
        reduction="none",
        tp_group=world.groups["world"][0],
        sequence_parallel=True,
    )
    assert loss.shape == (sequence, batch)
    loss.backward(upstream(TOKENS).view(sequence, batch))
    truth = sharded_truth(world, "world", inputs, dense, sequence_parallel=True)
    assert relative(loss.flatten(), truth[0]) < 1e-12 and hidden.grad.shape == hidden.shape
    assert relative(hidden.grad.reshape(-1, HIDDEN), truth[1]) < 1e-12
    assert relative(local.weight.grad, truth[2]) < 1e-12


@check
def loss_has_the_same_bits_on_every_rank(world):
    for dtype in (torch.float32, torch.bfloat16):
        inputs = make_inputs(257, HIDDEN, VOCAB, dtype)
        for options in ({}, {"label_smoothing": 0.1, "z_loss_weight": 0.01}):
            loss, grad_hidden, *_ = run(world, "world", inputs, reduction="none", **options)
            for tensor in (loss, grad_hidden):
                first = tensor.clone()
                dist.broadcast(first, 0)
                assert torch.equal(first, tensor)


@check
def number_and_kind_of_collectives(world):
    """One exchange of packed statistics in forward; nothing depends on chunks, options or the budget."""
    os.environ["LCE_FWD_VOCAB_SPLIT_SIZE"] = os.environ["LCE_BWD_VOCAB_SPLIT_SIZE"] = "7"
    group = world.groups["world"][0]
    scatter = "all_reduce SUM" if parallel._lacks_reduce_scatter(group, torch.device("cpu")) else "reduce_scatter"
    expected = {
        False: ({"gather": 1}, {"all_reduce SUM": 1}),
        True: ({"gather": 2}, {"gather": 1, scatter: 1}),
    }
    for sequence_parallel, (in_forward, in_backward) in expected.items():
        for options in ({}, {"label_smoothing": 0.1, "z_loss_weight": 0.1}, {"logits_budget_mb": "all"}):
            local = shard(world, "world", make_inputs(TOKENS, HIDDEN, VOCAB), sequence_parallel)
            with counted_collectives() as counts:
                loss = linear_cross_entropy(
                    local.hidden,
                    local.weight,
                    local.target,
                    tp_group=group,
                    sequence_parallel=sequence_parallel,
                    **options,
                )
                assert counts == in_forward, counts
                counts.clear()
                loss.backward()
                assert counts == in_backward, counts
    # A frozen hidden has no gradient to reduce, and a group of one rank has nothing to say.
    local = shard(world, "world", make_inputs(TOKENS, HIDDEN, VOCAB), False)
    loss = linear_cross_entropy(local.hidden.detach(), local.weight, local.target, tp_group=group)
    with counted_collectives() as counts:
        loss.backward()
        run(world, "alone", make_inputs(TOKENS, HIDDEN, VOCAB), sequence_parallel=True)
        assert not counts, counts


@check
def grad_hidden_travels_in_the_models_dtype_unless_asked(world):
    """In float32 there is one rounding, after the sum; the collectives are the same."""
    inputs = make_inputs(TOKENS, HIDDEN, VOCAB, torch.bfloat16)
    exact = loss_and_gradients(oracle(LossOptions()), inputs.leaves(torch.float64))
    for sequence_parallel in (False, True):
        truth = sharded_truth(world, "world", inputs, exact, sequence_parallel)[1]
        for budget in (0, "all"):
            travelled, found = [], []
            for fp32 in (False, True):
                options = {"fp32_grad_hidden": fp32, "logits_budget_mb": budget}
                inner = {"autospec": True, "side_effect": parallel.VocabParallel.reduce_grad_hidden}
                with mock.patch.object(parallel.VocabParallel, "reduce_grad_hidden", **inner) as reduce:
                    gradient = run(world, "world", inputs, sequence_parallel, **options)[1]
                travelled.append(reduce.call_args.args[1].dtype)
                assert gradient.dtype == torch.bfloat16
                found.append(world.largest(relative(gradient.double(), truth)))
            assert travelled == [torch.bfloat16, torch.float32]
            assert found[1] < 0.9 * found[0], found


@check
def ranks_may_freeze_or_keep_differently(world):
    """Neither a frozen weight nor another budget on one rank changes which collectives run (fla #1253)."""
    inputs = make_inputs(TOKENS, HIDDEN, VOCAB, torch.float64)
    dense = loss_and_gradients(oracle(LossOptions()), inputs.leaves())
    local = shard(world, "world", inputs, False)
    if world.rank == 0:
        local.weight.requires_grad_(False)
    loss = linear_cross_entropy(
        local.hidden,
        local.weight,
        local.target,
        tp_group=world.groups["world"][0],
        logits_budget_mb="all" if world.rank % 2 else 0,
    )
    loss.backward(upstream(()).to(loss))
    truth = sharded_truth(world, "world", inputs, dense, False)
    assert relative(local.hidden.grad, truth[1]) < 1e-12
    assert local.weight.grad is None if world.rank == 0 else relative(local.weight.grad, truth[2]) < 1e-12


@check
def a_shard_of_masked_classes(world):
    """Every class of rank 0 is -inf by bias: its maximum is -inf where the global one is finite."""
    inputs = make_inputs(TOKENS, HIDDEN, VOCAB, torch.float64, bias=True, ignored=0.0)
    rows = VOCAB // world.size
    inputs.bias[:rows] = -torch.inf
    inputs.target = rows + inputs.target % (VOCAB - rows)
    assert worst(errors(world, "world", inputs)) < 1e-12


@check
def no_valid_token(world):
    inputs = make_inputs(TOKENS, HIDDEN, VOCAB, ignored=1.0)
    for sequence_parallel in (False, True):
        loss, *gradients = run(world, "world", inputs, sequence_parallel)
        assert not loss.any() and not any(g.any() for g in gradients)


@check
def a_label_beyond_the_global_vocabulary(world):
    for label, vocab_size in ((VOCAB, None), (VOCAB - 1, VOCAB - 1), (-3, None)):
        inputs = make_inputs(TOKENS, HIDDEN, VOCAB, ignored=0.0)
        inputs.target.clamp_(max=VOCAB - 2)
        inputs.target[4] = label
        loss, grad_hidden, grad_weight = run(world, "world", inputs, reduction="none", vocab_size=vocab_size)
        assert loss.isnan().tolist() == [t == 4 for t in range(TOKENS)]
        assert grad_hidden.isnan().any(1).tolist() == [t == 4 for t in range(TOKENS)]
        assert grad_weight[0].isnan().all()
        os.environ["LCE_CHECK_LABELS"] = "1"
        with pytest.raises(
            IndexError, match=rf"target\[4\] is {label}: labels must be in \[0, {vocab_size or VOCAB}\)"
        ):
            run(world, "world", inputs, vocab_size=vocab_size)
        del os.environ["LCE_CHECK_LABELS"]


@check
def layouts_that_are_refused(world):
    group, inputs = world.groups["world"][0], make_inputs(TOKENS, HIDDEN, VOCAB)
    with pytest.raises(ValueError, match=f"weight has {VOCAB} rows .* group of {world.size}: it is not sharded"):
        linear_cross_entropy(inputs.hidden, inputs.weight, inputs.target, tp_group=group, vocab_size=VOCAB)
    with pytest.raises(ValueError, match="fewer in all than vocab_size"):
        linear_cross_entropy(inputs.hidden, inputs.weight[:5], inputs.target, tp_group=group, vocab_size=VOCAB)
    with pytest.raises(ValueError, match=f"target must have shape \\[{TOKENS * world.size}\\].*times {world.size}"):
        linear_cross_entropy(inputs.hidden, inputs.weight[:33], inputs.target, tp_group=group, sequence_parallel=True)
    with pytest.raises(ValueError, match="class_weight must be a float tensor of shape"):
        weights = torch.ones(VOCAB // world.size)
        run(world, "world", inputs, class_weight=weights)
    with pytest.raises(ValueError, match="tp_group must be a group that this process"):
        linear_cross_entropy(inputs.hidden, inputs.weight, inputs.target, tp_group=world.not_mine)


@check
def without_a_group_nothing_is_sharded(world):
    inputs = make_inputs(TOKENS, HIDDEN, VOCAB, torch.float64, seed=world.rank)
    ours = loss_and_gradients(linear_cross_entropy, inputs.leaves())
    truth = loss_and_gradients(oracle(LossOptions()), inputs.leaves())
    assert worst(relative(a, b) for a, b in zip(ours, truth, strict=True)) < 1e-12


@check
def a_normalizer_over_data_parallel_ranks(world):
    """Each rank has its own tokens and 10 or 90 % of them count: the sum over ranks is the dense mean."""
    inputs = make_inputs(100, HIDDEN, VOCAB, torch.float64, seed=world.rank, ignored=0.1 if world.rank else 0.9)
    count = (inputs.target != -100).sum()
    dist.all_reduce(count)
    loss = linear_cross_entropy(inputs.hidden, inputs.weight, inputs.target, normalizer=count)
    total = linear_cross_entropy(inputs.hidden, inputs.weight, inputs.target, reduction="sum")
    dist.all_reduce(loss)
    dist.all_reduce(total)
    assert relative(loss, total / count) < 1e-14


@check
def substitute_for_reduce_scatter(world):
    inputs = make_inputs(TOKENS, HIDDEN, VOCAB, torch.float64)
    with mock.patch.object(parallel, "_lacks_reduce_scatter", lambda *_: True), counted_collectives() as counts:
        assert worst(errors(world, "world", inputs, sequence_parallel=True)) < 1e-12
    assert not counts["reduce_scatter"]


@check
def memory_of_one_rank(world):
    """The largest block and the peak shrink with the shard; sequence parallelism adds the gathered hidden states."""
    tokens, hidden, vocab = 400, 64, 8000
    rows = vocab // world.size
    inputs = make_inputs(tokens, hidden, vocab)
    for sequence_parallel, budget in ((False, 0), (True, 0), (False, 2), (True, 2), (False, "all"), (True, "all")):
        kept = budget << 20 if budget != "all" else 4 * tokens * rows
        stated = plan_chunks("generic", tokens, hidden, rows, 4, kept, ranks_add_rounded=True).peak_bytes
        local = shard(world, "world", inputs, sequence_parallel)

        options = {"tp_group": world.groups["world"][0], "sequence_parallel": sequence_parallel}

        def forward_and_backward(local=local, options=options, budget=budget):
            linear_cross_entropy(*local.tensors, local.target, logits_budget_mb=budget, **options).backward()

        measured = record_allocations(forward_and_backward)
        extra = 4 * tokens * hidden * (1 + 1 / world.size) if sequence_parallel else 0
        assert measured.largest <= max(kept, 4 * max(tokens * min(3072, rows), tokens * hidden, rows * hidden))
        assert measured.peak <= stated + extra, (measured.peak, stated, extra)


# Seeded bugs: each must show as an error on some rank.


@contextlib.contextmanager
def local_log_sum_exp():
    original = parallel.VocabParallel.gather_statistics

    def only_mine(self, packed_KT):
        everyone = original(self, packed_KT).wait()
        everyone[:, 1] = packed_KT[1] / self.size
        return parallel.Pending(everyone)

    with mock.patch.object(parallel.VocabParallel, "gather_statistics", only_mine):
        yield


@contextlib.contextmanager
def grad_hidden_not_reduced():
    with mock.patch.object(parallel.VocabParallel, "reduce_grad_hidden", lambda self, grad: parallel.Pending(grad)):
        yield


@contextlib.contextmanager
def only_the_owner_gets_gradients():
    original = GenericRowKernels.gradient_

    def gradient_(self, logits, chunk, coefficients):
        original(self, logits, chunk, coefficients)
        elsewhere = (chunk.label_T < 0) | (chunk.label_T >= VOCAB // dist.get_world_size())
        logits.masked_fill_(elsewhere[:, None], 0.0)

    with mock.patch.object(GenericRowKernels, "gradient_", gradient_):
        yield


@contextlib.contextmanager
def label_one_past_the_shard_is_its_last_row():
    original = GenericRowKernels.accumulate

    def accumulate(self, logits, chunk, stats):
        rows = VOCAB // dist.get_world_size()
        label_T = torch.where(chunk.label_T == rows, rows - 1, chunk.label_T)
        original(self, logits, replace(chunk, label_T=label_T), stats)

    with mock.patch.object(GenericRowKernels, "accumulate", accumulate):
        yield


@check
def seeded_bugs_are_caught(world):
    bugs = {
        local_log_sum_exp: "mixed",
        grad_hidden_not_reduced: "mixed",
        only_the_owner_gets_gradients: "all on the last rank",
        label_one_past_the_shard_is_its_last_row: "edges",
    }
    for bug, kind in bugs.items():
        inputs = labels(make_inputs(TOKENS, HIDDEN, VOCAB, torch.float64, spread=1.5), kind, world.size)
        with bug():
            found = errors(world, "world", inputs)
        assert world.largest(worst(found)) > 1e-3, f"{bug.__name__} was not seen"
