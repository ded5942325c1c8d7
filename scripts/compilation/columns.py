"""The columns of the tables of `compile_report.py` in READMEs."""

from __future__ import annotations

from benchmarks.tables import TARGETS, Columns, entry

_TARGETS = {heading: TARGETS[heading] for heading in TARGETS if heading != "benchmark"}

TABLES: dict[str, Columns] = {
    "compiled-programs": {
        "program": entry("program"),
        "target": entry("target"),
        "temporary MiB": entry("temporary_mib", ".2f"),
        "kernel": entry("kernel"),
        **{name: entry(name, ",d") for name in ("bundles", "fills", "spills")},
    },
    "compiled-targets": _TARGETS,
    "compiled-tiles": {
        "score": entry("score"),
        "tile": entry("tile"),
        "forward": entry("forward", ".2f"),
        "backward": entry("backward", ".2f"),
    },
    "compiled-h100": {
        "program": entry("program"),
        "kernel or call": entry("kernel"),
        "registers": entry("registers"),
        "bytes spilled": entry("spills"),
        "special functions": entry("special", "g"),
        "instructions": entry("instructions", "g"),
    },
    "compiled-h100-targets": _TARGETS,
}
