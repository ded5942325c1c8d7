"""python tests/fuzz [NAME ...]: the long run of the fuzz tests, about half an hour.

Draws the cases of every kind, prints a table of how they end, and describes every defect. Each NAME
is a regular expression that selects kinds. The cases are the same in every run, and a row does not
depend on the other rows. The fast tests run a few cases of each kind, usually one.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import jax
from kinds import KINDS
from outcomes import Kind, run
from saved_table import save
from table import HEAD, line, table, total

CASES_PER_CACHE = 400  # then compiled programs are dropped: thousands of them fill gigabytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="regular expressions of kinds; default: all")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the number of cases")
    parser.add_argument(
        "--save", action="store_true", help="write results.json and the table in tests/README.md"
    )
    arguments = parser.parse_args()
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_disable_most_optimizations", True)
    warnings.simplefilter("error")
    if arguments.save and (arguments.names or arguments.scale != 1):
        parser.error("--save needs the whole run: no names, no --scale")
    rows: list[dict] = []
    defects: Counter = Counter()
    begun = time.monotonic()
    print(HEAD, flush=True)
    for kind in KINDS:
        if arguments.names and not any(re.search(name, kind.name) for name in arguments.names):
            continue
        count = max(int(kind.many * arguments.scale), 1)
        endings, seconds = conduct(kind, count, defects)
        rows.append({"kind": kind.name, "seconds": round(seconds, 1), **endings})
        print(line(rows[-1]), flush=True)
        jax.clear_caches()
    print(line(total(rows)))
    if arguments.save:
        save("fuzz", rows, time.monotonic() - begun, table)
    for text, count in defects.items():
        print(f"{count} times: {text}")
    return int(bool(defects))


def conduct(kind: Kind, count: int, defects: Counter) -> tuple[Counter, float]:
    """Runs a kind's cases; counts defects in `defects` by their message without numbers."""
    endings: Counter = Counter()
    start = time.perf_counter()

    def note(case: object, ending: str | Exception) -> None:
        if isinstance(ending, str):
            endings[ending] += 1
        else:
            endings["defect"] += 1
            text = f"{kind.name}: {type(ending).__name__}: {str(ending)[:300]}"
            text = re.sub(r"[-+]?\d[\d.e+-]*", "#", text)
            if text not in defects:
                print(f"{text}\n  {case!r:.1500}\n{shown(ending)}", file=sys.stderr)
            defects[text] += 1
        if sum(endings.values()) % CASES_PER_CACHE == 0:
            jax.clear_caches()

    run(kind, count, note)
    return endings, time.perf_counter() - start


def shown(error: Exception) -> str:
    """Returns the calls that led to the error, outermost first."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[1:]]
    return f"  at {' '.join([*places[:6], '...', *places[-3:]] if len(places) > 9 else places)}"


if __name__ == "__main__":
    sys.exit(main())
