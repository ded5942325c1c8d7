"""Writes the tables of READMEs from the committed result files of benchmarks.

    .venv/bin/python scripts/benchmarks/readme_tables.py

Each table stands between `<!-- begin NAME -->` and `<!-- end NAME -->`, where NAME is that of a
report in `results/*.json`. `benchmark_misses` is the table of all targets that are missed.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # this file is a command too
from benchmarks.catalogue import TABLES
from benchmarks.tables import Row, entry, measured, table

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "scripts/README.md", "scripts/benchmarks/README.md", "experiments/MISSES.md")


def committed() -> dict[str, list[Row]]:
    """The rows of all committed reports by name."""
    reports: dict[str, list[Row]] = {}
    for path in sorted(RESULTS.glob("*.json")):
        for name, report in json.loads(path.read_text())["benchmarks"].items():
            reports.setdefault(name, []).extend(report["rows"])
    return reports


def misses(reports: Mapping[str, list[Row]]) -> list[Row]:
    """The targets that are missed: benchmark, case, target and what was measured."""
    return [
        {
            "benchmark": row.get("benchmark", name.removesuffix("-targets")),
            "case": f"{row['claim']}: {row['what']}",
            "target": row["target"],
            "measured": measured(row) + row["met"].removeprefix("MISS"),
        }
        for name, rows in reports.items()
        for row in rows
        if row.get("met", "").startswith("MISS")
    ]


def tables() -> dict[str, str]:
    """All tables by the name of their marks."""
    reports = committed()
    found = {name: table(TABLES[name], rows) for name, rows in reports.items() if name in TABLES}
    missed = {name: entry(name) for name in ("benchmark", "case", "target", "measured")}
    return found | {"benchmark_misses": table(missed, misses(reports))}


def written(text: str, tables: Mapping[str, str]) -> str:
    """A page with the tables between their marks."""

    def part(found: re.Match[str]) -> str:
        begin, name, end = found.groups()
        return f"{begin}{tables[name]}\n{end}" if name in tables else found[0]

    return re.sub(r"(<!-- begin (.+?) -->\n).*?(<!-- end \2 -->)", part, text, flags=re.DOTALL)


def main() -> None:
    all_tables = tables()
    for page in PAGES:
        path = ROOT / page
        path.write_text(written(path.read_text(), all_tables))


if __name__ == "__main__":
    main()
