"""Communication of the tensor-parallel head by itself: without it, without its overlap, alone, and in a profile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist

from loongforge import parallel
from loongforge.parallel import Pending, Tokens, VocabParallel, all_gather, reduce_scatter

Interval = tuple[float, float]


@contextmanager
def left_out(all_TH: torch.Tensor) -> Iterator[None]:
    """Every collective of the head replaced by what costs nothing; ``all_TH`` is what the gather would bring."""

    def gather_tokens(parallel: VocabParallel, hidden_local: torch.Tensor) -> Tokens:
        return Tokens(all_TH if parallel.sequence_parallel else hidden_local.reshape(-1, hidden_local.shape[-1]))

    def reduce_grad_hidden(parallel: VocabParallel, grad_hidden: torch.Tensor) -> Pending:
        mine = grad_hidden.chunk(parallel.size)[parallel.rank] if parallel.sequence_parallel else grad_hidden
        return Pending(mine)

    def gather_statistics(parallel: VocabParallel, packed_KT: torch.Tensor) -> Pending:
        return Pending(packed_KT.repeat(parallel.size, 1, 1))

    with (
        mock.patch.object(VocabParallel, "gather_tokens", gather_tokens),
        mock.patch.object(VocabParallel, "reduce_grad_hidden", reduce_grad_hidden),
        mock.patch.object(VocabParallel, "gather_statistics", gather_statistics),
    ):
        yield


@contextmanager
def not_overlapped() -> Iterator[None]:
    """Every collective of the head waited for where it is started."""
    gather, reduce = VocabParallel.gather_tokens, VocabParallel.reduce_grad_hidden

    def gather_tokens(parallel: VocabParallel, hidden_local: torch.Tensor) -> Tokens:
        return Tokens(gather(parallel, hidden_local).wait())

    def reduce_grad_hidden(parallel: VocabParallel, grad_hidden: torch.Tensor) -> Pending:
        return Pending(reduce(parallel, grad_hidden).wait())

    with (
        at_once(),
        mock.patch.object(VocabParallel, "gather_tokens", gather_tokens),
        mock.patch.object(VocabParallel, "reduce_grad_hidden", reduce_grad_hidden),
    ):
        yield


def at_once() -> AbstractContextManager:
    """No pause between the start of a collective and what follows."""
    return mock.patch.object(parallel, "let_begin", lambda device: None)


@dataclass(frozen=True)
class Mode:
    """How a step is run."""

    name: str
    context: Callable[[], AbstractContextManager]
    high_priority: bool = False  # the group's own stream


AS_IT_IS = Mode("", nullcontext)


def modes(all_TH: torch.Tensor) -> tuple[Mode, ...]:
    """As it is, without its overlap, without its collectives, and collectives that are favoured less or more."""
    return (
        AS_IT_IS,
        Mode(" in series", not_overlapped),
        Mode(" without", lambda: left_out(all_TH)),
        Mode(" at once", at_once),
        Mode(" high priority", nullcontext, high_priority=True),
    )


@dataclass(frozen=True)
class Collective:
    """One collective of a given size and what each rank sends of it."""

    name: str
    num_bytes: int  # of the whole tensor
    size: int
    call: Callable[[], object]

    @property
    def sent_bytes(self) -> float:
        """Through each rank's links, for a ring: a share of (size - 1) / size, twice for an all-reduce."""
        return self.num_bytes * (self.size - 1) / self.size * (2 if self.name == "all_reduce" else 1)


def collective(name: str, whole: torch.Tensor, size: int) -> Collective:
    """``name`` of ``torch.distributed`` over the world; ``whole`` has a first dimension divisible by ``size``."""
    part = torch.empty_like(whole[: whole.shape[0] // size])
    calls = {
        "all_gather": lambda: all_gather(whole, part, None).wait(),
        "reduce_scatter": lambda: reduce_scatter(part, whole, None).wait(),
        "all_reduce": lambda: dist.all_reduce(whole),
    }
    return Collective(name, whole.nbytes, size, calls[name])


@dataclass(frozen=True)
class Overlap:
    """One communication kernel of a profiled step, in microseconds."""

    kernel: str
    time_us: float
    hidden_us: float  # of it, beside kernels that compute


def overlaps(profile: torch.profiler.profile) -> list[Overlap]:
    """Communication kernels in their order, and how much of each ran beside computation."""
    on_device = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    spans = [(event.name, event.time_range.start, event.time_range.end) for event in on_device]
    busy = union((start, stop) for name, start, stop in spans if not _moves_data(name))
    return [
        Overlap(name.split("(")[0], stop - start, shared((start, stop), busy))
        for name, start, stop in sorted(spans, key=lambda span: span[1])
        if name.startswith("ncclDevKernel")
    ]


def _moves_data(name: str) -> bool:
    return name.startswith(("nccl", "Memcpy", "Memset"))


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def shared(interval: Interval, others: Iterable[Interval]) -> float:
    """Length of what ``interval`` has in common with disjoint ``others``."""
    return sum(max(0.0, min(interval[1], stop) - max(interval[0], start)) for start, stop in others)
