"""Where a comparison stands, and how long it may go on.

Progress is one line that moves on a terminal, one line per step elsewhere; on standard error.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from loongforge.bench.shapes import positive

WIDTH = 24


@dataclass
class Step:
    """What runs now; ``outcome`` is set when it is known."""

    name: str
    outcome: str = ""


class Progress:
    """Counts ``total`` steps."""

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self._total, self._done = total, 0
        self._stream = sys.stderr if stream is None else stream
        self._start = time.monotonic()

    @contextmanager
    def step(self, name: str) -> Iterator[Step]:
        """One step: the bar names it while it runs, its outcome stays as a line."""
        step = Step(name)
        self._bar(name)
        try:
            yield step
        finally:
            self._done += 1
            self._clear()
            print(f"  {step.name}: {step.outcome}", file=self._stream, flush=True)

    def _bar(self, name: str) -> None:
        if not self._stream.isatty():
            return
        filled = WIDTH * self._done // max(1, self._total)
        minutes, seconds = divmod(int(time.monotonic() - self._start), 60)
        line = f"[{'#' * filled}{'.' * (WIDTH - filled)}] {self._done}/{self._total} {minutes}:{seconds:02} {name}"
        self._stream.write("\r" + line[: shutil.get_terminal_size().columns - 1])
        self._stream.flush()

    def _clear(self) -> None:
        if self._stream.isatty():
            self._stream.write("\r\033[K")


class TimeLimit:
    """Seconds for a whole measurement, from its creation on; None: as many as it takes."""

    def __init__(self, seconds: int | None) -> None:
        self._seconds, self._start, self._longest = seconds, time.monotonic(), 0.0

    @staticmethod
    def add_argument(parser: argparse.ArgumentParser) -> None:
        """``--time-limit``."""
        parser.add_argument(
            "--time-limit", type=positive, metavar="SECONDS", help="lines that do not fit are listed as not run"
        )

    def obstacle(self) -> str:
        """Why no further line is begun, or nothing: one may take as long as the longest before it."""
        if self._seconds is None:
            return ""
        left = self._start + self._seconds - time.monotonic()
        enough = left > self._longest
        return "" if enough else f"not run: --time-limit {self._seconds} left {max(0.0, left):.0f} s"

    @contextmanager
    def line(self) -> Iterator[None]:
        """Around each line, to know how long they take."""
        begun = time.monotonic()
        yield
        self._longest = max(self._longest, time.monotonic() - begun)
