"""Prints the tables of scripts/README.md from a benchmark's JSON file; a test compares the two.

.venv/bin/python scripts/benchmarks/readme_tables.py scripts/benchmarks/results/benchmark.json

With --write after the file, the tables replace those of scripts/README.md.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[dict[str, Any]]

_SCORES = {
    "scaled": "scaled dot",
    "own distance": "a user's own (negative squared distance)",
}


def speed_table(rows: Rows) -> str:
    """Our milliseconds, and each peer's time divided by ours."""
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
    """The temporary memory of every derivative at both lengths."""
    lines = []
    for _, group in itertools.groupby(rows, lambda row: row["work"]):
        short, long = group
        size = short["shape"].split(" ", 3)[3]  # without "B1 N1 T=S=4096"
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
    headings = ("implementation", "score", "derivative", "MiB at 4,096", "MiB at 16,384", "ratio")
    return _table(headings, lines)


def targets_table(rows: Rows) -> str:
    """All targets, the measured numbers, and whether they meet the targets."""
    lines = [
        (row["claim"], row["what"], row["target"], f"{row['found']:.3g}", row["met"])
        for row in rows
    ]
    return _table(("claim", "number", "target", "measured", "met"), lines)


def local_table(rows: Rows) -> str:
    """Local against global attention."""
    lines = [
        (
            f"{row['attention']}, {_score(row)}",
            f"{row['direction']}, {row['shape']}, radius {row['radius']}",
            f"{_three_digits(row['milliseconds'])} ms",
            f"{_three_digits(row['global_milliseconds'])} ms",
            _ratio(row["times_ours"]),
            _target(row),
        )
        for row in rows
    ]
    return _table(("attention", "work", "local", "global", "global / local", "target"), lines)


def decoding_table(rows: Rows) -> str:
    """Decoding with a cache against decoding without a cache."""
    lines = [
        (
            _score(row) + (f", {row['heads']} heads" if row["heads"] > 1 else ""),
            row["shape"],
            f"{_three_digits(row['milliseconds'])} ms",
            f"{_three_digits(row['naive_milliseconds'])} ms",
            f"{row['tokens_per_second']:,.0f}",
            _ratio(row["times_ours"]),
            _target(row),
        )
        for row in rows
    ]
    headings = ("score", "work", "cached", "all anew", "tokens/s", "all anew / cached", "target")
    return _table(headings, lines)


def ring_table(rows: Rows) -> str:
    """The temporary memory and arguments of each device, by the number of devices."""
    cells: dict[int, list[str]] = {}
    for row in rows:
        memory = f"{row['temporary_mib']:.1f} + {row['argument_mib']:.1f}"
        cells.setdefault(row["devices"], []).append(memory)
    columns = [
        f"{score}, {direction}"
        for score in ("scaled dot", "additive (A 128)")
        for direction in ("forward", "forward + backward")
    ]
    headings = ("devices", *columns)
    return _table(headings, ((str(devices), *row) for devices, row in cells.items()))


def translation_table(rows: Rows) -> str:
    """A training step of the translator, by score, and with parts of other libraries."""
    lines = [
        (
            _score(row),
            row["variant"],
            f"{row['milliseconds']:.0f} ms",
            f"{row['tokens_per_second']:,.0f}",
            _ratio(row["times_ours"]),
            f"{row['cross_attention_share']:.0%}" if row["cross_attention_share"] else "-",
        )
        for row in rows
        if row["variant"] != "without cross attention"
    ]
    headings = ("cross attention", "step", "time", "subwords/s", "times ours", "share of it")
    return _table(headings, lines)


def translation_parts_table(rows: Rows) -> str:
    """Where the step's time goes, and the machine's limit."""
    lines = [
        (
            row["part"],
            f"{row['milliseconds']:.1f} ms",
            "-" if row["share"] is None else f"{row['share']:.0%}",
            f"{row['gflop']:.2f}",
            f"{row['gflop_per_second']:,.0f}" if row["gflop_per_second"] else "-",
        )
        for row in rows
    ]
    headings = ("part of the step", "time", "share of the time", "GFLOP", "GFLOP/s")
    return _table(headings, lines)


def normalizers_table(rows: Rows) -> str:
    """Every normaliser beside softmax."""
    lines = [
        (
            row["normalizer"],
            _three_digits(row["milliseconds"]),
            f"{row['times_softmax']:.2f}",
            _target(row),
            f"{row['temporary_mib']:.1f} MiB",
            _target(row, "memory_", " MiB"),
        )
        for row in rows
    ]
    headings = ("normaliser", "ms", "time / softmax", "target", "temporary memory", "target")
    return _table(headings, lines)


def _target(row: dict[str, Any], prefix: str = "", unit: str = "") -> str:
    if f"{prefix}target" not in row:
        return "-"
    return f"{row[f'{prefix}target']}{unit}: {row[f'{prefix}met']}"


def _score(row: dict[str, Any]) -> str:
    name: str = row["score"]
    return _SCORES.get(name, name)


def _three_digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _ratio(times: float) -> str:
    return f"{times:.2f}" if times < 10 else f"{times:.0f}"


def _table(headings: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    rule = ["---" for _ in headings]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, rule, *lines))


def compiled_table(rows: Rows) -> str:
    """What compilers say of programs that were not run."""
    headings = ("program", "target", "temporary MiB", "kernel", "bundles", "fills", "spills")
    lines = [
        (
            row["program"],
            row["target"],
            f"{row['temporary_mib']:.2f}" if "temporary_mib" in row else "-",
            row.get("kernel", row.get("error", "-")),
            *(f"{row[name]:,}" if name in row else "-" for name in headings[4:]),
        )
        for row in rows
    ]
    return _table(headings, lines)


