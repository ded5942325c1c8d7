"""What every command line does: parse by tyro, and put a user's mistake in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import tyro

Arguments = TypeVar("Arguments")


def run_command(arguments: type[Arguments], main: Callable[[Arguments], int | None]) -> None:
    """Parses `sys.argv`, runs `main`, exits with its status; a ValueError is the user's mistake."""
    sys.path.insert(0, str(Path.cwd()))  # so that --score module:Name finds a module lying here
    try:
        parsed = tyro.cli(arguments, config=(tyro.conf.OmitArgPrefixes,))
        status = main(parsed)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        status = 130  # as shells say it, without a traceback
    sys.exit(status)
