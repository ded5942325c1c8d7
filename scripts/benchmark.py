"""Measures attention_jax against its peers; see --help."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import jax
import rich.console
import rich.table
import tyro
from benchmarks import gru_padding, reversal_training
from benchmarks.measure import JSON, Options, Report

from attention_jax.command_line import run_command
from attention_jax.training.run_folder import check_output, environment, write_json

BENCHMARKS: dict[str, Callable[[Options], Report]] = {
    "reversal": reversal_training.run,
    "gru-padding": gru_padding.run,
}

_PIPED_WIDTH = 120  # columns of a table that goes to no terminal


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Measure speed against named peers, and print a table for each benchmark.

    reversal: training throughput of our model, all seeds at once, and of a GRU in PyTorch (needs
    the extra [bench]; listed as absent without it).
    gru-padding: that GRU's accuracy with and without a padding mask, one seed, about 10 minutes.

    Attributes:
        benchmarks: which to run.
        out: also write everything, every repeat included, to this JSON file.
    """

    benchmarks: tuple[str, ...] = ("reversal",)
    measurement: Annotated[Options, tyro.conf.OmitArgPrefixes] = Options()
    out: Path | None = None

    def __post_init__(self) -> None:
        for name in self.benchmarks:
            if name not in BENCHMARKS:
                raise ValueError(f"benchmarks must be of {', '.join(BENCHMARKS)}; got {name!r}")
        check_output(self.out)


def main(arguments: Arguments) -> None:
    jax.config.update("jax_enable_compilation_cache", False)  # or compiling would be loading
    console = rich.console.Console()
    if not console.is_terminal:
        console = rich.console.Console(width=_PIPED_WIDTH)
    results: JSON = {}
    for name in arguments.benchmarks:
        report = BENCHMARKS[name](arguments.measurement)
        console.print(as_table(report))
        for note in report.notes:
            console.print(note, style="dim", highlight=False, markup=False)
        results[name] = report._asdict()
        del results[name]["columns"]
    if arguments.out is not None:
        write_json(arguments.out, {"environment": environment(), "benchmarks": results})


def as_table(report: Report) -> rich.table.Table:
    """A report for the terminal; a line divides the scores."""
    table = rich.table.Table(title=report.title)
    for heading, (_, specification) in report.columns.items():
        table.add_column(
            heading, justify="right" if specification else "left", no_wrap=not specification
        )
    for index, row in enumerate(report.rows):
        if index and row["score"] != report.rows[index - 1]["score"]:
            table.add_section()
        values = [(row.get(entry), form) for entry, form in report.columns.values()]
        table.add_row(*("-" if value is None else format(value, form) for value, form in values))
    return table


if __name__ == "__main__":
    run_command(Arguments, main)
