"""Ranks that were given different things say so, on every rank, instead of hanging (run by ``test_parallel.py``)."""

from __future__ import annotations

import os
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from loongforge import TeacherTopK, cross_entropy, linear_cross_entropy, linear_distillation, linear_logprobs
from tests.core.sharding import counted_collectives
from tests.core.worlds import registry

CHECKS, check = registry()


def call(group, tokens=4, hidden=8, rows=6, dtype=torch.float32, target=None, needs_grad=False, **options):
    target = torch.arange(tokens) if target is None else target
    hidden_TH = torch.ones(tokens, hidden, dtype=dtype, requires_grad=needs_grad)
    return linear_cross_entropy(hidden_TH, torch.ones(rows, hidden, dtype=dtype), target, tp_group=group, **options)


@contextmanager
def refused(pattern):
    with pytest.raises(ValueError, match=pattern):
        yield


@check
def the_first_call_of_a_group_names_the_ranks(world):
    """Whatever would make sums wrong or collectives hang; rank 1 is the odd one out."""
    odd = world.rank == 1
    cases = {
        r"weight must be equal .* rank 0 has \[6, 8\] torch.float32, rank 1 has \[7, 8\]": {"rows": 6 + odd},
        r"hidden must be equal .* rank 0 has \[4, 8\].*, rank 1 has \[5, 8\]": {"tokens": 4 + odd},
        r"hidden must be equal .* torch.float32, rank 1 has \[4, 8\] torch.float64": {
            "dtype": torch.float64 if odd else torch.float32
        },
        "vocab_size must be equal .* rank 0 has 10, rank 1 has 11": {"vocab_size": 10 + odd},
        "label_smoothing must be equal .* rank 0 has 0.1, rank 1 has 0.2": {"label_smoothing": 0.2 if odd else 0.1},
        "reduction must be equal .* rank 0 has 'mean', rank 1 has 'sum'": {"reduction": "sum" if odd else "mean"},
        "hidden.requires_grad must be equal .* rank 0 has False, rank 1 has True": {"needs_grad": odd},
        "the labels' checksum must be equal": {"target": torch.tensor([1, 2, 4, 3] if odd else [1, 2, 3, 4])},
    }
    for pattern, arguments in cases.items():
        with refused(pattern):
            call(dist.new_group(), **arguments)


@check
def what_a_rank_refuses_by_itself_reaches_the_others(world):
    group = dist.new_group()
    if world.rank == 1:
        with pytest.raises(TypeError, match="class probabilities are not supported"):
            call(group, target=torch.ones(4))
    else:
        with refused("target must be equal .* rank 1 has .*float32"):
            call(group)
    group, normalizer = dist.new_group(), "two" if world.rank == 1 else 2.0
    if world.rank == 1:
        with pytest.raises(TypeError, match="normalizer must be a number"):
            call(group, normalizer=normalizer)
    else:
        with refused(r"other ranks of tp_group refuse this call \(rank 1: TypeError: normalizer must be a number"):
            call(group, normalizer=normalizer)


@check
def a_refusal_of_whatever_cannot_be_described_reaches_the_others(world):
    """Layouts whose shape or labels cannot be read, and more tensors than fit into what is exchanged."""
    labels = torch.arange(4)
    strange = (
        {"target": labels.to_sparse()},
        {"target": torch.nested.nested_tensor([labels])},
        {"adapter": tuple(torch.ones(4, 2) for _ in range(300))},
    )
    for arguments in strange:
        group = dist.new_group()
        with pytest.raises(Exception) as raised:
            call(group, **(arguments if world.rank == 1 else {}))
        assert not isinstance(raised.value, AssertionError), raised.value
        assert world.rank == 1 or "rank 1" in str(raised.value), raised.value
        assert call(dist.new_group()).isfinite()


