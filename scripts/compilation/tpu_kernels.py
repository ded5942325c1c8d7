"""What libtpu reports about the kernels for TPUs: memory, bundles, fills and spills.

A bundle is what the units of a TPU begin in one cycle, if nothing stalls. libtpu writes the bundles
of all kernels into the folder that LIBTPU_INIT_ARGS names when it is loaded.
"""

from __future__ import annotations

import glob
import math
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import jax
from benchmarks.measure import JSON, attempt
from benchmarks.targets import judged

from compilation.programs import DIM, Program, programs

_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s+([A-Z]{2})?\s*:\s*((?:> ?)*)")
_PAIRS = 8 * 128  # of a register
_MIB = 2**20
# Peers, the direction, its kernels, and the most bundles over the peer's.
_OVER_PEERS = (
    ("splash attention", "forward", slice(1), 1.15),
    ("splash attention", "backward", slice(1, None), 1.25),
    ("splash attention with its fused backward", "backward", slice(1, None), 1.25),
)
# Direction, the floor in words and as cycles per tanh, and the most bundles over it.
_OVER_FLOORS = (
    ("forward", "one tanh per cycle", 1, 1.5),
    ("backward", "seven vector operations, four per cycle", 7 / 4, 2.0),
)


def reports(only: str) -> dict[str, list[JSON]]:
    """All kernels whose names and targets contain the text, sizes of tiles, and the targets."""
    rows: list[JSON] = []
    tiles: list[JSON] = []
    with tempfile.TemporaryDirectory() as folder:
        dump = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {dump}".strip()
        for program in programs():
            about = {"program": program.name, "target": program.target}
            if only in ", ".join(about.values()):
                found, refusal = attempt(_rows_of, program, Path(folder))
                kernels = [about | row for row in found or [refusal]]
                if program.tile is None:
                    rows += kernels
                else:
                    tiles.append(tile_row(program.name, program.tile, kernels))
    return {
        "compiled-programs": rows,
        "compiled-targets": targets_of(rows),
        "compiled-tiles": tiles,
    }


def _rows_of(program: Program, folder: Path) -> list[JSON]:
    """A row for each kernel of a program; one row for a program without kernels."""
    for file in folder.iterdir():  # those of the program before
        file.unlink()
    function, args = program.make(program.target)
    memory: Any = jax.jit(function).lower(*args).compile().memory_analysis()
    sizes = {
        f"{kind}_mib": round(getattr(memory, f"{name}_size_in_bytes") / _MIB, 3)
        for kind, name in (("temporary", "temp"), ("argument", "argument"), ("output", "output"))
    }
    rows = []
    for name in program.kernels:
        for file in sorted(folder.glob(f"*{glob.escape(name)}*-final_bundles.txt")):
            if "schedule-analysis" not in file.name and "gap" not in file.name:
                rows.append(sizes | kernel_row(file))
    return rows or [sizes]


def kernel_row(file: Path) -> dict[str, Any]:
    """The bundles of a kernel by loops, and those of the longest of its innermost loops.

    A loop is a stretch of bundles at one depth, with the use of each unit.
    """
    stem = re.sub(r"-\d+-final_bundles.txt$", "", file.name)
    use: list[dict[str, int]] = []
    pattern = f"{glob.escape(stem)}-*-final_hlo-static-per-bundle-utilization.txt"
    for numbers in file.parent.glob(pattern):
        _, names, _, _, *lines = numbers.read_text().splitlines()
        units = [name.strip() for name in names.split(",")]
        rows = (map(int, line.split()) for line in lines if line.strip())
        use = [dict(zip(units, row, strict=False)) for row in rows]
    loops: list[dict[str, Any]] = []
    for match in filter(None, map(_BUNDLE.match, file.read_text().splitlines())):
        depth = match[3].count(">")
        if not loops or match[2] in ("LB", "LH") or loops[-1]["depth"] != depth:
            loops.append({"depth": depth, "bundles": 0})
        loop, place = loops[-1], int(match[1], 16)
        loop["bundles"] += 1
        for unit, number in use[place].items() if place < len(use) else ():
            if number:
                loop[unit] = loop.get(unit, 0) + number
    inner = max(loops, key=lambda loop: (loop["depth"], loop["bundles"]))
    return {
        "kernel": re.sub(r"^\d+-", "", stem).split(".")[0],
        "bundles": inner["bundles"],
        "fills": inner.get("VLOAD:FILL", 0),
        "spills": inner.get("VSTORE:SPILL", 0),
        "loops": loops,
    }


