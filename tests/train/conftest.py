"""A tiny model, token files, and runs of the command line in processes of their own."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers import environment_of_checkout

pytest.importorskip("megatron.core", reason="megatron-core is missing: pip install 'loongforge[train]'")

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
model:
  num_layers: 2
  hidden_size: 32
  num_attention_heads: 4
  seq_length: 32
  make_vocab_size_divisible_by: 8
  hidden_dropout: 0.1
  attention_dropout: 0.1
training:
  train_iters: 8
  micro_batch_size: 2
  global_batch_size: 4
  lr: 1e-3
  lr_warmup_iters: 2
  eval_interval: 4
  eval_iters: 1
  # Dropout, warm-up, decay and two micro-batches: whatever a checkpoint forgets shows in the next losses.
data:
  split: "80,20,0"
logging:
  log_interval: 1
"""
# Starting Python with torch and megatron-core takes longer than most runs: several share a process.
_DRIVER = """
import json, os, sys
from loongforge.cli import main
for port, run in json.loads(sys.argv[1]):
    os.environ["MASTER_PORT"] = port
    if main(run):
        sys.exit(2)
"""


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """English that every Python brings."""
    from pydoc_data.topics import topics

    path = tmp_path_factory.mktemp("text") / "topics.txt"
    path.write_text("\n\n".join(topics.values())[:60_000], encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tokens(text_file: Path) -> str:
    """Prefix of token files made with the byte tokenizer."""
    from loongforge.train.preprocess import preprocess

    prefix = str(text_file.with_name("bytes"))
    preprocess([str(text_file)], prefix, "bytes")
    return prefix


@pytest.fixture(scope="session")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CONFIG in a file."""
    path = tmp_path_factory.mktemp("config") / "test.yaml"
    path.write_text(CONFIG, encoding="utf-8")
    return path


class Ranks:
    """The processes of one run and what they print."""

    def __init__(self, processes: list[subprocess.Popen], logs: list[Path]) -> None:
        self.processes = processes
        self._logs = logs

    @property
    def output(self) -> str:
        """What all ranks printed so far."""
        return "\n".join(log.read_text(encoding="utf-8") for log in self._logs)

    def wait(self, timeout: float = 300.0) -> list[int]:
        """Exit statuses once all have ended."""
        deadline = time.monotonic() + timeout
        return [process.wait(max(0.0, deadline - time.monotonic())) for process in self.processes]

    def wait_for(self, text: str, timeout: float = 240.0) -> None:
        """Until ``text`` was printed."""
        deadline = time.monotonic() + timeout
        while text not in self.output:
            running = any(process.poll() is None for process in self.processes)
            assert running and time.monotonic() < deadline, f"{text!r} never appeared in:\n{self.output}"
            time.sleep(0.05)


@pytest.fixture
def start(tmp_path: Path, config_file: Path, tokens: str) -> Iterator[Callable[..., Ranks]]:
    """``start(flags, more_flags, ranks=2)`` begins runs of `loongforge train`, one after the other in the same
    processes, on the test config and token files."""
    began: list[subprocess.Popen] = []

    def begin(*runs: tuple[str, ...], ranks: int = 1) -> Ranks:
        shared = ["train", "--config", str(config_file), "--data-path", tokens]
        numbered = [(port, [*shared, *flags]) for port, flags in zip(_free_ports(len(runs)), runs, strict=True)]
        command = [sys.executable, "-c", _DRIVER, json.dumps(numbered)]
        folder = tmp_path / f"log{len(began)}"
        folder.mkdir()
        logs = [folder / f"rank{rank}" for rank in range(ranks)]
        processes = [_popen(command, log, rank, ranks) for rank, log in enumerate(logs)]
        began.extend(processes)
        return Ranks(processes, logs)

    yield begin
    for process in began:
        if process.poll() is None:
            process.kill()
        process.wait()


@pytest.fixture
def train(start: Callable[..., Ranks]) -> Callable[..., str]:
    """As ``start``, but waits for the end, which must be a good one, and returns the output."""

    def run(*runs: tuple[str, ...], ranks: int = 1) -> str:
        processes = start(*runs, ranks=ranks)
        assert processes.wait() == [0] * ranks, processes.output
        return processes.output

    return run


def _popen(command: list[str], log: Path, rank: int, ranks: int) -> subprocess.Popen:
    environment = environment_of_checkout(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1")
    with log.open("w") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)


def _free_ports(count: int) -> list[str]:
    """Each run meets at a port of its own: the store of the one before may still listen at its port."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [str(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports
