"""Compares scores and settings: trains every combination, and makes one table; see --help."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import tyro
from command_line import ScoreNames, TaskName, is_users_mistake, run_command
from sweep_combinations import Combination, combinations_of
from sweep_table import rows_of, write_table

from attention_jax.runs.interruption import Interruption
from attention_jax.runs.progress import warn
from attention_jax.runs.run_folder import check_folder, make_folder
from attention_jax.scores import DEFAULT_SCORE
from attention_jax.tasks import task_of
from attention_jax.training import run as training
from attention_jax.training.run_results import FinishedRun, check_lengths, finished_run
from attention_jax.training.settings import name_of
from attention_jax.training.task import Task


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Train every combination of scores and settings, and compare them in one table.

    Every other option of scripts/train.py may be given too, once for all combinations: --seeds 3
    --steps 300. All combinations are checked before the first one trains.

    Each combination is a run of scripts/train.py, in a folder of its own in `workdir`. Ctrl-C or
    SIGTERM stops after the steps in progress and exits with 130 or 143; the same command goes on
    and ends bit-identical. Other scores or settings add combinations to `workdir`. With more
    --steps, finished runs go on where the learning rate does not depend on the number of steps;
    elsewhere they are another configuration, which is refused.

    At the end come a table of all finished runs in `workdir`, with a row per combination (mean ±
    standard deviation over seeds and the worst seed), and the files table.csv, table.json and
    sweep.png in `workdir`.

    Attributes:
        scores: the scores to compare.
        settings: settings to compare, by the names of scripts/train.py's options: dim=32,64
            learning_rate=1e-3,3e-3 trains four combinations with every score. "model.dim" is the
            same as "dim".
        workdir: the folder of the runs and the table; made if missing. With --table, by default the
            folder of the first run.
        task: what to learn, a name or "module:Name".
        lengths: also test at these lengths, for a task whose examples have lengths.
        table: train nothing; make the table of these run folders, made by any command. All must be
            of one task. What varies among them becomes the columns.
    """

    scores: ScoreNames = (DEFAULT_SCORE,)
    settings: Annotated[
        tuple[str, ...], tyro.conf.arg(name="set", metavar="NAME=VALUE,VALUE ...")
    ] = ()
    workdir: Path | None = None
    task: TaskName = "reversal"
    lengths: tuple[int, ...] = ()
    table: tuple[Path, ...] = ()
    combinations: Annotated[tuple[Combination, ...], tyro.conf.Suppress] = ()

    def with_other_options(self, words: list[str]) -> Self:
        """These arguments with their combinations; `words` are options of scripts/train.py.

        Raises:
            ValueError: a combination is not possible, or options do not go together.
        """
        if self.table:
            if words or self.settings:
                given = " ".join(["--set"] * bool(self.settings) + words)
                raise ValueError(f"table must go with workdir and lengths alone; got {given}")
            return self
        if self.workdir is None:
            raise ValueError("workdir must name the folder of the sweep; got none")
        check_lengths(task_of(self.task), self.lengths)
        made = combinations_of(self.task, self.scores, self.settings, self.workdir, words)
        return dataclasses.replace(self, combinations=tuple(made))


def main(arguments: Arguments) -> int:
    if arguments.table:
        files = [path for path in arguments.table if path.is_file()]
        if files:
            warn(f"left out of --table: {', '.join(map(str, files))}: no folder of a run")
        folders = [path for path in arguments.table if path not in files]
        into = arguments.workdir or arguments.table[0].parent
        make_table(folders, into, arguments.lengths, name="--table")
        return 0
    workdir = arguments.workdir
    assert workdir is not None  # `with_other_options` has checked it
    check_sweep(workdir, arguments.combinations)
    status = train_combinations(arguments.combinations, arguments.lengths)
    if status:
        print("stopped by a signal; the same command goes on from here", file=sys.stderr)
        return status
    folders = [combination.arguments.workdir for combination in arguments.combinations]
    others = sorted(path for path in workdir.iterdir() if path.is_dir() and path not in folders)
    make_table([*folders, *others], workdir, arguments.lengths, name="the table")
    return 0


