"""python -m tests.faults [--only NAME] [--repeats N] [--save]: the table; see `__init__.py`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import jax
from saved_table import save

from .findings import line, table
from .processes import Place
from .rows import ROWS, conduct


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    parser.add_argument("--repeats", type=int, help="cases of each row, in place of its own number")
    parser.add_argument(
        "--save", action="store_true", help="write results.json and the table in runs/README.md"
    )
    arguments = parser.parse_args()
    if arguments.save and (arguments.only or arguments.repeats):
        parser.error("--save needs the whole run: without --only and --repeats")
    begun, numbers = time.monotonic(), []
    with Place() as place:
        jax.config.update("jax_compilation_cache_dir", str(place.cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        for row in ROWS:
            if arguments.only not in row.name:
                continue
            started = time.monotonic()
            found = conduct(row, place, arguments.repeats or row.repeats, shown=True)
            seconds = time.monotonic() - started
            numbers.append({"fault": row.name, "seconds": round(seconds, 1), **found.to_json()})
            print(line(numbers[-1]), flush=True)
            for kind, what in found.defects:
                print(f"  {kind}: {what}", flush=True)
    print(f"\n{table(numbers)}\n\n{time.monotonic() - begun:.0f} s")
    if arguments.save:
        save("faults", numbers, time.monotonic() - begun, table)
    return int(any(row["defects"] for row in numbers))


if __name__ == "__main__":
    sys.exit(main())
