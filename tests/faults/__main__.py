"""python -m tests.faults [--only NAME] [--repeats N] [--out FILE]: the table; see `__init__.py`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import jax

from .findings import COLUMNS
from .processes import Place
from .rows import ROWS, conduct


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    parser.add_argument("--repeats", type=int, help="cases of each row, in place of its own number")
    parser.add_argument("--out", type=Path, help="also write the numbers to this file, as JSON")
    arguments = parser.parse_args()
    begun, lines, numbers = time.monotonic(), [], []
    with Place() as place:
        jax.config.update("jax_compilation_cache_dir", str(place.cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        for row in ROWS:
            if arguments.only not in row.name:
                continue
            started = time.monotonic()
            found = conduct(row, place, arguments.repeats or row.repeats, shown=True)
            seconds = time.monotonic() - started
            lines.append(found.row(row.name, seconds))
            numbers.append({"fault": row.name, "seconds": seconds, **found.to_json()})
            print(lines[-1], flush=True)
            for kind, what in found.defects:
                print(f"  {kind}: {what}", flush=True)
    print(f"\n| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
    print("\n".join(lines))
    print(f"\n{time.monotonic() - begun:.0f} s")
    if arguments.out:
        arguments.out.write_text(json.dumps(numbers, indent=2) + "\n")
    return int(any(row["defects"] for row in numbers))


if __name__ == "__main__":
    sys.exit(main())
