"""Training steps that were compiled for TPUs that are not there, against the formulas of a sketch.

The numbers are those of `scripts/compile_report.py --part steps`, from the committed file; no
compiler is needed to read them. Expected, written before any of these numbers was seen:

- data sends what its formula says, 2 (n - 1) / n P b, to 5 %: besides the gradients only the loss
  and the metrics are summed.
- fsdp sends 3 (n - 1) / n P b, to a third: a parameter with no axis that the devices divide is held
  whole, and its gradient is summed as with data (2 in place of 3); a small gradient that XLA sums
  whole, and then cuts, costs 4 in place of 3.
- cycles of a device are the same for 1, 8 and 256 devices, to 10 %.
- on 8 devices, fsdp holds at least 0.12 and at most 0.25 times the state that data does, and needs
  less memory in all.
- sending the translator's gradients takes less time than computing.

The counting was corrected after the first numbers were seen, the bounds were not: XLA spreads one
asynchronous gather over several fusions, and each of them had been counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from experiments.experiment import JSON, Expectation

FILE = Path(__file__).parents[2] / "scripts" / "benchmarks" / "results" / "compiled_steps.json"
NUMBER_BYTES = 4  # the tasks train in float32
FORMULA = {"data": 2, "fsdp": 3}  # times the parameters that a device sends, but for (n - 1) / n

# A v5e: 197e12 operations per second are 4 units of 128 x 128 multiply-adds at this clock, and its
# 1,600 Gbit/s of interconnect are both ways together.
CLOCK = 1.5e9
LINKS = 100e9  # bytes per second, one way
SOURCE = "Google Cloud, TPU v5e: 197 TFLOP/s in bfloat16, 1,600 Gbit/s of inter-chip interconnect"


def read(file: Path = FILE) -> JSON:
    """The compiled steps and where they come from: {"commit", "steps": [...], "missing": [...]}."""
    content = json.loads(file.read_text())
    rows = content["benchmarks"]["compiled-steps"]["rows"]
    return {
        "commit": content["environment"]["git_commit"],
        "steps": [_step(row) for row in rows if "error" not in row],
        "missing": [{"name": _name(row), "reason": row["error"]} for row in rows if "error" in row],
    }


def _step(row: JSON) -> JSON:
    """A row and its formula: bytes that a device sends, and seconds of sending and computing."""
    count, parameters = row["devices"], row["parameters"] * NUMBER_BYTES
    sent = sum(kind["sent_bytes"] for kind in row["collectives"].values())
    formula = FORMULA[row["mesh"]] * (count - 1) / count * parameters
    step = {
        **{name: row[name] for name in ("task", "target", "mesh", "devices", "mib")},
        "state_mib": row["argument_mib"],
        "collectives": {kind: each["count"] for kind, each in row["collectives"].items()},
        "sent_bytes": sent,
        "formula_bytes": round(formula),
    }
    if "cycles" in row:
        step["cycles"] = row["cycles"]
        step["computing_seconds"] = row["cycles"] / CLOCK
        step["communication_seconds"] = sent / LINKS
    return step


def expectations(compiled: JSON) -> list[Expectation]:
    """The compiled steps against what the docstring expects; for those that were compiled."""
    steps = {_name(step): step for step in compiled["steps"]}
    return [*_of_bytes(steps), *_of_cycles(steps), *_of_memory(steps), *_of_hiding(steps)]


def _of_bytes(steps: JSON) -> Iterator[Expectation]:
    for name, step in steps.items():
        if step["devices"] > 1:
            bounds = (0.95, 1.05) if step["mesh"] == "data" else (2 / 3, 4 / 3)
            ratio = step["sent_bytes"] / step["formula_bytes"]
            claim = f"{name}: bytes that a device sends, compiled over formula"
            yield Expectation(claim, "", ratio, *bounds, "see the docstring")


def _of_cycles(steps: JSON) -> Iterator[Expectation]:
    for name, step in steps.items():
        alone = steps.get(f"{step['task']}, {step['target']}, data=1")
        if "cycles" in step and alone and step["devices"] > 1:
            ratio = step["cycles"] / alone["cycles"]
            yield Expectation(
                f"{name}: cycles of a device, over those of one device alone",
                "", ratio, 0.9, 1.1, "each device computes the same",
            )  # fmt: skip


def _of_memory(steps: JSON) -> Iterator[Expectation]:
    for name, step in steps.items():
        other = steps.get(name.replace("fsdp", "data"))
        if step["mesh"] == "fsdp" and step["devices"] == 8 and other:
            for what, kind, bounds in (
                ("MiB of the state", "state_mib", (0.12, 0.25)),
                ("MiB in all", "mib", (0.0, 1.0)),
            ):
                claim = f"{name}: {what} per device, over that of data"
                yield Expectation(claim, "", step[kind] / other[kind], *bounds, "an eighth is held")


def _of_hiding(steps: JSON) -> Iterator[Expectation]:
    for name, step in steps.items():
        if step["task"] == "translation" and step["devices"] > 1 and "cycles" in step:
            ratio = step["communication_seconds"] / step["computing_seconds"]
            claim = f"{name}: communication over computing"
            yield Expectation(claim, "", ratio, 0.0, 1.0, "hidden, or not")


def report(compiled: JSON) -> str:
    """The table of the compiled steps."""
    lines = [
        "The library's own training steps were compiled for TPUs and not run. Each device has 64"
        " strings to reverse, or 71 pairs of sentences to translate, however many devices there"
        " are. MiB are those of a device: the state, and all with temporary arrays. Bytes sent are"
        " those of the compiled collectives, each as a ring; the ratio is to the formula. Cycles"
        " are XLA's own estimates, without copies and collectives. Seconds follow from them and"
        f" published speeds ({SOURCE}).",
        "",
        "| step | MiB of state | MiB in all | collectives | MB sent | compiled / formula"
        " | million cycles | ms sending | ms computing |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [_row(step) for step in compiled["steps"]]
    for missing in compiled["missing"]:
        lines += ["", f"{missing['name']}: {missing['reason']}."]
    return "\n".join(lines)


def _row(step: JSON) -> str:
    kinds = ", ".join(f"{count} {kind}" for kind, count in step["collectives"].items())
    formula = step["formula_bytes"]
    cells = [
        _name(step),
        f"{step['state_mib']:.1f}",
        f"{step['mib']:.1f}",
        kinds or "-",
        f"{step['sent_bytes'] / 1e6:.3g}",
        f"{step['sent_bytes'] / formula:.2f}" if formula else "-",
    ]
    if "cycles" in step:
        cells.append(f"{step['cycles'] / 1e6:.3g}")
        cells += [f"{1e3 * step[f'{kind}_seconds']:.3g}" for kind in _SECONDS]
    return f"| {' | '.join([*cells, *['-'] * (9 - len(cells))])} |"


_SECONDS = ("communication", "computing")


def _name(step: JSON) -> str:
    return f"{step['task']}, {step['target']}, {step['mesh']}={step['devices']}"
