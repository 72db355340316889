"""What a command of the tools prints as one line without a traceback."""

from __future__ import annotations

import tempfile
from pathlib import Path


class UsageError(ValueError):
    """Something the user can put right; the message says what was expected, what came and what to do."""


def require_folder(folder: Path | str | None) -> None:
    """:class:`UsageError` where no file could be written there: asked before the work, not after it."""
    if folder is None:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"results go to a folder that can be written to, {folder} is none: {error}") from error
