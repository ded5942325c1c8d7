"""The tables of pages from the committed result files; experiments/pages.py writes them there."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.catalogue import TABLES
from benchmarks.tables import Row, measured, table

RESULTS = Path(__file__).parent / "results"


def tables() -> dict[str, str]:
    """The table of each report in `results/*.json` by its name, and that of all missed targets."""
    reports: dict[str, list[Row]] = {}
    for path in sorted(RESULTS.glob("*.json")):
        for name, report in json.loads(path.read_text())["benchmarks"].items():
            reports.setdefault(name, []).extend(report["rows"])
    found = {name: table(TABLES[name], rows) for name, rows in reports.items() if name in TABLES}
    return found | {"benchmark_misses": table(TABLES["misses"], _misses(reports))}


def _misses(reports: dict[str, list[Row]]) -> list[Row]:
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
