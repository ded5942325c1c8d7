"""The table of several finished runs: on the terminal, as CSV and JSON, and as a figure."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import rich.console
import rich.table
from sweep_combinations import options_of

from attention_jax.reports import plotting
from attention_jax.reports.setting_figure import Panel, results_by_setting
from attention_jax.runs.metrics_file import finite_or_null
from attention_jax.runs.run_folder import make_folder, write_json, write_text, writing
from attention_jax.training.run_results import FinishedRun, Summary, summary_of
from attention_jax.training.task import Result


class Row(NamedTuple):
    """A run, and the settings that tell it from the other runs of the table."""

    run: FinishedRun
    settings: dict[str, Any]  # the score first


def rows_of(runs: Sequence[FinishedRun]) -> list[Row]:
    """The runs with their score and all settings that vary among them.

    Runs that do not differ in any setting are told apart by their folders, as the setting "run".
    """
    settings = [options_of(run.task) for run in runs]
    varying = [
        name
        for name in settings[0]
        if name != "score" and any(each[name] != settings[0][name] for each in settings)
    ]
    rows = [
        Row(run, {name: each[name] for name in ("score", *varying)})
        for run, each in zip(runs, settings, strict=True)
    ]
    if len({tuple(row.settings.values()) for row in rows}) < len(rows):
        rows = [row._replace(settings={**row.settings, "run": _name(row.run)}) for row in rows]
    return rows


def write_table(rows: Sequence[Row], folder: Path) -> None:
    """Prints the table, and writes table.csv, table.json and sweep.png to a folder.

    Raises:
        ValueError: a file cannot be written.
    """
    console = rich.console.Console()
    if not console.is_terminal:
        console.width = 1000  # a file has room for every column
    console.print(_terminal_table(rows))
    make_folder("workdir", folder)
    with writing("workdir", folder):
        write_text(folder / "table.csv", _csv(rows))
        write_json(folder / "table.json", _records(rows))
        plotting.save(_figure(rows), folder / "sweep.png")
    for name in ("table.csv", "table.json", "sweep.png"):
        print(folder / name)


def _terminal_table(rows: Sequence[Row]) -> rich.table.Table:
    metrics = _metrics(rows)
    table = rich.table.Table(title="mean ± standard deviation over seeds (worst seed)")
    for name in (*rows[0].settings, *metrics, "seconds"):
        text = name in ("score", "run")
        table.add_column(name, justify="left" if text else "right", overflow="fold")
    for row in rows:
        results = row.run.results
        cells = [_cell(results[name]) if name in results else "-" for name in metrics]
        settings = [str(value) for value in row.settings.values()]
        table.add_row(*settings, *cells, f"{row.run.seconds:.0f}")
    return table


def _cell(result: Result) -> str:
    summary = summary_of(result)
    form = ".2f" if result.high == 100 else "#.3g"
    if len(result.by_seed) == 1:
        return f"{summary.mean:{form}}"
    return f"{summary.mean:{form}} ± {summary.deviation:{form}} ({summary.worst:{form}})"


def _csv(rows: Sequence[Row]) -> str:
    """A line per run; a cell is empty where a run lacks a result, or where it is not finite."""
    metrics = _metrics(rows)
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    numbers = [f"{name} {part}" for name in metrics for part in Summary._fields]
    settings = [name for name in rows[0].settings if name != "run"]
    writer.writerow(["run", *settings, *numbers, "seeds", "steps", "seconds"])
    for run, of_run in rows:
        cells: list[Any] = [_name(run), *(of_run[name] for name in settings)]
        for name in metrics:
            missing = Summary(math.nan, math.nan, math.nan)
            cells += summary_of(run.results[name]) if name in run.results else missing
        cells += [run.task.train.seeds, run.step, run.seconds]
        writer.writerow([*map(finite_or_null, cells)])
    return file.getvalue()


def _records(rows: Sequence[Row]) -> dict[str, Any]:
    """The long form: an object per run and result, and the environment of each run."""
    records = []
    for run, settings in rows:
        known = {"run": _name(run), "settings": settings}
        for name, result in run.results.items():
            summary = summary_of(result)._asdict()
            records.append(
                {
                    **known,
                    "metric": name,
                    "by_seed": [*map(finite_or_null, result.by_seed)],
                    **{part: finite_or_null(value) for part, value in summary.items()},
                    "step": run.step,
                    "seconds": finite_or_null(run.seconds),
                }
            )
    environments = {_name(run): run.environment for run, _ in rows}
    return {"results": records, "environments": environments}


def _figure(rows: Sequence[Row]) -> Any:
    panels = []
    for metric in _metrics(rows):
        by_seed = {
            (str(settings["score"]), _setting_label(settings)): run.results[metric].by_seed
            for run, settings in rows
            if metric in run.results
        }
        result = next(run.results[metric] for run, _ in rows if metric in run.results)
        panels.append(Panel(metric, by_seed, result.low, result.high))
    return results_by_setting(panels)


def _setting_label(settings: dict[str, Any]) -> str:
    return "\n".join(f"{name} {value}" for name, value in settings.items() if name != "score")


def _metrics(rows: Sequence[Row]) -> list[str]:
    """The names of the results of all runs, in order and without repetition."""
    return list(dict.fromkeys(name for row in rows for name in row.run.results))


def _name(run: FinishedRun) -> str:
    return str(run.workdir)
