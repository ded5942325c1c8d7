"""At which size of its logits, and at which learning rate, does a model learn with each score?

Answer: At a deviation of the logits of 1/4 and rate 0.003, scaled dot and seven other scores solve
    recall with all seeds, after 250 to 400 steps. With the constants of their papers and this rate
    nine of 16 scores solve it with most of their seeds, at their best cells 14 do: dot's constant
    lies far outside of the region in which dot and scaled dot, one function, learn. Additive takes
    4,075 steps at its best cell, which two of eight seeds chose.
Source: ours. The tasks and their sources are in `attention_jax/tasks`.
Command: .venv/bin/python -m experiments.bench.maps  # 3.6 hours of H100 and CPU calls

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
Other seeds train there, for four times the steps.
"""

from __future__ import annotations

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
from attention_jax.tasks.noisy_recall import NoisyRecall
from attention_jax.tasks.recall import Recall
from attention_jax.tasks.selective_copy import SelectiveCopy
from attention_jax.tasks.sort import Sort
from attention_jax.training.task import Task, TrainConfig
from experiments import lab
from experiments.bench import map_figure, prediction
from experiments.bench.map_rows import (
    against_scaled,
    best_cell,
    cells_between,
    censored,
    correlation,
    infinite,
    pairs_that_differ,
    share,
    shares,
    tests_of,
)
from experiments.bench.significance import differ
from experiments.bench.summary import four_scores as four_scores  # of README.md
from experiments.bench.summary import steps_in_words
from experiments.bench.training import (
    LOOK,
    Start,
    deviation_of,
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
    "noisy_recall": NoisyRecall(train=SMALL, length=32),
    "sort": Sort(train=SMALL),
}
FULL = ("recall",)  # the others, and most controls, have coarse maps: see `_sizes`
DIFFERENT = (
    *("scaled", "general", "softcap", "softplus", "cosine", "ngpt", "l2", "elliptical"),
    *("hyperbolic", "manhattan", "tropical", "yat", "power", "indexer", "neural", "additive"),
)
TWINS = {"dot": "scaled", "distance": "l2", "concat": "additive"}  # one function up to a factor
_CONTROLS = "experiments.bench.controls"
CONTROLS = (
    *("additive(hidden_dim=16)", "additive(hidden_dim=256)", f"{_CONTROLS}:Projected"),
    *(f"{_CONTROLS}:Features", f"{_CONTROLS}:WithLength"),
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings; sizes and steps of the tasks are in `TASKS`.

    Attributes:
        scores: scores of every map.
        extra: scores of the first task alone. The deviations of `TWINS` lie between the others'.
        tasks: tasks to learn.
        others: scores of the maps of the other tasks than the first.
        rates: Adam's learning rates. A coarse map has the first of them.
        fast: one more rate of the first task, for the scores `at_fast`.
        deviations: of the logits at the start; each score's own constant is measured, too.
        gains: of additive's kernels at the start: a second map, on the first task, at the first
            rate. Gain 1 is in the first map.
        seeds: trainings of each cell; of a coarse map half as many.
        again: scores that are measured a second time, at the first rate, from other seeds.
        predicted: scores for which numbers at initialisation are computed, see `prediction.py`.
        tests: trainings at the best cell, from other seeds, with four times the steps.
        budget: the steps of every task are multiplied by this.
        workdir: folder of what is finished; an unchanged task and score is not trained again.
    """

    scores: ScoreNames = DIFFERENT
    extra: ScoreNames = (*CONTROLS, *TWINS)
    tasks: tuple[str, ...] = ("recall", "selective_copy")
    others: ScoreNames = (
        *("scaled", "general", "softplus", "cosine", "l2", "hyperbolic", "manhattan", "yat"),
        *("power", "neural", "additive"),
    )
    rates: tuple[float, ...] = (3e-3, 1e-3)
    fast: float = 1e-2
    at_fast: ScoreNames = DIFFERENT[:8]
    deviations: tuple[float, ...] = tuple(2.0**k for k in range(-5, 4))
    gains: tuple[float, ...] = (1 / 8, 1 / 4, 1 / 2)
    seeds: int = 8
    again: ScoreNames = ("scaled", "l2", "cosine")
    predicted: ScoreNames = (*DIFFERENT, *CONTROLS[:2])
    tests: int = 10
    budget: float = 1.0
    workdir: Path = Path("runs/maps")

    def __post_init__(self) -> None:
        lab.check_least(self, rates=1e-9, fast=1e-9, deviations=1e-9, seeds=1, tests=0, budget=1e-9)
        lab.check_names("tasks", self.tasks, TASKS)
        for task, score in itertools.product(self.tasks, (*self.scores, *self.extra, *self.again)):
            self.task(task, score)

    def task(self, name: str, score: str) -> Any:
        """A task with this score."""
        return with_score(TASKS[name], score)

    def steps(self, name: str) -> int:
        """The steps of a cell of the map, a multiple of `LOOK`."""
        return LOOK * max(1, round(self.budget * TASKS[name].train.steps / LOOK))


QUICK = Config(
    scores=("scaled",),
    extra=("dot",),
    tasks=("recall",),
    rates=(3e-3,),
    at_fast=(),
    deviations=(0.25, 1.0),
    gains=(),
    seeds=2,
    again=(),
    predicted=(),
    tests=2,
    budget=0.1,
    workdir=Path("runs/quick/maps"),
)


class Cells(NamedTuple):
    """Trainings that are one call of one program, and one row: all deviations and seeds.

    Attributes:
        kind: "map"; "again", from other seeds; "gain"; "test", at the best cell; or "prediction",
            numbers of an attention alone, without any training.
    """

    kind: str
    task: str
    score: str
    rate: float = 0.0
    gain: float = 1.0


def groups_of(config: Config) -> Iterator[tuple[Cells, ...]]:
    """The cells of the experiment, the most telling first; a group shares a program."""
    first, *others = config.tasks
    for score in (*config.scores, *config.extra):
        rates = [*config.rates, *([config.fast] if score in config.at_fast else [])]
        rates = rates[:1] if score in CONTROLS else rates
        maps = [Cells("map", first, score, rate) for rate in rates]
        has_test = config.tests and score not in (*TWINS, *CONTROLS[:2])
        yield *maps, *([Cells("test", first, score)] if has_test else [])
    for gain in config.gains:
        yield (Cells("gain", first, "additive", config.rates[0], gain),)
    for score in config.again:
        yield (Cells("again", first, score, config.rates[0]),)
    for task, score in itertools.product(others, config.others or config.scores):
        yield (Cells("map", task, score, config.rates[0]),)
    for score in config.predicted:
        yield (Cells("prediction", first, score),)


def run(config: Config) -> list[Row]:
    """A row for each call of a program; see `Cells`."""
    rows: list[Row] = []
    make_folder("workdir", config.workdir)
    groups = [*groups_of(config)]
    start = time.monotonic()
    for index, group in enumerate(groups):
        mine: list[Row] = []
        for cells in group:
            name = f"{cells.kind},{cells.task},{cells.rate:g},{cells.gain:g}"
            path = config.workdir / f"{score_folder(cells.score)},{name}.json"
            measure = functools.partial(_measured, config, cells, [*mine])
            mine += lab.kept_rows(path, _known_by(config, cells, mine), measure, group=index)
        rows += mine
        text = f"{group[0].score}, {group[0].task}, {len(mine)} of {len(group)} rows"
        lab.say_progress(index + 1, len(groups), start, text)
    return rows


def _known_by(config: Config, cells: Cells, maps: Sequence[Row]) -> list[Any]:
    """What a row is known by, for it to be kept: settings and the score, its init included."""
    task = config.task(cells.task, cells.score)
    sizes = [*_sizes(config, cells), config.steps(cells.task)]
    if cells.kind == "test":
        sizes = [config.tests, 4 * config.steps(cells.task), *best_cell(maps)] if maps else []
    return [cells._asdict(), repr(task), sizes, task.model.known().digest]


def _sizes(config: Config, cells: Cells) -> tuple[tuple[float, ...], int]:
    """Deviations and seeds of a map: half of them if it is coarse; a twin's lie between."""
    if cells.score in TWINS:
        return tuple(deviation * 2**0.5 for deviation in config.deviations[:-1]), config.seeds
    if cells.task in FULL and cells.score not in CONTROLS[1:]:
        return config.deviations, config.seeds
    return config.deviations[::2], -(-config.seeds // 2)


def _measured(config: Config, cells: Cells, maps: Sequence[Row]) -> list[Row]:
    """Trains the seeds of all deviations, or those of the test at the best cell of these rows."""
    if cells.kind == "prediction":
        names = {key: getattr(cells, key) for key in ("kind", "task", "score")}
        return [names | prediction.at_initialisation(cells.score)]
    task = config.task(cells.task, cells.score)
    row: Row = {key: value for key, value in cells._asdict().items() if key != "gain" or value != 1}
    steps, start = config.steps(cells.task), time.monotonic()
    own = maps[0]["own"] if cells.kind == "test" else deviation_of(task, cells.gain)
    if cells.kind == "test":
        if not maps:
            return []
        deviation, rate = best_cell(maps)
        steps, row["rate"] = 4 * steps, rate
        deviations, seeds = [deviation], range(1000, 1000 + config.tests)
    else:
        grid, number = _sizes(config, cells)
        deviations = [*grid, own]
        seeds = range(number * (cells.kind == "again"), 2 * number)[:number]
    starts = [
        Start(deviation / own, row["rate"], seed, cells.gain)
        for deviation in deviations
        for seed in seeds
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
    first, found = Config().tasks[0], []
    of_first = lab.where(rows, task=first)
    tests, cells = tests_of(rows, first), shares(of_first, kind="map")
    for task in Config().tasks:
        scores = DIFFERENT if task == first else Config().others
        own, best = pairs_that_differ(rows, task, scores, Config().rates[0])
        vanish = [not b for a, b in zip(own, best, strict=True) if a]
        text = f"{task}: of {len(vanish)} pairs of scores that differ at their papers' constants,"
        measured = float(np.mean(vanish)) if vanish else np.nan  # a miss, as nothing was compared
        found.append(Claim(f"{text} share that do not differ at their best cells", measured, 0.5))
    for twin, score in TWINS.items():
        text = f"{twin}, on a grid of its own: share of cells between those of {score} beside them"
        found.append(Claim(text, float(np.mean(cells_between(of_first, twin, score))), 0.95))
    again = shares(of_first, kind="again").items()
    moved = float(np.mean([differ(solved, cells[cell]) for cell, solved in again]))
    found.append(Claim("two sets of seeds: share of cells that differ", moved, high=0.05))
    for each in prediction.PREDICTIONS:
        text = f"{each.number} at initialisation: rank correlation with the solved share of the map"
        measured = correlation(of_first, each.number, DIFFERENT) * each.sign
        found.append(Claim(text, measured, each.low))
    gains = {row["score"]: row["gain"] for row in lab.where(of_first, kind="prediction")}
    least, *others = prediction.LEAST_GAIN
    text = f"gain at initialisation: of {len(others)} scores, number with a smaller one than"
    smaller = sum(gains[score] < gains[least] for score in others)
    found.append(Claim(f"{text} {least}", smaller, high=0))
    three = [
        differ(solved, cells[other, rate, deviation])
        for (score, rate, deviation), solved in cells.items()
        for other in ("l2", "hyperbolic")
        if score == "scaled" and deviation and (other, rate, deviation) in cells
    ]
    text = "scaled dot beside l2 and hyperbolic at equal deviation: share of cells that differ"
    found.append(Claim(text, float(np.mean(three)), high=0.15))
    for name, score, low in (
        ("additive at its best cell", "additive", 0.5),
        ("manhattan at its best cell", "manhattan", 0.9),
        ("scaled dot with additive's kernels", CONTROLS[2], 0.95),
        ("dot of features", CONTROLS[3], 0.9),
        ("scaled dot + w |k|^2", CONTROLS[4], 0.95),
    ):
        found.append(Claim(f"{name} solves recall: share of other seeds", share(tests[score]), low))
    additive, scaled = (np.median(censored(tests[score])) for score in ("additive", "scaled"))
    text = "additive's median steps until it solves recall over scaled dot's"
    found.append(Claim(text, float(additive / scaled), 4))
    units = [
        solved for (score, *_), solved in cells.items() if score in ("additive", *CONTROLS[:2])
    ]
    of_gains = [*shares(of_first, kind="gain").values()]
    for name, maps in {"other gains": of_gains, "16, 64 or 256 units": units}.items():
        text = "recall within the steps of the map: highest share of seeds of a cell, additive with"
        found.append(Claim(f"{text} {name}", max(float(np.mean(s)) for s in maps), high=0.5))
    return found


CAPTIONS = {
    "maps": "Share of seeds that solve the task, recall by default (black: all), over deviation and"
    " learning rate, and median steps. The star is the constant of the score's paper."
}


def table(rows: list[Row]) -> str:
    """The tests at the best cells, of each task that has them."""
    parts = []
    for task in dict.fromkeys(row["task"] for row in lab.where(rows, kind="test")):
        tests, p_values = tests_of(rows, task), against_scaled(rows, task)
        head = [f"{task.replace('_', ' ')}: score", "solved", "median steps (least to most)"]
        head += ["p (Holm)", "deviation; rate", "own deviation", "parameters"]
        order = sorted(tests, key=lambda score: (np.median(censored(tests[score])), score))
        lines = []
        for score in order:
            row = tests[score]
            p = f"{p_values[score]:.2g}" if score in p_values else "-"
            chosen = f"{row['deviations'][0]:.3g}; {row['rate']:g}"
            number = len(row["solved"][0])
            solved = f"{round(share(row) * number)} of {number}"
            cells = [label(score), solved, _steps(infinite(row["solved"])[0])]
            lines.append([*cells, p, chosen, f"{row['own']:.2g}", f"{row['parameters']:,}"])
        parts.append(lab.markdown(head, lines))
    return "\n\n".join(parts)


def label(score: str) -> str:
    """A score's name in tables and figures."""
    return score.replace(f"{_CONTROLS}:", "control: ")


def _steps(solved: np.ndarray) -> str:
    """The median and the range of steps until solved, e.g. "400 (250 to never)"."""
    middle, low, high = map(steps_in_words, (np.median(solved), solved.min(), solved.max()))
    return f"{middle} ({low} to {high})"


def plot(rows: list[Row]) -> dict[str, Any]:
    """A panel for each map of the first task, except those of controls, which are coarse."""
    maps = lab.where(rows, task=rows[0]["task"], kind="map")
    scores = dict.fromkeys(row["score"] for row in maps if row["score"] not in CONTROLS)
    panels = {label(score): lab.where(maps, score=score) for score in scores}
    return {"maps": map_figure.draw(panels)}


if __name__ == "__main__":
    lab.main(__name__)
