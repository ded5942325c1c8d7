"""Measures attention_jax against its peers; see --help."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Annotated

import jax
import tyro
from benchmarks.catalogue import BENCHMARKS
from benchmarks.measure import JSON, Options
from benchmarks.tables import TARGETS, table
from benchmarks.targets import targets_of
from command_line import check_names, command, run_command

from attention_jax.runs.environment import environment
from attention_jax.runs.progress import say
from attention_jax.runs.run_folder import check_output, write_json

SCHEMA = 2  # of result files


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
        out: also write everything, every turn included, to this JSON file.
    """

    benchmarks: tuple[str, ...] = ("attention", "local", "decoding", "reversal", "translation")
    measurement: Annotated[Options, tyro.conf.OmitArgPrefixes] = Options()
    out: Path | None = None

    def __post_init__(self) -> None:
        check_names("benchmarks", self.benchmarks, BENCHMARKS)
        if "ring" in self.benchmarks and len(self.benchmarks) > 1:
            raise ValueError("benchmarks must be ring alone, which simulates 8 devices")
        check_output(self.out)


def main(arguments: Arguments) -> None:
    jax.config.update("jax_enable_compilation_cache", False)  # or compiling would be loading
    options, start = arguments.measurement, time.monotonic()
    cases = {
        benchmark.name: benchmark.cases(options)
        for name in arguments.benchmarks
        for benchmark in BENCHMARKS[name]
    }
    cases = options.chosen(cases)
    reports: JSON = {}
    targets: list[JSON] = []
    for name in arguments.benchmarks:
        measured: list[JSON] = []
        for benchmark in BENCHMARKS[name]:
            rows = [row for case in cases[benchmark.name].values() for row in case()]
            say(f"\n{benchmark.name}\n\n{table(benchmark.columns, rows)}")
            reports[benchmark.name] = {"rows": rows}
            measured += rows
        targets += targets_of(name, measured)
    reports["targets"] = {"rows": targets}
    say(f"\ntargets\n\n{table(TARGETS, targets)}")
    if options.shrink > 1:
        say("\nlengths were divided, so these numbers are only a trial")
    if arguments.out is not None:
        content = {
            "schema": SCHEMA,
            "command": command(),
            "seconds": round(time.monotonic() - start),
            "options": dataclasses.asdict(options),
            "environment": environment(Path(__file__).parent),
            "benchmarks": reports,
        }
        write_json(arguments.out, content)


if __name__ == "__main__":
    run_command(Arguments, main)
