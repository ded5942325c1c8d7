"""Compares scores and settings: trains every combination, and makes one table; see --help."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import hashlib
import io
import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

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
from attention_jax.reports.setting_figure import Panel, results_by_setting
from attention_jax.runs.interruption import Interruption
from attention_jax.runs.metrics_file import finite_or_null
from attention_jax.runs.progress import say, warn
from attention_jax.runs.run_folder import make_folder, write_json, write_text, writing
from attention_jax.scores import DEFAULT_SCORE
from attention_jax.tasks import task_of
from attention_jax.training import run as training
from attention_jax.training.run_results import (
    FinishedRun,
    check_lengths,
    finished_run,
    summary_of,
    summary_text,
)
from attention_jax.training.settings import fields_of, leaves_of
from attention_jax.training.task import Result


class Combination(NamedTuple):
    """One score with one value of every setting."""

    label: str  # "additive, dim 32"
    arguments: Any  # `train.Arguments`; its workdir is the folder of this run


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

    At the end come a table of all finished runs in `workdir`, with a row per combination (mean ±
    standard deviation over seeds and the worst seed), a figure, and the files table.csv and
    table.json in `workdir`.

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
            finished, and the last part to end makes that of all.
        table: train nothing; make the table of these run folders, made by any command. All must be
            of one task. What varies among them becomes the columns.
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
    figure: Path | None = None
    combinations: Annotated[tuple[Combination, ...], tyro.conf.Suppress] = ()

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
                    f"table must go with workdir, lengths and figure alone; got {given}"
                )
            return self
        if self.workdir is None:
            raise ValueError("workdir must name the folder of the sweep; got none")
        check_lengths(task_of(self.task), self.lengths)
        made = _combinations(self, self.workdir, words)
        return dataclasses.replace(self, combinations=tuple(made))


def arguments_of(words: list[str]) -> Arguments:
    """Reads the words of a command line, those of scripts/train.py's options among them."""
    arguments, others = parse(Arguments, words, return_unknown_args=True)
    return arguments.with_other_options(others)


def _combinations(sweep: Arguments, workdir: Path, common: list[str]) -> list[Combination]:
    """The product of the scores and of all values of all settings, the last setting fastest."""
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
    combinations = []
    for score, *values in itertools.product(sweep.scores, *(values for _, values in settings)):
        words = ["--task", sweep.task, "--workdir", str(workdir), "--score", score, *common]
        for name, value in zip(names, values, strict=True):
            words += _option_words(name, value)
        try:
            combinations.append(_combination(words, names, workdir))
        except ValueError as error:
            if not is_users_mistake(error):
                raise
            raise ValueError(f"combination {', '.join([score, *values])}: {error}") from error
    folders = [combination.arguments.workdir for combination in combinations]
    if not 0 < len({*folders}) == len(folders):
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


def _combination(words: list[str], names: list[str], workdir: Path) -> Combination:
    arguments = train.arguments_of(words)
    settings = options_of(arguments.task)
    if unknown := set(names) - settings.keys():
        raise ValueError(f"set must name settings of the task; got {', '.join(unknown)}")
    # In the order of the task's settings, so that the command line's order changes no folder.
    values = {name: settings[name] for name in settings if name in names}
    label = ", ".join([settings["score"], *(f"{name} {value}" for name, value in values.items())])
    folder = workdir / folder_name(settings["score"], values)
    return Combination(label, dataclasses.replace(arguments, workdir=folder, resume=True))


def options_of(task: Any) -> dict[str, Any]:
    """The value of each setting of a task, by the name of its option of scripts/train.py."""
    return {
        name.rpartition(".")[2]: str(value) if isinstance(value, Path) else value
        for name, value in leaves_of(task).items()
    }


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
        check_sweep(workdir, arguments.combinations)
        status = train_combinations(arguments.combinations, arguments.part)
        if status:
            say("stopped by a signal; the same command goes on from here", error=True)
            return status
        trained = [combination.arguments.workdir for combination in arguments.combinations]
        others = (path for path in workdir.iterdir() if path.is_dir() and path not in trained)
        there = [path for path in trained if path.exists()]
        folders = [*there, *sorted(others)]
    figure = arguments.figure or workdir / "sweep.png"
    unfinished = make_table(folders, workdir, arguments.lengths, figure)
    if arguments.part:
        missing = len(trained) - len({*there} - {*unfinished})
        say(f"part {arguments.part}: {missing} of {len(trained)} combinations are missing")
    return 0


def check_sweep(workdir: Path, combinations: Sequence[Combination]) -> None:
    """Raises the first error of any combination; only makes the folder."""
    if (workdir / "config.json").exists():
        raise ValueError(
            f"workdir must be a folder of run folders; {workdir} is the folder of one run"
        )
    for _, arguments in combinations:
        training.check_run(arguments.task, arguments.workdir, **arguments.options)
    make_folder("workdir", workdir)


def train_combinations(combinations: Sequence[Combination], part: str | None) -> int:
    """Trains the unfinished combinations of a part; returns 0, or the exit status of a signal."""
    with Interruption() as interruption:  # between two runs too
        for index, (label, arguments) in share_of([*enumerate(combinations, 1)], part):
            task, folder = arguments.task, arguments.workdir
            title = f"combination {index} of {len(combinations)}: {label}"
            with contextlib.suppress(ValueError):  # `train_run` reports it
                finished = training.load_run(folder)
                same = fields_of(finished.task) == fields_of(task)
                if same and finished.step == task.train.steps:
                    say(f"{title}: finished")
                    continue
            if interruption.requested is not None:
                return interruption.exit_status
            say(title)
            run = training.train_run(task, folder, interruption=interruption, **arguments.options)
            if run.step < task.train.steps:
                return run.interrupted
    return 0


