"""Evaluates a trained run by string length; see --help."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import rich.console
import rich.table

from attention_jax.command_line import run_command
from attention_jax.tasks.reversal import load_run
from attention_jax.tasks.reversal_evaluation import Evaluation, check_beams, evaluate
from attention_jax.training.checkpoints import StepName
from attention_jax.training.metrics import mean_and_deviation
from attention_jax.training.run_folder import check_output, write_json


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Evaluate a checkpoint of a run on fresh random strings, length by length.

    "letters" is the share of letters that are right, "exact match" that of strings with every
    letter and the end in its place; "forced": each letter is predicted from the right ones before
    it (teacher forcing), "free": from the model's own.

    Attributes:
        workdir: a run folder made by scripts/train.py.
        step: the newest good checkpoint, the best (see --keep-best of scripts/train.py), or that
            of a step which is kept.
        lengths: which lengths.
        strings: test strings of each length.
        seed: of the test strings.
        beams: how many beginnings of an answer are kept while it is searched for; 1 is greedy.
        out: also write every seed's numbers to this JSON file.
    """

    workdir: Path
    step: StepName = "newest"
    lengths: tuple[int, ...] = (3, 4, 5, 6, 7, 8, 10)
    strings: int = 1000
    seed: int = 0
    beams: int = 1
    out: Path | None = None

    def __post_init__(self) -> None:
        check_output(self.out)
        check_beams(self.beams)
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be from 0 to 2**32 - 1; got {self.seed}")


_HEADINGS = {
    "teacher_forced_tokens": "letters, forced",
    "free_running_tokens": "letters, free",
    "free_running_exact": "exact match, free",
}


def main(arguments: Arguments) -> None:
    trained = load_run(arguments.workdir, arguments.step)
    results = evaluate(
        trained,
        lengths=arguments.lengths,
        strings=arguments.strings,
        seed=arguments.seed,
        beams=arguments.beams,
    )
    loop = trained.config.loop
    table = rich.table.Table(
        title=f"{trained.config.model.label}, step {trained.step}, {loop.seeds} seeds,"
        f" {arguments.strings} strings a length: mean ± sd (worst seed), %"
    )
    table.add_column("length", justify="right", no_wrap=True)
    for metric in Evaluation._fields:
        table.add_column(_HEADINGS[metric], justify="right", no_wrap=True)
    for length, evaluation in results.items():
        table.add_row(str(length), *(_percent(np.asarray(shares)) for shares in evaluation))
    rich.console.Console().print(table)
    if arguments.out is not None:
        numbers = {
            str(length): {name: np.asarray(v).tolist() for name, v in evaluation._asdict().items()}
            for length, evaluation in results.items()
        }
        write_json(arguments.out, {"workdir": str(arguments.workdir), "accuracy": numbers})


def _percent(shares: np.ndarray) -> str:
    mean, deviation = mean_and_deviation(100 * shares)
    return f"{mean:.2f} ± {deviation:.2f} ({100 * shares.min():.2f})"


if __name__ == "__main__":
    run_command(Arguments, main)
