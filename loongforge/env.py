"""The only reader of ``LCE_*`` environment variables: typed, validated, read anew at each call.

| variable | default | meaning |
| --- | --- | --- |
| ``LCE_IMPL`` | ``auto`` | ``auto``, ``flydsl``, ``triton`` or ``generic`` |
| ``LCE_FORCE_GENERIC`` | 0 | 1 is the same as ``LCE_IMPL=generic`` |
| ``LCE_<IMPL>_FWD_VOCAB_SPLIT_SIZE``, ``..._BWD_...`` | 3072 for generic, else planned | chunk width |
| ``LCE_FWD_VOCAB_SPLIT_SIZE``, ``LCE_BWD_VOCAB_SPLIT_SIZE`` | unset | used where the former is unset |
| ``LCE_LOGITS_BUDGET_MB`` | 0 | MiB of logits kept over all live calls of the process, or ``all`` |
| ``LCE_CHECK_LABELS``, ``LCE_CHECK_RANKS`` | 0 | debugging checks that synchronise |
"""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Literal

from loongforge.options import IMPLEMENTATIONS, check_budget

Direction = Literal["FWD", "BWD"]
_SPLIT = tuple(
    f"LCE_{prefix}{direction}_VOCAB_SPLIT_SIZE"
    for prefix in ("", *(f"{name.upper()}_" for name in IMPLEMENTATIONS if name != "auto"))
    for direction in ("FWD", "BWD")
)
VARIABLES = (
    "LCE_IMPL",
    "LCE_FORCE_GENERIC",
    *_SPLIT,
    "LCE_LOGITS_BUDGET_MB",
    "LCE_CHECK_LABELS",
    "LCE_CHECK_RANKS",
)


def implementation() -> str:
    """``LCE_IMPL``, or ``generic`` under ``LCE_FORCE_GENERIC=1``; ``ValueError`` where the two disagree."""
    _warn_of_unknown_names()
    impl = _get("LCE_IMPL") or "auto"
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"LCE_IMPL must be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")
    if not _flag("LCE_FORCE_GENERIC"):
        return impl
    if impl not in ("auto", "generic"):
        raise ValueError(f"LCE_FORCE_GENERIC=1 contradicts LCE_IMPL={impl}: unset one of them")
    return "generic"


def vocab_split_size(impl: str, direction: Direction) -> int | None:
    """Chunk width asked for by ``LCE_<IMPL>_<FWD|BWD>_VOCAB_SPLIT_SIZE``, else by the common variable, else None."""
    for name in (f"LCE_{impl.upper()}_{direction}_VOCAB_SPLIT_SIZE", f"LCE_{direction}_VOCAB_SPLIT_SIZE"):
        width = _split_size(name)
        if width is not None:
            return width
    return None


def logits_budget_mb() -> int | str:
    """``LCE_LOGITS_BUDGET_MB``: MiB >= 0 or ``"all"``; 0 when unset."""
    text = _get("LCE_LOGITS_BUDGET_MB")
    if text is None or text == "all":
        return text or 0
    try:
        return check_budget("LCE_LOGITS_BUDGET_MB", int(text))
    except ValueError:
        raise ValueError(f'LCE_LOGITS_BUDGET_MB must be a whole number of MiB >= 0, or "all", got {text!r}') from None


def check_labels() -> bool:
    """``LCE_CHECK_LABELS``: raise IndexError for labels out of range (synchronises with the host)."""
    return _flag("LCE_CHECK_LABELS")


def check_ranks() -> bool:
    """``LCE_CHECK_RANKS``: compare what the ranks were given at every call, not only at a group's first."""
    return _flag("LCE_CHECK_RANKS")


def set_variables(texts: Mapping[str, str]) -> None:
    """Set them for this process and its children; ``ValueError`` for a bad value or another one already set."""
    for name, text in texts.items():
        present = _get(name)
        if present not in (None, text):
            raise ValueError(f"{name} is {present} in the environment and {text} on the command line: drop one of them")
        os.environ[name] = text
    check()


def check() -> None:
    """``ValueError`` for a variable with a bad value, before the call that would read it."""
    for problem in problems():
        raise ValueError(problem)


def problems() -> list[str]:
    """Everything that is wrong with the values that are set, whether or not a call here would read them."""
    readers: list[Callable[[], object]] = [implementation, logits_budget_mb, check_labels, check_ranks]
    readers += [partial(_flag, "LCE_FORCE_GENERIC"), *(partial(_split_size, name) for name in _SPLIT)]
    found: dict[str, None] = {}
    for read in readers:
        try:
            read()
        except ValueError as error:
            found[str(error)] = None
    return [*found]


def in_force() -> dict[str, str]:
    """The variables of this module that are set, with their texts."""
    return {name: os.environ[name] for name in VARIABLES if _get(name) is not None}


def unknown() -> dict[str, str]:
    """Variables that begin with ``LCE_`` and are none of ours, each with a hint at what may have been meant."""
    hints = {}
    for name in sorted(os.environ):
        if name.startswith("LCE_") and name not in VARIABLES:
            close = difflib.get_close_matches(name, VARIABLES, n=1)
            hints[name] = f"; did you mean {close[0]}?" if close else f"; known are {', '.join(VARIABLES)}"
    return hints


def _get(name: str) -> str | None:
    text = os.environ.get(name, "").strip()
    return text or None


def _flag(name: str) -> bool:
    text = _get(name)
    if text in (None, "0"):
        return False
    if text == "1":
        return True
    raise ValueError(f"{name} must be 0 or 1, got {text!r}")


def _split_size(name: str) -> int | None:
    text = _get(name)
    if text is None:
        return None
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"{name} must be a whole number of at least 1, got {text!r}") from None
    if value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value}")
    return value


@cache
def _warn_of_unknown_names() -> None:
    """Once per process: reading the whole environment at every call would be slow."""
    for name, hint in unknown().items():
        warnings.warn(f"environment variable {name} is not one that loongforge reads{hint}", stacklevel=3)
