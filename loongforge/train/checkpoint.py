"""Checkpoints through megatron-core's dist_checkpointing.

    FOLDER/iter_0000050/                        one complete checkpoint
    FOLDER/latest_checkpointed_iteration.txt    names the newest complete one
    FOLDER/unfinished_iter_0000060/             being written, or left by a killed run and removed by the next save

A checkpoint gets its name when all ranks have written their parts, and the marker moves after that: a run killed at
any moment leaves the last complete checkpoint readable.
"""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from loongforge.errors import require_folder
from loongforge.train.config import TrainConfig
from loongforge.train.distributed import Layout
from loongforge.train.errors import CheckpointError
from loongforge.train.model import TrainState
from loongforge.train.torch_adam import allocate_state, restore_step_count, step_count

MARKER = "latest_checkpointed_iteration.txt"
_UNFINISHED = "unfinished_"
# Fields that may change between saving and loading without changing the shape or meaning of a weight.
_FREE_FIELDS = ("seq_length", "attention_dropout", "hidden_dropout", "init_method_std", "make_vocab_size_divisible_by")
# torch, pickle and Megatron each raise their own.
_READ_ERRORS = (Exception, CheckpointException)
_OPTIMIZER_METADATA = {"distrib_optim_sharding_type": "dp_reshardable"}


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far the run is."""

    iteration: int = 0
    consumed_samples: int = 0


def latest_iteration(folder: str) -> int | None:
    """Step named by the marker in ``folder``; None where there is no marker."""
    marker = Path(folder, MARKER)
    if not marker.exists():
        return None
    text = marker.read_text(encoding="utf-8").strip()
    if not text.isdecimal():
        raise CheckpointError(f"{marker} must hold the number of a step, got {text!r}; name one with --ckpt-step")
    return int(text)


def iteration_folder(folder: str, iteration: int) -> Path:
    """Where the checkpoint of step ``iteration`` lies."""
    return Path(folder, f"iter_{iteration:07d}")


def check_save_folder(config: TrainConfig) -> None:
    """Refuse a folder that cannot be written to, and a new run in one that holds the checkpoints of another."""
    save = config.checkpoint.save
    require_folder(save)
    if save is None or (_saves_where_it_loads(config) and not config.checkpoint.finetune):
        return
    iteration = latest_iteration(save)
    if iteration is not None:
        raise CheckpointError(
            f"--save {save} already holds a run at step {iteration}; continue it with --load {save}, or save elsewhere"
        )


def save_checkpoint(
    config: TrainConfig, state: TrainState, layout: Layout, progress: Progress, vocab_size: int
) -> None:
    """Write everything a bit-exact continuation needs to ``config.checkpoint.save``."""
    from megatron.core import dist_checkpointing

    assert config.checkpoint.save is not None
    final = iteration_folder(config.checkpoint.save, progress.iteration)
    unfinished = final.with_name(_UNFINISHED + final.name)
    if layout.rank == 0:
        final.parent.mkdir(parents=True, exist_ok=True)
        _remove_unfinished(final.parent)
        unfinished.mkdir()
    dist.barrier()
    content = {
        **_sharded_state(state, layout, is_loading=False),
        **asdict(progress),
        "opt_param_scheduler": state.scheduler.state_dict(),
        "adam_step": step_count(state.optimizer),
        "layout": layout.sizes,
        "model_config": {**asdict(config.model), "vocab_size": vocab_size},
        "optimizer_config": _optimizer_description(config),
    }
    dist_checkpointing.save(content, str(unfinished))
    dist.barrier()
    if layout.rank == 0:
        _publish(unfinished, final)
    dist.barrier()


def load_checkpoint(config: TrainConfig, state: TrainState, layout: Layout, vocab_size: int) -> Progress:
    """Restore ``config.checkpoint.load`` into ``state``; step 0 where there is nothing to load."""
    from megatron.core import dist_checkpointing

    path = _find(config)
    if path is None:
        return Progress()
    common = _read_common(path)
    _require_equal(path, "model", common["model_config"], {**asdict(config.model), "vocab_size": vocab_size})
    weights_only = config.checkpoint.finetune
    if not weights_only:
        _require_continuable(config, state, layout, path, common)
    if not weights_only:
        allocate_state(state.optimizer)
    wanted = _sharded_state(state, layout, is_loading=True, weights_only=weights_only)
    try:
        loaded = dist_checkpointing.load(wanted, str(path))
    except _READ_ERRORS as error:
        raise _unreadable(path, error) from error
    bare_model(state.model).load_state_dict(loaded["model"])
    if weights_only:
        state.optimizer.reload_model_params()
        return Progress()
    with torch.no_grad():
        state.optimizer.load_state_dict(loaded["optimizer"])
    restore_step_count(state.optimizer, common["adam_step"])
    state.scheduler.load_state_dict(common["opt_param_scheduler"])
    _restore_random_state(loaded["rng_state"])
    return Progress(iteration=common["iteration"], consumed_samples=common["consumed_samples"])


def _find(config: TrainConfig) -> Path | None:
    load, step = config.checkpoint.load, config.checkpoint.ckpt_step
    if load is None:
        return None
    iteration = latest_iteration(load) if step is None else step
    if iteration is None:
        if _saves_where_it_loads(config):
            return None
        raise CheckpointError(f"--load {load} holds no checkpoint: there is no {MARKER} in it")
    path = iteration_folder(load, iteration)
    if not path.is_dir():
        found = sorted(entry.name for entry in Path(load).glob("iter_*"))
        raise CheckpointError(f"checkpoint {path} does not exist; {load} holds {', '.join(found) or 'none'}")
    return path


def _saves_where_it_loads(config: TrainConfig) -> bool:
    save, load = config.checkpoint.save, config.checkpoint.load
    return save is not None and load is not None and Path(save).resolve() == Path(load).resolve()


def _read_common(path: Path) -> dict[str, Any]:
    from megatron.core import dist_checkpointing

    try:
        common = dist_checkpointing.load_common_state_dict(str(path))
    except _READ_ERRORS as error:
        raise _unreadable(path, error) from error
    if "model_config" not in common:
        raise CheckpointError(f"checkpoint {path} was not written by `loongforge train`: it has no model_config")
    return common


def _unreadable(path: Path, error: BaseException) -> CheckpointError:
    if isinstance(error, CheckpointException):  # holds each rank's error and traceback
        error = next(iter(error.failures.values()))[0]
    reason = f"{type(error).__name__}: {error}".strip(": \n").splitlines()[0]
    return CheckpointError(f"checkpoint {path} cannot be read: {reason}; choose an earlier one with --ckpt-step")


def _require_continuable(
    config: TrainConfig, state: TrainState, layout: Layout, path: Path, common: dict[str, Any]
) -> None:
    advice = "start with the same sizes, or take only the weights with --finetune"
    _require_equal(path, "layout", common["layout"], layout.sizes, advice)
    _require_equal(path, "optimizer", common["optimizer_config"], _optimizer_description(config), advice)
    if not config.checkpoint.override_opt_param_scheduler:
        saved = {key: value for key, value in common["opt_param_scheduler"].items() if key != "num_steps"}
        _require_equal(
            path,
            "schedule",
            saved,
            state.scheduler.state_dict(),
            "pass the values of the checkpoint, or --override-opt-param-scheduler to take this run's",
        )


def _require_equal(
    path: Path,
    what: str,
    saved: dict[str, Any],
    present: dict[str, Any],
    advice: str = "use the config it was made with",
) -> None:
    differences = [
        f"{key} is {saved[key]} there and {present.get(key)} here"
        for key in saved
        if key not in _FREE_FIELDS and saved[key] != present.get(key)
    ]
    if differences:
        raise CheckpointError(f"checkpoint {path} has another {what}: {'; '.join(differences)}; {advice}")


def _optimizer_description(config: TrainConfig) -> dict[str, Any]:
    return {
        "use_distributed_optimizer": config.parallel.use_distributed_optimizer,
        "bf16": config.training.bf16,
        "global_batch_size": config.training.global_batch_size,
        "seed": config.training.seed,
    }


def _sharded_state(state: TrainState, layout: Layout, is_loading: bool, weights_only: bool = False) -> dict[str, Any]:
    model = bare_model(state.model).sharded_state_dict(prefix="")
    if weights_only:
        return {"model": model}
    optimizer = state.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=_OPTIMIZER_METADATA)
    return {"model": model, "optimizer": optimizer, "rng_state": _random_state(layout)}


def bare_model(model: Any) -> Any:
    """The GPTModel inside DistributedDataParallel and Float16Module."""
    while hasattr(model, "module"):
        model = model.module
    return model


def _random_state(layout: Layout) -> Any:
    """Every generator of this rank, as an object with a place of its own in the checkpoint."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    states = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if layout.device.type == "cuda" else None,
        "tensor_parallel": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    grid = (layout.pipeline_parallel, layout.tensor_parallel, layout.data_parallel)
    place = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        layout.data_rank,
    )
    return ShardedObject("rng_state", states, grid, place)