def passes(loops: list[JSON]) -> list[dict[str, int]]:
    """The passes of additive attention over all features of a block of rows: forward, backward.

    The forward pass is one loop at depth 2. The backward pass comes after it, and contains loops
    over the features at depth 3, of 8 steps; what comes after without a tanh belongs to the forward
    pass. Each is {"bundles", "tanhs", "spills"}: spills are those of the loops with a tanh, counted
    once for each place in the code.
    """
    inner = [loop for loop in loops if loop["depth"] >= 2]
    tanhs = [i for i, loop in enumerate(inner) if loop["depth"] == 2 and "EUP" in loop]
    if not tanhs:
        return []
    end = tanhs[-1] + 1
    if not any("EUP" in loop for loop in inner[end:]):
        end = len(inner)
    return [
        {
            "bundles": sum((8 if loop["depth"] > 2 else 1) * loop["bundles"] for loop in part),
            "tanhs": sum((8 if loop["depth"] > 2 else 1) * loop.get("EUP", 0) for loop in part),
            "spills": sum(loop.get("VSTORE:SPILL", 0) for loop in part if "EUP" in loop),
        }
        for part in (inner[:end], inner[end:])
        if part
    ]


def tile_row(score: str, tile: tuple[int, int], kernels: list[JSON]) -> dict[str, Any]:
    """The bundles of 1,024 pairs in tiles of a size, forward and backward, at most.

    What may run at a step of the grid counts as if it did. Only in a kernel without inner loops,
    whose longest part is a tile, all other parts count once for a row of tiles.
    """
    row: dict[str, Any] = {"score": score, "tile": list(tile)}
    for direction, kernel in zip(("forward", "backward"), kernels, strict=False):
        if "error" in kernel:
            return row | {"error": kernel["error"]}
        parts = [loop["bundles"] for loop in kernel["loops"] if loop["depth"] == 1]
        over_features = sum(one["bundles"] / one["tanhs"] for one in passes(kernel["loops"]))
        of_tile = sum(parts)
        if not over_features:
            of_tile = max(parts) + (of_tile - max(parts)) * tile[1] / 4096
        row[direction] = round(of_tile * _PAIRS / math.prod(tile) + DIM * over_features, 2)
    return row


def targets_of(rows: list[JSON]) -> list[JSON]:
    """The targets, which were set before anything was compiled, and whether they are met."""
    checks = []
    for chip in ("v5e", "v6e"):
        kernels: dict[str, list[JSON]] = {}
        for row in rows:
            if row["target"] == chip and "kernel" in row:
                kernels.setdefault(row["program"].removesuffix(", T 4,096"), []).append(row)
        for peer, direction, part, most in _OVER_PEERS:
            sums = [
                sum(row["bundles"] for row in kernels.get(name, ())[part])
                for name in ("scaled dot", peer)
            ]
            if all(sums):
                claim = f"scaled dot, {direction}, {chip}"
                what = f"bundles of a tile of 512 x 512, over {peer}"
                checks.append(judged(claim, what, f"at most {most}", sums[0] / sums[1]))
        for kernel, (direction, floor, cycles, most) in zip(
            kernels.get("additive", []), _OVER_FLOORS, strict=False
        ):
            one = passes(kernel["loops"])[-1]  # the backward kernel computes the weights first
            ratio = one["bundles"] / one["tanhs"] / cycles
            claim, what = f"additive, {direction}, {chip}", "bundles of a pass over the features"
            checks.append(judged(claim, f"{what}, over {floor}", f"at most {most:g}", ratio))
            checks.append(judged(claim, "spills in the inner loop", "at most 0", one["spills"]))
    for row in rows:
        if row["program"].endswith("T 16,384") and "error" not in row:
            claim = f"{row['program']}, forward and backward, {row['target']}"
            most = row["argument_mib"] + row["output_mib"] + 8
            what = "temporary MiB, at most inputs + outputs + 8"
            checks.append(judged(claim, what, f"at most {most:g}", row["temporary_mib"]))
    return checks
