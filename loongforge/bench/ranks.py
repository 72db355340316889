"""The processes of one measurement, and times that are the slowest one's."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from loongforge.errors import UsageError


@dataclass(frozen=True)
class World:
    """This process among those that share the head."""

    group: dist.ProcessGroup
    high_priority_group: dist.ProcessGroup  # the same ranks; under NCCL on a stream of high priority
    rank: int
    size: int
    device: torch.device

    @classmethod
    def join(cls, device: str | None) -> World:
        """From the variables that torchrun sets; NCCL where every process has a GPU, else gloo."""
        missing = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name not in os.environ]
        if missing:
            raise UsageError(
                f"{', '.join(missing)} not set: start it by torchrun --nproc_per_node 2 scripts/benchmark_tp.py"
            )
        local_rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
        kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if kind == "cuda" and torch.cuda.device_count() < size:
            raise UsageError(f"{size} processes need {size} GPUs, torch sees {torch.cuda.device_count()}")
        place = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
        if kind == "cuda":
            torch.cuda.set_device(place)
        gpu = {"backend": "nccl", "device_id": place}
        dist.init_process_group(timeout=timedelta(seconds=120), **(gpu if kind == "cuda" else {"backend": "gloo"}))
        assert dist.group.WORLD is not None
        favoured = dist.new_group(pg_options=_high_priority() if kind == "cuda" else None)
        return cls(dist.group.WORLD, favoured, dist.get_rank(), size, place)

    def slowest(self, values: list[float]) -> list[float]:
        """Elementwise maximum over the ranks."""
        reduced = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(reduced, op=dist.ReduceOp.MAX)
        return reduced.tolist()

    def time_ms(self, call: Callable[[], object], lead: Callable[[], object]) -> float:
        """One call, begun on all ranks together; ``lead`` keeps a GPU busy while the host enqueues it."""
        dist.barrier()
        if self.device.type != "cuda":
            start = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - start)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.begin_together(lead)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    def begin_together(self, lead: Callable[[], object]) -> None:
        """What follows begins on all GPUs at one moment, long after the hosts have enqueued it."""
        torch.cuda.synchronize()
        lead()
        dist.all_reduce(torch.ones(1, device=self.device))

    def interleaved(
        self, calls: dict[str, Callable[[], object]], rounds: int, lead: Callable[[], object]
    ) -> dict[str, list[float]]:
        """Milliseconds of each call, the slowest rank's: one number a round."""
        for call in (*calls.values(), *calls.values()):
            call()
        samples = [self.time_ms(call, lead) for _ in range(rounds) for call in calls.values()]
        slowest, step = self.slowest(samples), len(calls)
        return {name: slowest[place::step] for place, name in enumerate(calls)}


def _high_priority() -> dist.ProcessGroupNCCL.Options:
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    return options