# --- the table ---


class Row(NamedTuple):
    """A run, and the settings that tell it from the other runs of the table."""

    run: FinishedRun
    settings: dict[str, Any]  # the score first


def make_table(
    folders: Sequence[Path], workdir: Path, lengths: Sequence[int], figure: Path
) -> list[Path]:
    """Prints the table of the finished runs in folders, and writes its files to `workdir`.

    Returns:
        the folders that are left out.

    Raises:
        ValueError: there is no finished run, the runs are of several tasks, or a file cannot be
            written.
    """
    runs: list[FinishedRun] = []
    left_out = []
    for folder in folders:
        try:
            runs.append(finished_run(folder, lengths))
        except ValueError as error:
            if not is_users_mistake(error):
                raise
            warn(f"left out of the table: {error}")
            left_out.append(folder)
    if not runs:
        raise ValueError("table must be of one or more finished runs; got none")
    if other := [run for run in runs if type(run.task) is not type(runs[0].task)]:
        raise ValueError(
            f"table must be of runs of one task; got {runs[0].task.name} ({runs[0].workdir})"
            f" and {other[0].task.name} ({other[0].workdir})"
        )
    rows = rows_of(runs)
    records = [_record(row, metric) for row in rows for metric in row.run.results]
    environments = {str(run.workdir): run.environment for run in runs}
    metrics = list(dict.fromkeys(name for row in rows for name in row.run.results))
    lines = [
        [
            *map(str, settings.values()),
            *(_cell(run.results[name]) if name in run.results else "-" for name in metrics),
            f"{run.seconds:.0f}",
        ]
        for run, settings in rows
    ]
    head = (*rows[0].settings, *metrics, "seconds")
    print_table("mean ± standard deviation over seeds (worst seed)", head, lines)
    make_folder("workdir", workdir)
    with writing("workdir", workdir):
        write_text(workdir / "table.csv", _csv(rows))
        write_json(workdir / "table.json", {"results": records, "environments": environments})
    with writing("figure", figure):
        plotting.save(_figure(rows), figure)
    for path in (workdir / "table.csv", workdir / "table.json", figure):
        say(str(path))
    return left_out


def rows_of(runs: Sequence[FinishedRun]) -> list[Row]:
    """The runs with their score and all settings that vary among them.

    Runs that do not differ in any setting are told apart by their folders, as the setting "run".
    """
    settings = [options_of(run.task) for run in runs]
    varying = [name for name in settings[0] if any(s[name] != settings[0][name] for s in settings)]
    names = dict.fromkeys([*(["score"] if "score" in settings[0] else []), *varying])
    rows = [Row(run, {n: s[n] for n in names}) for run, s in zip(runs, settings, strict=True)]
    if len({tuple(row.settings.values()) for row in rows}) < len(rows):
        rows = [Row(run, {**of_run, "run": str(run.workdir)}) for run, of_run in rows]
    return rows


def _cell(result: Result) -> str:
    return summary_text(result, ".2f" if result.high == 100 else "#.3g")


def _record(row: Row, metric: str) -> dict[str, Any]:
    """One result of a run; numbers that are not finite are null."""
    run, result = row.run, row.run.results[metric]
    numbers = {**summary_of(result)._asdict(), "step": run.step, "seconds": run.seconds}
    return {
        "run": str(run.workdir),
        "settings": row.settings,
        "metric": metric,
        "by_seed": [*map(finite_or_null, result.by_seed)],
        **{name: finite_or_null(number) for name, number in numbers.items()},
    }


def _csv(rows: Sequence[Row]) -> str:
    """A line per run; a cell is empty if the run lacks the result, or if it is not finite."""
    lines = []
    for run, settings in rows:
        numbers: dict[str, float] = {}
        for metric, result in run.results.items():
            summary = summary_of(result)._asdict()
            numbers |= {f"{metric} {part}": number for part, number in summary.items()}
        numbers |= {"seeds": run.task.train.seeds, "steps": run.step, "seconds": run.seconds}
        finite = {name: finite_or_null(number) for name, number in numbers.items()}
        lines.append({"run": str(run.workdir), **settings, **finite})
    file = io.StringIO()
    names = list(dict.fromkeys(name for line in lines for name in line))
    writer = csv.DictWriter(file, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return file.getvalue()


def _figure(rows: Sequence[Row]) -> Any:
    panels: dict[str, Panel] = {}
    for run, settings in rows:
        others = "\n".join(f"{name} {settings[name]}" for name in settings if name != "score")
        for metric, result in run.results.items():
            panel = panels.setdefault(metric, Panel(metric, {}, result.low, result.high))
            score = str(settings.get("score", run.task.name))
            by_seed = {**panel.by_seed, (score, others): result.by_seed}
            panels[metric] = panel._replace(by_seed=by_seed)
    return results_by_setting(list(panels.values()))


if __name__ == "__main__":
    run_command(arguments_of, main)
