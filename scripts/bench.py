"""Measures a score, including your own, beside all others: a row of the leaderboard; see --help."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NamedTuple

import tyro

from attention_jax.commands.command_line import (
    ScoreNames,
    check_names,
    command,
    print_table,
    run_command,
    share_of,
)
from attention_jax.reports import html_page, plotting
from attention_jax.reports.table_text import csv_table
from attention_jax.runs.progress import say
from attention_jax.runs.run_folder import make_folder, write_text, writing
from attention_jax.scores import SCORES, get_score

sys.path.insert(0, str(Path(__file__).parent.parent))

from experiments import lab
from experiments.bench import cost, maps, relations
from experiments.bench.summary import summary

TASKS = ("relations", "cost", *maps.TASKS)
_DEFAULT = ("relations", "cost", "recall")


class Work(NamedTuple):
    """An experiment with its settings.

    Attributes:
        cells: how many files it writes.
        minutes: of such a cell with scaled dot on 2 CPU cores, for the time that is left.
    """

    experiment: ModuleType
    config: Any
    cells: int
    minutes: float


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Measure scores beside all others: what each can express and learn, how fast, at what cost.

    "relations" trains one attention on nine relations between a query and a key. "cost" times a
    training step, beside scaled dot in turns. Every other part trains a small model on a task, over
    the deviation of the logits at the start and the learning rate: the map of the score. Recall has
    a full map, the other tasks have a coarse one. On the first of these tasks, fresh seeds train at
    the best cell of the map. experiments/bench/README.md has the rules. Ctrl-C stops, and the same
    command goes on.

    The rows of the other scores stand beside; the last column has the device of each row.

    Attributes:
        score: the scores, each a name, or "module:Name" for a score in a file of this folder.
        tasks: what to measure; if left out, relations, cost and recall.
        quick: few deviations, one rate, two seeds and few steps: three minutes in all. Scaled dot
            is measured in the same way, for comparison.
        workdir: folder of finished cells, and of bench.csv and bench.html.
        part: measure a part of the cells, which are a score with a task: 3/8 measures the 3rd, the
            11th and so on. Eight processes or machines with the parts 1/8 to 8/8 share `workdir`.
            The table is of what is finished; the page comes once all is.
    """

    score: Annotated[ScoreNames, tyro.conf.arg(metavar="SCORE [SCORE ...]")]
    tasks: tuple[str, ...] = ()
    quick: bool = False
    workdir: Path = Path("runs/bench")
    part: Annotated[str | None, tyro.conf.arg(metavar="I/N")] = None

    def __post_init__(self) -> None:
        if not self.score:
            raise ValueError("score must be one or more; got none")
        for score in self.score:
            get_score(score)
        check_names("tasks", self.tasks, TASKS)
        share_of((), self.part)
        self.works()  # checks the scores in every model

    def works(self) -> list[Work]:
        """What to run, with its settings."""
        scores = (*dict.fromkeys([*self.score, *(["scaled"] if self.quick else [])]),)
        tasks, quick = dict.fromkeys(self.tasks or _DEFAULT), self.quick
        folder = self.workdir / "quick" if quick else self.workdir
        works: list[Work] = []
        config: Any
        if "relations" in tasks:
            config = _relations(scores, folder / "relations", quick)
            works.append(Work(relations, config, len(scores), 0.2 if quick else 3.0))
        if "cost" in tasks:
            few: Any = {"most_turns": 6, "turn_seconds": 0.2} if quick else {}
            config = cost.Config(scores, workdir=folder / "cost", **few)
            works.append(Work(cost, config, len(scores), 0.4 if quick else 1.0))
        if of_maps := tuple(name for name in tasks if name in maps.TASKS):
            config = _maps(scores, of_maps, folder / "maps", quick)
            cells = sum(map(len, maps.groups_of(config)))
            works.append(Work(maps, config, cells, 0.6 if quick else 2.5))
        return works


def _relations(scores: tuple[str, ...], workdir: Path, quick: bool) -> Any:
    few: Any = {"rates": (1e-2,), "factors": (1 / 4, 1, 4), "trials": 1, "seeds": 2, "steps": 500}
    return relations.Config(scores, bases=(0,), workdir=workdir, **(few if quick else {}))


