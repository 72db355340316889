"""Compiled outputs in a world of processes: the collectives run inside the operators (run by ``test_parallel.py``)."""

from __future__ import annotations

import torch

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
