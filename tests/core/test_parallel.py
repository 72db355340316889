"""Vocabulary and sequence parallelism over gloo: checks that run in each of 2 or 4 processes."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch.torch_version import TorchVersion

from loongforge import agreement, parallel
from tests.core import disagreement_checks, layout_checks, parallel_checks, step_checks, work_checks
from tests.core.worlds import run_world

results = cache(run_world)


@pytest.mark.parametrize("size", (2, 4))
@pytest.mark.parametrize("check", parallel_checks.CHECKS)
def test_world(size, check):
    failures = results(size, parallel_checks.__name__)[check]
    assert not failures, failures


@pytest.mark.parametrize("size", (2, 3))
@pytest.mark.parametrize("check", step_checks.CHECKS)
def test_steps(size, check):
    failures = results(size, step_checks.__name__)[check]
    assert not failures, failures


@pytest.mark.parametrize("check", disagreement_checks.CHECKS)
def test_ranks_that_disagree(check):
    failures = results(3, disagreement_checks.__name__)[check]
    assert not failures, failures


@pytest.mark.parametrize("check", layout_checks.CHECKS)
def test_layouts_of_8_processes(check):
    failures = results(8, layout_checks.__name__)[check]
    assert not failures, failures


@pytest.mark.parametrize("check", work_checks.CHECKS)
def test_work_not_done(check):
    failures = results(2, work_checks.__name__)[check]
    assert not failures, failures


def test_a_checksum_part_by_part_is_that_of_the_whole():
    values = torch.arange(3 << 19) % 97
    assert agreement._checksum(values) == int((values * torch.arange(1, len(values) + 1)).sum())


@pytest.mark.parametrize("device, hip, pauses", (("cuda", None, 1), ("cuda", "7.0", 0), ("cpu", None, 0)))
def test_the_pause_after_a_start(device, hip, pauses, monkeypatch):
    """On NVIDIA GPUs, where it was measured."""
    monkeypatch.setattr(torch.version, "hip", hip)
    slept = []
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    parallel.let_begin(torch.device(device))
    assert slept == [parallel.PAUSE_CYCLES] * pauses


@pytest.mark.parametrize("version", ("2.4.0", "2.9.1", "2.12.0+cpu", "2.13.0+cpu"))
@pytest.mark.parametrize("backend", ("gloo", "undefined", "cpu:gloo,cuda:nccl"))
def test_which_groups_lack_reduce_scatter(version, backend, monkeypatch):
    """``init_process_group()`` without a backend says "undefined"."""
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr(parallel.dist, "get_backend", lambda group: backend)
    old = not version.startswith("2.13")
    assert parallel._lacks_reduce_scatter(None, torch.device("cpu")) == old
    assert parallel._lacks_reduce_scatter(None, torch.device("cuda")) == (old and backend == "gloo")
