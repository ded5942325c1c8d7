"""All benchmarks by name, and the columns of all tables."""

from __future__ import annotations

from benchmarks.attention import MEMORY, TIMES
from benchmarks.decoding import DECODING
from benchmarks.local import LOCAL
from benchmarks.measure import Benchmark
from benchmarks.ring import RING
from benchmarks.tables import TARGETS, Columns, entry
from benchmarks.training import REVERSAL, TRANSLATION

BENCHMARKS: dict[str, tuple[Benchmark, ...]] = {
    "attention": (TIMES, MEMORY),
    "local": (LOCAL,),
    "decoding": (DECODING,),
    "reversal": (REVERSAL,),
    "translation": (TRANSLATION,),
    "ring": (RING,),
}

TABLES: dict[str, Columns] = {
    **{each.name: each.columns for together in BENCHMARKS.values() for each in together},
    "targets": TARGETS,
    # Those of compile_report.py.
    "compiled-programs": {
        "program": entry("program"),
        "target": entry("target"),
        "temporary MiB": entry("temporary_mib", ".2f"),
        "kernel": entry("kernel"),
        **{name: entry(name, ",d") for name in ("bundles", "fills", "spills")},
    },
    "compiled-targets": TARGETS,
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
    "compiled-h100-targets": TARGETS,
    # All missed targets, of benchmarks and compiled programs.
    "misses": {name: entry(name) for name in ("benchmark", "case", "target", "measured")},
}
