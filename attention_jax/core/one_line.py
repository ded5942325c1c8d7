"""The message of another library's error, as part of a line of ours."""

from __future__ import annotations


def one_line(error: Exception) -> str:
    """The first line of the message, at most 300 characters; the error's class if it is empty."""
    line = str(error).strip().partition("\n")[0].partition(" See full ")[0]
    return line[:300].rstrip(".") or type(error).__name__
