"""Errors that the command line prints as one line without a traceback."""

from __future__ import annotations

import importlib.util


class TrainError(Exception):
    """Something the user can put right; the message says what was expected, what came and what to do."""


class ConfigError(TrainError, ValueError):
    """A key, flag or combination of values that cannot be trained."""


class DataError(TrainError):
    """A text, token or tokenizer file that is missing or damaged."""


class CheckpointError(TrainError):
    """A checkpoint that is missing, damaged or belongs to another model."""


class MissingPackageError(TrainError, ImportError):
    """A package that an extra of loongforge would have brought."""


def require_packages(*names: str, extra: str) -> None:
    """Raise :class:`MissingPackageError` unless every importable name in ``names`` is installed."""
    missing = [name for name in names if not _is_importable(name)]
    if missing:
        raise MissingPackageError(f"{', '.join(missing)} not installed; run: pip install 'loongforge[{extra}]'")


def _is_importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent of a dotted name is missing
        return False
