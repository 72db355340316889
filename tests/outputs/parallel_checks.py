"""The outputs in a world of processes, each with its shard of both vocabularies (run by ``test_parallel.py``)."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from loongforge import (
    TeacherHead,
    TeacherTopK,
    linear_cross_entropy,
    linear_distillation,
    linear_logprobs,
    linear_top_k,
)
from loongforge.outputs import logprobs as logprobs_module
from loongforge.outputs import teacher_head, teacher_top_k
from tests.core.worlds import registry
from tests.helpers import Inputs, relative, worst
from tests.outputs import oracle
from tests.outputs.oracle import make_case
from tests.outputs.test_logprobs import NAMES, gradients, truth

CHECKS, check = registry()
TOKENS, VOCAB = 24, 132
OPTIONS = (
    {},
    {"softcap": 2.5, "temperature": 0.7},
    {"logit_scale": -0.4},
    {"vocab_size": VOCAB - 3},
    {"vocab_size": VOCAB // 2 + 5},  # the last ranks of four hold padding only
    {"logits_budget_mb": "all"},
)


def narrow_chunks() -> None:
    os.environ["LCE_FWD_VOCAB_SPLIT_SIZE"], os.environ["LCE_BWD_VOCAB_SPLIT_SIZE"] = "19", "23"


def case_of(options: dict):
    case = make_case(tokens=TOKENS, vocab=VOCAB)
    vocab_size = options.get("vocab_size", VOCAB)
    valid = case.inputs.target >= 0
    edges = torch.tensor([0, 32, 33, 65, 66, 98, 99, VOCAB - 1] * TOKENS)[:TOKENS] % vocab_size
    case.inputs.target = torch.where(valid, edges, case.inputs.target)
    case.inputs.weight[vocab_size:] = 30.0  # padded rows must stay out
    case.head.weight[vocab_size:] = 30.0
    return case


def mine(tensor: torch.Tensor | None, world, dim: int = 0):
    return None if tensor is None else tensor.detach().chunk(world.size, dim)[world.rank].clone()


def shard(world, inputs: Inputs, sequence_parallel: bool) -> Inputs:
    hidden = mine(inputs.hidden, world) if sequence_parallel else inputs.hidden.clone()
    weight, bias = mine(inputs.weight, world), mine(inputs.bias, world)
    return Inputs(hidden.requires_grad_(), weight.requires_grad_(), inputs.target, bias.requires_grad_())


def shard_of_teacher(world, head: TeacherHead, sequence_parallel: bool) -> TeacherHead:
    hidden = mine(head.hidden, world) if sequence_parallel else head.hidden
    return replace(head, hidden=hidden, weight=mine(head.weight, world), bias=mine(head.bias, world))


def group_of(world, sequence_parallel: bool) -> dict:
    return {"tp_group": world.groups["world"][0], "sequence_parallel": sequence_parallel}


def local_truth(world, gradients_of_all, sequence_parallel: bool):
    grad_hidden, *rest = gradients_of_all
    return [mine(grad_hidden, world) if sequence_parallel else grad_hidden, *(mine(g, world) for g in rest)]


def worst_pair(found, expected) -> float:
    return worst(relative(a, b) for a, b in zip(found, expected, strict=True))


def logprob_error(world, options: dict, sequence_parallel: bool, predictions: bool = True, case=None) -> float:
    inputs = (case or case_of(options)).inputs
    local = shard(world, inputs, sequence_parallel)
    out = linear_logprobs(
        local.hidden, local.weight, local.target, bias=local.bias, entropy=True, predictions=predictions,
        z_loss_weight=0.01, **group_of(world, sequence_parallel), **options,
    )  # fmt: skip
    if predictions:
        assert torch.equal(out.predictions, oracle.predictions(inputs, **options))
    values = {name: getattr(out, name) for name in NAMES}
    found = [*(value.detach() for value in values.values()), *gradients(values, NAMES, local)]
    values_of_all, gradients_of_all = truth(inputs.leaves(), **options)
    return worst_pair(found, [*values_of_all, *local_truth(world, gradients_of_all, sequence_parallel)])


@check
def log_probabilities_entropy_and_predictions(world):
    narrow_chunks()
    for options in (*OPTIONS, {"compact_tokens": True}, {"compact_tokens": TOKENS}):
        for sequence_parallel in (False, True):
            error = logprob_error(world, options, sequence_parallel)
            assert error < 1e-12, (options, sequence_parallel, error)


@check
def predictions_of_ties_over_ranks(world):
    """The same maximum on several ranks: the smallest class number, with every rank's answer the same."""
    hidden, weight = torch.ones(3, 4), torch.zeros(VOCAB, 4)
    weight[[VOCAB // world.size + 1, VOCAB - 1]] = 1.0
    out = linear_logprobs(
        hidden, mine(weight, world), torch.tensor([0, 1, 2]), predictions=True, **group_of(world, False)
    )
    assert out.predictions.tolist() == [VOCAB // world.size + 1] * 3
    out = linear_logprobs(
        hidden, mine(0 * weight, world), torch.zeros(3).long(), predictions=True, **group_of(world, False)
    )
    assert out.predictions.tolist() == [0] * 3 and float(out.accuracy) == 1


@check
def largest_classes(world):
    narrow_chunks()
    for options in OPTIONS[:-1]:
        inputs = case_of(options).inputs
        x = oracle.logits_of(inputs.hidden, inputs.weight, inputs.bias, **options)
        values, ids = x.sort(dim=1, descending=True, stable=True)
        for k in (1, 9, 64):  # 64 classes are more than a rank of four holds
            for sequence_parallel in (False, True):
                local = shard(world, inputs, sequence_parallel)
                out = linear_top_k(
                    local.hidden, local.weight, k, bias=local.bias, **group_of(world, sequence_parallel), **options
                )
                assert torch.equal(out.ids, ids[:, :k]), (options, k)
                assert relative(out.logprobs, values[:, :k] - x.logsumexp(1)[:, None]) < 1e-12
    ties = linear_top_k(torch.ones(1, 4), torch.zeros(VOCAB // world.size, 4), 50, **group_of(world, False))
    assert ties.ids.tolist() == [list(range(50))]


def divergence_error(world, divergence: str, given: str, options: dict, sequence_parallel: bool, case=None) -> float:
    case = case or case_of(options)
    local = shard(world, case.inputs, sequence_parallel)
    if given == "head":
        teacher, local_teacher = case.head, shard_of_teacher(world, case.head, sequence_parallel)
    else:
        shared = {name: options[name] for name in ("vocab_size", "temperature") if name in options}
        teacher = local_teacher = case.top_k(9, given, **shared)
    value_T = linear_distillation(
        local.hidden, local.weight, local_teacher, divergence=divergence, target=local.target, bias=local.bias,
        reduction="none", **group_of(world, sequence_parallel), **options,
    )  # fmt: skip
    upstream_T = torch.linspace(-1, 1, TOKENS, dtype=torch.float64)
    found = [value_T.detach(), *torch.autograd.grad(value_T, local.tensors, upstream_T)]
    dense = case.inputs.leaves()
    right_T = oracle.divergence(dense, teacher, divergence, **options)
    gradients_of_all = torch.autograd.grad(right_T, dense.tensors, upstream_T)
    return worst_pair(found, [right_T.detach(), *local_truth(world, gradients_of_all, sequence_parallel)])


@check
def divergences(world):
    narrow_chunks()
    kinds = (("forward", "head"), ("reverse", "head"), ("forward", "bucket"), ("reverse", "bucket"))
    for divergence, given in (*kinds, ("forward", "renormalize")):
        for options in OPTIONS:
            for sequence_parallel in (False, True):
                error = divergence_error(world, divergence, given, options, sequence_parallel)
                assert error < 1e-11, (divergence, given, options, sequence_parallel, error)


@check
def outputs_have_the_same_bits_on_every_rank(world):
    inputs = make_case(torch.bfloat16, tokens=257, vocab=VOCAB).inputs
    local = shard(world, inputs, False)
    out = linear_logprobs(local.hidden, local.weight, local.target, entropy=True, **group_of(world, False))
    top = linear_top_k(local.hidden, local.weight, 20, **group_of(world, False))
    for value in (out.logprobs, out.entropy, out.log_sum_exp, top.logprobs, top.ids):
        first = value.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, value)


@check
def a_shard_of_masked_classes(world):
    """Every class of rank 0 is -inf by bias: its maximum is -inf where the global one is finite."""
    case = case_of({})
    rows = VOCAB // world.size
    case.head = replace(case.head, softcap=None)  # a capped logit is never -inf
    case.inputs.bias[:rows] = case.head.bias[:rows] = -torch.inf
    case.inputs.target = torch.where(case.inputs.target >= 0, VOCAB - 1, case.inputs.target)
    assert logprob_error(world, {}, False, case=case) < 1e-12
    for divergence in ("forward", "reverse"):
        assert divergence_error(world, divergence, "head", {}, True, case) < 1e-11
        assert divergence_error(world, divergence, "bucket", {}, False, case) < 1e-11


@check
def ranks_that_differ_are_named(world):
    os.environ["LCE_CHECK_RANKS"] = "1"
    case = case_of({})
    local = shard(world, case.inputs, False)
    teacher = shard_of_teacher(world, case.head, False)
    if world.rank == 1:
        teacher = replace(teacher, hidden=teacher.hidden[:, :5], weight=teacher.weight[:, :5])
    with pytest.raises(
        ValueError, match=r"teacher.hidden must be equal on all ranks of tp_group, but rank 0 has \[24, 12\]"
    ):
        linear_distillation(local.hidden, local.weight, teacher, **group_of(world, False))


@check
def what_is_asked_for_must_be_the_same_on_all_ranks(world):
    """Else the ranks' statistics have different sizes, or halves of two divergences are added."""
    odd = world.rank == 1
    inputs = case_of({}).inputs
    local, head = shard(world, inputs, False), shard_of_teacher(world, case_of({}).head, False)
    known = TeacherTopK(torch.full((TOKENS, 2), -2.0, dtype=torch.float64), torch.tensor([[1, 2]] * TOKENS))
    arguments = local.hidden, local.weight
    ignored = torch.arange(TOKENS) != 3 + odd
    low_rank, up = torch.ones(TOKENS, 1, dtype=torch.float64), torch.ones(len(local.weight), 1, dtype=torch.float64)
    for name, run in {
        "entropy": lambda group: linear_logprobs(*arguments, local.target, entropy=odd, tp_group=group),
        "k": lambda group: linear_top_k(*arguments, 2 + odd, tp_group=group),
        "divergence": lambda group: linear_distillation(
            *arguments, head, divergence="reverse" if odd else "forward", tp_group=group
        ),
        "teacher.rest": lambda group: linear_distillation(
            *arguments, replace(known, rest="renormalize" if odd else "bucket"), tp_group=group
        ),
        "teacher.logit_scale": lambda group: linear_distillation(
            *arguments, replace(head, logit_scale=1.0 + odd), tp_group=group
        ),
        "the checksum of token_weight": lambda group: linear_cross_entropy(
            *arguments, local.target, token_weight=ignored, compact_tokens=True, tp_group=group
        ),
        "hidden.requires_grad": lambda group: linear_cross_entropy(
            *(tensor.detach() for tensor in arguments), local.target,
            adapter=(low_rank.clone().requires_grad_(odd), up), tp_group=group,
        ),
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=f"{name} must be equal on all ranks of tp_group"):
            run(dist.new_group())


@check
def what_a_teacher_holds_is_compared(world):
    """Else each rank takes another teacher's probabilities and the gradients fit no loss."""
    odd = world.rank == 1
    local, head = shard(world, case_of({}).inputs, False), shard_of_teacher(world, case_of({}).head, False)
    known = TeacherTopK(torch.full((TOKENS, 2), -2.0, dtype=torch.float64), torch.tensor([[1, 2]] * TOKENS))

    def run(teacher, group, sequence_parallel=False, **options):
        hidden = mine(local.hidden, world) if sequence_parallel else local.hidden
        options |= {"tp_group": group, "sequence_parallel": sequence_parallel}
        return linear_distillation(hidden, local.weight, teacher, **options)

    def refused(name, teacher, group, **options):
        with pytest.raises(ValueError, match=f"{name} must be equal on all ranks of tp_group, but rank 0 has"):
            run(teacher, group, **options)

    other_ids = replace(known, ids=torch.tensor([[1, 2]] * (TOKENS - 1) + [[1, 2 + odd]]))
    other_logprobs = replace(known, logprobs=known.logprobs - 2.0**-50 * odd)
    other_hidden = replace(head, hidden=head.hidden * (1 + odd))
    refused("the checksum of teacher.ids", other_ids, dist.new_group())
    refused("the checksum of teacher.logprobs", other_logprobs, dist.new_group())
    refused("the checksum of normalizer", known, dist.new_group(), normalizer=torch.tensor(2.0 + odd))
    group = dist.new_group()
    assert run(other_hidden, group).isfinite()  # large: on a group's first call it is not read
    os.environ["LCE_CHECK_RANKS"] = "1"
    for _ in range(2):
        assert run(head, group).isfinite() and run(known, group).isfinite()  # weights are shards, which differ
    refused("the checksum of teacher.hidden", other_hidden, group)
    refused("the checksum of teacher.ids", other_ids, group)
    assert run(replace(head, hidden=mine(head.hidden, world)), group, sequence_parallel=True).isfinite()


@check
def a_teacher_that_one_rank_refuses_reaches_the_others(world):
    local, head = shard(world, case_of({}).inputs, False), shard_of_teacher(world, case_of({}).head, False)
    if world.rank == 1:
        head = replace(head, softcap=-1.0)
    expected = "^teacher.softcap must be a number" if world.rank == 1 else "teacher.softcap must be equal"
    with pytest.raises(ValueError, match=expected):
        linear_distillation(local.hidden, local.weight, head, tp_group=dist.new_group())


# Seeded bugs: each must show as an error on some rank.


def patched(module, name, function):
    return mock.patch.object(module, name, function)


def without_shift(max_RT, max_T):
    return torch.exp(max_RT - max_T), torch.zeros_like(max_RT)


@contextlib.contextmanager
def local_ids():
    original = teacher_top_k._Apart._columns

    def columns(self, logits_TC, first_class):
        here_TK, column_TK = original(self, logits_TC, first_class)
        return here_TK & (dist.get_rank() == 0), column_TK

    with patched(teacher_top_k._Apart, "_columns", columns):
        yield


@check
def seeded_bugs_are_caught(world):
    with patched(logprobs_module, "moved", without_shift):
        assert world.largest(logprob_error(world, {}, False)) > 1e-3
    with patched(teacher_head, "moved", without_shift):
        for divergence in ("forward", "reverse"):
            assert world.largest(divergence_error(world, divergence, "head", {}, False)) > 1e-3
    with local_ids():
        assert world.largest(divergence_error(world, "forward", "bucket", {}, False)) > 1e-3
    with patched(logprobs_module, "_over_ranks", lambda stats, call: stats):
        assert world.largest(logprob_error(world, {}, False, predictions=False)) > 1e-3
    assert world.largest(logprob_error(world, {}, False)) < 1e-12
