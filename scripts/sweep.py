"""Compares scores and settings: trains every combination, and makes one table; see --help."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import train
import tyro

from attention_jax.commands.command_line import (
    ScoreNames,
    TaskName,
    is_users_mistake,
    parse,
    print_table,
    run_command,
    share_of,
)
from attention_jax.reports import plotting
from attention_jax.reports.results_table import ResultsTable, check_choose_on, options_of
from attention_jax.runs.interruption import Interruption
from attention_jax.runs.progress import say, warn
from attention_jax.runs.run_folder import make_folder
from attention_jax.scores import DEFAULT_SCORE
from attention_jax.tasks import task_of
from attention_jax.training import run as training
from attention_jax.training.prepare import Prepared
from attention_jax.training.run_results import SUMMARY, check_lengths, evaluated_run
from attention_jax.training.settings import fields_of


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Train every combination of scores and settings, and compare them in one table.

    Every other option of scripts/train.py may be given too, once for all combinations: --seeds 3
    --steps 300. All combinations are checked before the first one trains.

    Each combination is a run of scripts/train.py, in a folder of its own in `workdir`. Ctrl-C or
    SIGTERM stops after the steps in progress and exits with 130 or 143, a closed terminal with 129;
    the same command goes on, and on a CPU ends bit-identical. Other scores or settings add
    combinations to `workdir`. With more --steps, finished runs go on where the learning rate does
    not depend on the number of steps; elsewhere they are another configuration, which is refused.

    At the end come a table of all runs in `workdir`, with a row per combination (the mean over
    seeds, its 95 % interval and the worst seed), a figure, and the table as table.md, table.tex,
    table.csv and table.json in `workdir`. A run that is not finished is a row with its step.

    Attributes:
        scores: the scores to compare.
        settings: settings to compare, by the names of scripts/train.py's options: dim=32,64
            learning_rate=1e-3,3e-3 trains four combinations with every score. "model.dim" is the
            same as "dim".
        workdir: the folder of the runs and the table; made if missing. With --table, by default the
            folder of the first run.
        task: what to learn, a name or "module:Name".
        lengths: also test at these lengths, for a task whose examples have lengths.
        part: train a part of the combinations: 3/8 trains the 3rd, the 11th and so on. Eight
            processes or machines with the parts 1/8 to 8/8 share `workdir`. The table is of what is
            trained, and the last part to end makes that of all.
        table: train nothing; make the table of these run folders, made by any command. All must be
            of one task. What varies among them becomes the columns.
        choose_on: how many seeds, the first ones, choose the best setting of each score, by the
            task's first result. The row of this setting is marked, and the numbers of the table are
            those of the other seeds. With 0 nothing is chosen.
        figure: a .png, .pdf or .svg file; None for `workdir`/sweep.png.
    """

    scores: ScoreNames = (DEFAULT_SCORE,)
    settings: Annotated[
        tuple[str, ...], tyro.conf.arg(name="set", metavar="NAME=VALUE,VALUE ...")
    ] = ()
    workdir: Path | None = None
    task: TaskName = "reversal"
    lengths: tuple[int, ...] = ()
    part: Annotated[str | None, tyro.conf.arg(metavar="I/N")] = None
    table: tuple[Path, ...] = ()
    choose_on: int = 0
    figure: Path | None = None
    # Of each combination, by a label such as "additive, dim 32", the arguments of scripts/train.py.
    combinations: Annotated[Any, tyro.conf.Suppress] = None

    def with_other_options(self, words: list[str]) -> Self:
        """These arguments with their combinations; `words` are options of scripts/train.py.

        Raises:
            ValueError: a combination is not possible, or options do not go together.
        """
        share_of((), self.part)
        if self.figure is not None:
            plotting.check_figure(self.figure)
        if self.table:
            if words or self.settings or self.part:
                options = {"--set": self.settings, "--part": self.part}
                given = " ".join([*(name for name in options if options[name]), *words])
                raise ValueError(
                    f"table must go with workdir, lengths, choose_on and figure alone; got {given}"
                )
            return self
        if self.workdir is None:
            raise ValueError("workdir must name the folder of the sweep; got none")
        check_lengths(task_of(self.task), self.lengths)
        combinations = _combinations(self, self.workdir, words)
        for arguments in combinations.values():
            check_choose_on(self.choose_on, arguments.task.train.seeds)
        return dataclasses.replace(self, combinations=combinations)


