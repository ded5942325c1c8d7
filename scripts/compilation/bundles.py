"""The final instructions of a TPU kernel, from libtpu's dumps: bundles by loop, and unit use.

A bundle is what the units of a TPU begin in one cycle, if nothing stalls. libtpu writes the bundles
with `LIBTPU_INIT_ARGS="--xla_jf_dump_to=FOLDER --xla_jf_dump_llo_text=true"`.
"""

from __future__ import annotations

import glob
import re
from pathlib import Path
from typing import Any

_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s+([A-Z]{2})?\s*:\s*((?:> ?)*)")
_NOT_FINAL = ("schedule-analysis", "gap")


def kernels(folder: Path, name: str) -> list[dict[str, Any]]:
    """The kernels in the folder whose names contain `name`, each with its loops.

    Returns:
        for each kernel {"kernel": its name, "bundles": their number, "loops": [...]}; each loop, a
        stretch of bundles at one depth, is {"depth", "bundles", and the use of each unit}.
    """
    files = sorted(folder.glob(f"*{glob.escape(name)}*-final_bundles.txt"))
    final = [file for file in files if not any(word in file.name for word in _NOT_FINAL)]
    return [_kernel(file) for file in final]


def _kernel(file: Path) -> dict[str, Any]:
    stem = re.sub(r"-\d+-final_bundles.txt$", "", file.name)
    use = _use_of_units(file.parent, stem)
    loops: list[dict[str, Any]] = []
    count = 0
    for line in file.read_text().splitlines():
        match = _BUNDLE.match(line)
        if match is None:
            continue
        depth, begins = match[3].count(">"), match[2] in ("LB", "LH")
        if not loops or begins or loops[-1]["depth"] != depth:
            loops.append({"depth": depth, "bundles": 0})
        loops[-1]["bundles"] += 1
        for unit, number in use.get(int(match[1], 16), {}).items():
            if number:
                loops[-1][unit] = loops[-1].get(unit, 0) + number
        count += 1
    return {"kernel": re.sub(r"^\d+-", "", stem), "bundles": count, "loops": loops}


def _use_of_units(folder: Path, stem: str) -> dict[int, dict[str, int]]:
    """For each bundle, the number of operations of each unit."""
    files = list(folder.glob(f"{glob.escape(stem)}-*-final_hlo-static-per-bundle-utilization.txt"))
    if not files:
        return {}
    _, names, _, _, *rows = files[0].read_text().splitlines()
    units = [name.strip() for name in names.split(",")]
    numbers = (list(map(int, row.split())) for row in rows if row.strip())
    return {i: dict(zip(units, row, strict=False)) for i, row in enumerate(numbers)}