def _restore_random_state(states: dict[str, Any]) -> None:
    from megatron.core import tensor_parallel

    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None:
        torch.cuda.set_rng_state(states["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tensor_parallel"])


def _publish(unfinished: Path, final: Path) -> None:
    """Give a complete checkpoint its name, then move the marker; each step survives a power cut."""
    folder = final.parent
    _sync_folder(unfinished)
    if final.exists():  # the run went back with --ckpt-step, or was killed before it moved the marker
        older = [int(entry.name.removeprefix("iter_")) for entry in folder.glob("iter_*") if entry.name < final.name]
        if older:
            _write_marker(folder, max(older))
        final.rename(folder / f"{_UNFINISHED}replaced_{final.name}")
    unfinished.rename(final)
    _sync_folder(folder)
    _write_marker(folder, int(final.name.removeprefix("iter_")))
    _remove_unfinished(folder)


def _write_marker(folder: Path, iteration: int) -> None:
    draft = folder / (_UNFINISHED + MARKER)
    with draft.open("w", encoding="utf-8") as stream:
        stream.write(str(iteration))
        stream.flush()
        os.fsync(stream.fileno())
    draft.replace(folder / MARKER)
    _sync_folder(folder)


def _remove_unfinished(folder: Path) -> None:
    for leftover in folder.glob(_UNFINISHED + "*"):
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
