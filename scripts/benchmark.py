"""Measures attention_jax against its peers; see --help."""

from __future__ import annotations

import dataclasses
import fnmatch
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from benchmarks import attention, models
from benchmarks.measure import JSON, Cases, run
from benchmarks.tables import TABLES, table, write_report
from benchmarks.targets import targets_of
from command_line import ScoreNames, check_names, run_command

from attention_jax.core.checks import check_integer
from attention_jax.runs.progress import say
from attention_jax.runs.run_folder import check_output
from attention_jax.scores import SCORES, get_score
from attention_jax.scores.registry import FOUR_SCORES

SCHEMA = 2  # of result files
# The races of each table.
CASES: dict[str, Callable[[Any], Cases]] = {
    "attention": attention.times,
    "attention_memory": attention.memory,
    "local": attention.windows,
    "decoding": models.decoding,
    "reversal": models.reversal,
    "translation": models.translation,
    "ring": attention.rings,
}


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Measure speed and memory against named peers, and print a table for each benchmark.

    attention: times of attention with every score and normaliser, for our implementations and for
    each installed peer (the extra [bench] installs them; others are absent), and the temporary
    memory of every derivative. 10 minutes.
    local: attention through windows, and to all keys. A minute.
    decoding: the reversal model decodes with a cache and without. A minute.
    reversal: training steps, all seeds at once, one after another, and with a log of gradients.
    5 minutes.
    translation: a training step of the translator with each score. 2 minutes.
    ring: memory of each device when 1 to 8 devices share a sequence. It compiles only. A minute.

    Contestants take turns. The tables show medians, and between parentheses the quartiles of the
    turns, which are the noise of the measurement.

    Attributes:
        benchmarks: which to run.
        scores: the scores of the training benchmarks.
        works: names of cases or patterns such as "additive*"; all cases if empty.
        shrink: divides lengths and steps, for a trial that takes seconds.
        repeats: number of turns of each contestant. The median counts; the quartiles are its noise.
        out: also write everything, every turn included, to this JSON file.
    """

    benchmarks: tuple[str, ...] = ("attention", "local", "decoding", "reversal", "translation")
    scores: ScoreNames = FOUR_SCORES
    works: tuple[str, ...] = ()
    shrink: int = 1
    repeats: int = 7
    out: Path | None = None

    def __post_init__(self) -> None:
        names = [name for name in CASES if "_" not in name]
        check_names("benchmarks", self.benchmarks, names)
        if "ring" in self.benchmarks and len(self.benchmarks) > 1:
            raise ValueError("benchmarks must be ring alone, which simulates 8 devices")
        if not self.scores:
            raise ValueError(f"scores must name at least one of {', '.join(SCORES)}; got none")
        for score in self.scores:
            get_score(score)
        for name in ("shrink", "repeats"):
            check_integer(name, getattr(self, name))
        check_output(self.out)


def main(arguments: Arguments) -> None:
    jax.config.update("jax_enable_compilation_cache", False)  # or compiling would be loading
    start = time.monotonic()
    tables = {
        name: cases(arguments)
        for name, cases in CASES.items()
        if name.partition("_")[0] in arguments.benchmarks
    }
    kept = chosen(arguments.works, [case for cases in tables.values() for case in cases])
    reports: dict[str, list[JSON]] = {}
    targets: list[JSON] = []
    for name, cases in tables.items():
        races = [race for case, race in cases.items() if case in kept]
        reports[name] = [row for race in races for row in run(race, arguments.repeats)]
        targets += targets_of(name, reports[name])
        say(f"\n{name}\n\n{table(TABLES[name], reports[name])}")
    reports["targets"] = targets
    say(f"\ntargets\n\n{table(TABLES['targets'], targets)}")
    if arguments.shrink > 1:
        say("\nlengths were divided, so these numbers are only a trial")
    if arguments.out is not None:
        options = dataclasses.asdict(arguments)
        del options["benchmarks"], options["out"]
        about = {"seconds": round(time.monotonic() - start), "options": options}
        write_report(arguments.out, SCHEMA, about, reports, ("torch", "keras", "pykeops"))


def chosen(patterns: tuple[str, ...], names: list[str]) -> set[str]:
    """The names that match one of the patterns; all if there are none."""
    kept: set[str] = set()
    for pattern in patterns or ("*",):
        if not (matching := fnmatch.filter(names, pattern)):
            raise ValueError(f"works must be among {', '.join(names)}; got {pattern!r}")
        kept.update(matching)
    return kept


if __name__ == "__main__":
    run_command(Arguments, main)
