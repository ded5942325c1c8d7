"""At which size of its logits, and at which learning rate, does a model learn with each score?

Answer: Scaled dot with logits of deviation 1/4 takes 250 steps to solve recall, with the constant
    of its paper 450 (medians of ten fresh seeds, rate 0.003). At the constants of their papers six
    of 16 scores solve it with at most two of ten seeds, at their best cells all do. Their speeds
    stay apart: in steps 101 of 120 pairs differ at the best cells, 90 at the papers' constants.
    Additive takes 2,200 steps at its best cell, and 900 without the part of its logits that depends
    on the key alone, where one of ten seeds never solves it.
Source: ours. The tasks and their sources are in `attention_jax/tasks`. The part that depends on the
    query: `attention_jax.analysis.logit_size`.
Command: .venv/bin/python -m experiments.bench.maps  # 4 hours of H100 and CPU calls

A model learns a task with a score whose logits are multiplied by a constant, so that they have a
chosen deviation within rows at the start; `deviation_of` in `training.py` measures it in the model
at hand. The map of a score is the share of seeds that solve the task, over deviation and learning
rate. The constant of the score's paper is one point of the map, its star. Two scores that differ by
a factor have one map with two stars.

A training has *solved* a task after the first 50 steps whose batches have 90 % right answers, each
batch before it is learned. The rate is constant (Adam, gradients clipped to norm 1), so that the
number of steps does not depend on when a training would end.

The best cell of a map has the fewest steps, as a median over seeds; a training that never solves
the task counts as infinite. Ties are decided by how many seeds solve it, then by the accuracy.
Additive and neural, which no cell of 1,500 steps lets most seeds solve, have a second map of 6,000
steps. Fresh seeds train at the best cell for 6,000 steps, and at the constant of the paper.
"""

import dataclasses
import functools
import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from attention_jax.runs.run_folder import make_folder
from attention_jax.scores import score_folder
from attention_jax.tasks.recall import Recall
from attention_jax.tasks.selective_copy import SelectiveCopy
from attention_jax.training.task import Task, TrainConfig
from experiments import lab
from experiments.bench import map_claims, map_figure
from experiments.bench.map_rows import (
    CONTROLS,
    DIFFERENT,
    NORMALIZED,
    OWN,
    SAME,
    WARM_UP,
    WITHOUT_KEY,
    best_cell,
)
from experiments.bench.map_tables import constants as constants  # of README.md, as the next three
from experiments.bench.map_tables import headline as headline
from experiments.bench.map_tables import label as label
from experiments.bench.map_tables import table as table
from experiments.bench.map_tables import widths as widths
from experiments.bench.summary import four_scores as four_scores  # of README.md
from experiments.bench.training import (
    LOOK,
    Start,
    deviation_of,
    query_share_of,
    states,
    steps_until_solved,
    with_score,
)
from experiments.lab import Claim, Row, ScoreNames

SMALL = TrainConfig(steps=1500, batch_size=16, schedule="constant")
TASKS: dict[str, Task] = {
    "recall": Recall(train=SMALL, length=20),
    "selective_copy": SelectiveCopy(
        train=dataclasses.replace(SMALL, steps=1000), length=32, copied=8
    ),
}
FULL = ("recall",)  # the others, and the controls, have coarse maps: see `_sizes`
FRONT = ("scaled", "general", "additive", WITHOUT_KEY["additive"])


