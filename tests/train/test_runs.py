"""Whole runs in processes of their own: layouts, resuming, signals, a killed rank."""

from __future__ import annotations

import math
import re
import signal
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from loongforge.train.checkpoint import iteration_folder, latest_iteration

ENDLESS = ("--train-iters", "100000", "--eval-iters", "0")
NO_DROPOUT = ("--hidden-dropout", "0", "--attention-dropout", "0")
SHARDED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
TENSOR_PARALLEL = ("--tensor-model-parallel-size", "2", "--sequence-parallel")


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """TensorBoard curves: name -> step -> value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def tensors(checkpoint: Path, scratch: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, weights and optimizer state."""
    dcp_to_torch_save(checkpoint, scratch)
    flat: dict[str, torch.Tensor] = {}

    def walk(prefix: str, node: object) -> None:
        if torch.is_tensor(node):
            flat[prefix] = node
        elif isinstance(node, dict):
            for key, value in node.items():
                walk(f"{prefix}/{key}", value)

    walk("", torch.load(scratch, weights_only=False))
    return flat


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (1, ()),
        (2, TENSOR_PARALLEL),
        # Every parameter a multiple of 64 long: Megatron saves the gaps between others, which nobody initialises.
        (2, (*SHARDED, "--bf16", "--untie-embeddings-and-output-weights", "--hidden-size", "64")),
    ],
    ids=["one process", "tensor and sequence parallel", "distributed optimizer in bf16"],
)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(train, tmp_path, ranks, flags):
    def run(name: str, *more: str) -> tuple[str, ...]:
        return (*flags, "--save", str(tmp_path / name), "--tensorboard-dir", str(tmp_path / f"{name}_curves"), *more)

    output = train(
        run("whole", "--save-interval", "4"),
        run("rest", "--load", str(tmp_path / "whole"), "--ckpt-step", "4"),
        ranks=ranks,
    )
    assert f"continuing {tmp_path / 'whole'} at step 4" in output
    whole, rest = scalars(tmp_path / "whole_curves"), scalars(tmp_path / "rest_curves")
    assert list(whole["loss"]) == list(range(1, 9)) and list(whole["validation_loss"]) == [4, 8]
    for curve in ("loss", "grad_norm", "learning_rate", "validation_loss", "validation_perplexity"):
        assert rest[curve] == {step: value for step, value in whole[curve].items() if step > 4}, curve
    assert whole["peak_memory_mib"][8] > 0 and whole["tokens_per_second"][8] > 0
    for step, loss in whole["validation_loss"].items():
        assert whole["validation_perplexity"][step] == pytest.approx(math.exp(loss), rel=1e-5)
    expected, actual = (
        tensors(iteration_folder(str(tmp_path / name), 8), tmp_path / f"{name}.pt") for name in ("whole", "rest")
    )
    assert expected.keys() == actual.keys() and any("exp_avg_sq" in name for name in expected)
    for name, tensor in expected.items():
        assert torch.equal(tensor, actual[name]), name


def test_every_layout_trains_alike(train, tmp_path):
    def run(name: str, *flags: str) -> tuple[str, ...]:
        curves = ("--tensorboard-dir", str(tmp_path / name))
        # A vocabulary that every tensor-parallel size pads to the same number of rows.
        return (*flags, *NO_DROPOUT, *curves, "--train-iters", "4", "--vocab-size", "272")

    train(run("plain", "--no-cross-entropy-loss-fusion"), run("fused"))
    pipeline = run("pipeline", "--pipeline-model-parallel-size", "2")
    train(run("tensor", *TENSOR_PARALLEL), run("data", *SHARDED), pipeline, ranks=2)
    curves = {
        name: list(scalars(tmp_path / name)["loss"].values())
        for name in ("plain", "fused", "tensor", "data", "pipeline")
    }
    assert [len(losses) for losses in curves.values()] == [4] * 5
    for name in ("fused", "tensor", "data"):
        assert curves[name] == pytest.approx(curves["plain"], rel=1e-5), name
    # Each stage draws its initial weights from a seed of its own: the loss starts elsewhere, and has to fall.
    assert curves["pipeline"][-1] < curves["pipeline"][0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_sigterm_saves_and_exits_well(start, train, tmp_path, ranks):
    flags = (*ENDLESS, *(TENSOR_PARALLEL if ranks == 2 else ()), "--save", str(tmp_path / "run"))
    run = start(flags, ranks=ranks)
    run.wait_for("step 3/100000")
    run.processes[-1].send_signal(signal.SIGTERM)  # one rank is told, all of them stop
    assert run.wait() == [0] * ranks, run.output
    (step,) = re.findall(r"stopped by SIGTERM at step (\d+)", run.output)
    assert latest_iteration(str(tmp_path / "run")) == int(step)
    more = train((*flags, "--load", str(tmp_path / "run"), "--exit-interval", "1"), ranks=ranks)
    assert f"at step {step}" in more and f"step {int(step) + 1}/100000 | loss" in more


def test_a_killed_rank_ends_the_run_and_its_restart_equals_an_uninterrupted_one(start, train, tmp_path):
    def flags(name: str, *more: str) -> tuple[str, ...]:
        return (*ENDLESS, *TENSOR_PARALLEL, "--save", str(tmp_path / name), *more)

    run = start(flags("run", "--save-interval", "3"), ranks=2)
    run.wait_for("step 3/100000 | saved")
    run.wait_for("step 4/100000")
    run.processes[1].kill()
    survivor, killed = run.wait()
    assert killed == -signal.SIGKILL and survivor > 0, run.output
    step = latest_iteration(str(tmp_path / "run"))
    assert step is not None and step % 3 == 0
    assert FileSystemReader(iteration_folder(str(tmp_path / "run"), step)).read_metadata().state_dict_metadata
    last = str(step + 2)
    whole = flags("whole", "--exit-interval", last)
    more = train(flags("run", "--load", str(tmp_path / "run"), "--exit-interval", last), whole, ranks=2)
    assert f"at step {step}" in more and f"step {last}/100000 | loss" in more
    restarted, uninterrupted = (
        tensors(iteration_folder(str(tmp_path / name), int(last)), tmp_path / f"{name}.pt") for name in ("run", "whole")
    )
    assert restarted.keys() == uninterrupted.keys()
    for name, tensor in uninterrupted.items():
        assert torch.equal(tensor, restarted[name]), name


def test_comparison_measures_both_output_layers(train, monkeypatch):
    monkeypatch.setenv("LCE_FWD_VOCAB_SPLIT_SIZE", "64")
    monkeypatch.setenv("LCE_BWD_VOCAB_SPLIT_SIZE", "64")
    output = train(("--compare-unfused", "3", "--vocab-size", "2048"))
    assert "chunks of 64 forward and 64 backward" in output
    assert "losses equal" in output
    peaks = [float(peak) for peak in re.findall(r"fused: peak +([0-9.]+) MiB", output)]
    assert len(peaks) == 2
    one_copy = 2 * 32 * 2048 * 4 / 2**20
    assert peaks[1] >= one_copy > peaks[0] > 0
