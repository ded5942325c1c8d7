"""The targets of all benchmarks, each written before the measurement that it judges.

A target is met or a MISS. Where its bound lies between the quartiles of what was measured, the
measurement cannot tell, and the verdict says "within noise".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.measure import FOUR_SCORES, JSON, ratio

# What the entries of a row are called; any other number is the ratio of two contestants' times.
_ENTRIES = {
    "temporary_mib": "temporary MiB",
    "times_shorter": "temporary memory / that of a quarter of the length",
    "compile_seconds": "seconds to compile, the longest",
    "milliseconds": "milliseconds",
    "worst": "largest error, as a share of its bound",
    "seconds": "seconds",
    "differences": "arrays and lines that differ",
}


class Target(NamedTuple):
    """A number computed from the rows of a benchmark, and its bound.

    Attributes:
        case: the work whose rows are read; or "score, direction", for the rows of all such works.
        number: "A / B", the time of contestant A divided by that of B in the same turn; or an entry
            of our rows, the largest of which counts.
        bound: "at least" or "at most".
        limit: the bound's number.
        contestant: whose entry it is.
    """

    case: str
    number: str
    bound: str
    limit: float
    contestant: str = "ours"

    def measured(self, rows: Sequence[JSON]) -> tuple[float, float, float] | None:
        """The first quartile, median and third quartile; None if it was not measured."""
        by_name = {row["contestant"]: row for row in rows}
        if " / " in self.number:
            return ratio(*(by_name.get(name, {}) for name in self.number.split(" / ")))
        having = [row for row in rows if self.number in row]
        entries = [row[self.number] for row in having if row["contestant"] == self.contestant]
        return (max(entries),) * 3 if entries else None

    def row(self, rows: Sequence[JSON]) -> JSON:
        """The target as a row: what was measured, its noise, and the verdict."""
        measured = self.measured(rows)
        return {
            "claim": self.case,
            "what": _ENTRIES.get(self.number, f"time of {self.number}"),
            "target": f"{self.bound} {self.limit:.3g}",
            "found": measured and measured[1],
            "quartiles": measured and [measured[0], measured[2]],
            "met": self.verdict(*measured) if measured else "not measured",
        }

    def verdict(self, low: float, found: float, high: float) -> str:
        """Returns "yes" or "MISS", and whether the bound is finer than the noise."""
        met = found >= self.limit if self.bound == "at least" else found <= self.limit
        return ("yes" if met else "MISS") + ", within noise" * (low < self.limit < high)


def targets_of(benchmark: str, rows: Sequence[JSON]) -> list[JSON]:
    """A row for each target of a benchmark whose case was measured."""
    found = []
    for target in TARGETS.get(benchmark, ()):
        cases = ((row["work"], f"{row.get('score')}, {row.get('direction')}") for row in rows)
        matching = [row for row, names in zip(rows, cases, strict=True) if target.case in names]
        if matching:
            found.append({"benchmark": benchmark, **target.row(matching)})
    return found


TARGETS: dict[str, tuple[Target, ...]] = {
    "attention": (
        Target("scaled", "jax.nn / ours", "at least", 4),
        Target("scaled", "PyTorch SDPA / ours", "at least", 1),
        Target("scaled-grad", "jax.nn / ours", "at least", 2.5),
        Target("scaled-grad", "PyTorch SDPA / ours", "at least", 1 / 1.2),
        Target("additive", "naive JAX / ours", "at least", 20),
        Target("additive", "Keras / ours", "at least", 20),
        Target("additive-grad", "naive JAX / ours", "at least", 15),
        Target("own-distance", "ours, reference / ours", "at least", 1),
        Target("causal", "ours / ours, not causal", "at most", 0.6),
        Target("causal-grad", "ours / ours, not causal", "at most", 0.6),
        Target("local-16k", "ours / ours, half as long", "at most", 2.3),
        Target("scaled-jvp", "ours / ours, forward", "at most", 4),
        Target("additive-jvp", "ours / ours, forward", "at most", 6),
        Target("general", "ours / ours, scaled dot", "at most", 1.15),
        Target("general-grad", "ours / ours, scaled dot", "at most", 1.15),
        *(Target(f"small-{s}", "ours / ours, reference", "at most", 1.05) for s in FOUR_SCORES),
        Target("softmax(sink=True)", "ours / ours, softmax", "at most", 1.1),
        Target("ssmax", "ours / ours, softmax", "at most", 1.1),
        Target("sigmoid", "ours / ours, softmax", "at most", 1.1),
        Target("entmax", "ours / ours, softmax", "at most", 6),
        Target("entmax", "temporary_mib", "at most", 32),
        Target("sparsemax", "ours / ours, softmax", "at most", 6),
        Target("sparsemax", "temporary_mib", "at most", 32),
        Target("log_scaled(normalizer=entmax)", "ours / ours, softmax", "at most", 6),
        Target("log_scaled(normalizer=entmax)", "temporary_mib", "at most", 32),
        # Memory at T = S = 16,384.
        Target("memory-scaled-grad", "temporary_mib", "at most", 128),
        Target("memory-scaled-grad", "times_shorter", "at most", 4.5),
        Target("memory-scaled-jvp", "temporary_mib", "at most", 64),
        Target("memory-scaled-jvp-of-grad", "temporary_mib", "at most", 96),
        Target("memory-scaled-grad-of-grad", "temporary_mib", "at most", 256),
        Target("memory-additive-grad", "temporary_mib", "at most", 128),
        Target("memory-additive-grad", "times_shorter", "at most", 4.5),
        Target("memory-additive-jvp", "temporary_mib", "at most", 160),
        Target("memory-additive-jvp", "times_shorter", "at most", 4.5),
        Target("memory-additive-jvp-of-grad", "temporary_mib", "at most", 320),
        Target("memory-additive-jvp-of-grad", "times_shorter", "at most", 4.5),
        # 278: the figure before forward mode was rewritten.
        Target("memory-additive-grad-of-grad", "temporary_mib", "at most", 278),
        Target("memory-additive-grad-of-grad", "times_shorter", "at most", 4.5),
        *(
            Target(f"{score}, forward + backward", "compile_seconds", "at most", 15)
            for score in (*FOUR_SCORES, "own distance")
        ),
    ),
    "local": (Target("local-m", "global / local", "at least", 5),),
    "decoding": (
        Target("decoding-scaled", "all anew / with a cache", "at least", 3),
        Target("decoding-additive", "all anew / with a cache", "at least", 3),
    ),
    "reversal": (
        Target("reversal-scaled", "with --log-gradients / all seeds at once", "at most", 1.1),
        Target("reversal-additive", "with --log-gradients / all seeds at once", "at most", 1.1),
    ),
}
