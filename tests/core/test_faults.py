"""One rank raises or dies inside the loss: the others end with an error, and what was saved before stays whole."""

from __future__ import annotations

import datetime
import json
import os
import signal
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from loongforge import chunks, linear_cross_entropy
from tests.core.worlds import FORKED

TIMEOUT = 5
LONGEST = 60
"""Seconds for everything; much more than the group's timeout, which is what ends the waiting ranks."""


def fault(how: str):
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("planted")


def work(rank: int, folder: Path, where: str, how: str) -> None:
    """Two good steps, each saved; in the third rank 1 fails and, where it only raises, stays."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3,
        timeout=datetime.timedelta(seconds=TIMEOUT),
    )  # fmt: skip
    weight = torch.full((4, 8), 0.1 * rank, requires_grad=True)
    hidden = torch.linspace(-1, 1, 2 * 8).view(2, 8).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    target = torch.arange(6)
    saved = folder / f"rank{rank}.pt"

    def one_step() -> None:
        optimizer.zero_grad()
        loss = linear_cross_entropy(hidden, weight, target, tp_group=dist.group.WORLD, sequence_parallel=True)
        loss.backward()
        optimizer.step()

    for _ in range(2):
        one_step()
        torch.save(weight, saved.with_suffix(".part"))
        os.replace(saved.with_suffix(".part"), saved)
    name = {"forward": "_accumulate", "backward": "_to_gradient"}[where]
    planted = mock.patch.object(chunks, name, lambda *args: fault(how)) if rank == 1 else mock.MagicMock()
    try:
        with planted:
            one_step()
        outcome = "no error"
    except RuntimeError as error:
        outcome = str(error)
    report = {"outcome": outcome, "unchanged": torch.equal(torch.load(saved), weight)}
    (folder / f"rank{rank}.json").write_text(json.dumps(report))
    if rank == 1:
        time.sleep(LONGEST)


@pytest.mark.parametrize("how", ("raises", "dies"))
@pytest.mark.parametrize("where", ("forward", "backward"))
def test_the_others_end_with_an_error(tmp_path, where, how):
    processes = [FORKED.Process(target=work, args=(rank, tmp_path, where, how), daemon=True) for rank in range(3)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + LONGEST
    others = [0, 2]
    for rank in others:
        processes[rank].join(timeout=max(0.1, deadline - time.monotonic()))
    alive = [rank for rank in others if processes[rank].is_alive()]
    for process in processes:
        process.kill()
    assert not alive, f"ranks {alive} still wait"
    reports = {rank: json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in others}
    for rank in others:
        assert "planted" not in reports[rank]["outcome"] and reports[rank]["outcome"] != "no error", reports
        # The failed step reached neither the weights nor what was saved.
        assert reports[rank]["unchanged"]
        assert torch.load(tmp_path / f"rank{rank}.pt").isfinite().all()
    assert torch.load(tmp_path / "rank1.pt").isfinite().all() and not list(tmp_path.glob("*.part"))
    if how == "raises":
        assert json.loads((tmp_path / "rank1.json").read_text()) == {"outcome": "planted", "unchanged": True}


def work_in_two_worlds(folder: Path) -> None:
    """The second world gives its group the name that the first one's had."""
    hidden, weight, target = torch.randn(3, 8), torch.randn(6, 8), torch.arange(3)
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    losses = []
    for world in range(2):
        dist.init_process_group("gloo", init_method=f"file://{folder}/store{world}", rank=0, world_size=1)
        losses.append(float(compiled(hidden, weight, target, tp_group=dist.group.WORLD)))
        dist.destroy_process_group()
    (folder / "losses.json").write_text(json.dumps([*losses, float(linear_cross_entropy(hidden, weight, target))]))


def test_a_world_that_is_made_again_after_a_compiled_step(tmp_path):
    process = FORKED.Process(target=work_in_two_worlds, args=(tmp_path,), daemon=True)
    process.start()
    process.join(timeout=LONGEST)
    assert process.exitcode == 0
    first, second, eager = json.loads((tmp_path / "losses.json").read_text())
    assert first == second == eager
