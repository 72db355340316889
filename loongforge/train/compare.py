"""The same steps with the fused and with the plain output layer: losses side by side, memory of each measured."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace

from loongforge.train.checkpoint import bare_model
from loongforge.train.config import OutputLayerConfig, TrainConfig
from loongforge.train.errors import ConfigError, TrainError
from loongforge.train.head_memory import HeadMemory, HeadMemoryProbe
from loongforge.train.loop import Run, open_run, start_state, train_batches
from loongforge.train.output_layer import describe_output_layer
from loongforge.train.step import train_step

TOLERANCE = {False: 1e-5, True: 2e-2}
"""Largest relative difference of a loss in fp32 (False) and in bf16 (True)."""
_MIB = 1 << 20


@dataclass(frozen=True)
class Outcome:
    """Losses of one variant, and what its output layer allocated in the last step."""

    losses: list[float]
    memory: HeadMemory


def compare_with_unfused(config: TrainConfig, steps: int) -> None:
    """Print both variants side by side; :class:`TrainError` where a loss differs by more than ``TOLERANCE``."""
    if not 1 <= steps <= config.training.train_iters:
        raise ConfigError(f"--compare-unfused must be from 1 to train_iters={config.training.train_iters}, got {steps}")
    if config.parallel.pipeline_model_parallel_size > 1 or config.model.mtp_num_layers:
        raise ConfigError("--compare-unfused needs pipeline_model_parallel_size=1 and no mtp_num_layers")
    config = replace(config, output_layer=OutputLayerConfig())
    with open_run(config) as run:
        run.layout.say(describe_output_layer(config, run.vocab_size, run.layout.device))
        fused = _train(run, steps)
        plain = _train(replace(run, config=_unfused(config)), steps)
        _report(run, fused, plain)


def _unfused(config: TrainConfig) -> TrainConfig:
    return replace(config, output_layer=OutputLayerConfig(cross_entropy_loss_fusion=False))


def _train(run: Run, steps: int) -> Outcome:
    state = start_state(run)
    data = train_batches(run)
    probe = HeadMemoryProbe(bare_model(state.model).output_layer, run.layout.device)
    losses = [train_step(run.config, state, run.layout, data).loss for _ in range(steps - 1)]
    with probe.measure():
        losses.append(train_step(run.config, state, run.layout, data).loss)
    assert probe.result is not None
    outcome = Outcome(losses, probe.result)
    del state, probe
    gc.collect()  # the second variant must not find the first one's gradient buffers
    return outcome


def _report(run: Run, fused: Outcome, plain: Outcome) -> None:
    say = run.layout.say
    say(f"{'step':>6}{'fused loss':>14}{'unfused loss':>14}{'relative difference':>22}")
    differences = [abs(a - b) / abs(b) for a, b in zip(fused.losses, plain.losses, strict=True)]
    for step, (a, b, difference) in enumerate(zip(fused.losses, plain.losses, differences, strict=True), start=1):
        say(f"{step:>6}{a:>14.6f}{b:>14.6f}{difference:>22.1e}")
    say("\noutput layer and loss, forward and backward, measured by the allocator's events in the last step:")
    for name, memory in (("fused", fused.memory), ("unfused", plain.memory)):
        peak, largest = memory.peak / _MIB, memory.largest_allocation / _MIB
        say(f"{name:>9}: peak {peak:8.1f} MiB, largest allocation {largest:8.1f} MiB")
    say(f"    saved: {(plain.memory.peak - fused.memory.peak) / _MIB:.1f} MiB")
    tolerance = TOLERANCE[run.config.training.bf16]
    if not max(differences) <= tolerance:
        raise TrainError(
            f"fused and unfused losses differ by up to {max(differences):.1e}, more than {tolerance:.0e}: "
            "this is a defect of loongforge, please report it with the config"
        )
    say(f"losses equal: largest relative difference {max(differences):.1e}, allowed {tolerance:.0e}")
