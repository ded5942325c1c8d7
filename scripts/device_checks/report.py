"""The tables of a device check, its targets, and what is wrong or failed."""

from __future__ import annotations

from benchmarks.measure import RACES
from benchmarks.tables import TARGETS as TARGET_COLUMNS
from benchmarks.tables import Columns, digits, entry
from benchmarks.targets import Target
from command_line import print_table

from device_checks.record import JSON, Record

# The targets, written before any run on an H100; on other devices they are not judged.
_JUDGED = ("H100", "H200")
_KERNEL, _ADDITIVE = "ours, mosaic_gpu", "additive, B8 T2048 A128"
_SIZES = ("N16 K16 T2048 H64", "N16 K16 T2048 H128", "N16 K4 T2048 H128", "N16 K16 T8192 H64")
_SCALED = [
    f"scaled, B{4 if 'T8192' in size else 8} {size}, {causal}{direction}"
    for size in _SIZES
    for causal in ("causal, ", "")
    for direction in ("forward", "forward + backward")
]
TARGETS = (
    *(Target(work, "jax.nn, cudnn / ours", "at least", 0.95) for work in _SCALED),
    Target(f"{_ADDITIVE}, forward", "milliseconds", "at most", 2.2, _KERNEL),
    Target(f"{_ADDITIVE}, forward", f"PyTorch / {_KERNEL}", "at least", 4),
    Target(f"{_ADDITIVE}, forward + backward", f"{_KERNEL} / {_KERNEL}, forward", "at most", 4),
    Target("every error, float32", "worst", "at most", 1),
    Target("every error, bfloat16", "worst", "at most", 1),
    Target("four scores, 5 seeds", "seconds", "at most", 60),
    Target("stopped and resumed", "differences", "at most", 0),
)

_TRAINING = ("steps_per_second", "exact_percent", "seconds", "peak_mib", "differences", "accuracy")
_SPEED: Columns = {
    **{name: RACES[name] for name in ("case", "time", "others, times as long")},
    "TFLOP/s": entry("tflops", ",.4g"),
    "GB/s": entry("gigabytes_per_second", ",.4g"),
    "of the ceiling, %": entry("percent", ".3g"),
    "compile s": entry("compile_seconds", ".3g"),
}


def print_report(record: Record) -> int:
    """Prints everything; returns 1 if a number is wrong."""
    about = record.about
    packages = ", ".join(f"{name} {version}" for name, version in about["packages"].items())
    memory = about["memory_bytes"]
    print(f"{about['device']}, {f'{memory / 2**30:.1f} GiB' if memory else 'memory not known'}")
    print(f"{about['driver']}; Python {about['python']}, {packages}; commit {about['git_commit']}")
    _print_right(record.rows("right"))
    _print_speed(record)
    if rows := [*record.rows("training"), *record.rows("tasks")]:
        shown = [(row["work"], *(_text(row.get(name)) for name in _TRAINING)) for row in rows]
        print_table("training", ["work", *(name.replace("_", " ") for name in _TRAINING)], shown)
    judged = any(name in about["device"] for name in _JUDGED) and record.shrink == 1
    lines = [target.row(_rows_of(target, record)) for target in TARGETS]
    for line in lines:
        line["met"] = line["met"] if judged else "not judged on this device"
    cells = [[column([line]) for column in TARGET_COLUMNS.values()] for line in lines]
    print_table("targets on an H100", [*TARGET_COLUMNS], cells)
    rows = record.rows()
    for kind in ("wrong", "error", "not measured"):
        failed = [row for row in rows if kind in row]
        print(f"{kind}: {len(failed)} of {len(rows)} rows")
        if kind != "not measured":
            for row in failed:
                print(f"  {row['part']}: {row['work']}, {row['contestant']}: {row[kind]}")
    return int(any("wrong" in row for row in rows))


def _text(number: float | None) -> str:
    return "-" if number is None else digits(number)


def _print_right(rows: list[JSON]) -> None:
    """The worst of all masks for each score, dtype and implementation."""
    columns = ("output", "statistics", "gradients", "must be 0")
    lines: dict[str, list[JSON]] = {}
    for row in rows:
        if "shares" in row:
            name = f"{row['contestant']}, {row['dtype']}, {row['score']}"
            lines.setdefault(name, []).append(row["shares"])
    worst = [
        [name, *(_text(max((s[x] for s in shares if x in s), default=None)) for x in columns)]
        for name, shares in sorted(lines.items())
    ]
    if worst:
        head = ["implementation, dtype, score", *columns]
        print_table("largest errors, as shares of their bounds: 1 is the bound", head, worst)
    reasons = {f"{r['contestant']}: {r['not served']}" for r in rows if "not served" in r}
    for reason in sorted(reasons):
        print(f"not served by {reason}")


def _print_speed(record: Record) -> None:
    """A line per work: ours, then the others relative to it."""
    parts = ("machine", "scaled", "additive", "tiles")
    rows = [dict(row) for part in parts for row in record.rows(part)]
    ceiling = max((row.get("tflops", 0.0) for row in record.rows("machine")), default=0.0)
    lines: dict[str, list[JSON]] = {}
    for row in rows:
        if ceiling and "tflops" in row:
            row["percent"] = 100 * row["tflops"] / ceiling
        lines.setdefault(row["work"], []).append(row)
    cells = [[column(line) for column in _SPEED.values()] for line in lines.values()]
    if cells:
        print_table("times, with the quartiles of the turns", [*_SPEED], cells)


def _rows_of(target: Target, record: Record) -> list[JSON]:
    """The rows that a target reads."""
    if target.number == "worst":
        rows = [r for r in record.rows("right") if "worst" in r and "for information" not in r]
        return [{**r, "contestant": "ours"} for r in rows if target.case.endswith(r["dtype"])]
    rows = [row for row in record.rows() if row["work"] == target.case]
    forward = target.case.replace("forward + backward", "forward")
    others = [row for row in record.rows() if row["work"] == forward != target.case]
    return [*rows, *({**row, "contestant": f"{row['contestant']}, forward"} for row in others)]
