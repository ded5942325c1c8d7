"""What an error of another library says, as part of a line of ours."""

from __future__ import annotations


def one_line(error: Exception) -> str:
    """The first line of its message without the full stop, cut to 300 characters; or its kind."""
    line = str(error).strip().partition("\n")[0].partition(" See full ")[0]
    return line[:300].rstrip(".") or type(error).__name__
