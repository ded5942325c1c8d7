"""The rows and the targets of `compile_report.py`."""

from __future__ import annotations

import math
from typing import Any

Rows = list[dict[str, Any]]

FUSED = "splash attention with its fused backward"
TILES = "additive, XLA's tiles, T 4,096"

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
_FEATURE_STEPS = 8  # of a loop over 128 features, 16 in a step
_FEATURES = 128
_LENGTH = 4096  # tokens of a program with T 4,096
_REGISTER = 8 * 128  # numbers


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


def passes(loops: list[dict[str, Any]]) -> list[dict[str, int]]:
    """The passes of additive attention over all features of a block of rows: forward, backward.

    The forward pass is one loop at depth 2. The backward pass comes after it, and contains loops
    over the features at depth 3; what comes after without a tanh belongs to the forward pass.
    Each is {"bundles", "tanhs", "spills"}: spills are those of the
    loops with a tanh, counted once for each place in the code.
    """
    inner = [loop for loop in loops if loop["depth"] >= 2]
    forward = [i for i, loop in enumerate(inner) if loop["depth"] == 2 and "EUP" in loop]
    if not forward:
        return []
    groups = [inner[: forward[-1] + 1], inner[forward[-1] + 1 :]]
    if not any("EUP" in loop for loop in groups[1]):
        groups = [inner]
    return [_pass(group) for group in groups]


def _pass(loops: list[dict[str, Any]]) -> dict[str, int]:
    total = {"bundles": 0, "tanhs": 0, "spills": 0}
    for loop in loops:
        runs = _FEATURE_STEPS if loop["depth"] > 2 else 1
        total["bundles"] += runs * loop["bundles"]
        if "EUP" in loop:
            total["tanhs"] += runs * loop["EUP"]
            total["spills"] += loop.get("VSTORE:SPILL", 0)
    return total


def against_tiles(rows: Rows) -> Rows:
    """Additive attention in our kernels against the tiles that XLA compiles, in cycles."""
    found: Rows = []
    for row in rows:
        kernels = _kernels(rows, "additive, T 4,096", row["target"])
        if row["program"] == TILES and "xla_cycles" in row and kernels:
            pairs = _LENGTH**2 // _REGISTER
            ours = round(pairs * sum(_bundles_of_pairs(kernel, (256, 512)) for kernel in kernels))
            numbers = {"xla_cycles": row["xla_cycles"], "kernel_cycles": ours}
            found.append({"target": row["target"], **numbers, "ratio": row["xla_cycles"] / ours})
    return found


def tile_row(score: str, tile: tuple[int, int], kernels: Rows) -> dict[str, Any]:
    """The bundles of 1,024 pairs in tiles of a size, forward and backward."""
    row: dict[str, Any] = {"score": score, "tile": list(tile)}
    for direction, kernel in zip(("forward", "backward"), kernels, strict=False):
        row[direction] = round(_bundles_of_pairs(kernel, tile), 2)
    return row


def _bundles_of_pairs(kernel: dict[str, Any], tile: tuple[int, int]) -> float:
    """The bundles of 1,024 pairs, at most: what may run at a step of the grid counts as if it did.

    Only in a kernel without inner loops, whose longest part is a tile, all other parts count once
    for a row of tiles.
    """
    parts = [loop["bundles"] for loop in kernel["loops"] if loop["depth"] == 1]
    of_features = sum(one["bundles"] / one["tanhs"] for one in passes(kernel["loops"]))
    of_tile = sum(parts)
    if not of_features:
        of_tile = max(parts) + (of_tile - max(parts)) * tile[1] / _LENGTH
    return of_tile * _REGISTER / math.prod(tile) + _FEATURES * of_features


def target_row(claim: str, what: str, most: float, number: float) -> dict[str, Any]:
    """A number that was to be at most so much, and whether it is."""
    met = "yes" if number <= most else "MISS"
    return {
        "claim": claim, "what": what, "target": f"at most {most:g}", "found": number, "met": met,
    }  # fmt: skip


def targets(rows: Rows) -> Rows:
    """The targets, which were set before anything was compiled, and whether they are met."""
    found: Rows = []

    def add(claim: str, what: str, target: float, number: float) -> None:
        found.append(target_row(claim, what, target, number))

    for chip in ("v5e", "v6e"):
        ours, peer = (
            _kernels(rows, f"{name}, T 4,096", chip) for name in ("scaled dot", "splash attention")
        )
        if ours and peer:
            what = "bundles of a tile of 512 x 512, over splash attention"
            ratio = ours[0]["bundles"] / peer[0]["bundles"]
            add(f"scaled dot, forward, {chip}", what, 1.15, ratio)
            backward = f"scaled dot, backward, {chip}"
            add(backward, what, 1.25, ours[1]["bundles"] / _all_but_first(peer))
            fused = _all_but_first(_kernels(rows, f"{FUSED}, T 4,096", chip))
            if fused:
                add(backward, f"{what} with its fused backward", 1.25, ours[1]["bundles"] / fused)
        for direction, floor, operations, target, kernel in zip(
            ("forward", "backward"),
            ("one tanh per cycle", "seven vector operations, four per cycle"),
            (1, _VECTOR_OPERATIONS / _VECTOR_UNITS),
            (1.5, 2.0),
            _kernels(rows, "additive, T 4,096", chip),
            strict=False,
        ):
            one = passes(kernel["loops"])[-1]  # the backward kernel computes the weights first
            ratio = one["bundles"] / one["tanhs"] / operations
            claim = f"additive, {direction}, {chip}"
            add(claim, f"bundles of a pass over the features, over {floor}", target, ratio)
            add(claim, "spills in the inner loop", 0, one["spills"])
    for row in rows:
        if row["program"].endswith("T 16,384") and "error" not in row:
            claim = f"{row['program']}, forward and backward, {row['target']}"
            most = row["argument_mib"] + row["output_mib"] + 8
            add(claim, "temporary MiB, at most inputs + outputs + 8", most, row["temporary_mib"])
    return found


def _all_but_first(kernels: Rows) -> int:
    """The bundles of the backward pass; 0 without one."""
    return sum(kernel["bundles"] for kernel in kernels[1:])


def _kernels(rows: Rows, program: str, target: str) -> Rows:
    """The rows of a program; none if it was not compiled."""
    of_program = [row for row in rows if (row["program"], row["target"]) == (program, target)]
    return [row for row in of_program if "kernel" in row]