class Cells(NamedTuple):
    """Trainings that are one call of one program, and one row: all deviations and seeds.

    Attributes:
        kind: "map"; "long", with four times the steps; "width", of another size of the model;
            "test", fresh seeds at the best cell; one of `Config.fresh`, and with these "size", the
            share of the variance of the logits that depends on the query, without any training.
        dim: of the model; 0 for that of the task.
    """

    kind: str
    task: str
    score: str
    rate: float = 0.0
    dim: int = 0


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings; sizes and steps of the tasks are in `TASKS`.

    Attributes:
        scores: scores of every map.
        extra: scores of the first task alone.
        tasks: tasks to learn.
        others: scores of the maps of the other tasks than the first.
        rates: Adam's learning rates. A coarse map has the first of them.
        fast: one more rate of the first task, for the scores `at_fast`.
        deviations: of the logits at the start; each score's own constant is measured, too.
        slow: scores that have a second map of the first task, of four times the steps.
        slow_rates: its rates.
        slow_deviations: its deviations.
        widths: sizes of the model, at which `of_widths` have a map of the first task each.
        of_widths: scores of these maps.
        of_width: their deviations.
        seeds: trainings of each cell; of a coarse map and the two further ones half as many.
        constants: scores that are another one times a constant: they train at their own alone.
        fresh: what trains from fresh seeds at the first rate: "own", "warm-up", "normalized".
        tests: trainings at the best cell and of each of `fresh`, with four times the steps; with
            warm-up or normalisation, twice the steps.
        budget: the steps of every task are multiplied by this.
        workdir: folder of what is finished; an unchanged task and score is not trained again.
    """

    scores: ScoreNames = (*DIFFERENT, *WITHOUT_KEY.values())
    extra: ScoreNames = CONTROLS
    tasks: tuple[str, ...] = ("recall", "selective_copy")
    others: ScoreNames = (
        *("scaled", "general", "softplus", "cosine", "l2", "hyperbolic", "manhattan", "yat"),
        *("power", "neural", "additive"),
    )
    rates: tuple[float, ...] = (3e-3, 1e-3)
    fast: float = 1e-2
    at_fast: ScoreNames = DIFFERENT[:8]
    deviations: tuple[float, ...] = tuple(2.0**k for k in range(-5, 4))
    slow: ScoreNames = tuple(WITHOUT_KEY)
    slow_rates: tuple[float, ...] = (1e-3, 3e-4)
    slow_deviations: tuple[float, ...] = (1.0, 2.0)
    widths: tuple[int, ...] = (32, 64, 128)
    of_widths: ScoreNames = ("scaled", "l2")
    of_width: tuple[float, ...] = tuple(2.0**k for k in range(-4, 1))
    seeds: int = 8
    constants: ScoreNames = tuple(SAME)
    fresh: tuple[str, ...] = (OWN, NORMALIZED, WARM_UP)
    tests: int = 10
    budget: float = 1.0
    workdir: Path = Path("runs/maps")

    def __post_init__(self) -> None:
        lab.check_least(self, rates=1e-9, fast=1e-9, deviations=1e-9, seeds=1, tests=0, budget=1e-9)
        lab.check_names("tasks", self.tasks, TASKS)
        lab.check_names("fresh", self.fresh, (OWN, NORMALIZED, WARM_UP))
        for task, score in itertools.product(
            self.tasks, (*self.scores, *self.extra, *self.constants)
        ):
            self.task(Cells("map", task, score))

    def task(self, cells: Cells) -> Any:
        """The task of these cells, with their score."""
        task = with_score(TASKS[cells.task], cells.score)
        model, train = task.model, task.train
        if cells.kind == NORMALIZED:
            model = dataclasses.replace(model, normalize_qk=True)
        if cells.kind == WARM_UP:
            train = dataclasses.replace(train, warmup_steps=300)
        if cells.dim:
            model = dataclasses.replace(model, dim=cells.dim)
        return dataclasses.replace(task, model=model, train=train)

    def steps(self, cells: Cells) -> int:
        """The most steps of a training, a multiple of `LOOK`."""
        steps = LOOK * max(1, round(self.budget * TASKS[cells.task].train.steps / LOOK))
        return steps * {"test": 4, OWN: 4, "long": 4, NORMALIZED: 2, WARM_UP: 2}.get(cells.kind, 1)


QUICK = Config(
    scores=("scaled",),
    extra=(),
    tasks=("recall",),
    rates=(3e-3,),
    at_fast=(),
    deviations=(0.25, 1.0),
    slow=(),
    widths=(),
    seeds=2,
    constants=(),
    fresh=(OWN,),
    tests=2,
    budget=0.1,
    workdir=Path("runs/quick/maps"),
)


def groups_of(config: Config) -> Iterator[tuple[Cells, ...]]:
    """The cells of the experiment, the most telling first; a group shares a program."""
    first, *others = config.tasks
    for score in (*config.scores, *config.extra):
        rates = [*config.rates, *([config.fast] if score in config.at_fast else [])]
        rates = rates[:1] if score in CONTROLS else rates
        maps = [Cells("map", first, score, rate) for rate in rates]
        long = config.slow_rates if score in config.slow else ()
        maps += [Cells("long", first, score, rate) for rate in long]
        yield *maps, *([Cells("test", first, score)] if config.tests else [])
    for kind, score in itertools.product(config.fresh, (*config.scores, *config.constants)):
        if kind == OWN or score in config.scores:
            yield (Cells(kind, first, score, config.rates[0]),)
    for dim, score in itertools.product(config.widths, config.of_widths):
        yield tuple(Cells("width", first, score, rate, dim) for rate in config.rates)
    for task, score in itertools.product(others, config.others or config.scores):
        yield (Cells("map", task, score, config.rates[0]),)
    for score in config.scores if config.fresh else ():
        yield (Cells("size", first, score),)


def run(config: Config) -> list[Row]:
    """A row for each call of a program; see `Cells`."""
    rows: list[Row] = []
    make_folder("workdir", config.workdir)
    groups = [*groups_of(config)]
    start = time.monotonic()
    for index, group in enumerate(groups):
        mine: list[Row] = []
        for cells in group:
            name = f"{cells.kind},{cells.task},{cells.rate:g},{cells.dim}"
            path = config.workdir / f"{score_folder(cells.score)},{name}.json"
            measure = functools.partial(_measured, config, cells, [*mine])
            mine += lab.kept_rows(path, _known_by(config, cells, mine), measure, group=index)
        rows += mine
        text = f"{group[0].score}, {group[0].task}, {len(mine)} of {len(group)} rows"
        lab.say_progress(index + 1, len(groups), start, text)
    return rows


def _known_by(config: Config, cells: Cells, maps: Sequence[Row]) -> list[Any]:
    """What a row is known by, for it to be kept: settings and the score, its init included."""
    task, steps = config.task(cells), config.steps(cells)
    sizes = [*_sizes(config, cells), steps]
    if cells.kind == "test":
        sizes = [config.tests, steps, *best_cell(maps)] if maps else []
    return [cells._asdict(), repr(task), sizes, task.model.known().digest]


def _sizes(config: Config, cells: Cells) -> tuple[tuple[float, ...], int]:
    """Deviations and seeds; a coarse map, and the further ones, have half of the seeds."""
    half = -(-config.seeds // 2)
    if cells.kind in config.fresh:
        return (), config.tests
    if cells.kind in ("long", "width"):
        return config.slow_deviations if cells.kind == "long" else config.of_width, half
    if cells.task in FULL and cells.score not in CONTROLS:
        return config.deviations, half if cells.score in WITHOUT_KEY.values() else config.seeds
    return config.deviations[::2], half


def _measured(config: Config, cells: Cells, maps: Sequence[Row]) -> list[Row]:
    """Trains the seeds of all deviations, or those of the test at the best cell of these rows."""
    task, steps, start = config.task(cells), config.steps(cells), time.monotonic()
    row: Row = {key: value for key, value in cells._asdict().items() if key != "dim" or value}
    if cells.kind == "size":
        share = lab.significant(query_share_of(task))
        return [row | {"own": lab.significant(deviation_of(task)), "query_share": share}]
    if cells.kind == "test" and not maps:
        return []
    own = maps[0]["own"] if cells.kind == "test" else deviation_of(task)
    grid, number = _sizes(config, cells)
    deviations, first_seed = [*grid, own], 0
    if cells.kind == "test":
        deviation, row["rate"] = best_cell(maps)
        deviations = [deviation]
    if cells.kind == "test" or cells.kind in config.fresh:
        first_seed, number = 1000, config.tests
    seeds = range(first_seed, first_seed + number)
    starts = [
        Start(deviation / own, row["rate"], seed) for deviation in deviations for seed in seeds
    ]
    solved, accuracy = steps_until_solved(task, starts, steps)
    shape = len(deviations), len(seeds)
    row["parameters"] = sum(leaf.size for leaf in jax.tree.leaves(states(task, [0]).params))
    row |= {"own": lab.significant(own), "deviations": lab.significant(deviations)}
    row["solved"] = [
        [int(step) if np.isfinite(step) else None for step in each]
        for each in solved.reshape(shape)
    ]
    row["accuracy"] = np.round(accuracy.reshape(shape).mean(1), 3).tolist()
    row |= {"steps": steps, "seconds": round(time.monotonic() - start, 1)}
    return [row | {"device": jax.devices()[0].device_kind}]


# --- what came out ---


def claims(rows: list[Row]) -> list[Claim]:
    """What the maps say; all bounds were written before the run."""
    return map_claims.claims(rows, Config().others)


CAPTIONS = {
    "maps": "Share of seeds that solve the task, recall by default, over deviation and learning"
    " rate, and median steps. Hatched: not run. Scaled and l2 have two stars, those of dot and"
    " distance, which are the same functions with another constant, among them. The best cells of"
    " additive and neural are at rate 0.0003, in maps of 6,000 steps.",
    "maps_front": "The same for four scores.",
}


def plot(rows: list[Row]) -> dict[str, Any]:
    """The maps of the first task, without the controls; four of them in a figure of their own."""
    maps = lab.where(rows, task=rows[0]["task"], kind="map")
    scores = dict.fromkeys(row["score"] for row in maps if row["score"] not in CONTROLS)
    panels = {label(score): lab.where(maps, score=score) for score in scores}
    stars = {title: [of_score[0]["own"]] for title, of_score in panels.items()}
    for other, score in SAME.items():
        if score in stars:
            stars[score] += lab.column(rows, "own", kind=OWN, score=other)
    figures = {"maps": map_figure.draw(panels, stars, columns=4)}
    if panels.keys() >= {*FRONT}:
        few = {title: panels[title] for title in FRONT}
        figures["maps_front"] = map_figure.draw(few, stars, columns=2)
    return figures


if __name__ == "__main__":
    lab.main(__name__)
