"""Results on disk: written in one step, read with an error that names the file, and what they depend on."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from loongforge.errors import UsageError


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one step: whoever ends this process finds the earlier one or this one whole."""
    unfinished = path.with_name(f"{path.name}.part")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


@contextlib.contextmanager
def record_of(path: Path, problem: str) -> Iterator[Any]:
    """The JSON at ``path``; whatever a damaged or foreign one brings about inside is a UsageError after ``problem``."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{problem}: {type(error).__name__}: {error}") from error
    try:
        yield json.loads(text)
    except UsageError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise UsageError(f"{problem}: {type(error).__name__}: {error}") from error


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Versions of those that are installed."""
    found = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
