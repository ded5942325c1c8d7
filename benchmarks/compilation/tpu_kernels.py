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

from benchmarks.compilation.programs import DIM, Program, programs
from benchmarks.measure import JSON, attempt
from benchmarks.targets import targets_of

_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s+([A-Z]{2})?\s*:\s*((?:> ?)*)")
_PAIRS = 8 * 128  # of a register
_MIB = 2**20
# Of additive attention, forward and backward, in words and as cycles per tanh.
_FLOORS = ("one tanh per cycle", 1), ("seven vector operations, four per cycle", 7 / 4)


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
        "compiled-targets": targets_of("compiled", judged_rows(rows)),
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


def judged_rows(rows: list[JSON]) -> list[JSON]:
    """The numbers that targets judge."""
    numbers: dict[str, JSON] = {}
    by_program: dict[tuple[str, str], list[JSON]] = {}
    for row in rows:
        if "kernel" in row:
            by_program.setdefault((row["program"], row["target"]), []).append(row)
        elif "temporary_mib" in row:
            claim = f"{row['program']}, forward and backward, {row['target']}"
            what = "temporary MiB, at most inputs + outputs + 8"
            numbers[claim] = {what: row["temporary_mib"]}
    for (program, chip), kernels in by_program.items():
        name = program.removesuffix(", T 4,096")
        if name.startswith("splash"):
            ours, peer = (
                [row["bundles"] for row in each]
                for each in (by_program.get(("scaled dot, T 4,096", chip), []), kernels)
            )
            for direction, part in {"forward": slice(1), "backward": slice(1, None)}.items():
                what = f"bundles of a tile of 512 x 512, over {name}"
                ratio = sum(ours[part]) / sum(peer[part])
                numbers.setdefault(f"scaled dot, {direction}, {chip}", {})[what] = ratio
        for index, kernel in enumerate(kernels if name == "additive" else ()):
            direction, (floor, cycles) = ("forward", "backward")[index], _FLOORS[index]
            one = passes(kernel["loops"])[-1]  # the backward kernel computes the weights first
            ratio = one["bundles"] / one["tanhs"] / cycles
            numbers[f"additive, {direction}, {chip}"] = {
                f"bundles of a pass over the features, over {floor}": ratio,
                "spills in the inner loop": one["spills"],
            }
    return [{"work": claim, "contestant": "ours", **found} for claim, found in numbers.items()]
