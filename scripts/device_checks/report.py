"""The tables of a device check, its targets, and what is wrong or failed."""

from __future__ import annotations

from attention_jax.runs.progress import say
from benchmarks.measure import JSON
from benchmarks.tables import TABLES, TIMES, Columns, entries, entry, table
from benchmarks.targets import targets_of
from device_checks.record import Record

_JUDGED = ("H100", "H200")  # on other devices the targets are not judged
_TIMES: Columns = {
    "case": entry("work"),
    **TIMES,
    **entries(".4g", "tflops", "percent_of_product", "gigabytes_per_second", "compile_seconds"),
}
_ERRORS: Columns = {
    "implementation, dtype, score": entry("name"),
    **entries(".4g", "output", "statistics", "gradients", "must be 0"),
}
_TRAINING: Columns = {
    "work": entry("work"),
    **entries(".4g", "steps_per_second", "exact_percent", "longer_percent", "solved_percent"),
    **entries(".4g", "seconds", "process_peak_mib", "differences"),
}


def print_report(record: Record) -> int:
    """Prints everything; returns 1 if a number is wrong."""
    about, rows, errors = record.about, record.rows(), record.rows("right")
    memory = f"{about['memory_bytes'] / 2**30:.1f} GiB; " if about["memory_bytes"] else ""
    say(f"{about['device']}; {memory}{about['driver']}; Python {about['python']}")
    say(", ".join(f"{name} {version}" for name, version in about["packages"].items()))
    _print("largest errors, as shares of their bounds", _ERRORS, _worst(errors))
    _print_refusals(errors)
    times = [row for row in rows if {"milliseconds", "compile_seconds"} & row.keys()]
    _print("times, with the quartiles of the turns", _TIMES, times)
    _print("training", _TRAINING, [*record.rows("training"), *record.rows("tasks")])
    if record.shrink == 1 and any(name in about["device"] for name in _JUDGED):
        _print("targets on an H100", TABLES["targets"], targets_of("H100", judged_rows(rows)))
    else:
        say("The targets of an H100 are not judged on this device.")
    if record.shrink > 1:
        say(f"Lengths were divided by {record.shrink}: the times are only a rehearsal.")
    for kind in ("not measured", "error", "wrong"):
        found = [row for row in rows if kind in row]
        more = "; the same command measures them" if found and kind == "not measured" else ""
        say(f"{kind}: {len(found)} of {len(rows)} rows{more}")
        for row in found if kind != "not measured" else ():
            say(f"  {row['part']}: {row['work']}, {row['contestant']}: {row[kind]}")
    # What an implementation does not serve is no error; what fails in another way is.
    return int(any("wrong" in row or ("error" in row and row["part"] == "right") for row in rows))


def _print(title: str, columns: Columns, rows: list[JSON]) -> None:
    if rows:
        say(f"\n{title}\n\n{table(columns, rows)}\n")


def _worst(rows: list[JSON]) -> list[JSON]:
    """The worst of all masks for each score, dtype and implementation."""
    worst: dict[str, JSON] = {}
    for row in rows:
        name = f"{row['contestant']}, {row.get('dtype')}, {row.get('score')}"
        for kind, share in row.get("shares", {}).items():
            line = worst.setdefault(name, {"name": name})
            line[kind] = max(share, line.get(kind, 0))
    return [worst[name] for name in sorted(worst)]


def _print_refusals(rows: list[JSON]) -> None:
    """What each implementation does not serve, and why."""
    for name in dict.fromkeys(row["contestant"] for row in rows):
        mine = [row for row in rows if row["contestant"] == name]
        served = sum("worst" in row for row in mine)
        reasons = [row["not served"] for row in mine if "not served" in row]
        say(f"{name} served {served} of {served + len(reasons)} cases")
        for reason in sorted({*reasons}):
            say(f"    others: {reason}")


def judged_rows(rows: list[JSON]) -> list[JSON]:
    """The rows that targets read: besides all, the errors of each dtype together, and the times of
    the forward pass beside those of the backward pass."""
    errors = [
        {"work": f"every error, {row['dtype']}", "contestant": "ours", "worst": row["worst"]}
        for row in rows
        if "worst" in row and "for information" not in row
    ]
    forward = [
        {**row, "work": f"{row['work']} + backward", "contestant": f"{row['contestant']}, forward"}
        for row in rows
        if row["work"].endswith("forward")
    ]
    return [*rows, *errors, *forward]
