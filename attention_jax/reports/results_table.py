"""The table of many runs of one task: their results over seeds, and the best setting of each score.

>>> runs = [evaluated_run(folder) for folder in folders]  # doctest: +SKIP
>>> print(ResultsTable.of(runs, choose_on=2).markdown())  # doctest: +SKIP
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from matplotlib.figure import Figure

from attention_jax.reports import table_text
from attention_jax.reports.setting_figure import results_by_setting
from attention_jax.runs.metrics_file import finite_or_null
from attention_jax.runs.run_folder import JSON, make_folder, write_json, write_text, writing
from attention_jax.training.run_results import SUMMARY, EvaluatedRun, summary_of, summary_text
from attention_jax.training.settings import leaves_of
from attention_jax.training.task import Result


class Row(NamedTuple):
    """A run in a table."""

    run: EvaluatedRun
    settings: dict[str, Any]  # those that tell it from the other runs; the score first
    results: dict[str, Result]  # of the reported seeds
    chosen: bool  # whether it is the best of its score


@dataclasses.dataclass(frozen=True)
class ResultsTable:
    """A row per run, with its results over seeds.

    Attributes:
        rows: the runs.
        choose_on: how many seeds, the first ones, choose the setting of each score; the numbers are
            then those of the other seeds. With 0 nothing is chosen.
    """

    rows: list[Row]
    choose_on: int = 0

    @classmethod
    def of(cls, runs: Sequence[EvaluatedRun], *, choose_on: int = 0) -> Self:
        """The table of some runs of one task; runs of the same settings are told by their folders.

        Among the finished runs of a score, the one with the best mean of the task's first result is
        chosen, over the first `choose_on` seeds. At a tie the smaller training loss decides, then
        the order of the runs. A run in which one of these seeds diverged is not chosen.

        Raises:
            ValueError: there is no run, the runs are of several tasks, or one has too few seeds.
        """
        if not runs:
            raise ValueError("table must be of one or more runs; got none")
        for run in runs:
            if type(run.task) is not type(runs[0].task):
                raise ValueError(
                    f"table must be of runs of one task; got {runs[0].task.name}"
                    f" ({runs[0].workdir}) and {run.task.name} ({run.workdir})"
                )
            check_choose_on(choose_on, run.task.train.seeds)
        rows = []
        for run, settings in zip(runs, _varying_settings(runs), strict=True):
            reported = {
                name: result._replace(by_seed=result.by_seed[choose_on:])
                for name, result in run.results.items()
            }
            rows.append(Row(run, settings, reported, chosen=False))
        best: dict[Any, tuple[Any, ...]] = {}  # (merit, index) by score
        for index, row in enumerate(rows if choose_on else ()):
            merit, score = _merit(row.run, choose_on), row.settings.get("score")
            if row.run.is_finished and np.isfinite(merit).all():
                best[score] = min((merit, index), best.get(score, (merit, index)))
        for _, index in best.values():
            rows[index] = rows[index]._replace(chosen=True)
        return cls(rows, choose_on)

    @property
    def caption(self) -> str:
        """What the numbers are: task, steps, seeds, interval, and how settings were chosen."""
        runs = [row.run for row in self.rows]
        steps = _count({run.task.train.steps for run in runs}, "step")
        seeds = {run.task.train.seeds - self.choose_on for run in runs}
        text = f"{runs[0].task.name}, {steps}, n = {_count(seeds, 'seed')}"
        if max(seeds) > 1:
            text += (
                f": {SUMMARY}."
                " Intervals of the mean are Student's t, cut off where no result can be"
            )
        if self.choose_on:
            name, result = next(iter(runs[0].results.items()))
            better = "largest" if result.larger_is_better else "smallest"
            finished = [row.settings for row in self.rows if row.run.is_finished]
            among = "; ".join(
                f"{setting} {', '.join(dict.fromkeys(str(each[setting]) for each in finished))}"
                for setting in self.rows[0].settings
                if setting != "score"
            )
            text += (
                ". One run of each score is marked: it was chosen among the finished runs"
                f"{f' ({among})' if among else ''} on {_count({self.choose_on}, 'other seed')}, by"
                f" the {better} mean {name}, at a tie by the smallest training loss."
                " A run of which such a seed diverged was not chosen"
            )
        if not self._all_finished:
            text += ". A run that is not finished shows the results of its step"
        return f"{text}."

    @property
    def head(self) -> list[str]:
        """The heading of each column."""
        step = [] if self._all_finished else ["step"]
        return [*self.rows[0].settings, *step, *self._metrics, "seconds"]

    @property
    def lines(self) -> list[list[str]]:
        """The cells of each row, in the order of `head`; "-" for a result that a run lacks."""
        return [
            [
                *map(str, settings.values()),
                *([] if self._all_finished else [f"{run.step} of {run.task.train.steps}"]),
                *(_cell(results[name]) if name in results else "-" for name in self._metrics),
                f"{run.seconds:.0f}" if np.isfinite(run.seconds) else "-",
            ]
            for run, settings, results, _ in self.rows
        ]

    def markdown(self) -> str:
        """The table with its caption in Markdown; chosen rows are bold."""
        text = table_text.markdown_text
        table = table_text.markdown([*map(text, self.head)], self._lines(text, "**{}**"))
        return f"{text(self.caption)}\n\n{table}\n"

    def latex(self) -> str:
        """The table with its caption in LaTeX, which needs no package; chosen rows are bold."""
        text, lines = table_text.latex_text, self._lines(table_text.latex_text, r"\textbf{{{}}}")
        return table_text.latex([*map(text, self.head)], lines, text(self.caption)) + "\n"

    def _lines(self, text: Callable[[str], str], bold: str) -> list[list[str]]:
        """The cells of each row in a language, those of chosen rows in bold."""
        return [
            [bold.format(text(cell)) if row.chosen else text(cell) for cell in line]
            for row, line in zip(self.rows, self.lines, strict=True)
        ]

    def csv(self) -> str:
        """A line per run; a cell is empty if the run lacks the result, or if it is not finite."""
        lines = []
        for row in self.rows:
            line: JSON = {"run": str(row.run.workdir), **row.settings}
            for metric, result in row.results.items():
                line |= {f"{metric} {part}": x for part, x in _numbers_of(result).items()}
            lines.append(line | self._about(row))
        names = list(dict.fromkeys(name for line in lines for name in line))
        return table_text.csv_table(names, ([line.get(name) for name in names] for line in lines))

    def json(self) -> JSON:
        """The caption, an object per run and result, and environments; null for what is not finite.

        "by_seed" are the numbers of all seeds, those that choose first.
        """
        records = [
            {
                "run": str(row.run.workdir),
                "settings": row.settings,
                "metric": metric,
                "by_seed": [*map(finite_or_null, row.run.results[metric].by_seed)],
                **_numbers_of(result),
                **self._about(row),
            }
            for row in self.rows
            for metric, result in row.results.items()
        ]
        environments = {str(row.run.workdir): row.run.environment for row in self.rows}
        return {"caption": self.caption, "results": records, "environments": environments}

    def save(self, folder: Path) -> list[Path]:
        """Writes table.csv, table.md, table.tex and table.json to a folder; returns their paths.

        Raises:
            ValueError: the folder cannot be made, or a file cannot be written.
        """
        make_folder("workdir", folder)
        texts = {"csv": self.csv(), "md": self.markdown(), "tex": self.latex()}
        with writing("workdir", folder):
            for suffix, text in texts.items():
                write_text(folder / f"table.{suffix}", text)
            write_json(folder / "table.json", self.json())
        return [folder / f"table.{suffix}" for suffix in (*texts, "json")]

    def figure(self) -> Figure:
        """Each result by setting, with a point per reported seed."""
        metrics: dict[str, dict[tuple[str, str], Result]] = {}
        for run, settings, results, _ in self.rows:
            others = "\n".join(f"{name} {settings[name]}" for name in settings if name != "score")
            score = str(settings.get("score", run.task.name))
            for metric, result in results.items():
                metrics.setdefault(metric, {})[score, others] = result
        return results_by_setting(metrics)

    @property
    def _metrics(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row.results))

    @property
    def _all_finished(self) -> bool:
        return all(row.run.is_finished for row in self.rows)

    def _about(self, row: Row) -> JSON:
        """Seeds, steps and seconds of a row, for files."""
        train, seconds = row.run.task.train, finite_or_null(row.run.seconds)
        chosen = {"choose_on": self.choose_on, "chosen": row.chosen} if self.choose_on else {}
        steps = {"seeds": train.seeds, "step": row.run.step, "steps": train.steps}
        return {**steps, **chosen, "seconds": seconds}


def check_choose_on(choose_on: int, seeds: int) -> None:
    """Raises ValueError unless so many seeds can choose and leave one or more to be reported."""
    if not 0 <= choose_on < seeds:
        raise ValueError(
            f"choose_on must be from 0 to {seeds - 1}, less than the {seeds} seeds of a run;"
            f" got {choose_on}"
        )


def options_of(task: Any) -> dict[str, Any]:
    """The value of each setting of a task, by the name of its option of scripts/train.py."""
    return {
        name.rpartition(".")[2]: str(value) if isinstance(value, Path) else value
        for name, value in leaves_of(task).items()
    }


def _varying_settings(runs: Sequence[EvaluatedRun]) -> list[dict[str, Any]]:
    """The score and all settings that vary among the runs, of each run.

    Runs that do not differ in any setting are told apart by their folders, as the setting "run".
    """
    settings = [options_of(run.task) for run in runs]
    varying = [name for name in settings[0] if any(s[name] != settings[0][name] for s in settings)]
    names = dict.fromkeys([*(["score"] if "score" in settings[0] else []), *varying])
    shown = [{name: of_run[name] for name in names} for of_run in settings]
    if len({tuple(of_run.values()) for of_run in shown}) < len(runs):
        folders = [{"run": str(run.workdir)} for run in runs]
        return [of_run | folder for of_run, folder in zip(shown, folders, strict=True)]
    return shown


def _merit(run: EvaluatedRun, seeds: int) -> tuple[float, float]:
    """What ranks a run, smaller is better: the first result and the training loss of some seeds."""
    first = next(iter(run.results.values()))
    sign = -1 if first.larger_is_better else 1
    loss = run.results["training loss"]
    return sign * float(np.mean(first.by_seed[:seeds])), float(np.mean(loss.by_seed[:seeds]))


def _count(numbers: Iterable[int], noun: str) -> str:
    """Returns "1 seed", "3 seeds" or "2 to 3 seeds"."""
    low, high = min(numbers), max(numbers)
    return f"{f'{low} to ' if low < high else ''}{high} {noun}{'s' * (high > 1)}"


def _numbers_of(result: Result) -> JSON:
    return {name: finite_or_null(x) for name, x in summary_of(result)._asdict().items()}


def _cell(result: Result) -> str:
    return summary_text(result, ".2f" if result.high == 100 else "#.3g")
