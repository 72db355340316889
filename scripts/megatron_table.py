"""What one run of Megatron printed, and the table that compares runs (compare_megatron.py)."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

STEP = re.compile(
    r"iteration\s+(\d+)/.*?elapsed time per iteration \(ms\): ([\d.]+).*?lm loss: (\S+).*?grad norm: ([\d.]+|nan|inf)"
)
NOT_RUN = "not run: "
FIRST_STEPS = 10
HEADER = """\
| row | last loss | loss difference | gradient norm difference | tokens/s | speed over unfused | peak GiB |
| --- | --- | --- | --- | --- | --- | --- |
"""


@dataclass
class Outcome:
    """What one run printed."""

    name: str
    base: str
    """Row that it is compared with."""
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)
    alone_from: int = 0
    """First step that no other row ran beside; 0 where there was none."""
    peak_bytes: int = 0
    fused_losses: int = 0
    seconds: float = 0.0
    """From the start of the process to its end, waiting included."""
    error: str = ""
    log_tail: list[str] = field(default_factory=list)
    """Last lines of the log of a row that failed."""

    @property
    def timed(self) -> list[float]:
        """Milliseconds of the steps that ran alone, without the first of them, which waited for its turn."""
        return self.milliseconds[self.alone_from :] if self.alone_from else []


def read_log(text: str, outcome: Outcome) -> None:
    """Steps, peak memory and the number of fused losses from one run's output."""
    for _, milliseconds, loss, grad_norm in STEP.findall(text):
        outcome.milliseconds.append(float(milliseconds))
        outcome.losses.append(float(loss))
        outcome.grad_norms.append(float(grad_norm))
    outcome.peak_bytes = _number(r"PEAK MEMORY BYTES (\d+)", text)
    outcome.fused_losses = _number(r"loongforge: (\d+) fused losses", text)
    outcome.alone_from = _number(r"ALONE FROM STEP (\d+)", text)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found.group(1)) if found else 0


# ---------------------------------------------------------------- differences


def differences(values: Sequence[float], expected: Sequence[float]) -> list[float]:
    """Relative difference at every step of two runs of one length."""
    return [abs(a - b) / abs(b) for a, b in zip(values, expected, strict=True)]


def largest(values: Sequence[float]) -> float:
    """The maximum; NaN where one is NaN."""
    return float("nan") if any(value != value for value in values) else max(values)


def difference_cell(values: Sequence[float], expected: Sequence[float]) -> str:
    """Largest of the first steps / median of all / largest of all and where that was.

    The maximum alone says little: a training step can amplify a difference in rounding a thousandfold.
    """
    found = differences(values, expected)
    worst = largest(found)
    step = found.index(worst) + 1 if worst == worst else next(n for n, x in enumerate(found, 1) if x != x)
    return f"{largest(found[:FIRST_STEPS]):.1e} / {statistics.median(found):.1e} / {worst:.1e} ({step})"


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    return tuple(statistics.quantiles(values, n=4, method="inclusive")) if len(values) > 1 else (values[0],) * 3


def speed_cell(outcome: Outcome, tokens_per_step: int) -> str:
    """Tokens per second of the median step, and of the quartiles."""
    if not outcome.timed:
        return "not timed"
    slow, middle, fast = (tokens_per_step / time * 1e3 for time in reversed(quartiles(outcome.timed)))
    return f"{middle:.0f} ({slow:.0f} to {fast:.0f})"


def quotient_cell(outcome: Outcome, base: Outcome) -> str:
    """How many times faster than the other row; in brackets one's lower quartile by the other's upper, and back."""
    if not (outcome.timed and base.timed):
        return ""
    ours, theirs = quartiles(outcome.timed), quartiles(base.timed)
    return f"{theirs[1] / ours[1]:.2f} ({theirs[0] / ours[2]:.2f} to {theirs[2] / ours[0]:.2f})"


# ---------------------------------------------------------------- table


def table(outcomes: Sequence[Outcome], settings: Mapping) -> str:
    """Markdown; the settings are those of ``compare.json``."""
    batch = int(settings["global_batch_size"]) or int(settings["micro_batch_size"])
    tokens_per_step = batch * int(settings["seq_length"])
    lines, by_name = [], {outcome.name: outcome for outcome in outcomes}
    for outcome in outcomes:
        if outcome.error or not outcome.losses:
            lines.append(f"| {outcome.name} | {outcome.error or f'{NOT_RUN}not yet'} | | | | | |\n")
            continue
        base = by_name.get(outcome.base)
        cells = [f"{outcome.losses[-1]:.6f}", "", "", speed_cell(outcome, tokens_per_step), ""]
        if base and base is not outcome and base.losses and not base.error:
            cells[1] = difference_cell(outcome.losses, base.losses)
            cells[2] = difference_cell(outcome.grad_norms, base.grad_norms)
            cells[4] = quotient_cell(outcome, base)
        cells.append(f"{outcome.peak_bytes / 2**30:.1f}" if outcome.peak_bytes else "unknown")
        lines.append(f"| {outcome.name} | {' | '.join(cells)} |\n")
    machine = "".join(f"{name} {version}, " for name, version in settings.get("versions", {}).items())
    notes = (
        f"{machine}{settings['train_iters']} steps of {tokens_per_step} tokens.  Differences are relative to the row "
        f"without fusion: largest of the first {FIRST_STEPS} steps / median of all / largest of all (its step).  "
        "Speed: median (quartiles) of the steps that ran alone.\n"
    )
    return f"{HEADER}{''.join(lines)}\n{notes}"


def wrong_rows(outcomes: Sequence[Outcome], tolerance: float) -> list[str]:
    """Rows that failed or whose losses left the unfused ones."""
    by_name = {outcome.name: outcome for outcome in outcomes}
    wrong = []
    for outcome in outcomes:
        base = by_name.get(outcome.base)
        if outcome.error:
            wrong += [] if outcome.error.startswith(NOT_RUN) else [outcome.name]
        elif outcome.losses and base and base.losses and not base.error:  # where one is missing it has not run yet
            difference = largest(differences(outcome.losses, base.losses))
            wrong += [] if difference <= tolerance else [outcome.name]
    return wrong