def check_sweep(workdir: Path, combinations: Sequence[Combination]) -> None:
    """Raises the first error of any combination; changes nothing but to make the folder."""
    check_folder("workdir", workdir)
    if (workdir / "config.json").exists():
        raise ValueError(
            f"workdir must be a folder of run folders; {workdir} is the folder of one run"
        )
    for label, arguments in combinations:
        try:
            training.check_run(
                arguments.settings,
                arguments.workdir,
                resume=True,
                **_options(arguments),
            )
        except Exception as error:
            error.add_note(f"in the combination {label}")  # shown with a traceback
            raise
    make_folder("workdir", workdir)


def train_combinations(combinations: Sequence[Combination], lengths: Sequence[int]) -> int:
    """Trains what is not finished; returns the exit status, 0 if all combinations are finished."""
    finished: list[FinishedRun] = []
    with Interruption() as interruption:  # between two runs too
        for index, (label, arguments) in enumerate(combinations):
            title = f"combination {index + 1} of {len(combinations)}: {label}"
            with contextlib.suppress(ValueError):  # `train_run` reports it
                run = finished_run(arguments.workdir, lengths)
                if run.task == arguments.settings:  # or else this command asks for more steps
                    finished.append(run)
                    print(f"{title}: finished", flush=True)
                    continue
            if interruption.requested is not None:
                return interruption.exit_status
            print(title + _time_left(finished, combinations[index:]), flush=True)
            trained = training.train_run(
                arguments.settings,
                arguments.workdir,
                resume=True,
                interruption=interruption,
                **_options(arguments),
            )
            if trained.step < trained.task.train.steps and not trained.exhausted:
                return trained.interrupted
            finished.append(finished_run(arguments.workdir, lengths))
    return 0


def _options(arguments: Any) -> dict[str, Any]:
    """What `train_run` takes besides the settings."""
    return {name: getattr(arguments, name) for name in ("log_gradients", "mesh")}


def _time_left(finished: Sequence[FinishedRun], left: Sequence[Combination]) -> str:
    """Estimates the time of the combinations that are left by the mean of those that are finished,
    per step and seed.
    """
    done = sum(_work(run.task) for run in finished)
    if not done:
        return ""
    rate = sum(run.seconds for run in finished) / done
    seconds = rate * sum(_work(combination.arguments.settings) for combination in left)
    if not seconds >= 0:  # NaN: a run was killed before it wrote its time
        return ""
    return (
        f"; about {seconds:.0f} s left" if seconds < 100 else f"; about {seconds / 60:.0f} min left"
    )


def _work(task: Task) -> int:
    return task.train.steps * task.train.seeds


def make_table(
    folders: Sequence[Path], workdir: Path, lengths: Sequence[int], *, name: str
) -> None:
    """Makes the table of the finished runs in folders, and says why it leaves out the others.

    Args:
        folders: of runs, or others.
        workdir: the folder to write to.
        lengths: also the results at these lengths of strings.
        name: what warnings call the table.

    Raises:
        ValueError: there is no finished run, or the runs are of several tasks.
    """
    runs: list[FinishedRun] = []
    tasks: dict[str, Path] = {}
    for folder in folders:
        try:
            run = finished_run(folder)
        except ValueError as error:
            if not is_users_mistake(error):
                raise
            reason = str(error).removeprefix("workdir must be the folder of a training run; ")
            warn(f"left out of {name}: {reason.removeprefix('workdir ')}")
            continue
        runs.append(finished_run(folder, lengths) if lengths else run)
        tasks.setdefault(name_of(type(run.task)), folder)
    if len(tasks) > 1:
        named = " and ".join(f"{name} ({folder})" for name, folder in tasks.items())
        raise ValueError(f"table must be of runs of one task; got {named}")
    if not runs:
        raise ValueError("table must be of one or more finished runs; got none")
    write_table(rows_of(runs), workdir)


if __name__ == "__main__":
    run_command(Arguments, main)
