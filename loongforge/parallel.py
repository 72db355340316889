"""Vocabulary-parallel and sequence-parallel collectives, each a named function; the identity without a group.

Rank r of the tensor-parallel group holds rows ``[r * V, (r + 1) * V)`` of the weight.  Under sequence parallelism
it also holds slice r of the tokens along dim 0 of ``hidden`` (Korthikanti et al., arXiv:2205.05198).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


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
        outside = group == dist.GroupMember.NON_GROUP_MEMBER  # what new_group returns to those it leaves out
        if not outside and not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"tp_group must be a torch.distributed.ProcessGroup, got {type(group).__name__}")
        rank = -1 if outside else dist.get_rank(group)
        if rank < 0:
            raise ValueError(f"tp_group must be a group that this process (global rank {dist.get_rank()}) belongs to")
        size = dist.get_world_size(group)
        return cls(group, rank, size, sequence_parallel and size > 1)

    def gather_tokens(self, hidden_local: torch.Tensor) -> torch.Tensor:
        """[S_local, ..., H] -> [S, ..., H] under sequence parallelism, else ``hidden_local`` itself."""
        if not self.sequence_parallel:
            return hidden_local
        hidden_local = hidden_local.contiguous()
        hidden = hidden_local.new_empty((hidden_local.shape[0] * self.size, *hidden_local.shape[1:]))
        dist.all_gather_into_tensor(hidden, hidden_local, group=self.group)
        return hidden

    def reduce_grad_hidden(self, grad_hidden: torch.Tensor) -> torch.Tensor:
        """Add the ranks' shares of grad_hidden: reduce-scatter along dim 0 under sequence parallelism, else all-reduce.

        The argument is contiguous and may be overwritten.
        """
        if self.size == 1:
            return grad_hidden
        if self.sequence_parallel:
            return _reduce_scatter_dim0(grad_hidden, self)
        dist.all_reduce(grad_hidden, group=self.group)
        return grad_hidden

    def max_over_ranks_(self, max_T: torch.Tensor) -> torch.Tensor:
        """In-place maximum over the group."""
        if self.size > 1:
            dist.all_reduce(max_T, op=dist.ReduceOp.MAX, group=self.group)
        return max_T

    def sum_over_ranks_(self, statistics: torch.Tensor) -> torch.Tensor:
        """In-place sum over the group."""
        if self.size > 1:
            dist.all_reduce(statistics, group=self.group)
        return statistics

    def require_equal(self, names: tuple[str, ...], values: tuple[int, ...], device: torch.device) -> None:
        """Raise ``ValueError`` on every rank where a value differs between ranks.  Synchronises with the host."""
        if self.size == 1:
            return
        mine = torch.tensor(values, dtype=torch.int64, device=device)
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(gathered, mine, group=self.group)
        table = torch.stack(gathered).tolist()
        for column, name in enumerate(names):
            by_rank = [row[column] for row in table]
            if len(set(by_rank)) > 1:
                listing = ", ".join(f"rank {rank} has {value}" for rank, value in enumerate(by_rank))
                raise ValueError(f"{name} must be equal on all ranks of tp_group, but {listing}")


def _reduce_scatter_dim0(full: torch.Tensor, parallel: VocabParallel) -> torch.Tensor:
    local = full.new_empty((full.shape[0] // parallel.size, *full.shape[1:]))
    if _lacks_reduce_scatter(parallel.group):
        dist.all_reduce(full, group=parallel.group)
        return local.copy_(full.chunk(parallel.size)[parallel.rank])
    dist.reduce_scatter_tensor(local, full, group=parallel.group)
    return local


def _lacks_reduce_scatter(group: Any) -> bool:
    """Gloo has reduce_scatter_tensor in torch 2.13; with older versions everything is reduced and sliced."""
    return dist.get_backend(group) == "gloo" and torch.__version__ < "2.13"
