"""What holds on two ranks with FlyDSL's row kernels on the AMD emulator (run by ``test_flydsl_end_to_end.py``)."""

from __future__ import annotations

import sys

import pytest
import torch

import loongforge
from loongforge import LossOptions
from tests.amdgpu.rows import EmulatedFlyDSLRowKernels
from tests.core.worlds import registry
from tests.helpers import make_inputs, oracle, relative, upstream

CHECKS, check = registry()
CHUNK_WIDTH = 64


def use(monkeypatch: pytest.MonkeyPatch, kernels, width: int = CHUNK_WIDTH):
    """Every call runs on ``kernels``, in chunks of ``width`` classes."""
    for module in ("loongforge.call", "loongforge.cross_entropy"):
        monkeypatch.setattr(sys.modules[module], "row_kernels", lambda *arguments: kernels)
    for direction in ("FWD", "BWD"):
        monkeypatch.setenv(f"LCE_{direction}_VOCAB_SPLIT_SIZE", str(width))
    return kernels


@check
def vocabulary_over_two_ranks(world):
    """Loss and gradients of hidden and of this rank's weight rows, one architecture of each wave size."""
    group, ranks = world.groups["world"]
    rank, rows = ranks.index(world.rank), 75
    for arch in ("gfx942", "gfx1201"):
        inputs = make_inputs(9, 16, 2 * rows, torch.float32)
        with pytest.MonkeyPatch.context() as monkeypatch:
            kernels = use(monkeypatch, EmulatedFlyDSLRowKernels(arch))
            hidden = inputs.hidden.clone().requires_grad_()
            shard = inputs.weight[rank * rows : (rank + 1) * rows].clone().requires_grad_()
            loss = loongforge.linear_cross_entropy(hidden, shard, inputs.target, reduction="none", tp_group=group)
            loss.backward(upstream(9).float())
        whole = inputs.leaves(torch.float64)
        truth = oracle(LossOptions(reduction="none"))(whole.hidden, whole.weight, whole.target)
        truth.backward(upstream(9))
        assert len(kernels.launches) == 4
        assert relative(loss, truth) < 1e-6 and relative(hidden.grad, whole.hidden.grad) < 1e-6
        assert relative(shard.grad, whole.weight.grad[rank * rows : (rank + 1) * rows]) < 1e-6