@check
def what_a_rank_refuses_before_it_compares_reaches_the_others(world):
    """Options, and what one host's environment does not allow."""
    odd = world.rank == 1
    options = ({"label_smoothing": 1.5}, {"reduction": "avg"}, {"no_such_option": 1}, {"impl": "triton"})
    variables = (("LCE_CHECK_RANKS", "yes"), ("LCE_LOGITS_BUDGET_MB", "many"), ("LCE_IMPL", "triton"))
    variables += (("LCE_GENERIC_FWD_VOCAB_SPLIT_SIZE", "0"), ("LCE_CHECK_LABELS", "yes"))
    cases = [(given, None) for given in options] + [({}, variable) for variable in variables]
    for given, variable in cases:
        if odd and variable:
            os.environ[variable[0]] = variable[1]
        with pytest.raises((ValueError, TypeError, RuntimeError)) as raised:
            call(dist.new_group(), **(given if odd else {}))
        if variable:
            os.environ.pop(variable[0], None)
        assert odd or "rank 1: " in str(raised.value), (given, variable, raised.value)
    for function in (linear_logprobs, linear_distillation):
        with pytest.raises((ValueError, TypeError)) as raised:
            arguments = (torch.ones(4, 8), torch.ones(6, 8), torch.arange(4))
            if function is linear_distillation:
                arguments = (*arguments[:2], TeacherTopK(torch.full((4, 2), -1.0), torch.arange(2).expand(4, 2)))
            function(*arguments, tp_group=dist.new_group(), **({"temperature": -1.0} if odd else {}))
        assert odd or "rank 1: " in str(raised.value), raised.value


@check
def numbers_and_weights_are_compared_by_value(world):
    odd = world.rank == 1
    one = torch.ones(4)
    cases = {
        "normalizer must be equal .* rank 0 has 2.0, rank 1 has 3.0": {"normalizer": 2.0 + odd},
        "checksum of normalizer": {"normalizer": torch.tensor(2.0 + odd)},
        "checksum of class_weight": {"class_weight": torch.ones(6 * world.size) * (1 + odd)},
        "checksum of token_weight": {"token_weight": one * (1 + odd)},
    }
    for pattern, arguments in cases.items():
        with refused(pattern):
            call(dist.new_group(), **arguments)
    with torch.autocast("cpu", torch.bfloat16, enabled=odd), refused("dtype of the matrix products must be equal"):
        call(dist.new_group())


@check
def what_may_differ(world):
    group = dist.new_group()
    call(group, impl="generic" if world.rank else "auto", logits_budget_mb="all" if world.rank else 0)
    call(world.groups["alone"][0], tokens=4 + world.rank)


@check
def a_shard_may_be_frozen_unless_backward_would_wait_for_it(world):
    """Under sequence parallelism every rank's backward gathers hidden, where it runs at all."""
    odd = world.rank == 1
    target = torch.zeros(4 * world.size, dtype=torch.int64)

    def step(needs_hidden, target=target, sequence_parallel=True, **options):
        hidden = torch.ones(4, 8, requires_grad=needs_hidden)
        weight = torch.ones(6, 8, requires_grad=not odd)
        options |= {"tp_group": dist.new_group(), "sequence_parallel": sequence_parallel}
        loss = linear_cross_entropy(hidden, weight, target, **options)
        if loss.requires_grad:
            loss.backward()
        assert (weight.grad is None) == odd

    different = "hidden, weight, bias or adapter.requires_grad must be equal .* rank 0 has True, rank 1 has False"
    with refused(different):
        step(False)
    with refused(different):
        adapter = torch.ones(4, 2), torch.ones(6, 2, requires_grad=not odd)
        options = {"tp_group": dist.new_group(), "sequence_parallel": True}
        linear_cross_entropy(torch.ones(4, 8), torch.ones(6, 8), target, adapter=adapter, **options)
    step(True)
    step(False, target[:4], sequence_parallel=False)
    step(False, compact_tokens=True)


