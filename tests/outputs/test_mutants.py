"""A test of the tests: bugs seeded into the outputs show in the comparisons of this folder."""

from __future__ import annotations

import pytest
import torch

from loongforge import linear_top_k
from loongforge.kernels import generic
from loongforge.outputs import logprobs, teacher_head, teacher_top_k
from tests.helpers import relative, worst
from tests.outputs.test_distillation import compare
from tests.outputs.test_logprobs import case_of, flat, ours, truth

MUTANTS = {}


def mutant(*caught_by):
    """Register a patch with the comparisons that must see it: logprobs, or a divergence and its teacher."""

    def register(function):
        MUTANTS[function.__name__] = (function, caught_by)
        return function

    return register


HEADS = (("forward", "head"), ("reverse", "head"))
TOP = (("forward", "bucket"), ("reverse", "bucket"))


@mutant("logprobs", *HEADS)
def sums_stay_where_they_were_when_the_maximum_moves(monkeypatch):
    original = generic._base
    calls = []
    monkeypatch.setattr(generic, "_base", lambda max_B: calls.append(0) or original(max_B) * (len(calls) > 3))


@mutant("logprobs", ("reverse", "head"))
def gradient_without_the_distance(monkeypatch):
    original = generic._weighted_softmax
    monkeypatch.setattr(
        generic, "_weighted_softmax", lambda relative, gap, softmax, by: original(relative, 0 * gap, softmax, by)
    )


@mutant("logprobs")
def entropy_gradient_without_the_mean(monkeypatch):
    original = logprobs.RowCoefficients
    monkeypatch.setattr(
        logprobs, "RowCoefficients", lambda max_T, softmax_T, *rest: original(max_T, 0.99 * softmax_T, *rest)
    )


@mutant(("forward", "head"))
def teacher_not_normalised(monkeypatch):
    original = teacher_head.PairCoefficients
    monkeypatch.setattr(
        teacher_head, "PairCoefficients", lambda *args:
        original(*args[:4], None if args[4] is None else 2 * args[4])
    )  # fmt: skip


@mutant(*TOP)
def classes_stay_in_the_rest(monkeypatch):
    original = teacher_top_k._put_

    def put_(logits_TC, here_TK, column_TK, value_TK):
        if not value_TK.isinf().all():
            original(logits_TC, here_TK, column_TK, value_TK)

    monkeypatch.setattr(teacher_top_k, "_put_", put_)


@mutant(*TOP)
def values_of_other_chunks_written_to_the_edge(monkeypatch):
    monkeypatch.setattr(
        teacher_top_k, "_put_", lambda logits, here, column, value: logits.scatter_(1, column, value.to(logits.dtype))
    )


@mutant(*TOP)
def mass_of_the_rest_forgotten(monkeypatch):
    original = teacher_top_k.teacher_of

    def teacher_of(*args):
        teacher = original(*args)
        teacher.log_q_rest_T = teacher.log_q_rest_T - 0.1
        return teacher

    monkeypatch.setattr(teacher_top_k, "teacher_of", teacher_of)


def error_of(name) -> float:
    if name == "logprobs":
        inputs, _ = case_of({})
        mine, right = flat(ours(inputs.leaves())), flat(truth(inputs.leaves()))
    else:
        mine, _, right = compare({"softcap": 2.5}, *name)
    return worst(relative(a, b) for a, b in zip(mine, right, strict=True))


@pytest.mark.parametrize("name", MUTANTS)
def test_a_seeded_bug_is_seen(name, monkeypatch):
    patch, caught_by = MUTANTS[name]
    for comparison in caught_by:
        assert error_of(comparison) < 1e-11
        with monkeypatch.context() as patched:
            patch(patched)
            assert error_of(comparison) > 1e-6, f"{comparison} does not see it"


def test_the_surplus_of_capped_logits_is_seen(monkeypatch):
    """What is taken out of a chunk is -softcap there, and exp(-softcap) each must be taken off the rest."""
    original = torch.exp
    with monkeypatch.context() as patched:
        patched.setattr(teacher_top_k.torch, "exp", lambda tensor: 0 * original(tensor))
        found = worst(relative(a, b) for a, b in zip(*compare({"softcap": 2.5}, "forward", "bucket")[::2], strict=True))
    assert found > 1e-6


def test_ties_out_of_order_are_seen(monkeypatch):
    hidden, weight = torch.ones(1, 4), torch.zeros(101, 4)
    weight[[3, 47, 48, 90]] = 1.0
    monkeypatch.setattr(
        generic, "first_k", lambda value, classes, k: (value.flip(1).topk(k)[0], classes.flip(1)[:, :k])
    )
    assert linear_top_k(hidden, weight, 3).ids.tolist() != [[3, 47, 48]]
