"""Targets of a benchmark: a number computed from its rows, and a bound for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.measure import JSON

Rows = Sequence[JSON]
Quantity = Callable[[Rows], float | None]  # None: not measured


class Target(NamedTuple):
    """A number computed from rows, and its bound."""

    claim: str
    what: str  # describes the number
    quantity: Quantity
    bound: str  # "at least" or "at most"
    limit: float

    def row(self, rows: Rows) -> JSON:
        """The claim, its bound, the measured number, and "yes", "no" or "not measured"."""
        measured = self.quantity(rows)
        if measured is None:
            met = "not measured"
        else:
            enough = measured >= self.limit if self.bound == "at least" else measured <= self.limit
            met = "yes" if enough else "no"
        return {
            "claim": self.claim,
            "what": self.what,
            "target": f"{self.bound} {self.limit:.3g}",
            "found": measured,
            "met": met,
        }


def with_target(row: JSON, entry: str, least: float | None) -> JSON:
    """The row with the entries "target" and "met" for one of its numbers, if there is a target."""
    if least is None:
        return row
    target = Target("", entry, lambda rows: rows[0].get(entry), "at least", least).row([row])
    return row | {name: target[name] for name in ("target", "met")}
