"""Evaluates a trained run of any task; see --help."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from attention_jax.commands.command_line import OfARun, print_table, run_command
from attention_jax.runs.metrics_file import finite_or_null
from attention_jax.runs.run_folder import check_output, write_json
from attention_jax.training.run_results import SUMMARY, results_of, summary_text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(OfARun):
    """Evaluate a checkpoint of a run: the results of its task, as means with their intervals.

    For a task from sequence to sequence they are measured on 1,000 fresh random examples of each
    length, the same for all runs; an exact match has every letter and the end right. To score
    translations of a text, see scripts/translate.py.

    Attributes:
        lengths: also test at these lengths, for a task whose examples have lengths.
        out: also write every seed's numbers to this JSON file.
    """

    lengths: tuple[int, ...] = ()
    out: Path | None = None

    def __post_init__(self) -> None:
        check_output(self.out)


def main(arguments: Arguments) -> None:
    workdir = arguments.workdir
    run = arguments.run()
    results = results_of(run, arguments.lengths)
    lines = [(name, summary_text(result, ".4g")) for name, result in results.items()]
    print_table(run.describe(), ("result", SUMMARY), lines)
    if arguments.out is not None:
        by_seed = {name: [*map(finite_or_null, result.by_seed)] for name, result in results.items()}
        content = {"workdir": str(workdir), "step": run.step, "results": by_seed}
        write_json(arguments.out, content)


if __name__ == "__main__":
    run_command(Arguments, main)
