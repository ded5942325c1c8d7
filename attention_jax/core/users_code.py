"""Finds the line of the user's code that raised an error."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Collection
from pathlib import Path

_LIBRARY = Path(__file__).resolve().parents[1]
_INSTALLED = {
    Path(sysconfig.get_path(name)).resolve()
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
}


def users_line(error: BaseException, files: Collection[str] = ()) -> str | None:
    """The deepest line of the user's code in the traceback, as "my_scores.py, line 12".

    None if the user's code did not raise the error: then it is ours or another library's.

    Args:
        error: an error that was caught around a call of the user's code.
        files: files that are the user's although they lie among the installed packages.
    """
    if isinstance(error, SyntaxError) and error.filename is not None:
        return line_name(error.filename, error.lineno or 1)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_users(frame.filename, files):
            return line_name(frame.filename, frame.lineno or 1)
    return None


def line_name(file: str, line: int) -> str:
    """A line of a file as messages name it; the path is relative to the current folder."""
    path = Path(file)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        file = os.path.relpath(path)
    return f"{file}, line {line}"


def _is_users(file: str, files: Collection[str]) -> bool:
    folders = Path(file).resolve().parents
    if file.startswith("<frozen ") or _LIBRARY in folders:
        return False
    return file in files or _INSTALLED.isdisjoint(folders)
