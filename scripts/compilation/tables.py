"""The tables of scripts/README.md, from the JSON file of `compile_report.py`."""

from __future__ import annotations

from typing import Any

Rows = list[dict[str, Any]]

HEADINGS = (
    "program",
    "target",
    "temporary MiB",
    "kernel",
    "bundles of the inner loop",
    "fills",
    "spills",
)


def inner_loop(kernel: dict[str, Any]) -> dict[str, Any]:
    """The innermost loop that has the most bundles."""
    loops = [loop for loop in kernel["loops"] if loop["bundles"] > 1]
    deepest = max(loop["depth"] for loop in loops)
    inner = [loop for loop in loops if loop["depth"] == deepest]
    return max(inner, key=lambda loop: loop["bundles"])


def cells(rows: Rows) -> list[tuple[str, ...]]:
    """A line for each kernel of each program."""
    lines: list[tuple[str, ...]] = []
    for row in rows:
        start = row["program"], row["target"]
        if "error" in row:
            lines.append((*start, "-", row["error"], "-", "-", "-"))
            continue
        memory = f"{row['temporary_mib']:.2f}"
        lines += [
            (
                *start,
                memory,
                kernel["kernel"].split(".")[0],
                str(inner_loop(kernel)["bundles"]),
                str(inner_loop(kernel).get("VLOAD:FILL", 0)),
                str(inner_loop(kernel).get("VSTORE:SPILL", 0)),
            )
            for kernel in row["kernels"]
        ] or [(*start, memory, "-", "-", "-", "-")]
    return lines


def table(rows: Rows) -> str:
    """The table of all programs, in Markdown."""
    lines = [HEADINGS, ["---"] * len(HEADINGS), *cells(rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# --- targets ---

_VECTOR_OPERATIONS = 7  # per pair and feature, of the backward pass of additive attention
_VECTOR_UNITS = 4


def targets(rows: Rows) -> list[dict[str, Any]]:
    """The targets, which were set before anything was compiled, and whether they are met."""
    found = []

    def add(claim: str, target: float, number: float | None) -> None:
        if number is not None:
            met = "yes" if number <= target else "MISS"
            found.append({"claim": claim, "target": target, "found": number, "met": met})

    for chip in ("v5e", "v6e"):
        ours, peer = (_loops(rows, f"{name}, T 4,096", chip) for name in _SCALED)
        forward = _ratio(ours[:1], peer[:1])
        add(f"scaled dot forward, {chip}: bundles of a tile, over splash attention", 1.15, forward)
        backward = _ratio(ours[1:], peer[1:])
        add(f"scaled dot backward, {chip}: the same, over its two kernels", 1.25, backward)
        for direction, floor, target, loop in zip(
            ("forward", "backward"),
            ("EUP's tanh", "vector units' seven operations"),
            (1.5, 2.0),
            _loops(rows, "additive, T 4,096", chip),
            strict=False,
        ):
            cycles = loop["EUP"] * (1 if target == 1.5 else _VECTOR_OPERATIONS / _VECTOR_UNITS)
            claim = f"additive {direction}, {chip}: bundles of the inner loop"
            add(f"{claim}, over the {floor}", target, loop["bundles"] / cycles)
            add(f"additive {direction}, {chip}: spills in it", 0, loop.get("VSTORE:SPILL", 0))
    for row in rows:
        if row["program"].endswith("T 16,384") and "error" not in row:
            name = row["program"].split(",")[0]
            add(f"{name}, forward and backward, T 16,384: temporary MiB", 8, row["temporary_mib"])
    return found


_SCALED = ("scaled dot", "splash attention")


def _loops(rows: Rows, program: str, target: str) -> list[dict[str, Any]]:
    """The inner loops of the kernels of a program; none if it is not among the rows."""
    for row in rows:
        if (row["program"], row["target"]) == (program, target) and "error" not in row:
            return [inner_loop(kernel) for kernel in row["kernels"]]
    return []


def _ratio(ours: list[dict[str, Any]], peers: list[dict[str, Any]]) -> float | None:
    """The bundles of our loops over those of a peer's."""
    if not (ours and peers):
        return None
    return sum(loop["bundles"] for loop in ours) / sum(loop["bundles"] for loop in peers)


def targets_table(rows: Rows) -> str:
    """The table of targets, in Markdown."""
    lines = [("claim", "target", "found", "met"), ("---",) * 4]
    for target in targets(rows):
        lines.append(
            (target["claim"], f"{target['target']:g}", f"{target['found']:.3g}", target["met"])
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
