"""What a benchmark is meant to show: a number that its rows hold, and the bound that it keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.measure import JSON

Rows = Sequence[JSON]
Found = Callable[[Rows], float | None]  # None: not measured


class Target(NamedTuple):
    """A number that rows hold, and its bound."""

    claim: str
    what: str  # the number is
    found: Found
    bound: str  # "at least" or "at most"
    limit: float

    def row(self, rows: Rows) -> JSON:
        """The claim, its bound, what was found, and "yes", "no" or "not measured"."""
        found = self.found(rows)
        if found is None:
            met = "not measured"
        else:
            enough = found >= self.limit if self.bound == "at least" else found <= self.limit
            met = "yes" if enough else "no"
        return {
            "claim": self.claim,
            "what": self.what,
            "target": f"{self.bound} {self.limit:.3g}",
            "found": found,
            "met": met,
        }


def with_target(row: JSON, entry: str, least: float | None) -> JSON:
    """The row, and "target" and "met" of one of its entries; no more if there is no target."""
    if least is None:
        return row
    target = Target("", entry, lambda rows: rows[0].get(entry), "at least", least).row([row])
    return row | {name: target[name] for name in ("target", "met")}