def arguments_of(words: list[str]) -> Arguments:
    """Reads the words of a command line, those of scripts/train.py's options among them."""
    arguments, others = parse(Arguments, words, return_unknown_args=True)
    return arguments.with_other_options(others)


def _combinations(sweep: Arguments, workdir: Path, common: list[str]) -> dict[str, Any]:
    """`train.Arguments` by label: all scores with all values of the settings, the last fastest."""
    settings = [_parsed_setting(text) for text in sweep.settings]
    names = [name for name, _ in settings]
    given = [word[2:].split("=")[0].replace("-", "_") for word in common if word[:2] == "--"]
    given = [*names, *(name.removeprefix("no_") for name in given)]
    for name in given:
        if name == "score":
            raise ValueError("score must be left out: a sweep has --scores")
        if name in ("distributed", "processes", "process"):
            raise ValueError(f"{name} must be left out: a sweep has --part for several machines")
        if name in names and given.count(name) > 1:
            raise ValueError(f"{name} must be given once, to --set or as an option")
    combinations: dict[str, Any] = {}
    product = [*itertools.product(sweep.scores, *(values for _, values in settings))]
    for score, *values in product:
        words = ["--task", sweep.task, "--workdir", str(workdir), "--score", score, *common]
        for name, value in zip(names, values, strict=True):
            words += _option_words(name, value)
        try:
            combinations |= _combination(words, names, workdir)
        except ValueError as error:
            if not is_users_mistake(error):
                raise
            raise ValueError(f"combination {', '.join([score, *values])}: {error}") from error
    folders = {arguments.workdir for arguments in combinations.values()}
    if not 0 < len(folders) == len(product):
        raise ValueError("scores and set must be one or more different combinations")
    return combinations


def _parsed_setting(text: str) -> tuple[str, list[str]]:
    """The name and the values of NAME=VALUE,VALUE, split at the commas outside of parentheses."""
    path, _, values = text.partition("=")
    pieces, depth = [""], 0
    for letter in values:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += letter
    if depth or not path or not all(piece.strip() for piece in pieces):
        raise ValueError(f"set must be NAME=VALUE,VALUE; got {text!r}")
    return path.split(".")[-1].replace("-", "_"), pieces


def _option_words(name: str, value: str) -> list[str]:
    """["--dim", "32"]; ["--no-mask-padding"] for a setting that is True or False."""
    option = name.replace("_", "-")
    if value.lower() in ("true", "false"):
        return [f"--{option}" if value.lower() == "true" else f"--no-{option}"]
    try:
        return [f"--{option}", *shlex.split(value)]
    except ValueError as error:
        raise ValueError(f"set {name}: {value!r} has no closing quotation mark") from error


def _combination(words: list[str], names: list[str], workdir: Path) -> dict[str, Any]:
    arguments = train.arguments_of(words)
    settings = options_of(arguments.task)
    if unknown := set(names) - settings.keys():
        raise ValueError(f"set must name settings of the task; got {', '.join(unknown)}")
    # In the order of the task's settings, so that the command line's order changes no folder.
    values = {name: settings[name] for name in settings if name in names}
    label = ", ".join([settings["score"], *(f"{name} {value}" for name, value in values.items())])
    folder = workdir / folder_name(settings["score"], values)
    return {label: dataclasses.replace(arguments, workdir=folder, resume=True)}


