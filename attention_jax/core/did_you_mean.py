"""The end of an error about an unknown name: the known name that is spelled most like it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of an error about an unknown name; "" if no known name is spelled like it.

    >>> did_you_mean("aditive", ["additive", "dot"])
    "; did you mean 'additive'?"
    """
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
