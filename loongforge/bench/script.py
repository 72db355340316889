"""How a script of ``scripts/`` runs a module of this package."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from loongforge.errors import UsageError


def main(
    description: str | None,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], Any],
) -> None:
    """Parse the command line and run; what the user can put right ends in one line and status 2."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    try:
        run(parser.parse_args())
    except UsageError as error:
        parser.error(str(error))
