"""All benchmarks by name, and the columns of all tables."""

from __future__ import annotations

from compilation import columns

from benchmarks.attention import MEMORY, TIMES
from benchmarks.decoding import DECODING
from benchmarks.local import LOCAL
from benchmarks.measure import Benchmark
from benchmarks.ring import RING
from benchmarks.tables import TARGETS, Columns
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
    **columns.TABLES,
}
