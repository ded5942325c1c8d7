"""The tables that README shows of a written benchmark, for pasting; a test holds README to them.

.venv/bin/python scripts/benchmarks/readme_tables.py experiments/results/benchmark.json
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[dict[str, Any]]

_SCORES = {"scaled": "scaled dot", "distance": "a user's own (negative squared distance)"}


def speed_table(rows: Rows) -> str:
    """Ours in milliseconds, and how many times as long each peer takes."""
    lines = []
    for _, group in itertools.groupby(rows, lambda row: row["work"]):
        ours, *peers = group
        ratios = [
            f"{peer['contestant']} {_ratio(peer['times_ours'])}"
            for peer in peers
            if peer.get("times_ours")
        ]
        score = _score(ours)
        details = [ours["direction"], ours["shape"]]
        details += [ours["mask"]] * (ours["mask"] != "none")
        details += [ours["dtype"]] * (ours["dtype"] != "float32")
        milliseconds = f"{ours['milliseconds']:.3g} ms ({ours['implementation']})"
        lines.append((score, ", ".join(details), milliseconds, " · ".join(ratios)))
    return _table(("score", "work", "ours", "times as long as ours"), lines)


def memory_table(rows: Rows) -> str:
    """Temporary memory of every derivative at both lengths."""
    lines = []
    for _, group in itertools.groupby(rows, lambda row: row["work"]):
        short, long = group
        size = short["shape"].split(" ", 3)[3]  # after "B1 N1 T=S=4096"
        lines.append(
            (
                short["implementation"],
                f"{_score(short)}, {size}",
                short["direction"].replace("-", " "),
                f"{short['temporary_mib']:,.1f}",
                f"{long['temporary_mib']:,.1f}",
                f"{long['times_shorter']:.1f}",
            )
        )
    heads = ("implementation", "score", "derivative", "MiB at 4,096", "MiB at 16,384", "ratio")
    return _table(heads, lines)


def targets_table(rows: Rows) -> str:
    """Every target, what was found, and whether it is met."""
    lines = [
        (row["claim"], row["what"], row["target"], f"{row['found']:.3g}", row["met"])
        for row in rows
    ]
    return _table(("claim", "number", "target", "measured", "met"), lines)


def _score(row: dict[str, Any]) -> str:
    name: str = row["score"]
    return _SCORES.get(name, name)


def _ratio(times: float) -> str:
    return f"{times:.2f}" if times < 10 else f"{times:.0f}"


def _table(heads: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    rule = ["---" for _ in heads]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, rule, *lines))


if __name__ == "__main__":
    benchmarks = json.loads(Path(sys.argv[1]).read_text())["benchmarks"]
    for name, table in (
        ("attention", speed_table),
        ("attention-memory", memory_table),
        ("attention-targets", targets_table),
    ):
        print(table(benchmarks[name]["rows"]), end="\n\n")
