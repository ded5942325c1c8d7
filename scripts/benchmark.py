"""Measures attention_jax against its peers; see --help."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import jax
import rich.console
import rich.markup
import rich.table
import tyro
from benchmarks import (
    attention,
    crossover,
    decoding,
    gradient_log,
    local,
    normalizers,
    reversal_training,
    ring,
    translation,
)
from benchmarks.measure import JSON, Benchmark, Options, Report
from command_line import run_command

from attention_jax.core.names import did_you_mean
from attention_jax.runs.environment import environment
from attention_jax.runs.run_folder import check_output, write_json

BENCHMARKS: dict[str, Benchmark] = {
    "attention": Benchmark(attention.check, attention.run),
    "local": Benchmark(local.check, local.run),
    "decoding": Benchmark(decoding.check, decoding.run),
    "gradient-log": Benchmark(gradient_log.check, gradient_log.run),
    "ring": Benchmark(ring.check, ring.run),
    "crossover": Benchmark(crossover.check, crossover.run),
    "normalizers": Benchmark(normalizers.check, normalizers.run),
    "reversal": Benchmark(reversal_training.check, reversal_training.run),
    "translation": Benchmark(translation.check, translation.run),
}

SCHEMA = 1  # of result files
_PIPED_WIDTH = 150  # columns of a table that goes to no terminal


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Measure speed and memory against named peers, and print the tables of each benchmark.

    attention: milliseconds and temporary memory of attention with every score, for our
    implementations and for each installed peer (the extra [bench] installs them; others are listed
    as absent); the memory of every derivative; the targets, and whether they are met. About 15
    minutes.
    local: attention through windows against attention to all keys. Target: all keys take at least
    five times as long. A minute.
    decoding: the reversal model decodes with a cache and without. Target: without takes at least
    three times as long. A minute.
    gradient-log: training with the default log of gradients against training without it. Target:
    at most a tenth more. A minute.
    ring: memory of each device when 1 to 8 devices share a sequence. It compiles only. A minute.
    crossover: times of "reference" and "tiled" over lengths, from which the default is chosen.
    normalizers: time and memory of every normaliser in tiles against softmax. Targets: at most 1.1
    times softmax's time, 6 times and 32 MiB for entmax. A minute.
    reversal: throughput of our training, all seeds at once, and of a GRU in PyTorch (needs the
    extra [bench]; listed as absent without it).
    translation: a training step of the translator with each score, the share of cross attention in
    it, the same step with optax's loss and Flax's dropout in place of ours, and where its time
    goes. 5 minutes.

    Attributes:
        benchmarks: which to run.
        out: also write everything, every repeat included, to this JSON file.
    """

    benchmarks: tuple[str, ...] = ("attention", "local", "decoding", "gradient-log", "reversal")
    measurement: Annotated[Options, tyro.conf.OmitArgPrefixes] = Options()
    out: Path | None = None

    def __post_init__(self) -> None:
        for name in self.benchmarks:
            if name not in BENCHMARKS:
                raise ValueError(
                    f"benchmarks must be of {', '.join(BENCHMARKS)}; got {name!r}"
                    f"{did_you_mean(name, BENCHMARKS)}"
                )
        check_output(self.out)


def main(arguments: Arguments) -> None:
    for name in arguments.benchmarks:  # all of them before the first starts to take minutes
        BENCHMARKS[name].check(arguments.measurement)
    jax.config.update("jax_enable_compilation_cache", False)  # or compiling would be loading
    console = rich.console.Console()
    if not console.is_terminal:
        console = rich.console.Console(width=_PIPED_WIDTH)
    results: JSON = {}
    start = time.monotonic()
    for name in arguments.benchmarks:
        for report in BENCHMARKS[name].run(arguments.measurement):
            console.print(as_table(report))
            for note in report.notes:
                console.print(note, style="dim", highlight=False, markup=False)
            results[report.name] = report.as_json()
    if arguments.out is not None:
        content = {
            "schema": SCHEMA,
            "command": shlex.join(["python", "scripts/benchmark.py", *sys.argv[1:]]),
            "seconds": round(time.monotonic() - start),
            "environment": environment(Path(__file__).parent),
            "benchmarks": results,
        }
        write_json(arguments.out, content)


def as_table(report: Report) -> rich.table.Table:
    """A report for the terminal; a line divides its sections."""
    table = rich.table.Table(title=report.title)
    for heading, (_, specification) in report.columns.items():
        table.add_column(
            heading, justify="right" if specification else "left", no_wrap=not specification
        )
    for index, row in enumerate(report.rows):
        above = report.rows[index - 1] if index else {}
        same = all(row[entry] == above.get(entry) for entry in report.section)
        if index and not same:
            table.add_section()
        table.add_row(
            *(
                "" if same and entry in report.section else _cell(row.get(entry), form)
                for entry, form in report.columns.values()
            )
        )
    return table


def _cell(value: Any, form: str) -> str:
    return "-" if value is None else rich.markup.escape(format(value, form))


if __name__ == "__main__":
    run_command(Arguments, main)
