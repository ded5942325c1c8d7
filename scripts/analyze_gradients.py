"""Writes a report on the gradients of one run or several; see --help."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Annotated

import tyro

from attention_jax.commands.command_line import command, run_command
from attention_jax.reports.gradient_report import report
from attention_jax.runs.progress import printable, say
from attention_jax.runs.run_folder import check_output, write_json, write_text
from attention_jax.tasks.gradients import GradientAnalysis, analyze_run, load_analyzed_run


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Where did gradients vanish, which pairs carried them, how curved is the loss?

    Writes a self-contained HTML page, and a JSON file beside it with all its numbers. Curves
    against the step are read from gradients.jsonl if the run was trained with --log-gradients;
    otherwise they are computed at step 0 and at the checkpoints that are kept.

    Attributes:
        workdir: a run folder made by scripts/train.py, of any task.
        score: what the score of the run is called now, "module:Name", if its file or its class was
            renamed; it must give the same numbers. scripts/train.py --resume records the new name.
            "task=module:Name normalizer=module:Name" are new names of other parts, those of
            `load_run`.
        compare: further run folders to compare it with.
        out: the page; None for gradients.html in `workdir`.
    """

    workdir: Path
    score: str | None = None
    compare: tuple[Path, ...] = ()
    analysis: Annotated[GradientAnalysis, tyro.conf.OmitArgPrefixes] = GradientAnalysis()
    out: Path | None = None

    def __post_init__(self) -> None:
        check_output(self.out, ".html")

    @property
    def page(self) -> Path:
        """The HTML file."""
        return self.workdir / "gradients.html" if self.out is None else self.out


def main(arguments: Arguments) -> None:
    # All runs are loaded first, so that a wrong folder is reported at once.
    loaded = [load_analyzed_run(arguments.workdir, score=arguments.score)]
    loaded += map(load_analyzed_run, arguments.compare)
    check_output(arguments.page)
    for run in loaded:
        say(printable(run.description), error=True)
    start = time.perf_counter()

    def progress(line: str) -> None:
        say(f"{time.perf_counter() - start:4.0f} s  {line} ...", error=True)

    runs = [analyze_run(run, arguments.analysis, progress=progress) for run in loaded]
    numbers = arguments.page.with_suffix(".numbers.json")  # never overwrites config.json
    write_json(numbers, {"command": command(), "runs": runs})
    write_text(arguments.page, report(runs, command=command()))
    say(f"{arguments.page}\n{numbers}")


if __name__ == "__main__":
    run_command(Arguments, main)
