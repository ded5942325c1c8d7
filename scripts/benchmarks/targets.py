"""The targets of all benchmarks, each written before the measurement that it judges.

A target is met or a MISS. Where its bound lies between the quartiles of what was measured, the
measurement cannot tell, and the verdict says "within noise".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.measure import FOUR_SCORES, JSON, ratio

# {case: {number: bound}}. A case is a work, whose rows are read; or "score, direction", for the
# rows of all such works. A number is "A / B", the time of contestant A divided by that of B in the
# same turn; or "ENTRY of CONTESTANT", the largest one; "of ours" may be left out.
Targets = Mapping[str, Mapping[str, str]]

_ENTRIES = {
    "temporary_mib": "temporary MiB",
    "growth": "temporary memory / that of a quarter of the length",
    "compile_seconds": "seconds to compile, the longest",
    "milliseconds": "milliseconds",
    "worst": "largest error, as a share of its bound",
    "seconds": "seconds",
    "differences": "arrays and lines that differ",
}


def targets_of(targets: Targets, rows: Sequence[JSON], **about: str) -> list[JSON]:
    """A row for each target whose case was measured."""
    found = []
    for case, numbers in targets.items():
        named = ((row["work"], f"{row.get('score')}, {row.get('direction')}") for row in rows)
        matching = [row for row, names in zip(rows, named, strict=True) if case in names]
        for number, bound in numbers.items() if matching else ():
            what = _ENTRIES.get(number.partition(" of ")[0], f"time of {number}")
            found.append(about | judged(case, what, bound, measured(number, matching)))
    return found


def measured(number: str, rows: Sequence[JSON]) -> tuple[float, float, float] | None:
    """The first quartile, median and third quartile; None if it was not measured."""
    by_name = {row["contestant"]: row for row in rows}
    if " / " in number:
        return ratio(*(by_name.get(name, {}) for name in number.split(" / ")))
    entry, _, contestant = number.partition(" of ")
    if entry == "growth":
        sizes = [
            by_name.get(f"ours{x}", {}).get("temporary_mib") for x in ("", ", a quarter as long")
        ]
        return None if None in sizes else (sizes[0] / sizes[1],) * 3
    mine = [row for row in rows if row["contestant"] == (contestant or "ours")]
    found = [row[entry] for row in mine if entry in row]
    return (max(found),) * 3 if found else None


def judged(claim: str, what: str, bound: str, found: tuple[float, float, float] | None) -> JSON:
    """The row of a target: what was measured, its noise, and the verdict.

    >>> judged("scaled", "seconds", "at most 4", (3.5, 3.9, 4.1))["met"]
    'yes, within noise'
    """
    row = {"claim": claim, "what": what, "target": bound, "found": None, "met": "not measured"}
    if found is None:
        return row
    low, median, high = found
    limit = float(bound.split()[-1])
    is_met = median >= limit if bound.startswith("at least") else median <= limit
    met = ("yes" if is_met else "MISS") + ", within noise" * (low < limit < high)
    return row | {"found": median, "quartiles": [low, high], "met": met}


TARGETS: dict[str, Targets] = {
    "attention": {
        "scaled": {"jax.nn / ours": "at least 4", "PyTorch SDPA / ours": "at least 1"},
        "scaled-grad": {"jax.nn / ours": "at least 2.5", "PyTorch SDPA / ours": "at least 0.833"},
        "additive": {"naive JAX / ours": "at least 20", "Keras / ours": "at least 20"},
        "additive-grad": {"naive JAX / ours": "at least 15"},
        "own-distance": {"ours, reference / ours": "at least 1"},
        "causal": {"ours / ours, not causal": "at most 0.6"},
        "causal-grad": {"ours / ours, not causal": "at most 0.6"},
        "local-16k": {"ours / ours, half as long": "at most 2.3"},
        "scaled-jvp": {"ours / ours, forward": "at most 4"},
        "additive-jvp": {"ours / ours, forward": "at most 6"},
        "general": {"ours / ours, scaled dot": "at most 1.15"},
        "general-grad": {"ours / ours, scaled dot": "at most 1.15"},
        **{f"small-{x}": {"ours / ours, reference": "at most 1.05"} for x in FOUR_SCORES},
        "softmax(sink=True)": {"ours / ours, softmax": "at most 1.1"},
        "ssmax": {"ours / ours, softmax": "at most 1.1"},
        "sigmoid": {"ours / ours, softmax": "at most 1.1"},
        "entmax": {"ours / ours, softmax": "at most 6", "temporary_mib": "at most 32"},
        "sparsemax": {"ours / ours, softmax": "at most 6", "temporary_mib": "at most 32"},
        "log_scaled(normalizer=entmax)": {
            "ours / ours, softmax": "at most 6",
            "temporary_mib": "at most 32",
        },
        "memory-scaled-grad": {"temporary_mib": "at most 128", "growth": "at most 4.5"},
        "memory-scaled-jvp": {"temporary_mib": "at most 64"},
        "memory-scaled-jvp-of-grad": {"temporary_mib": "at most 96"},
        "memory-scaled-grad-of-grad": {"temporary_mib": "at most 256"},
        "memory-additive-grad": {"temporary_mib": "at most 128", "growth": "at most 4.5"},
        "memory-additive-jvp": {"temporary_mib": "at most 160", "growth": "at most 4.5"},
        "memory-additive-jvp-of-grad": {"temporary_mib": "at most 320", "growth": "at most 4.5"},
        # 278: the figure before forward mode was rewritten.
        "memory-additive-grad-of-grad": {"temporary_mib": "at most 278", "growth": "at most 4.5"},
        **{
            f"{x}, forward + backward": {"compile_seconds": "at most 15"}
            for x in (*FOUR_SCORES, "own distance")
        },
    },
    "local": {
        "local-m": {"global / local": "at least 5"},
    },
    "decoding": {
        "decoding-scaled": {"all anew / with a cache": "at least 3"},
        "decoding-additive": {"all anew / with a cache": "at least 3"},
    },
    "reversal": {
        "reversal-scaled": {"with --log-gradients / all seeds at once": "at most 1.1"},
        "reversal-additive": {"with --log-gradients / all seeds at once": "at most 1.1"},
    },
}
