"""Measures a score, including your own, beside all others: a row of the leaderboard; see --help."""

from __future__ import annotations

import csv
import dataclasses
import io
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import tyro
from command_line import ScoreNames, check_names, command, part_of, print_table, run_command

from attention_jax.reports import html_page
from attention_jax.runs.progress import say
from attention_jax.runs.run_folder import make_folder, write_text, writing
from attention_jax.scores import get_score

sys.path.insert(0, str(Path(__file__).parent.parent))

from experiments import lab
from experiments.bench import learning, relations

PARTS = ("relations", *learning.TASKS)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Measure scores beside all others: what each can express and learn, how fast, at what cost.

    "relations" trains one attention on nine relations between a query and a key. Every other part
    trains a small model on a task. Rate and size of the logits are chosen for each score, and the
    numbers are those of fresh seeds; experiments/bench/README.md has the rules. Ctrl-C stops, and
    the same command goes on.

    The rows of the other scores were measured with the same settings. A step's time is divided by
    that of scaled dot in the same run.

    Attributes:
        score: the scores, each a name, or "module:Name" for a score in a file of this folder.
        tasks: which parts to measure; if left out, all, or relations and recall with `quick`.
        quick: one rate, two seeds, and few steps for relations: two minutes in all.
            Scaled dot is measured in the same way, for comparison.
        workdir: folder of finished parts, and of bench.csv and bench.html.
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
        check_names("tasks", self.tasks, PARTS)
        part_of((), self.part)
        self.experiments()  # checks the scores in every model

    def experiments(self) -> list[tuple[ModuleType, Any]]:
        """What to run, with its settings."""
        scores = dict.fromkeys([*self.score, *(["scaled"] if self.quick else [])])
        parts = self.tasks or (("relations", "recall") if self.quick else PARTS)
        found: list[tuple[ModuleType, Any]] = []
        if "relations" in parts:
            few: Any = (
                {"rates": (1e-2,), "trials": 1, "seeds": 2, "steps": 500} if self.quick else {}
            )
            folder = self.workdir / "relations"
            settings: Any = relations.Config(tuple(scores), bases=(0,), workdir=folder, **few)
            found.append((relations, settings))
        if tasks := tuple(name for name in parts if name in learning.TASKS):
            few = {"rates": (3e-3,), "factors": (1.0,), "seeds": 2} if self.quick else {}
            folder = self.workdir / "learning"
            settings = learning.Config(tuple(scores), tasks, workdir=folder, **few)
            found.append((learning, settings))
        return found


def main(arguments: Arguments) -> int:
    make_folder("workdir", arguments.workdir)
    rows, parts, all_missing = {}, [], 0
    for experiment, config in arguments.experiments():
        name = lab.name_of(experiment)
        mark = " (quick)" if arguments.quick else ""
        found, missing = lab.rows_of(experiment, config, arguments.part)
        all_missing += missing
        measured = [{**row, "score": f"{row['score']}{mark}"} for row in found]
        own, tasks = ({row.get(key) for row in measured} for key in ("score", "task"))
        committed = (lab.content_of(name) or {"rows": []})["rows"]
        others = [r for r in committed if r["score"] not in own and r.get("task") in tasks]
        rows[name] = measured + others
        parts += [] if missing else _page_of(experiment, rows[name])
    head, lines = learning.summary(rows.get("relations", []), rows.get("learning", []))
    print_table("mean ± standard deviation over seeds (worst seed)", head, lines)
    if all_missing:
        return 0
    page = [html_page.command(command()), *parts]
    page.insert(1, html_page.table(head, lines))
    with writing("workdir", arguments.workdir):
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([head, *lines])
        write_text(arguments.workdir / "bench.csv", text.getvalue())
        write_text(arguments.workdir / "bench.html", html_page.page("Scores compared", page))
    say(f"{arguments.workdir / 'bench.csv'}\n{arguments.workdir / 'bench.html'}")
    return 0


def _page_of(experiment: ModuleType, rows: list[lab.Row]) -> list[str]:
    """Question, tables and figures of an experiment with these rows."""
    parts = [html_page.heading(lab.labelled(experiment))]
    for text in experiment.table(rows).split("\n\n"):
        lines = [line.strip("| ").split(" | ") for line in text.splitlines()]
        parts.append(html_page.table(lines[0], lines[2:]))
    for stem, figure in experiment.plot(rows).items():
        parts.append(html_page.figure(figure, experiment.CAPTIONS[stem]))
    return parts


if __name__ == "__main__":
    run_command(Arguments, main)
