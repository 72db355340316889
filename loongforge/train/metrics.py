"""Log lines, progress bar and TensorBoard scalars of one run; silent on every rank but 0."""

from __future__ import annotations

import math
import resource
import time
from typing import Any

import torch

from loongforge.errors import require_folder
from loongforge.train.config import TrainConfig
from loongforge.train.distributed import Layout
from loongforge.train.errors import require_packages
from loongforge.train.step import StepResult

_MIB = 1 << 20


class Metrics:
    """Collects step results and reports every ``log_interval`` steps."""

    def __init__(self, config: TrainConfig, layout: Layout, first_iteration: int) -> None:
        require_packages("tqdm", extra="train")
        from tqdm import tqdm

        self._interval = config.logging.log_interval
        self._layout = layout
        self._bar = tqdm(
            total=config.training.train_iters,
            initial=first_iteration,
            unit="step",
            # Other ranks and outputs that are no terminal get the log lines only.
            disable=None if layout.rank == 0 else True,
        )
        self._writer = _tensorboard_writer(config, layout, first_iteration)
        self._started = time.perf_counter()
        self._tokens = 0

    def step(self, iteration: int, result: StepResult, learning_rate: float) -> None:
        """Report step ``iteration`` (counted from 1)."""
        self._tokens += result.num_tokens
        tokens_per_second = self._tokens / (time.perf_counter() - self._started)
        self._bar.update(1)
        self._bar.set_postfix_str(f"loss {result.loss:.4f}, {tokens_per_second:,.0f} tokens/s")
        if iteration % self._interval:
            return
        memory = peak_memory_bytes(self._layout.device) / _MIB
        self._scalars(
            iteration,
            {
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "learning_rate": learning_rate,
                "tokens_per_second": tokens_per_second,
                "peak_memory_mib": memory,
            },
        )
        self.say(
            f"step {iteration}/{self._bar.total} | loss {result.loss:.6f} | grad norm {result.grad_norm:.4f} | "
            f"lr {learning_rate:.3e} | {tokens_per_second:,.0f} tokens/s | peak memory {memory:,.0f} MiB"
        )
        self.restart_clock()

    def validation(self, iteration: int, loss: float) -> None:
        """Report a validation; its time does not count as training time."""
        perplexity = math.exp(min(loss, 700.0))
        self._scalars(iteration, {"validation_loss": loss, "validation_perplexity": perplexity})
        self.say(f"step {iteration}/{self._bar.total} | validation loss {loss:.6f} | perplexity {perplexity:,.2f}")

    def restart_clock(self) -> None:
        """Start a new stretch of training time."""
        self._started, self._tokens = time.perf_counter(), 0

    def say(self, message: str) -> None:
        """Print on rank 0 without tearing the bar."""
        if self._layout.rank == 0:
            self._bar.write(message)

    def close(self) -> None:
        """Write out what is buffered."""
        self._bar.close()
        if self._writer is not None:
            self._writer.close()

    def _scalars(self, iteration: int, values: dict[str, float]) -> None:
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, iteration)


def peak_memory_bytes(device: torch.device) -> int:
    """Largest memory so far: what torch allocated on a GPU, the process's resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _tensorboard_writer(config: TrainConfig, layout: Layout, first_iteration: int) -> Any:
    if config.logging.tensorboard_dir is None or layout.rank != 0:
        return None
    require_packages("tensorboard", extra="train")
    from torch.utils.tensorboard import SummaryWriter

    require_folder(config.logging.tensorboard_dir)
    # Events that a killed run wrote after its last checkpoint are dropped from the curves.
    return SummaryWriter(config.logging.tensorboard_dir, purge_step=first_iteration + 1)
