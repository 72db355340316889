"""Processes, groups and random state; one process without torchrun is a group of one."""

from __future__ import annotations

import datetime
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from loongforge.train.config import TrainConfig
from loongforge.train.errors import ConfigError, require_packages


@dataclass(frozen=True, kw_only=True)
class Layout:
    """This process's place in the run."""

    device: torch.device
    rank: int
    world_size: int
    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    data_rank: int
    is_last_stage: bool

    @property
    def sizes(self) -> dict[str, int]:
        """What a checkpoint must agree with to be continued."""
        return {
            "tensor_model_parallel_size": self.tensor_parallel,
            "pipeline_model_parallel_size": self.pipeline_parallel,
            "data_parallel_size": self.data_parallel,
        }

    def say(self, message: str) -> None:
        """Print on rank 0."""
        if self.rank == 0:
            print(message, flush=True)


def world_from_environment() -> tuple[int, int]:
    """(rank, world size) as torchrun sets them; (0, 1) without it."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def use_cpu_stand_ins() -> None:
    """Replace what megatron-core assumes of CUDA where there is none."""
    require_packages("megatron.core", extra="train")
    if not torch.cuda.is_available():
        from loongforge.megatron import cpu

        cpu.apply()


@contextmanager
def process_groups(config: TrainConfig) -> Iterator[Layout]:
    """Join the run's processes, build Megatron's groups, seed every generator; take all of it down at the end."""
    rank, world_size = world_from_environment()
    check_world_size(config, world_size)
    use_cpu_stand_ins()
    from megatron.core import parallel_state

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    parallel = config.parallel
    timeout = datetime.timedelta(minutes=parallel.distributed_timeout_minutes)
    rendezvous = {"store": dist.HashStore()} if world_size == 1 else {"init_method": "env://"}
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", rank=rank, world_size=world_size, timeout=timeout, **rendezvous
    )
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor_model_parallel_size,
            pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
            distributed_timeout_minutes=parallel.distributed_timeout_minutes,
        )
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        yield Layout(
            device=device,
            rank=rank,
            world_size=world_size,
            tensor_parallel=parallel.tensor_model_parallel_size,
            pipeline_parallel=parallel.pipeline_model_parallel_size,
            data_parallel=parallel_state.get_data_parallel_world_size(),
            data_rank=parallel_state.get_data_parallel_rank(),
            is_last_stage=parallel_state.is_pipeline_last_stage(),
        )
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def check_world_size(config: TrainConfig, world_size: int) -> None:
    """Raise :class:`ConfigError` unless ``world_size`` processes can be laid out and share the global batch."""
    parallel, training = config.parallel, config.training
    model_parallel = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    if world_size % model_parallel:
        raise ConfigError(
            f"tensor x pipeline parallel size is {model_parallel}, so the number of processes must be a multiple of "
            f"it, got {world_size}; start with: torchrun --nproc-per-node {model_parallel} -m loongforge.cli train ..."
        )
    share = training.micro_batch_size * (world_size // model_parallel)
    if training.global_batch_size % share:
        raise ConfigError(
            f"global_batch_size={training.global_batch_size} must be a multiple of micro_batch_size x data-parallel "
            f"size = {share}"
        )


def seed_everything(seed: int) -> None:
    """Seed Python, numpy, torch and Megatron's tensor-parallel generators."""
    from megatron.core import parallel_state, tensor_parallel

    stage_seed = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(stage_seed)
    np.random.seed(stage_seed)
    torch.manual_seed(stage_seed)
    tensor_parallel.model_parallel_cuda_manual_seed(stage_seed, force_reset_rng=True)


def from_last_stage(value: torch.Tensor) -> torch.Tensor:
    """``value`` of the last pipeline stage, on every stage (in place)."""
    from megatron.core import parallel_state

    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        source = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(value, source, group=parallel_state.get_pipeline_model_parallel_group())
    return value


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether ``flag`` is set on any rank."""
    votes = torch.tensor([int(flag)], device=device)
    dist.all_reduce(votes, op=dist.ReduceOp.MAX)
    return bool(votes.item())