def folder_name(score: str, values: Mapping[str, Any]) -> str:
    """A file name for a combination, different for different combinations.

    >>> folder_name("additive", {"dim": 32, "learning_rate": 1e-3})
    'additive,dim=32,learning_rate=0.001'
    """
    text = ",".join([score, *(f"{name}={value}" for name, value in values.items())])
    safe = re.sub(r"[^\w.,=+-]+", "-", text, flags=re.ASCII)
    if safe == text and len(text) <= 100 and not text.startswith((".", "-")):
        return text
    # The digest keeps apart what would be the same without the replaced or cut letters.
    readable = safe.strip(".-")[:90] or "score"
    return f"{readable}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


# --- training ---


def main(arguments: Arguments) -> int:
    folders = list(arguments.table)
    workdir = arguments.workdir or folders[0].parent
    if not folders:
        prepared = prepare_sweep(workdir, arguments.combinations)
        status = train_combinations(prepared, arguments.part)
        if status:
            say("stopped by a signal; the same command goes on from here", error=True)
            return status
        trained = [run.workdir for run in prepared.values()]
        others = (path for path in workdir.iterdir() if path.is_dir() and path not in trained)
        folders = [*(path for path in trained if path.exists()), *sorted(others)]
    finished = make_table(folders, workdir, arguments)
    if arguments.part:
        missing = len({*trained} - {*finished})
        say(f"part {arguments.part}: {missing} of {len(trained)} combinations are missing")
    return 0


def prepare_sweep(workdir: Path, combinations: Mapping[str, Any]) -> dict[str, Prepared]:
    """Prepares all runs; raises the first error of any combination; only makes the folder."""
    if (workdir / "config.json").exists():
        raise ValueError(
            f"workdir must be a folder of run folders; {workdir} is the folder of one run"
        )
    prepared = {
        label: training.prepare(arguments.task, arguments.workdir, **arguments.options)
        for label, arguments in combinations.items()
    }
    make_folder("workdir", workdir)
    return prepared


def train_combinations(prepared: Mapping[str, Prepared], part: str | None) -> int:
    """Trains the unfinished combinations of a part; returns 0, or the exit status of a signal."""
    runs = share_of([*enumerate(prepared.items(), 1)], part)
    with Interruption() as interruption:  # between two runs too
        for place, (index, (label, prepared_run)) in enumerate(runs, 1):
            steps = prepared_run.task.train.steps
            title = f"combination {index} of {len(prepared)}: {label}"
            with contextlib.suppress(ValueError):  # `run` reports it
                finished = training.load_run(prepared_run.workdir)
                same = fields_of(finished.task) == fields_of(prepared_run.task)
                if same and finished.step == steps:
                    say(f"{title}: finished")
                    continue
            if interruption.exit_status:
                return interruption.exit_status
            say(title)
            for _, (_, following) in runs[place : place + 1]:
                following.begin_compiling()  # while this one trains
            run = training.run(prepared_run, interruption=interruption)
            if run.step < steps:
                return run.interrupted
    return 0


# --- the table ---


def make_table(folders: Sequence[Path], workdir: Path, arguments: Arguments) -> list[Path]:
    """Prints the table of the runs in folders, and writes its files to `workdir`.

    Returns:
        the folders of the finished runs.

    Raises:
        ValueError: `ResultsTable.of` refuses the runs, or a file cannot be written.
    """
    runs = []
    for folder in folders:
        try:
            runs.append(evaluated_run(folder, arguments.lengths))
        except ValueError as error:
            if not is_users_mistake(error):
                raise
            warn(f"left out of the table: {error}")
    table = ResultsTable.of(runs, choose_on=arguments.choose_on)
    lines = [
        [line[0] + " *" * row.chosen, *line[1:]]
        for row, line in zip(table.rows, table.lines, strict=True)
    ]
    print_table(SUMMARY, table.head, lines)
    say(table.caption)
    figure = arguments.figure or workdir / "sweep.png"
    for path in (*table.save(workdir), plotting.save(table.figure(), figure)):
        say(str(path))
    return [run.workdir for run in runs if run.is_finished]


if __name__ == "__main__":
    run_command(arguments_of, main)
