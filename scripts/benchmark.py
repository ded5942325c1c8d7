"""Measures attention_jax against its peers; see --help."""

from __future__ import annotations

import dataclasses
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
    reversal_training,
    ring,
    translation,
)
from benchmarks.measure import JSON, Benchmark, Options, Report
from command_line import run_command

from attention_jax.runs.environment import environment
from attention_jax.runs.run_folder import check_output, write_json

BENCHMARKS: dict[str, Benchmark] = {
    "attention": Benchmark(attention.check, attention.run),
    "local": Benchmark(local.check, local.run),
    "decoding": Benchmark(decoding.check, decoding.run),
    "gradient-log": Benchmark(gradient_log.check, gradient_log.run),
    "ring": Benchmark(ring.check, ring.run),
    "crossover": Benchmark(crossover.check, crossover.run),
    "reversal": Benchmark(reversal_training.check, reversal_training.run),
    "translation": Benchmark(translation.check, translation.run),
}

_PIPED_WIDTH = 150  # columns of a table that goes to no terminal


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Measure speed and memory against named peers, and print the tables of each benchmark.

    attention: milliseconds and temporary memory of attention with every score, of ours and of each
    peer that is installed (the extra [bench] has them; one that is not is listed as absent); what
    every derivative takes; the targets, and whether they are met. About 15 minutes.
    local: attention through windows against attention to all keys, which should take at least five
    times as long; a minute.
    decoding: the reversal model says its answers token by token with a cache, and without, which
    should take at least three times as long; a minute.
    gradient-log: training that logs gradients as often as it does by default, against training that
    does not: a tenth more at most; a minute.
    ring: memory of each device where sequences are cut up over 1 to 8 of them; compiles only, a
    minute.
    crossover: from what size tiles are faster than the whole table of logits; a few minutes.
    reversal: training throughput of our model, all seeds at once, and of a GRU in PyTorch (needs
    the extra [bench]; listed as absent without it).
    translation: a training step of the translator with each score, what of it is cross attention,
    and with optax's loss and Flax's dropout in place of ours; 5 minutes.

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
                raise ValueError(f"benchmarks must be of {', '.join(BENCHMARKS)}; got {name!r}")
        check_output(self.out)


def main(arguments: Arguments) -> None:
    for name in arguments.benchmarks:  # all of them before the first starts to take minutes
        BENCHMARKS[name].check(arguments.measurement)
    jax.config.update("jax_enable_compilation_cache", False)  # or compiling would be loading
    console = rich.console.Console()
    if not console.is_terminal:
        console = rich.console.Console(width=_PIPED_WIDTH)
    results: JSON = {}
    for name in arguments.benchmarks:
        for report in BENCHMARKS[name].run(arguments.measurement):
            console.print(as_table(report))
            for note in report.notes:
                console.print(note, style="dim", highlight=False, markup=False)
            results[report.name] = report.as_json()
    if arguments.out is not None:
        write_json(arguments.out, {"environment": environment(), "benchmarks": results})


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
