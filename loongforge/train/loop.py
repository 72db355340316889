"""The training run: set up, resume, step, validate, save."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from loongforge.train.checkpoint import Progress, check_save_folder, load_checkpoint, save_checkpoint
from loongforge.train.config import TrainConfig
from loongforge.train.data import Datasets, MicroBatches, batches, build_datasets, load_run_tokenizer
from loongforge.train.distributed import Layout, any_rank, process_groups, seed_everything
from loongforge.train.errors import ConfigError, TrainError, require_packages
from loongforge.train.metrics import Metrics
from loongforge.train.model import TrainState, build_train_state
from loongforge.train.output_layer import describe_output_layer
from loongforge.train.step import Batches, StepResult, evaluate, train_step


@dataclass(frozen=True, kw_only=True)
class Run:
    """What stays the same over a run."""

    config: TrainConfig
    layout: Layout
    datasets: Datasets
    vocab_size: int


@contextmanager
def open_run(config: TrainConfig) -> Iterator[Run]:
    """Processes and data of a run; nothing is built yet."""
    require_packages("megatron.core", "psutil", extra="train")
    tokenizer = load_run_tokenizer(config)
    vocab_size = config.model.vocab_size or tokenizer.vocab_size
    if vocab_size < tokenizer.vocab_size:
        raise ConfigError(f"vocab_size={vocab_size} is less than the tokenizer's {tokenizer.vocab_size}")
    with process_groups(config) as layout:
        datasets = build_datasets(config, tokenizer)
        yield Run(config=config, layout=layout, datasets=datasets, vocab_size=vocab_size)


def train(config: TrainConfig) -> None:
    """Train as ``config`` says, from ``load`` where that is set; :class:`TrainError` says what stopped it."""
    check_save_folder(config)
    with open_run(config) as run, _sigterm_flag() as stop_asked:
        state = start_state(run)
        progress = load_checkpoint(config, state, run.layout, run.vocab_size)
        _announce(run, state, progress)
        metrics = Metrics(config, run.layout, progress.iteration)
        try:
            _steps(run, state, progress, metrics, stop_asked)
        finally:
            metrics.close()


def start_state(run: Run) -> TrainState:
    """Model, optimizer and schedule at step 0, the same for the same seed."""
    install_output_layer(run.config)
    seed_everything(run.config.training.seed)
    return build_train_state(run.config, run.vocab_size, run.layout.device)


def install_output_layer(config: TrainConfig) -> None:
    """Install the Megatron hook where the config asks for the fused output layer."""
    layer = config.output_layer
    if layer.cross_entropy_loss_fusion and layer.cross_entropy_fusion_impl == "linear":
        import loongforge.megatron

        loongforge.megatron.install()


def train_batches(run: Run, consumed_samples: int = 0) -> Batches:
    """This rank's training batches from ``consumed_samples`` on."""
    training = run.config.training
    return _batches(run, run.datasets.train, consumed_samples, training.train_iters * training.global_batch_size)


def validation_loss(run: Run, state: TrainState) -> float:
    """Loss over the first ``eval_iters`` global batches of the validation share."""
    training = run.config.training
    data = _batches(run, run.datasets.valid, 0, training.eval_iters * training.global_batch_size)
    with _gathered_parameters(run.config, state):
        return evaluate(run.config, state, run.layout, data)


def _steps(run: Run, state: TrainState, start: Progress, metrics: Metrics, stop_asked: list[int]) -> None:
    training, checkpoint = run.config.training, run.config.checkpoint
    data = train_batches(run, start.consumed_samples)
    saved = start.iteration
    for iteration in range(start.iteration + 1, training.train_iters + 1):
        result = train_step(run.config, state, run.layout, data)
        _require_finite(iteration, result)
        metrics.step(iteration, result, state.optimizer.param_groups[0]["lr"])
        stop = any_rank(bool(stop_asked), run.layout.device)
        last = stop or iteration == training.train_iters or _due(iteration, training.exit_interval)
        if run.datasets.valid is not None and not stop and (last or _due(iteration, training.eval_interval)):
            metrics.validation(iteration, validation_loss(run, state))
            metrics.restart_clock()
        if checkpoint.save is not None and (last or _due(iteration, checkpoint.save_interval)):
            progress = Progress(iteration=iteration, consumed_samples=iteration * training.global_batch_size)
            with _gathered_parameters(run.config, state):
                save_checkpoint(run.config, state, run.layout, progress, run.vocab_size)
            saved = iteration
            metrics.say(f"step {iteration}/{training.train_iters} | saved to {checkpoint.save}")
            metrics.restart_clock()
        if last:
            why = "stopped by SIGTERM" if stop else "done"
            metrics.say(f"{why} at step {iteration}; last checkpoint: {saved if checkpoint.save else 'none'}")
            return
    metrics.say(f"nothing to do: the checkpoint is at step {start.iteration} of {training.train_iters}")


def _batches(run: Run, dataset: Any, consumed_samples: int, total_samples: int) -> Batches:
    order = MicroBatches(
        consumed_samples=consumed_samples,
        total_samples=total_samples,
        micro_batch_size=run.config.training.micro_batch_size,
        rank=run.layout.data_rank,
        size=run.layout.data_parallel,
    )
    return batches(dataset, order, run.config.data.num_workers, run.vocab_size, run.layout.device)


def _due(iteration: int, interval: int | None) -> bool:
    return interval is not None and iteration % interval == 0


def _require_finite(iteration: int, result: StepResult) -> None:
    if not math.isfinite(result.loss):
        raise TrainError(
            f"the loss became {result.loss} at step {iteration}; continue from the last checkpoint with a smaller --lr"
        )


@contextmanager
def _gathered_parameters(config: TrainConfig, state: TrainState) -> Iterator[None]:
    """With overlapped gathering the parameters are current only after a forward: gather them now."""
    if not config.parallel.overlap_param_gather:
        yield
        return
    state.model.disable_forward_pre_hook(param_sync=True)
    try:
        yield
    finally:
        state.model.enable_forward_pre_hook()


@contextmanager
def _sigterm_flag() -> Iterator[list[int]]:
    """A list that holds something once SIGTERM arrived."""
    received: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, previous)


def _announce(run: Run, state: TrainState, progress: Progress) -> None:
    import megatron.core

    layout = run.layout
    parameters = sum(parameter.numel() for parameter in state.model.parameters())
    layout.say(
        f"megatron-core {megatron.core.__version__}, torch {torch.__version__}, {layout.world_size} process(es) on "
        f"{layout.device.type}: tensor {layout.tensor_parallel} x pipeline {layout.pipeline_parallel} x data "
        f"{layout.data_parallel}\n"
        f"model: {parameters:,} parameters on rank 0, vocabulary {run.vocab_size}"
    )
    layout.say(describe_output_layer(run.config, run.vocab_size, layout.device))
    if progress.iteration:
        layout.say(f"continuing {run.config.checkpoint.load} at step {progress.iteration}")
