"""What the rows of `maps` say: shares of seeds, best cells, paired steps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments import lab
from experiments.bench.prediction import rank_correlation
from experiments.bench.significance import differ, holm, p_value, share_interval
from experiments.lab import Row


def infinite(solved: Sequence[Sequence[int | None]]) -> np.ndarray:
    """Steps until solved, [deviations, seeds]; infinite for never."""
    return np.array([[np.inf if step is None else step for step in each] for each in solved])


def best_cell(maps: Sequence[Row]) -> tuple[float, float]:
    """The deviation and the rate of the best cell of a map, its own constant excepted."""
    cells = []
    for row in maps:
        solved = infinite(row["solved"])
        for index, deviation in enumerate(row["deviations"][:-1]):
            rank = np.median(solved[index]), -np.isfinite(solved[index]).sum()
            cells.append((*rank, -row["accuracy"][index], deviation, row["rate"]))
    *_, deviation, rate = min(cells)
    return deviation, rate


def shares(rows: Sequence[Row], **values: Any) -> dict[tuple[str, float, float], np.ndarray]:
    """Whether each seed has solved the task, by (score, rate, deviation); sets of seeds joined.

    The deviation is 0 for the constant of the score's paper.
    """
    found: dict[tuple[str, float, float], np.ndarray] = {}
    for row in lab.where(rows, "solved", **values):
        deviations = [*row["deviations"][:-1], 0.0]
        for deviation, solved in zip(deviations, infinite(row["solved"]), strict=True):
            cell = row["score"], row["rate"], deviation
            found[cell] = np.append(found.get(cell, []), np.isfinite(solved))
    return found


def tests_of(rows: Sequence[Row], task: str) -> dict[str, Row]:
    """The row of the test seeds of each score."""
    return {row["score"]: row for row in lab.where(rows, kind="test", task=task)}


def share(row: Row) -> float:
    """The share of the seeds of a test that have solved the task."""
    return float(np.mean(np.isfinite(infinite(row["solved"]))))


def censored(row: Row) -> np.ndarray:
    """Steps until solved of the test seeds; never is twice the limit, beyond all others."""
    return np.minimum(infinite(row["solved"])[0], 2.0 * row["steps"])


def against_scaled(rows: Sequence[Row], task: str) -> dict[str, float]:
    """By score: the corrected p-value of its steps until solved minus scaled dot's, by seed.

    It is empty without a test of scaled dot.
    """
    tests = tests_of(rows, task)
    others = [score for score in tests if score != "scaled" and "scaled" in tests]
    return holm(
        {name: p_value(censored(tests[name]), censored(tests["scaled"])) for name in others}
    )


def pairs_that_differ(
    rows: Sequence[Row], task: str, scores: Sequence[str], rate: float
) -> tuple[list[bool], list[bool]]:
    """For each pair of scores: whether they differ at their own constants; and at their best cells.

    The own constants of their papers are compared at one rate.
    """
    cells = shares(rows, task=task, kind="map")
    best = {}
    for score in scores:
        deviation, best_rate = best_cell(lab.where(rows, kind="map", task=task, score=score))
        best[score] = cells[score, best_rate, deviation]
    own, at_best = [], []
    for a, b in itertools.combinations(scores, 2):
        own.append(differ(cells[a, rate, 0.0], cells[b, rate, 0.0]))
        at_best.append(differ(best[a], best[b]))
    return own, at_best


def cells_between(rows: Sequence[Row], twin: str, score: str) -> list[bool]:
    """Whether each cell of a twin lies between the intervals of the score's cells beside it.

    The score may have been measured again, from other seeds; maps of other gains do not count.
    """
    cells = shares([row for row in rows if row["kind"] in ("map", "again")])
    inside = []
    for (name, rate, deviation), solved in cells.items():
        if name == twin and deviation:
            beside = [
                share_interval(of)
                for (other, at, x), of in cells.items()
                if other == score and at == rate and 0.6 < x / deviation < 1.6
            ]
            low, high = min(x for x, _ in beside), max(x for _, x in beside)
            inside.append(low <= np.mean(solved) <= high)
    return inside


def correlation(rows: Sequence[Row], number: str, scores: Sequence[str]) -> float:
    """Spearman's correlation of a number at initialisation with the share of a map that is solved.

    It is over the scores; the share is over deviations, seeds and the rates that all of them have.
    """
    predicted = {row["score"]: row[number] for row in lab.where(rows, kind="prediction")}
    solved: dict[str, dict[float, float]] = {score: {} for score in scores}
    for row in lab.where(rows, kind="map"):
        if row["score"] in solved:
            of_rate = float(np.isfinite(infinite(row["solved"][:-1])).mean())
            solved[row["score"]][row["rate"]] = of_rate
    rates = set.intersection(*map(set, solved.values()))
    area = [float(np.mean([of_rate[rate] for rate in rates])) for of_rate in solved.values()]
    return rank_correlation([predicted[score] for score in solved], area)
