"""What an error says, and where: for messages of one line about code of other people."""

import os
import sysconfig
import traceback

LIBRARY_FOLDER = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_INSTALLED = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
# How the names of files begin that are installed, which no user writes.
_INSTALLED_FILES = ("<frozen ", LIBRARY_FOLDER, *(os.path.join(path, "") for path in _INSTALLED))


def users_line(error: BaseException) -> str | None:
    """The deepest line of the user's code in the traceback, as "my_scores.py, line 12".

    The user's code is neither this library nor an installed package. None if there is no such line.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(_INSTALLED_FILES):
            return f"{os.path.basename(frame.filename)}, line {frame.lineno}"
    return None


def one_line(error: BaseException) -> str:
    """The first line of the message, at most 300 characters; the error's class if it is empty.

    A line that ends with a colon is continued by the next.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return line.partition(" See full ")[0][:300].rstrip(".") or type(error).__name__