def tiles_table(rows: Rows) -> str:
    """Bundles of 1,024 pairs by size of the tile, a column a score and direction."""
    kinds = [(s, d) for s in ("scaled dot", "additive") for d in ("forward", "backward")]
    lines = []
    for size, group in itertools.groupby(rows, lambda row: row["tile"]):
        by_score = {row["score"]: row for row in group}
        numbers = [by_score[score].get(direction) for score, direction in kinds]
        cells = ["too large" if number is None else f"{number:.2f}" for number in numbers]
        lines.append((f"{size[0]:,} × {size[1]:,}", *cells))
    return _table(("tile", *(f"{score}, {direction}" for score, direction in kinds)), lines)


def against_tiles_table(rows: Rows) -> str:
    """Additive attention: cycles of our kernels and of the tiles that XLA compiles."""
    lines = [
        (
            row["target"],
            f"{row['xla_cycles'] / 1e6:.1f}",
            f"{row['kernel_cycles'] / 1e6:.1f}",
            f"{row['ratio']:.1f}",
        )
        for row in rows
    ]
    headings = ("target", "million cycles, XLA's tiles", "million cycles, our kernels", "ratio")
    return _table(headings, lines)


def compiled_h100_table(rows: Rows) -> str:
    """Kernels and calls compiled for an H100: registers, spills, special functions."""
    lines = [
        (
            row["program"],
            row.get("kernel", row.get("error", "-")),
            *(str(row.get(name, "-")) for name in ("registers", "spills")),
            *(", ".join(f"{n:g}" for n in row.get(name) or "") or "-" for name in _OF_LOOPS),
        )
        for row in rows
    ]
    headings = ("program", "kernel or call", "registers", "bytes spilled")
    return _table((*headings, "special functions", "instructions"), lines)


_OF_LOOPS = ("special", "instructions")


def compiled_steps_table(rows: Rows) -> str:
    """A training step on many devices: memory of a device, collectives, cycles."""
    memory, traffic = ("MiB of state", "MiB in all"), ("MB in them", "MB sent")
    headings = ("step", "target", "mesh", *memory, "collectives", *traffic, "million cycles")
    lines = []
    for row in rows:
        step = (row["task"], row["target"], f"{row['mesh']}={row['devices']}")
        if "error" in row:
            lines.append((*step, *"--", row["error"], *"---"))
            continue
        kinds = row["collectives"]
        total, sent = (
            sum(kind[name] for kind in kinds.values()) for name in ("bytes", "sent_bytes")
        )
        lines.append(
            (
                *step,
                f"{row['argument_mib']:.1f}",
                f"{row['mib']:.1f}",
                ", ".join(f"{each['count']} {kind}" for kind, each in kinds.items()) or "-",
                *(f"{size / 1e6:.3g}" if kinds else "-" for size in (total, sent)),
                f"{row['cycles'] / 1e6:.3g}" if "cycles" in row else "-",
            )
        )
    return _table(headings, lines)


# report -> (its marker in scripts/README.md, table)
TABLES: dict[str, tuple[str, Callable[[Rows], str]]] = {
    "attention": ("attention speed", speed_table),
    "attention-memory": ("attention memory", memory_table),
    "attention-targets": ("targets", targets_table),
    "local": ("local", local_table),
    "decoding": ("decoding", decoding_table),
    "ring": ("ring", ring_table),
    "compiled-programs": ("compiled programs", compiled_table),
    "compiled-targets": ("compiled targets", targets_table),
    "compiled-tiles": ("compiled tiles", tiles_table),
    "compiled-against-tiles": ("compiled against tiles", against_tiles_table),
    "compiled-steps": ("compiled steps", compiled_steps_table),
    "compiled-h100": ("compiled h100", compiled_h100_table),
    "compiled-h100-targets": ("compiled h100 targets", targets_table),
    "translation": ("translation", translation_table),
    "translation-parts": ("translation parts", translation_parts_table),
    "normalizers": ("normalizers", normalizers_table),
}
README = Path(__file__).parents[1] / "README.md"


def tables_of(path: str | Path) -> dict[str, str]:
    """Returns {marker: table} for the benchmarks in a JSON file."""
    benchmarks = json.loads(Path(path).read_text())["benchmarks"]
    return {
        marker: table(benchmarks[name]["rows"])
        for name, (marker, table) in TABLES.items()
        if name in benchmarks
    }


def written(text: str, tables: Mapping[str, str]) -> str:
    """Returns the text of the README with these tables between their markers."""
    for marker, table in tables.items():
        start, end = f"<!-- {marker} -->\n", f"\n<!-- end of {marker} -->"
        before, found, rest = text.partition(start)
        _, found_end, after = rest.partition(end)
        if not (found and found_end):
            raise ValueError(f"README must have the markers {start.strip()} and {end.strip()}")
        text = f"{before}{start}{table}{end}{after}"
    return text


def main(path: str, *, write: bool = False) -> None:
    tables = tables_of(path)
    for marker, table in tables.items():
        print(f"<!-- {marker} -->", table, f"<!-- end of {marker} -->\n", sep="\n")
    if write:
        README.write_text(written(README.read_text(), tables))


if __name__ == "__main__":
    main(sys.argv[1], write="--write" in sys.argv[2:])