def _maps(scores: tuple[str, ...], tasks: tuple[str, ...], workdir: Path, quick: bool) -> Any:
    few: Any = {"rates": maps.Config().rates[:1], "deviations": (1 / 16, 1 / 4, 1, 4)}
    few |= {"at_fast": (), "seeds": 2, "tests": 0, "budget": 0.4}
    many: Any = {"at_fast": scores, "seeds": 4}
    of_others: Any = {**dict.fromkeys(("extra", "others", "slow", "widths", "fresh"), ())}
    of_others |= {"constants": (), "workdir": workdir}
    many["fresh"] = (maps.OWN,)
    return maps.Config(scores, tasks=tasks, **(of_others | (few if quick else many)))


def main(arguments: Arguments) -> int:
    make_folder("workdir", arguments.workdir)
    works = arguments.works()
    rows: dict[str, list[lab.Row]] = {}
    sections, all_missing, progress = [], 0, Progress(works, arguments.part)
    for work in works:
        name = lab.name_of(work.experiment)
        mark = " (quick)" if arguments.quick else ""
        found, missing = lab.rows_of(
            work.experiment, work.config, arguments.part, progress.after(work)
        )
        all_missing += missing
        measured = [{**row, "score": f"{row['score']}{mark}"} for row in found]
        rows[name] = measured + _others(name, measured)
        sections += [] if missing else _page_of(work.experiment, rows[name], measured)
    head, lines = summary(*(rows.get(name, []) for name in ("relations", "maps", "cost")))
    small = " (quick: small settings, hardly trained)" if arguments.quick else ""
    print_table(f"Scores compared{small}", head, lines)
    if all_missing:
        return 0
    page = [html_page.code(command()), html_page.table(head, lines), *sections]
    with writing("workdir", arguments.workdir):
        write_text(arguments.workdir / "bench.csv", csv_table(head, lines))
        write_text(arguments.workdir / "bench.html", html_page.page("Scores compared", page))
    say(f"{arguments.workdir / 'bench.csv'}\n{arguments.workdir / 'bench.html'}")
    return 0


class Progress:
    """Says after each cell how many of all cells are done, and how long the others will take.

    A process that measures a part of the cells needs its share of that time.
    """

    def __init__(self, works: list[Work], part: str | None):
        self.cells = [work.minutes for work in works for _ in range(work.cells)]
        self.shares = int((part or "1/1").partition("/")[2])
        self.done, self.minutes, self.expected = 0, 0.0, 0.0

    def after(self, work: Work) -> Any:
        """The function to call after each cell of this work."""

        def say_progress(cell: str, seconds: float) -> None:
            self.done += 1
            if seconds >= 1:  # others have been measured before
                self.minutes += seconds / 60
                self.expected += work.minutes
            pace = self.minutes / self.expected if self.expected else 1.0
            left = pace * sum(self.cells[self.done :]) / self.shares
            text = f"{self.done} of {len(self.cells)} cells: {lab.name_of(work.experiment)}, {cell}"
            say(f"{text}; {self.minutes:.1f} min, about {left:.0f} left", error=True)

        return say_progress


def _others(name: str, measured: list[lab.Row]) -> list[lab.Row]:
    """The committed rows of the other scores of the library, of the same tasks."""
    committed = (lab.content_of(name) or {"rows": []})["rows"]
    scores, tasks, kinds = ({row.get(key) for row in measured} for key in ("score", "task", "kind"))
    return [
        row
        for row in committed
        if row["score"] in SCORES
        and row["score"] not in scores
        and row.get("task") in tasks
        and row.get("kind") in kinds | {"long", "test", "own"}
    ]


@plotting.own_settings
def _page_of(experiment: ModuleType, rows: list[lab.Row], measured: list[lab.Row]) -> list[str]:
    """Question, tables and figures of an experiment; maps are those of these and four scores."""
    section = [html_page.heading(lab.labelled(experiment))]
    for text in filter(None, experiment.table(rows).split("\n\n")):
        lines = [line.strip("| ").split(" | ") for line in text.splitlines()]
        section.append(html_page.table(lines[0], lines[2:]))
    shown = {*lab.FOUR_SCORES, *(row["score"] for row in measured)}
    drawn = [row for row in rows if experiment is not maps or row["score"] in shown]
    for task in dict.fromkeys(row.get("task") for row in drawn):
        of_task = [row for row in drawn if row.get("task") == task]
        for stem, figure in experiment.plot(of_task).items():
            caption = experiment.CAPTIONS[stem]
            section.append(html_page.figure(figure, f"{task}: {caption}" if task else caption))
    return section


if __name__ == "__main__":
    run_command(Arguments, main)
