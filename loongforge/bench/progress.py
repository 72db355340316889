"""Where a comparison stands: one line that moves on a terminal, one line per step elsewhere; on standard error."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

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
