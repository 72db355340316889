"""Vocabulary-parallel and sequence-parallel collectives, each a named function; the identity without a group.

Rank r of the tensor-parallel group holds rows ``[r * V, (r + 1) * V)`` of the weight.  Under sequence parallelism
it also holds slice r of the tokens along dim 0 of ``hidden`` (Korthikanti et al., arXiv:2205.05198).

Every large collective is started before the products that need not wait for it and waited for after them:

* the gather of the tokens, in forward and again in backward, runs beside products over this rank's own tokens
  (:class:`Tokens`), and in backward beside whatever needs no hidden states at all;
* the sum of grad_hidden over ranks runs beside the last product of the weight gradient (:class:`Pending`).

On an NVIDIA GPU the products follow after a pause (:func:`let_begin`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


def all_gather(everyone: torch.Tensor, mine: torch.Tensor, group: Any) -> dist.Work:
    """Start it: ``everyone`` [size * n, ...] of ``mine`` [n, ...]."""
    start = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    return start(everyone, mine, group=group, async_op=True)


def reduce_scatter(mine: torch.Tensor, everyone: torch.Tensor, group: Any) -> dist.Work:
    """Start it: the sum over ranks of ``everyone`` [size * n, ...], of which this rank gets ``mine`` [n, ...]."""
    start = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in torch 2.13
    return start(mine, everyone, group=group, async_op=True)


PAUSE_CYCLES = 20_000
"""About 10 microseconds."""


def let_begin(device: torch.device) -> None:
    """Hold the computing stream back a little, so that the collective just started has its multiprocessors first.

    What comes next fills the device with programs that run to its end.  Where they come first the collective waits for
    them, and on other ranks it waits for this one, on multiprocessors that their products lack (``docs/scaling.md``).
    """
    if device.type == "cuda" and torch.version.hip is None:
        torch.cuda._sleep(PAUSE_CYCLES)


class Pending:
    """The result of a collective that may still be under way."""

    def __init__(self, result: torch.Tensor, work: Any = None, operand: torch.Tensor | None = None) -> None:
        self._result, self._work, self._operand = result, work, operand

    def wait(self) -> torch.Tensor:
        """The result: the current stream waits for it (NCCL; the host does not), or the host does (gloo)."""
        if self._work is not None:
            self._work.wait()
        self._work = self._operand = None
        return self._result


class Tokens:
    """Hidden states [T, H] in gathered order, of which only this rank's own rows may be there yet."""

    def __init__(
        self, all_TH: torch.Tensor, local_TH: torch.Tensor | None = None, first_local: int = 0, work: Any = None
    ) -> None:
        self._all_TH, self._gather = all_TH, Pending(all_TH, work, local_TH)
        self._local_TH, self._first_local = local_TH, first_local

    @property
    def dtype(self) -> torch.dtype:
        return self._all_TH.dtype

    def new_empty(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Memory on the device of the hidden states, of their dtype unless told; waits for nothing."""
        return self._all_TH.new_empty(shape, dtype=dtype)

    def wait(self) -> torch.Tensor:
        """All rows, once they are there."""
        self._local_TH = None
        return self._gather.wait()

    def pieces(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Rows and their hidden states: what is there first, so that work on it hides the gather of the rest."""
        local_TH, num_tokens = self._local_TH, self._all_TH.shape[0]
        if local_TH is None:
            yield slice(0, num_tokens), self._all_TH
            return
        first, last = self._first_local, self._first_local + local_TH.shape[0]
        yield slice(first, last), local_TH
        all_TH = self.wait()
        for rows in (slice(0, first), slice(last, num_tokens)):
            if rows.stop > rows.start:
                yield rows, all_TH[rows]


@dataclass(frozen=True)
class VocabParallel:
    """Position of this rank in its tensor-parallel group; ``group=None`` means that nothing is sharded."""

    group: Any = None
    rank: int = 0
    size: int = 1
    sequence_parallel: bool = False

    @classmethod
    def from_group(cls, group: Any, sequence_parallel: bool = False) -> VocabParallel:
        """Read rank and size from ``group``; ``TypeError``, ``ValueError`` where it is none or not this process's."""
        if group is None:
            return cls()
        if torch.compiler.is_compiling():
            _guarded(group)
        outside = group == dist.GroupMember.NON_GROUP_MEMBER  # what new_group returns to those it leaves out
        if not outside and not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"tp_group must be a torch.distributed.ProcessGroup, got {type(group).__name__}")
        rank = -1 if outside else dist.get_rank(group)
        if rank < 0:
            raise ValueError(f"tp_group must be a group that this process (global rank {dist.get_rank()}) belongs to")
        size = dist.get_world_size(group)
        return cls(group, rank, size, sequence_parallel and size > 1)

    def gather_tokens(self, hidden_local: torch.Tensor) -> Tokens:
        """Start the all-gather of [S_local, ..., H] along dim 0 under sequence parallelism; else nothing travels."""
        width = hidden_local.shape[-1]
        if not self.sequence_parallel:
            return Tokens(hidden_local.reshape(-1, width))
        hidden_local = hidden_local.contiguous()
        hidden = hidden_local.new_empty((hidden_local.shape[0] * self.size, *hidden_local.shape[1:]))
        work = all_gather(hidden, hidden_local, self.group)
        let_begin(hidden.device)
        local_TH = hidden_local.view(-1, width)
        return Tokens(hidden.view(-1, width), local_TH, self.rank * local_TH.shape[0], work)

    def reduce_grad_hidden(self, grad_hidden: torch.Tensor) -> Pending:
        """Start adding the ranks' shares: reduce-scatter along dim 0 under sequence parallelism, else all-reduce.

        The argument is contiguous and may be overwritten.
        """
        if self.size == 1:
            return Pending(grad_hidden)
        if not self.sequence_parallel:
            work = dist.all_reduce(grad_hidden, group=self.group, async_op=True)
            let_begin(grad_hidden.device)
            return Pending(grad_hidden, work)
        local = grad_hidden.new_empty((grad_hidden.shape[0] // self.size, *grad_hidden.shape[1:]))
        if _lacks_reduce_scatter(self.group, grad_hidden.device):
            dist.all_reduce(grad_hidden, group=self.group)
            return Pending(local.copy_(grad_hidden.chunk(self.size)[self.rank]))
        work = reduce_scatter(local, grad_hidden, self.group)
        let_begin(local.device)
        return Pending(local, work, grad_hidden)

    def gather_statistics(self, packed_KT: torch.Tensor) -> Pending:
        """Start the all-gather of the statistics [K, T]: the result [size, K, T] has the same bits on every rank."""
        num_statistics, num_tokens = packed_KT.shape
        everyone = packed_KT.new_empty((self.size * num_statistics, num_tokens))
        work = all_gather(everyone, packed_KT, self.group)
        return Pending(everyone.view(self.size, num_statistics, num_tokens), work, packed_KT)


def _guarded(group: Any) -> None:
    """A graph holds for the group it was made for: torch 2.13 would call it for any other one as well."""


_guarded._dynamo_marked_constant = True  # type: ignore[attr-defined]  # what such a function is given is compared


def _lacks_reduce_scatter(group: Any, device: torch.device) -> bool:
    """Gloo has reduce_scatter_tensor in torch 2.13; with older versions everything is reduced and sliced.

    On a CPU it may be part of a group for several devices, whose name says nothing of it.
    """
    return torch.__version__ < "2.13" and (device.type == "cpu" or dist.get_backend(group) == "gloo")
