"""Tables in Markdown, each from one list of columns, and the tables of committed results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from attention_jax.commands.command_line import command
from attention_jax.reports.table_text import markdown
from attention_jax.runs.environment import environment
from attention_jax.runs.run_folder import write_json
from benchmarks.measure import quartiles, ratio

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]
Column = Callable[[list[Row]], str]
Columns = Mapping[str, Column]  # heading -> the cell for the rows of one line


def table(columns: Columns, rows: Iterable[Row]) -> str:
    """A table in Markdown, a line for all rows that share the entry "work", or for each row."""
    lines: dict[Any, list[Row]] = {}
    for index, row in enumerate(rows):
        lines.setdefault(str(row.get("work", index)), []).append(row)
    cells = ([column(line) for column in columns.values()] for line in lines.values())
    return markdown([*columns], cells)


def committed() -> dict[str, str]:
    """The table of each report in `results/` by its name, and that of all missed targets.

    Those of a folder in it are named "FOLDER.NAME".
    """
    reports: dict[str, list[Row]] = {}
    for path in sorted(RESULTS.rglob("*.json")):
        folder = "" if path.parent == RESULTS else f"{path.parent.name}."
        content = json.loads(path.read_text())
        for name, report in content.get("benchmarks", {}).items():  # a device check has none
            reports.setdefault(folder + name, []).extend(report["rows"])
    misses = [
        row | {"benchmark": f"{name.rpartition('.')[0]} {row.get('benchmark', name)}".strip()}
        for name, rows in reports.items()
        for row in rows
        if row.get("met", "").startswith("MISS")
    ]
    columns = {name: TABLES.get(name.rpartition(".")[2]) for name in reports}
    tables = {name: table(each, reports[name]) for name, each in columns.items() if each}
    return tables | {"benchmark_misses": table(MISSES, misses)}


def write_report(
    path: Path, schema: int, about: Row, reports: Mapping[str, list[Row]], packages: Iterable[str]
) -> None:
    """Writes the rows of each table, and what they depend on, to a file like those committed."""
    content = {
        "schema": schema,
        "command": command(),
        **about,
        "environment": environment(Path(__file__).parent, packages=packages),
        "benchmarks": {name: {"rows": rows} for name, rows in reports.items()},
    }
    write_json(path, content)


# --- columns ---


def entry(name: str, form: str = "", index: int = 0) -> Column:
    """An entry of the first row, or of another one, in a format; a dash where there is none."""

    def cell(rows: list[Row]) -> str:
        value = rows[index].get(name) if index < len(rows) else None
        values = value if isinstance(value, list) else [value]
        return ", ".join(format(each, form) for each in values if each is not None) or "-"

    return cell


def entries(form: str, *names: str) -> Columns:
    """A column for each entry."""
    return {name.replace("_", " "): entry(name, form) for name in names}


def with_noise(low: float, median: float, high: float) -> str:
    """A median, and the quartiles around it if there are any; three digits, or whole numbers."""
    texts = [f"{x:,.0f}" if x >= 100 else f"{x:.3g}" for x in (low, median, high)]
    return texts[1] if texts[0] == texts[2] else f"{texts[1]} ({texts[0]}-{texts[2]})"


def _first(rows: list[Row]) -> str:
    """The contestant that the others are compared with: its time, with noise, and its rate."""
    row = rows[0]
    if "turns" not in row:
        return f"{row['contestant']}: absent"
    rate = f", {row['rate']:,.0f} {row['unit']}/s" if "rate" in row else ""
    return f"{row['contestant']}: {with_noise(*quartiles(row['turns']))} ms{rate}"


def _others(rows: list[Row]) -> str:
    """The other contestants' times divided by the first one's, and the noise of these ratios."""
    ratios = ((row["contestant"], ratio(row, rows[0])) for row in rows[1:])
    return " · ".join(f"{name} {with_noise(*found)}" for name, found in ratios if found) or "-"


def _measured(rows: list[Row]) -> str:
    """What a target has measured."""
    found = rows[0]["found"]
    low, high = rows[0].get("quartiles") or [found] * 2
    return "-" if found is None else with_noise(low, found, high)


def _growth(rows: list[Row]) -> str:
    return f"{rows[1]['temporary_mib'] / rows[0]['temporary_mib']:.1f}" if rows[1:] else "-"


TIMES: Columns = {"time": _first, "others, times as long": _others}
RACES: Columns = {"case": entry("work"), "work": entry("what"), **TIMES}
TARGETS: Columns = {
    "case": entry("claim"),
    "number": entry("what"),
    "target": entry("target"),
    "measured": _measured,
    "met": entry("met"),
}
MISSES: Columns = {
    "benchmark": entry("benchmark"),
    "case": lambda rows: f"{rows[0]['claim']}: {rows[0]['what']}",
    "target": entry("target"),
    "measured": lambda rows: _measured(rows) + rows[0]["met"].removeprefix("MISS"),
}
TABLES: dict[str, Columns] = {
    **dict.fromkeys(("attention", "local", "decoding", "reversal", "translation"), RACES),
    "attention_memory": {
        "case": entry("work"),
        "work": entry("what"),
        "MiB": entry("temporary_mib", ",.1f"),
        "MiB with T=S=16384": entry("temporary_mib", ",.1f", 1),
        "ratio": _growth,
    },
    "ring": {"temporary MiB per device": entry("work")}
    | {f"{2**i} devices": entry("temporary_mib", ".1f", i) for i in range(4)},
    "alone": {**RACES, "cores busy": entry("cores", ".2f")},
    **dict.fromkeys(
        ("targets", "alone-targets", "compiled-targets", "compiled-h100-targets"), TARGETS
    ),
    # Those of compile_report.py.
    "compiled-programs": {
        **entries("", "program", "target"),
        "temporary MiB": entry("temporary_mib", ".2f"),
        **entries("", "kernel"),
        **entries(",d", "bundles", "fills", "spills"),
    },
    "compiled-tiles": {**entries("", "score", "tile"), **entries(".2f", "forward", "backward")},
    "compiled-h100": {
        "program": entry("program"),
        "kernel or call": entry("kernel"),
        "registers": entry("registers"),
        "bytes spilled": entry("spills"),
        "special functions": entry("special", "g"),
        "instructions": entry("instructions", "g"),
    },
}
