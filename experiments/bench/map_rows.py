"""What the rows of `maps` say: shares of seeds, best cells, paired steps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments import lab
from experiments.bench.significance import differ, holm, p_value, rank_sum
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


def times_of(row: Row) -> np.ndarray:
    """Steps until solved of each fresh seed of a row, infinite for never."""
    return infinite(row["solved"])[0]


def steps_differ(
    rows: Sequence[Row], kind: str, scores: Sequence[str], corrected: bool = False
) -> dict[tuple[str, str], bool]:
    """Whether the steps of two scores differ: the rank-sum test of fresh seeds, p < 0.05.

    Never comes after all steps. `corrected` is with Holm's correction over all pairs.
    """
    times = {row["score"]: times_of(row) for row in lab.where(rows, "solved", kind=kind)}
    pairs = itertools.combinations(scores, 2)
    p_values = {(a, b): rank_sum(times[a], times[b]) for a, b in pairs}
    p_values = holm(p_values) if corrected else p_values
    return {pair: p < 0.05 for pair, p in p_values.items()}


def right_edges(
    rows: Sequence[Row], scores: Sequence[str], of_pairs: bool = False
) -> dict[str, float]:
    """The largest deviation at which half of the seeds solve the task, at the better of two rates.

    It is interpolated on a logarithmic axis between the cells; the last cell is an edge where half
    of its seeds solve it. Scores without such a cell are left out. `of_pairs`: of the part of the
    logits that depends on the query, the root of its share of the variance times the deviation.
    """
    found = {}
    share_of = {row["score"]: row["query_share"] for row in lab.where(rows, kind="size")}
    for score in scores:
        maps = [
            row for row in lab.where(rows, kind="map", score=score) if row["rate"] in (3e-3, 1e-3)
        ]
        deviations = maps[0]["deviations"][:-1]
        solved = np.isfinite([infinite(row["solved"])[:-1] for row in maps]).mean(-1).max(0)
        half = np.flatnonzero(solved >= 0.5)
        if not half.size:
            continue
        last = half[-1]
        edge = np.log2(deviations[last])
        if last + 1 < len(deviations):
            part = (solved[last] - 0.5) / (solved[last] - solved[last + 1])
            edge += part * np.log2(deviations[last + 1] / deviations[last])
        found[score] = float(2**edge) * (share_of[score] ** 0.5 if of_pairs else 1.0)
    return found


def edge_ratio(edges: dict[str, float]) -> float:
    """The largest of the edges over the smallest."""
    return max(edges.values()) / min(edges.values())
