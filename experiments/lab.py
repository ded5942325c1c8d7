"""The frame of every experiment: run it, keep its rows, and hold them against claims.

An experiment is one file: a docstring (the question; `Answer:`, `Source:`, `Command:`; derivations)
and

    Config                     a frozen dataclass: every setting, with its default
    QUICK                      a Config that takes seconds
    CAPTIONS                   {file stem of a figure: what it shows}; the index shows the first
    run(config) -> rows        measures: a list with a dict per measured point, which is JSON
    table(rows) -> Markdown    what a reader needs to see of the rows
    plot(rows) -> figures      {file stem: figure}
    claims(rows) -> claims     findings about default rows, with bounds written before the run
    missing(config) -> reason  optional: the data or package the user has yet to bring, or ""

and ends with `if __name__ == "__main__": main(__name__)`. `table`, `plot` and `claims` read rows
alone, so that they can be changed without a new run: `scripts/reproduce.py NAME` draws the figures
again. `table` and `plot` work with any scores and settings.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NamedTuple

import numpy as np
import tyro

from attention_jax.commands.command_line import ScoreNames as ScoreNames
from attention_jax.commands.command_line import check_names as check_names
from attention_jax.commands.command_line import command, run_command, share_of
from attention_jax.parts import identity, known_score
from attention_jax.reports import plotting
from attention_jax.reports.table_text import markdown as markdown
from attention_jax.runs.environment import environment
from attention_jax.runs.progress import say as say
from attention_jax.runs.run_folder import make_folder, write_json
from attention_jax.scores import get_score
from attention_jax.scores.registry import FOUR_SCORES as FOUR_SCORES
from attention_jax.training.metrics import mean_and_deviation
from benchmarks.measure import interleaved as interleaved

FOLDER = Path(__file__).parent
Row = dict[str, Any]
SCHEMA = 3  # of result files
NO_FINDINGS = "untrained, small settings: they show that all runs; their numbers are no findings"
OTHER_SETTINGS = "other settings than those of the page: no claim is held against these numbers"
# Folders of the experiments, in the order of the index.
SUBJECTS: dict[str, tuple[str, ...]] = {
    "scores": (
        "worked_example",
        "qkv_walkthrough",
        "score_variance",
        "entropy_vs_dimension",
        "softmax_saturation",
        "geometry",
        "attention_masks",
    ),
    "bench": ("maps", "relations", "language", "cost"),
    "reversal": (
        "gru_padding",
        "scale_and_dimension",
        "local_attention",
        "coverage",
        "length",
    ),
    "costs": ("complexity_ledger", "recurrence"),
    "gradients": ("gradient_analysis",),
    "translation": ("translation_comparison",),
}
SUBJECT_OF = {name: subject for subject, names in SUBJECTS.items() for name in names}


class Claim(NamedTuple):
    """A finding: a number, and the bounds within which the finding holds."""

    text: str
    measured: float
    low: float = -math.inf
    high: float = math.inf
    source: str = ""  # the source's number or words
    denies: bool = False  # the finding is the opposite of what the source says

    @property
    def verdict(self) -> str:
        """How the finding stands to its source; MISS if the number is out of bounds or NaN."""
        if not self.low <= self.measured <= self.high:
            return "MISS"
        return ("contradicted" if self.denies else "reproduced") if self.source else "ours"

    @property
    def bounds(self) -> str:
        """The bounds in words."""
        if math.isinf(self.high):
            return f"at least {self.low:.5g}"
        low = "at most" if math.isinf(self.low) else f"{self.low:.5g} to"
        return f"{low} {self.high:.5g}"

    def cells(self) -> tuple[str, ...]:
        """The row of a table."""
        return self.text, self.source, f"{self.measured:.4g}", self.bounds, self.verdict


# --- rows ---


def where(rows: Iterable[Row], *names: str, **values: Any) -> list[Row]:
    """The rows that have these columns, and these values."""
    having = (row for row in rows if row.keys() >= {*names, *values})
    return [row for row in having if all(row[name] == value for name, value in values.items())]


def column(rows: Iterable[Row], name: str, **values: Any) -> list[Any]:
    """One column of the rows that have it, and these values."""
    return [row[name] for row in where(rows, name, **values)]


def significant(numbers: Any) -> Any:
    """Numbers, arrays, and dicts of them, as floats and lists with five significant digits."""
    if isinstance(numbers, dict):
        return {name: significant(each) for name, each in numbers.items()}
    array = np.asarray(numbers, np.float64)
    return [significant(part) for part in array] if array.ndim else float(f"{float(array):.5g}")


def gain(more: Any, less: Any) -> tuple[float, float]:
    """The mean of the differences by seed, and two standard errors of it.

    Seeds are paired: they learn from the same strings. With three seeds, a true difference of 0 is
    measured within two standard errors with probability 0.82 (Student's t).
    """
    mean, deviation = mean_and_deviation(np.subtract(more, less))
    return float(mean), 2 * float(deviation) / math.sqrt(len(more))


def plus_minus(mean: float, error: float) -> str:
    """Returns "mean ± error": the error with two significant digits, the mean with as many places.

    >>> plus_minus(0.20123, 0.0567), plus_minus(1234.5, 180.2), plus_minus(1, 0)
    ('0.201 ± 0.057', '1230 ± 180', '1 ± 0')
    """
    if not round(error, 12) > 0:  # NaN, of a single seed, stays out
        return f"{mean:.4g}" if math.isnan(error) else f"{mean:g} ± 0"
    places = 1 - math.floor(math.log10(float(f"{error:.1e}")))
    return " ± ".join(f"{round(x, places):.{max(0, places)}f}" for x in (mean, error))


def spread(by_seed: Sequence[float] | np.ndarray) -> str:
    """Returns "mean ± deviation" over seeds, or the number of a single seed."""
    return plus_minus(*map(float, mean_and_deviation(by_seed)))


def spread_and_worst(
    by_seed: Sequence[float] | np.ndarray, worst: Callable[..., float] = min
) -> str:
    """Returns "mean ± deviation (worst seed)"."""
    return f"{spread(by_seed)} ({float(f'{worst(by_seed):.3g}'):g})"


def check_least(config: Any, **least: float) -> None:
    """Raises ValueError for a setting, a number or a tuple of them, that is empty or too small."""
    for name, number in least.items():
        values = np.ravel(getattr(config, name))
        if not values.size:
            raise ValueError(f"{name} must be at least one; got none")
        if not np.all(values >= number):  # also NaN
            raise ValueError(f"{name} must be at least {number}; got {values.min()}")


# --- running ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """The command line of an experiment.

    Attributes:
        results: folder of the rows and figures. If left out, those of the default settings are
            written beside the experiment, and those of other settings to runs/NAME.
    """

    results: Path | None = None
    config: Annotated[Any, tyro.conf.OmitArgPrefixes]


def main(module: str) -> None:
    """Runs an experiment from the command line; the fields of its Config are the options."""
    experiment = sys.modules[module]
    run_command(
        options_of(experiment),
        lambda arguments: conduct(experiment, arguments.config, arguments.results),
        description=inspect.getdoc(experiment) or "",
    )


def options_of(experiment: ModuleType) -> Any:
    """The class of an experiment's command line."""
    fields = [("config", Annotated[experiment.Config, tyro.conf.OmitArgPrefixes])]
    return dataclasses.make_dataclass(
        "Options", fields, bases=(Arguments,), frozen=True, kw_only=True
    )


def load(name: str) -> ModuleType:
    """Imports an experiment."""
    return importlib.import_module(f"experiments.{SUBJECT_OF[name]}.{name}")


def name_of(experiment: ModuleType) -> str:
    """The name of an experiment's file, without folder and ending."""
    return Path(str(experiment.__file__)).stem


def conduct(experiment: ModuleType, config: Any, results: Path | None = None) -> int:
    """Runs an experiment, writes NAME.json and the figures, and prints the table and their paths.

    With the default settings, for which claims are made, it prints the claims too.

    Returns:
        1 if a claim is missed with the default settings; else 0.

    Raises:
        ValueError: data is missing; there are no scores, or one is not known; the folder cannot be
            written; or it holds the results of the default settings and these are others.
    """
    if hasattr(experiment, "missing") and (reason := experiment.missing(config)):
        raise ValueError(reason)
    scores = getattr(config, "scores", None)
    if scores == ():
        raise ValueError("scores must be one or more; got none")
    for score in scores or ():
        get_score(score)  # a wrong name is found before the first training
    beside, name = Path(str(experiment.__file__)).parent, name_of(experiment)
    default = _settings(config) == _settings(experiment.Config())
    folder = results or (beside if default else Path("runs") / name)
    if not default and folder.resolve() == beside.resolve():
        raise ValueError(f"results must not be {folder}, which holds those of the default settings")
    make_folder("results", folder)
    start = time.monotonic()
    rows = json.loads(json.dumps(experiment.run(config)))  # what reading the file will give
    content = {
        "schema": SCHEMA,
        "experiment": name,
        "command": command(),
        "config": json.loads(json.dumps(dataclasses.asdict(config), default=str)),
        "seconds": round(time.monotonic() - start),
        "environment": environment(FOLDER),
        "rows": rows,
    }
    write_json(folder / f"{name}.json", content)
    paths = draw(experiment, rows, folder)
    claims = claims_of(experiment, content)
    say("\n".join(" | ".join(claim.cells()) for claim in claims))
    if not default:
        say(NO_FINDINGS if _settings(config) == _settings(experiment.QUICK) else OTHER_SETTINGS)
    say(experiment.table(rows))
    say("\n".join(map(str, [folder / f"{name}.json", *paths])))
    return int(any(claim.verdict == "MISS" for claim in claims))


@plotting.own_settings
def draw(experiment: ModuleType, rows: list[Row], folder: Path) -> list[Path]:
    """Writes the figures of an experiment's rows; returns their paths."""
    figures = experiment.plot(rows).items()
    return [plotting.save(figure, folder / f"{stem}.png") for stem, figure in figures]


def claims_of(experiment: ModuleType, content: Row) -> list[Claim]:
    """The claims on a result file; none unless its settings are the default ones."""
    default = _settings(experiment.Config()).items()
    is_default = all(content["config"].get(name) == value for name, value in default)
    return [*experiment.claims(content["rows"])] if is_default else []


def _settings(config: Any) -> Row:
    """The settings that numbers depend on, all but folders, as they stand in a result file."""
    fields = dataclasses.asdict(config).items()
    numbers = {name: value for name, value in fields if not isinstance(value, Path)}
    return json.loads(json.dumps(numbers))


def program_of(score: str, dim: int) -> str:
    """What identifies a score of tokens [T, dim] besides its name: its fields, or its program."""
    return identity(known_score(get_score(score), None, dim, dim))


class Share(NamedTuple):
    """The cells that this process measures, as in `rows_of`, and those that it has come to."""

    part: str | None
    after: Callable[[str, float], None] | None
    cells: list[tuple[Any, bool]]  # the group of each cell, and whether its rows are there


_share = Share(None, None, [])


def rows_of(
    experiment: ModuleType,
    config: Any,
    part: str | None,
    after: Callable[[str, float], None] | None = None,
) -> tuple[list[Row], int]:
    """Runs an experiment; returns its rows, and how many of its cells are missing.

    Args:
        experiment: its cells are the calls of `kept_rows`, in their order.
        config: its settings.
        part: "3/8" measures the 3rd, the 11th group of cells and so on, and reads what is there of
            the others; None measures all.
        after: is called after each cell with its name, and the seconds that it was measured for.
    """
    global _share
    share_of((), part)  # checks the words
    everything, _share = _share, Share(part, after, [])
    try:
        rows, cells = experiment.run(config), _share.cells
    finally:
        _share = everything
    missing = sum(not is_there for _, is_there in cells)
    if part is not None:
        say(f"{name_of(experiment)}: {missing} of {len(cells)} cells are missing")
    return rows, missing


def kept_rows(
    path: Path, settings: Any, measure: Callable[[], list[Row]], group: Any = None
) -> list[Row]:
    """Returns the rows in a file of the work folder; measures and writes them if settings differ.

    It returns [] for a cell that is missing and belongs to another part; see `rows_of`. Cells of
    one group belong to the same part, because they share a program; by default a cell is alone.
    """
    settings = json.loads(json.dumps(settings, default=str))  # what reading the file will give
    part, after, cells = _share
    group = ("cell", len(cells)) if group is None else group
    groups = [*dict.fromkeys([*(each for each, _ in cells), group])]
    is_mine = group in share_of(groups, part)
    try:
        content = json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        raise ValueError(f"{path} is damaged; delete it to measure it again: {error}") from error
    is_there = content.get("settings") == settings
    cells.append((group, is_there or is_mine))
    start = time.monotonic()
    if not is_there and is_mine:
        content = {"settings": settings, "rows": measure()}
        write_json(path, content)
        is_there = True
    if after:
        after(path.stem, time.monotonic() - start)
    return [*content["rows"]] if is_there else []


def say_progress(done: int, total: int, start: float, text: str) -> None:
    """Says how many of the cells are done, and how long the others take at the pace since `start`.

    It says nothing where `rows_of` has an `after`, which says it.
    """
    if _share.after is None:
        minutes = (time.monotonic() - start) / 60
        left = minutes * (total - done) / done
        say(f"{done} of {total}: {text}; {minutes:.1f} min, about {left:.0f} left", error=True)


def exit_if_interrupted(status: int) -> None:
    """Exits with `status` if a signal has stopped a training; 0 means that none has."""
    if status:
        say("stopped by a signal; the same command goes on from here", error=True)
        sys.exit(status)


def labelled(experiment: ModuleType, label: str = "") -> str:
    """A docstring's text after "Answer:", "Source:" or "Command:"; without label, the question."""
    text = inspect.getdoc(experiment) or ""
    if not label:
        return text.partition("\n")[0]
    match = re.search(rf"^{label}:\s+(.*?)(?=^\S|\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
    return " ".join(match[1].split()) if match else ""


def content_of(name: str, folder: Path | None = None) -> Row | None:
    """The result file of an experiment, by default the committed one; None if there is none."""
    path = (folder or FOLDER / SUBJECT_OF[name]) / f"{name}.json"
    try:
        return json.loads(path.read_text()) if path.exists() else None
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}; {name} --force makes it anew") from error
