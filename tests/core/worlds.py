"""Worlds of gloo processes: spawned once, every check of a module runs in them, each result is one test."""

from __future__ import annotations

import datetime
import importlib
import json
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SECONDS_PER_WORLD = 400
SECONDS_PER_COLLECTIVE = 90


@dataclass
class World:
    """This process and the groups it belongs to, each with the global ranks of its members in order."""

    rank: int
    size: int
    groups: dict[str, tuple[Any, list[int]]]
    not_mine: Any

    def largest(self, value: float) -> float:
        """Maximum over all processes; NaN counts as infinite."""
        reduced = torch.tensor(value if value == value else float("inf"), dtype=torch.float64)
        dist.all_reduce(reduced, op=dist.ReduceOp.MAX)
        return float(reduced)


def _make_groups(rank: int, size: int) -> World:
    layouts = {"world": [list(range(size))], "alone": [[r] for r in range(size)]}
    if size == 4:
        layouts |= {"pairs": [[0, 1], [2, 3]], "strided": [[0, 2], [1, 3]]}
    if size == 8:
        layouts |= {
            "pairs": [[r, r + 1] for r in range(0, 8, 2)],
            "pairs across": [[r, r + 4] for r in range(4)],
            "fours": [[0, 1, 2, 3], [4, 5, 6, 7]],
            "fours strided": [[0, 2, 4, 6], [1, 3, 5, 7]],
        }
    groups, not_mine = {}, None
    for name, members in layouts.items():
        for ranks in members:
            group = dist.new_group(ranks, timeout=datetime.timedelta(seconds=SECONDS_PER_COLLECTIVE))
            if rank in ranks:
                groups[name] = (group, ranks)
            else:
                not_mine = group
    return World(rank, size, groups, not_mine)


FORKED = multiprocessing.get_context("forkserver")
"""Processes are forked from one that has imported what takes long and done nothing else."""
FORKED.set_forkserver_preload(["torch", "torch.distributed.fsdp", "torch.distributed.tensor", "loongforge"])


def _work(rank: int, size: int, folder: str, module: str, environment: dict[str, str]) -> None:
    os.environ.clear()  # the forked ones have the variables of when their origin was started
    os.environ.update(environment)
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=SECONDS_PER_COLLECTIVE)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timeout)
    world = _make_groups(rank, size)
    results = {}
    for name, check in importlib.import_module(module).CHECKS.items():
        environment = dict(os.environ)
        try:
            check(world)
            results[name] = None
        except BaseException:
            results[name] = traceback.format_exc()
        finally:
            os.environ.clear()
            os.environ.update(environment)
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def run_world(size: int, module: str) -> dict[str, str]:
    """Run every check of ``module`` in ``size`` processes; name -> the tracebacks of the ranks that failed."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (size, folder, module, dict(os.environ))
        context = mp.start_processes(_work, arguments, nprocs=size, join=False, start_method="forkserver")
        deadline = time.monotonic() + SECONDS_PER_WORLD
        try:
            while not context.join(timeout=max(0.1, deadline - time.monotonic())):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{size} processes did not finish {module} in {SECONDS_PER_WORLD} s")
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
        per_rank = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(size)]
    return {
        name: "\n".join(f"rank {r}:\n{results[name]}" for r, results in enumerate(per_rank) if results[name])
        for name in per_rank[0]
    }


def registry() -> tuple[dict[str, Callable[[World], None]], Callable]:
    """A dict of checks and the decorator that fills it."""
    checks: dict[str, Callable[[World], None]] = {}

    def check(function: Callable[[World], None]) -> Callable[[World], None]:
        checks[function.__name__] = function
        return function

    return checks, check
