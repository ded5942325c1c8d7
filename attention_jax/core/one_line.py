"""The message of another library's error, as part of a line of ours."""

from __future__ import annotations


def one_line(error: Exception) -> str:
    """The first line of the message, at most 300 characters; the error's class if it is empty.

    A line that ends with a colon is continued by the next.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1]).partition(" See full ")[
        0
    ]
    return line[:300].rstrip(".") or type(error).__name__
