"""The rows and the targets of `compile_report.py`."""

from __future__ import annotations

from typing import Any

Rows = list[dict[str, Any]]

COLUMNS = {
    "program": "program",
    "target": "target",
    "temporary MiB": "temporary_mib",
    "kernel": "kernel",
    "bundles of the inner loop": "bundles",
    "fills": "fills",
    "spills": "spills",
}

_VECTOR_OPERATIONS = 7  # per pair and feature, of the backward pass of additive attention
_VECTOR_UNITS = 4


def kernel_rows(program: dict[str, Any], kernels: list[dict[str, Any]]) -> Rows:
    """A row for each kernel of a program; one row for a program without kernels."""
    rows = []
    for kernel in kernels:
        loop = inner_loop(kernel["loops"])
        numbers = {
            "kernel": kernel["kernel"].split(".")[0],
            "bundles": loop["bundles"],
            "fills": loop.get("VLOAD:FILL", 0),
            "spills": loop.get("VSTORE:SPILL", 0),
            "loops": kernel["loops"],
        }
        rows.append({**program, **numbers})
    return rows or [program]


def inner_loop(loops: list[dict[str, Any]]) -> dict[str, Any]:
    """The innermost loop that has the most bundles."""
    deepest = max(loop["depth"] for loop in loops)
    return max((loop for loop in loops if loop["depth"] == deepest), key=_bundles)


def _bundles(loop: dict[str, Any]) -> int:
    bundles: int = loop["bundles"]
    return bundles


def targets(rows: Rows) -> Rows:
    """The targets, which were set before anything was compiled, and whether they are met."""
    found: Rows = []

    def add(claim: str, what: str, target: float, number: float) -> None:
        met = "yes" if number <= target else "MISS"
        row = {"claim": claim, "what": what, "target": f"at most {target:g}", "found": number}
        found.append({**row, "met": met})

    for chip in ("v5e", "v6e"):
        ours, peer = (
            _kernels(rows, f"{name}, T 4,096", chip) for name in ("scaled dot", "splash attention")
        )
        if ours and peer:
            what = "bundles of a tile of 512 x 512, over splash attention"
            ratio = ours[0]["bundles"] / peer[0]["bundles"]
            add(f"scaled dot, forward, {chip}", what, 1.15, ratio)
            ratio = ours[1]["bundles"] / sum(kernel["bundles"] for kernel in peer[1:])
            add(f"scaled dot, backward, {chip}", what, 1.25, ratio)
        for direction, floor, operations, target, kernel in zip(
            ("forward", "backward"),
            ("one tanh per cycle", "seven vector operations, four per cycle"),
            (1, _VECTOR_OPERATIONS / _VECTOR_UNITS),
            (1.5, 2.0),
            _kernels(rows, "additive, T 4,096", chip),
            strict=False,
        ):
            tanhs = inner_loop(kernel["loops"])["EUP"]
            what = f"bundles of the inner loop, over {floor}"
            add(
                f"additive, {direction}, {chip}",
                what,
                target,
                kernel["bundles"] / tanhs / operations,
            )
            add(f"additive, {direction}, {chip}", "spills in the inner loop", 0, kernel["spills"])
    for row in rows:
        if row["program"].endswith("T 16,384") and "error" not in row:
            claim = f"{row['program']}, forward and backward, {row['target']}"
            most = row["argument_mib"] + row["output_mib"] + 8
            add(claim, "temporary MiB, at most inputs + outputs + 8", most, row["temporary_mib"])
    return found


def _kernels(rows: Rows, program: str, target: str) -> Rows:
    """The rows of a program; none if it was not compiled."""
    of_program = [row for row in rows if (row["program"], row["target"]) == (program, target)]
    return [row for row in of_program if "kernel" in row]
