"""Compiled outputs in a world of processes: the collectives run inside the operators (run by ``test_parallel.py``)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from loongforge import linear_distillation, linear_logprobs, linear_top_k
from tests.core.worlds import World, registry
from tests.outputs.parallel_checks import case_of, group_of, narrow_chunks, shard, shard_of_teacher
from tests.outputs.test_compile import assert_equal, results

CHECKS, check = registry()
OPTIONS = {"softcap": 2.5, "temperature": 0.7, "vocab_size": 129}


@check
def compiled_outputs(world: World):
    """Equal to eager, whose values other checks compare with the dense truth; ignored rows, padding, both layouts."""
    narrow_chunks()
    case = case_of({"vocab_size": 129})
    known = case.top_k(9, vocab_size=129)
    for sequence_parallel in (False, True):
        teacher = shard_of_teacher(world, case.head, sequence_parallel)
        group = group_of(world, sequence_parallel)

        def step(i, teacher=teacher, group=group):
            tensors, options = (i.hidden, i.weight), {"bias": i.bias, **group, **OPTIONS}
            out = linear_logprobs(*tensors, i.target, entropy=True, predictions=True, logits_budget_mb="all", **options)
            divergences = [
                linear_distillation(*tensors, given, divergence=kind, target=i.target, reduction="none", **options)
                for given, kind in ((teacher, "reverse"), (known, "forward"))
            ]
            return [*out[:5], *divergences, *linear_top_k(*tensors, 40, **options)]

        mine = results(
            torch.compile(step, backend="aot_eager", fullgraph=True), shard(world, case.inputs, sequence_parallel)
        )
        assert_equal(mine, results(step, shard(world, case.inputs, sequence_parallel)), 1e-6)


@check
def teachers_that_differ_are_named(world: World):
    """As in eager calls: their contents where every rank has all of it, and what is done to their logits."""
    odd = world.rank == 1
    case = case_of({"vocab_size": 129})
    inputs, head = shard(world, case.inputs, False), shard_of_teacher(world, case.head, False)
    known = case.top_k(9, vocab_size=129)
    cases = {
        "the checksum of teacher.ids": (known, replace(known, ids=known.ids.flip(-1))),
        "the checksum of teacher.logprobs": (known, replace(known, logprobs=known.logprobs - 1)),
        "teacher.logit_scale": (replace(head, logit_scale=2.0), replace(head, logit_scale=3.0)),
        "teacher.softcap": (replace(head, softcap=2.0), replace(head, softcap=3.0)),
    }
    for name, teachers in cases.items():

        def divergence(hidden, weight, group, teacher=teachers[odd]):
            return linear_distillation(hidden, weight, teacher, tp_group=group, vocab_size=129)

        compiled = torch.compile(divergence, backend="aot_eager", fullgraph=True)
        with pytest.raises(ValueError, match=f"^{name} must be equal on all ranks of tp_group"):
            compiled(inputs.hidden, inputs.weight, dist.new_group())
