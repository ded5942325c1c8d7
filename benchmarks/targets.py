"""The targets of all benchmarks, each written before the measurement that it judges.

targets.json has {benchmark: {case: {number: bound}}}. A case is a work, whose rows are read; or
"score, direction", for the rows of all such works. A number is "A / B", the time of contestant A
divided by that of B in the same turn; or "ENTRY by CONTESTANT", the largest one; "by ours" may be
left out. "at most 278" for the second derivative of additive attention is the figure before forward
mode was rewritten.

A target is met or a MISS. Where its bound lies between the quartiles of what was measured, the
measurement cannot tell, and the verdict says "within noise".
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import JSON, ratio

TARGETS: dict[str, dict[str, dict[str, str]]] = json.loads(
    Path(__file__).with_suffix(".json").read_text()
)
_ENTRIES = {
    "temporary_mib": "temporary MiB",
    "growth": "temporary memory / that of a quarter of the length",
    "compile_seconds": "seconds to compile, the longest",
    "worst": "largest error, as a share of its bound",
    "differences": "arrays and lines that differ",
}


def targets_of(benchmark: str, rows: Sequence[JSON]) -> list[JSON]:
    """A row for each target of a benchmark whose case was measured."""
    found = []
    for case, numbers in TARGETS.get(benchmark, {}).items():
        named = ((row["work"], f"{row.get('score')}, {row.get('direction')}") for row in rows)
        matching = [row for row, names in zip(rows, named, strict=True) if case in names]
        for number, bound in numbers.items() if matching else ():
            words = f"time of {number}" if " / " in number else number
            what = _ENTRIES.get(number, words)
            row = judged(case, what, bound, *_measured(number, matching))
            found.append({"benchmark": benchmark, **row})
    return found


def _measured(number: str, rows: Sequence[JSON]) -> tuple[float, ...]:
    """A number, or the first quartile, median and third quartile; () if it was not measured."""
    by_name = {row["contestant"]: row for row in rows}
    if " / " in number:
        return ratio(*(by_name.get(name, {}) for name in number.split(" / "))) or ()
    entry, _, contestant = number.partition(" by ")
    if entry == "growth":
        pair = by_name.get("ours", {}), by_name.get("ours, a quarter as long", {})
        sizes = [row["temporary_mib"] for row in pair if "temporary_mib" in row]
        return (sizes[0] / sizes[1],) if len(sizes) == 2 else ()
    mine = [row for row in rows if row["contestant"] == (contestant or "ours")]
    found = [row[entry] for row in mine if entry in row]
    return (max(found),) if found else ()


def judged(claim: str, what: str, bound: str, *found: float) -> JSON:
    """The row of a target: what was measured, its noise, and the verdict.

    Args:
        claim: the case.
        what: the number in words.
        bound: "at least" or "at most", and a number.
        found: the number; with noise the first quartile, the median and the third quartile; nothing
            if it was not measured.

    >>> judged("scaled", "seconds", "at most 4", 3.5, 3.9, 4.1)["met"]
    'yes, within noise'
    """
    row = {"claim": claim, "what": what, "target": bound, "found": None, "met": "not measured"}
    if not found:
        return row
    low, median, high = found if len(found) > 1 else 3 * found
    limit = float(bound.split()[-1])
    is_met = median >= limit if bound.startswith("at least") else median <= limit
    met = ("yes" if is_met else "MISS") + ", within noise" * (low < limit < high)
    return row | {"found": median, "quartiles": [low, high], "met": met}
