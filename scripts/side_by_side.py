"""Runs several processes beside each other on one device, under a common time limit, each with a log of its own.

Processes that want to be timed take turns: each starts with a shared lock on one file, which whoever started it took
for it, gives that up where its timed part begins and waits there for an exclusive one.  So the first gets it when all
have come that far, and runs alone on the device; the others wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from loongforge.bench.records import record_of, versions_of  # noqa: E402
from loongforge.bench.records import write_whole as write_whole  # noqa: E402  # for the scripts too
from loongforge.errors import UsageError  # noqa: E402

TURN = "SIDE_BY_SIDE_TURN"
"""Environment variable with the number of the file descriptor that holds the lock."""
PATIENCE = 5.0
"""Seconds that a process has between the polite signal and the other one."""


def versions(*packages: str) -> dict[str, str]:
    """Device and versions that results depend on: torch's, and of those packages that are installed."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"device": device, "torch": torch.__version__} | versions_of(packages)


@dataclass(frozen=True, eq=False)  # each is itself
class Job:
    """A process to run; ``log`` gets both of its outputs."""

    name: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Ended:
    """How a job ended; ``status`` is None where it was stopped at the time limit."""

    job: Job
    status: int | None
    seconds: float

    @property
    def text(self) -> str:
        """The log."""
        return self.job.log.read_text(errors="replace")


# ---------------------------------------------------------------- in the process that starts them


def run_together(
    jobs: Sequence[Job], deadline: float, ended: Callable[[Ended], None], patience: float = PATIENCE
) -> None:
    """Start all and call ``ended`` as each one ends.

    What still runs at ``deadline`` (of ``time.monotonic``), or when this process is told to end, is stopped.
    """
    running: dict[Job, tuple[subprocess.Popen, float]] = {}
    try:
        for job in jobs:
            running[job] = _start(job, jobs[0].log.with_name("turn")), time.monotonic()
        while running:
            late = time.monotonic() >= deadline
            if late:
                stop([process for process, _ in running.values()], patience)
            for job, (process, started) in list(running.items()):
                status = process.poll()
                if status is not None:
                    del running[job]
                    ended(Ended(job, None if late else status, time.monotonic() - started))
            time.sleep(0.1)
    finally:
        stop([process for process, _ in running.values()], patience)
        for job, (_, started) in running.items():
            ended(Ended(job, None, time.monotonic() - started))


def _start(job: Job, lock: Path) -> subprocess.Popen:
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # before any other job can ask for its turn
        with job.log.open("w") as output:
            return subprocess.Popen(
                list(job.command), env={**job.environment, TURN: str(descriptor)}, pass_fds=[descriptor],
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
    finally:
        os.close(descriptor)  # the child's copy holds the lock


def stop(processes: Sequence[subprocess.Popen], patience: float) -> None:
    """End processes and their children: asked first, killed after ``patience`` seconds."""
    for number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, None)):
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, number)
        until = None if seconds is None else time.monotonic() + seconds
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(None if until is None else max(0.0, until - time.monotonic()))


def stop_on_sigterm() -> None:
    """So that whoever ends this process ends what it started."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def pack(folder: Path, archive: Path, pattern: str = "*.log") -> None:
    """All logs in one compressed file; a half-written one never takes the place of the last."""
    unfinished = archive.with_suffix(".part")
    with tarfile.open(unfinished, "w:gz") as tar:
        for path in sorted(folder.glob(pattern)):
            content = path.read_bytes()  # a running process may add to it meanwhile
            entry = tarfile.TarInfo(path.name)
            entry.size, entry.mtime = len(content), int(path.stat().st_mtime)
            tar.addfile(entry, io.BytesIO(content))
    unfinished.rename(archive)


@contextlib.contextmanager
def results_of(path: Path) -> Iterator[Any]:
    """The JSON of an earlier run; the script ends, saying so, where it or what is made of it inside is damaged."""
    try:
        with record_of(path, f"{path} holds no results of this script") as content:
            yield content
    except UsageError as error:
        raise SystemExit(str(error)) from error


# ---------------------------------------------------------------- in a process that takes turns


def wait_for_turn() -> bool:
    """Wait until no other process of the group runs; False where nobody else is there to wait for."""
    if TURN not in os.environ:
        return False
    descriptor = int(os.environ[TURN])
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return True


def end_turn() -> None:
    """Let the next one run; ending the process does the same."""
    if TURN in os.environ:
        fcntl.flock(int(os.environ[TURN]), fcntl.LOCK_UN)
