"""The tables of a device check, its targets, and what is wrong or failed."""

from __future__ import annotations

from benchmarks.measure import RACES
from benchmarks.tables import TARGETS as TARGET_COLUMNS
from benchmarks.tables import Columns, entry
from benchmarks.targets import Target
from command_line import print_table

from device_checks.record import JSON, Record

# The targets, written before any run on an H100; on other devices they are not judged.
_JUDGED = ("H100", "H200")
_KERNEL, _ADDITIVE = "ours, mosaic_gpu", "additive, B8 T2048 A128"
_SCALED = ("B8 N16 K16 T2048 H64", "B8 N16 K16 T2048 H128", "B8 N16 K4 T2048 H128",
           "B4 N16 K16 T8192 H64")  # fmt: skip
_DIRECTIONS = ("causal, forward", "causal, forward + backward", "forward", "forward + backward")
TARGETS = (
    *(
        Target(f"scaled, {size}, {direction}", "jax.nn, cudnn / ours", "at least", 0.95)
        for size in _SCALED
        for direction in _DIRECTIONS
    ),
    Target(f"{_ADDITIVE}, forward", "milliseconds", "at most", 2.2, _KERNEL),
    Target(f"{_ADDITIVE}, forward", f"PyTorch / {_KERNEL}", "at least", 4),
    Target(f"{_ADDITIVE}, forward + backward", f"{_KERNEL} / {_KERNEL}, forward", "at most", 4),
    Target("every error, float32", "worst", "at most", 1),
    Target("every error, bfloat16", "worst", "at most", 1),
    Target("four scores, 5 seeds", "seconds", "at most", 60),
    Target("stopped and resumed", "differences", "at most", 0),
)


def _entries(*names: str) -> Columns:
    return {name.replace("_", " "): entry(name, ".4g") for name in names}


_TIMES: Columns = {
    **{name: RACES[name] for name in ("case", "time", "others, times as long")},
    **_entries("tflops", "percent_of_product", "gigabytes_per_second", "compile_seconds"),
}
_ERRORS: Columns = {
    "implementation, dtype, score": entry("name"),
    **_entries("output", "statistics", "gradients", "must be 0"),
}
_TRAINING: Columns = {
    "work": entry("work"),
    **_entries("steps_per_second", "exact_percent", "longer_percent", "accuracy", "seconds"),
    **_entries("process_peak_mib", "differences"),
}


def print_report(record: Record) -> int:
    """Prints everything; returns 1 if a number is wrong."""
    about, rows = record.about, record.rows()
    memory = f"{about['memory_bytes'] / 2**30:.1f} GiB; " if about["memory_bytes"] else ""
    print(f"{about['device']}; {memory}{about['driver']}; Python {about['python']}")
    print(*(f"{name} {version}" for name, version in about["packages"].items()), sep=", ")
    _print_errors(record.rows("right"))
    times = [row for row in rows if {"milliseconds", "compile_seconds"} & row.keys()]
    works = dict.fromkeys(row["work"] for row in times)
    lines = [[row for row in times if row["work"] == work] for work in works]
    _print("times, with the quartiles of the turns", _TIMES, lines)
    others = [row for part in ("training", "tasks") for row in record.rows(part)]
    _print("training", _TRAINING, [[row] for row in others])
    judged = any(name in about["device"] for name in _JUDGED) and record.shrink == 1
    if judged:
        lines = [[target.row(_rows_of(target, rows))] for target in TARGETS]
        _print("targets on an H100", TARGET_COLUMNS, lines)
    else:
        print("The targets of an H100 are not judged on this device.")
    if record.shrink > 1:
        print(f"Lengths were divided by {record.shrink}: the times are only a rehearsal.")
    for kind in ("not measured", "error", "wrong"):
        found = [row for row in rows if kind in row]
        more = "; the same command measures them" if found and kind == "not measured" else ""
        print(f"{kind}: {len(found)} of {len(rows)} rows{more}")
        for row in found if kind != "not measured" else ():
            print(f"  {row['part']}: {row['work']}, {row['contestant']}: {row[kind]}")
    # What an implementation does not serve is no error; what fails in another way is.
    return int(any("wrong" in row or ("error" in row and row["part"] == "right") for row in rows))


def _print(title: str, columns: Columns, lines: list[list[JSON]]) -> None:
    """Prints a table with a line for each list of rows."""
    if lines:
        cells = [[column(line) for column in columns.values()] for line in lines]
        print_table(title, [*columns], cells)


def _print_errors(rows: list[JSON]) -> None:
    """The worst of all masks for each score, dtype and implementation."""
    worst: dict[str, JSON] = {}
    for row in rows:
        name = f"{row['contestant']}, {row.get('dtype')}, {row.get('score')}"
        for kind, share in row.get("shares", {}).items():
            line = worst.setdefault(name, {"name": name})
            line[kind] = max(share, line.get(kind, 0))
    lines = [[worst[name]] for name in sorted(worst)]
    _print("largest errors, as shares of their bounds", _ERRORS, lines)
    names = dict.fromkeys(row["contestant"] for row in rows)
    for name in names:
        served = [row for row in rows if row["contestant"] == name and "worst" in row]
        refused = [row for row in rows if row["contestant"] == name and "not served" in row]
        print(f"{name} served {len(served)} of {len(served) + len(refused)} cases")
        for reason in sorted({row["not served"] for row in refused}):
            print(f"    others: {reason}")


def _rows_of(target: Target, rows: list[JSON]) -> list[JSON]:
    """The rows that a target reads; those of the forward pass beside those of the backward pass."""
    if target.number == "worst":
        judged = [row for row in rows if "worst" in row and "for information" not in row]
        return [{**row, "contestant": "ours"} for row in judged if row["dtype"] in target.case]
    forward = target.case.replace("forward + backward", "forward")
    others = [row for row in rows if row["work"] == forward != target.case]
    others = [{**row, "contestant": f"{row['contestant']}, forward"} for row in others]
    return [*(row for row in rows if row["work"] == target.case), *others]
