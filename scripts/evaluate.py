"""Evaluates a trained run of any task; see --help."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from command_line import print_table, run_command

from attention_jax.runs.checkpoints import StepName
from attention_jax.runs.metrics_file import finite_or_null
from attention_jax.runs.run_folder import check_output, write_json
from attention_jax.training.run import load_run
from attention_jax.training.run_results import results_of, summary_of


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Evaluate a checkpoint of a run: the results of its task, as mean and deviation over seeds.

    For a task from sequence to sequence they are measured on 1,000 fresh random examples of each
    length, the same for all runs; an exact match has every letter and the end right. To score
    translations of a text, see scripts/translate.py.

    Attributes:
        workdir: a run folder made by scripts/train.py, of any task.
        score: what the score of the run is called now, "module:Name", if its file or its class was
            renamed; it must give the same numbers. scripts/train.py --resume records the new name.
        step: the newest good checkpoint, the best (see --keep-best of scripts/train.py), a step
            that is kept, or 0 for the model before training.
        lengths: also test at these lengths, for a task whose examples have lengths.
        out: also write every seed's numbers to this JSON file.
    """

    workdir: Path
    score: str | None = None
    step: StepName = "newest"
    lengths: tuple[int, ...] = ()
    out: Path | None = None

    def __post_init__(self) -> None:
        check_output(self.out)


def main(arguments: Arguments) -> None:
    workdir = arguments.workdir
    run = load_run(workdir, arguments.step, score=arguments.score)
    results = results_of(run, arguments.lengths)
    lines = [
        (name, "{:.4g} ± {:.2g} ({:.4g})".format(*summary_of(result)))
        for name, result in results.items()
    ]
    print_table(
        run.describe(), ("result", "mean ± standard deviation over seeds (worst seed)"), lines
    )
    if arguments.out is not None:
        by_seed = {name: [*map(finite_or_null, result.by_seed)] for name, result in results.items()}
        content = {"workdir": str(workdir), "step": run.step, "results": by_seed}
        write_json(arguments.out, content)


if __name__ == "__main__":
    run_command(Arguments, main)