@check
def only_the_first_call_or_every_one(world):
    group = dist.new_group()
    for expected in (2, 1, 1):
        with counted_collectives() as counts:
            call(group)
        assert counts == {"gather": expected}, counts
    call(group, vocab_size=10 + world.rank % 2)  # no longer compared
    os.environ["LCE_CHECK_RANKS"] = "1"
    for _ in range(2):
        with counted_collectives() as counts:
            call(group)
        assert counts == {"gather": 2}, counts
        with refused("vocab_size must be equal .* rank 1 has 11"):
            call(group, vocab_size=10 + world.rank % 2)
        with refused("rank 1: ValueError: label_smoothing" if world.rank != 1 else "^label_smoothing"):
            call(group, label_smoothing=1.5 if world.rank == 1 else 0.1)


@check
def one_rank_with_the_variable_and_one_without(world):
    if world.rank == 1:
        os.environ["LCE_CHECK_RANKS"] = "1"
    with refused("LCE_CHECK_RANKS must be equal .* rank 0 has False, rank 1 has True"):
        call(dist.new_group())


@check
def global_ranks_of_a_part_of_the_world(world):
    """The message counts as the launcher does."""
    pair = [world.size - 2, world.size - 1]
    group = dist.new_group(pair)
    if world.rank in pair:
        with refused(f"rank {pair[0]} has .*, rank {pair[1]} has"):
            call(group, tokens=4 + world.rank)


@check
def a_tensor_that_was_released_reaches_the_others(world):
    """What cannot be read is refused by its name and not by the comparison."""
    odd = world.rank == 1
    for name in ("weight", "target", "token_weight", "class_weight"):
        tensors = {"weight": torch.ones(6, 8), "target": torch.arange(4)}
        tensors |= {"token_weight": torch.ones(4), "class_weight": torch.ones(6 * world.size)}
        if odd:
            tensors[name].untyped_storage().resize_(0)
        with refused(rf"{'^' if odd else 'rank 1: ValueError: '}{name} .* has no storage: whoever shards it"):
            linear_cross_entropy(torch.ones(4, 8), **tensors, tp_group=dist.new_group())


@check
def a_refusal_of_any_text_fits_what_is_exchanged(world):
    class Strange(str):
        def __repr__(self):
            return '\x01"\\\u00e9\n' * 1000

    reduction = Strange("maximum") if world.rank == 1 else "mean"
    with refused("reduction must be one of" if world.rank == 1 else r"rank 1: ValueError: reduction.*got \?\"\\\?\n"):
        call(dist.new_group(), reduction=reduction)


@check
def existing_logits_that_one_rank_refuses(world):
    """By its environment, or by how its logits lie in memory."""
    odd = world.rank == 1

    def step(logits=None, **options):
        logits = torch.ones(4, 2, 6, requires_grad=True) * 1 if logits is None else logits
        cross_entropy(logits, torch.zeros(4, 2).long(), tp_group=dist.new_group(), **options)

    for name, value in (("LCE_IMPL", "triton"), ("LCE_FWD_VOCAB_SPLIT_SIZE", "0"), ("LCE_CHECK_LABELS", "yes")):
        if odd:
            os.environ[name] = value
        with pytest.raises(
            (RuntimeError, ValueError), match="LCE_|triton" if odd else "rank 1: (RuntimeError|ValueError): "
        ):
            step()
        os.environ.pop(name, None)
    transposed = (torch.ones(2, 4, 6, requires_grad=True) * 1).transpose(0, 1)
    with refused("flatten to" if odd else "rank 1: ValueError: inplace_backward needs logits that flatten"):
        step(transposed if odd else None, inplace_backward=True)
    with refused("logits have 6 columns for a vocabulary of 6 under a tensor-parallel group of 3: it is not sharded"):
        step(vocab_size=6)


@check
def existing_logits_too(world):
    odd = world.rank == 1
    with refused("logits must be equal .*rank 0 has .4, 6. torch.float32, rank 1 has .4, 7."):
        cross_entropy(torch.ones(4, 6 + odd), torch.arange(4), tp_group=dist.new_group())
