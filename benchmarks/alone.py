"""Contestants that run alone, each in a process of its own; processes take turns.

In one process contestants disturb each other: the threads of one library wait beside those of
another. So another commit, another JAX and PyTorch are also measured like this.

    .venv/bin/python -m benchmarks.alone --works scaled additive --before ../older --out alone.json
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np

from attention_jax.commands.command_line import check_names, run_command
from attention_jax.core.checks import check_integer, check_real
from attention_jax.runs.progress import say
from attention_jax.runs.run_folder import check_output
from benchmarks.measure import JSON, quartiles, significant
from benchmarks.peers import PEERS
from benchmarks.tables import TABLES, table, write_report
from benchmarks.targets import targets_of
from benchmarks.works import WORKS

_WORKS = {work.name: work for works in WORKS.values() for work in works}
# Prints the milliseconds of a call, and how many cores it keeps busy, as JSON. It needs nothing of
# this file, which an older commit lacks.
_PROCESS = """
import json, sys, time
import numpy as np
from benchmarks.peers import PEERS, ours
from benchmarks.works import WORKS
name, peer, seconds = sys.argv[1:]
works = {work.name: work for works in WORKS.values() for work in works}
if name not in works:
    sys.exit(f"there is no work {name}")
work = works[name]
call = PEERS.get(peer, ours)(work).call
for _ in range(3):
    call(1)
times, cpu, start = [], time.process_time(), time.perf_counter()
while time.perf_counter() < start + float(seconds) or len(times) < 5:
    before = time.perf_counter()
    call(1)
    times.append(time.perf_counter() - before)
cores = (time.process_time() - cpu) / (time.perf_counter() - start)
print(json.dumps({"milliseconds": 1000 * np.median(times), "cores": cores}))
"""


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Measure works of attention in processes of their own, and print a table.

    Attributes:
        works: names of works.
        peers: libraries beside ours, by their names in benchmarks/peers.py; one that is not
            installed, or that lacks the score, is left out.
        before: the folder of a checkout of another commit, "ours, before".
        other_python: a Python in which another JAX is installed, "ours, other JAX".
        repeats: number of processes of each contestant.
        seconds: how long each of them calls.
        out: also write the rows to this JSON file.
    """

    works: tuple[str, ...]
    peers: tuple[str, ...] = ()
    before: Path | None = None
    other_python: Path | None = None
    repeats: int = 4
    seconds: float = 2.0
    out: Path | None = None

    def __post_init__(self) -> None:
        if not self.works:
            raise ValueError("works must name at least one work; got none")
        check_names("works", self.works, [*_WORKS])
        check_names("peers", self.peers, PEERS)
        if self.before is not None and not (self.before / "benchmarks" / "peers.py").exists():
            raise ValueError(f"before must be a checkout of this project; got {self.before}")
        if self.other_python is not None and shutil.which(self.other_python) is None:
            raise ValueError(f"other_python must be a Python that runs; got {self.other_python}")
        check_integer("repeats", self.repeats)
        check_real("seconds", self.seconds, above=0)
        check_output(self.out)


def main(arguments: Arguments) -> None:
    here, python = Path.cwd(), Path(sys.executable)
    contestants = {"ours": (python, here), **dict.fromkeys(arguments.peers, (python, here))}
    if arguments.before is not None:
        contestants["ours, before"] = python, arguments.before
    if arguments.other_python is not None:
        contestants["ours, other JAX"] = arguments.other_python, here
    rows = []
    for name in arguments.works:
        work = _WORKS[name]
        found: dict[str, list[JSON]] = {contestant: [] for contestant in contestants}
        for repeat in range(arguments.repeats):
            for contestant in [*contestants][:: -1 if repeat % 2 else 1]:
                found[contestant] += _one(name, contestant, arguments, *contestants[contestant])
        for contestant, turns in found.items():
            if turns:
                times = [significant(turn["milliseconds"]) for turn in turns]
                cores = significant(np.median([turn["cores"] for turn in turns]))
                about = {**work.described(), "contestant": contestant, "cores": cores}
                rows.append({**about, "turns": times, "milliseconds": quartiles(times)[1]})
        say(table(TABLES["alone"], [row for row in rows if row["work"] == name]))
    version = ".".join(jax.__version__.split(".")[:2])
    targets = targets_of(f"alone, jax {version}", rows)
    say(f"\ntargets\n\n{table(TABLES['targets'], targets)}")
    if arguments.out is not None:
        reports = {"alone": rows, "alone-targets": targets}
        write_report(arguments.out, 1, {}, reports, ("torch",))


def _one(name: str, peer: str, arguments: Arguments, python: Path, folder: Path) -> list[JSON]:
    """What a process has measured; [] where it fails, which only a peer may."""
    paths = [str(folder.resolve()), os.environ.get("PYTHONPATH", "")]
    finished = subprocess.run(
        [python.absolute(), "-c", _PROCESS, name, peer, str(arguments.seconds)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    if finished.returncode:
        reason = [f"status {finished.returncode}", *finished.stderr.strip().splitlines()][-1]
        if peer not in PEERS or peer.startswith("ours"):
            raise ValueError(f"{name}: {peer}: {reason}")
        say(f"{name}: {peer}: {reason}", error=True)
        return []
    return [json.loads(finished.stdout.splitlines()[-1])]


if __name__ == "__main__":
    run_command(Arguments, main)
