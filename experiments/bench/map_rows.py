"""What the rows of `maps` say: shares of seeds, best cells, paired steps."""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments import lab
from experiments.bench.significance import fisher, holm, p_value, rank_sum
from experiments.lab import Row

DIFFERENT = (
    *("scaled", "general", "softcap", "softplus", "cosine", "ngpt", "l2", "elliptical"),
    *("hyperbolic", "manhattan", "tropical", "yat", "power", "indexer", "neural", "additive"),
)
WITHOUT_KEY = {"additive": "additive(key_part=False)", "neural": "neural(key_part=False)"}
SAME = {"dot": "scaled", "distance": "l2"}  # one function up to a constant: a map, two stars
_CONTROLS = "experiments.bench.controls"
CONTROLS = (f"{_CONTROLS}:Projected", f"{_CONTROLS}:Features", f"{_CONTROLS}:WithLength")
# Trainings from fresh seeds: at the constant of the paper, with 300 steps of warm-up there, and
# with layer normalisation of queries and keys there; see `maps.Config.task`.
OWN, WARM_UP, NORMALIZED = "own", "warm-up", "normalized"


def infinite(solved: Sequence[Sequence[int | None]]) -> np.ndarray:
    """Steps until solved, [deviations, seeds]; infinite for never."""
    return np.array([[np.inf if step is None else step for step in each] for each in solved])


def best_cell(maps: Sequence[Row]) -> tuple[float, float]:
    """The deviation and the rate of the best cell of a map, its own constant excepted."""
    cells = []
    for row in maps:
        solved = infinite(row["solved"])
        for index, deviation in enumerate(row["deviations"][:-1]):
            rank = np.median(solved[index]), -np.isfinite(solved[index]).mean()
            cells.append((*rank, -row["accuracy"][index], deviation, row["rate"]))
    *_, deviation, rate = min(cells)
    return deviation, rate


def tests_of(rows: Sequence[Row], task: str) -> dict[str, Row]:
    """The row of the test seeds of each score."""
    return {row["score"]: row for row in lab.where(rows, kind="test", task=task)}


def share(row: Row) -> float:
    """The share of the seeds of a test that have solved the task."""
    return float(np.mean(np.isfinite(infinite(row["solved"]))))


def times_of(row: Row) -> np.ndarray:
    """Steps until solved of each fresh seed of a row, infinite for never."""
    return infinite(row["solved"])[0]


def against_scaled(rows: Sequence[Row], task: str) -> dict[str, float]:
    """By score: the corrected p-value of its steps until solved minus scaled dot's, by seed.

    Never is twice the limit, beyond all others. It is empty without a test of scaled dot.
    """
    tests = tests_of(rows, task)
    times = {name: np.minimum(times_of(row), 2.0 * row["steps"]) for name, row in tests.items()}
    others = [score for score in tests if score != "scaled" and "scaled" in tests]
    return holm({name: p_value(times[name], times["scaled"]) for name in others})


class Compared(NamedTuple):
    """Of all pairs of scores, how many differ: p < 0.05 for each pair, and corrected over all."""

    seeds: int  # the share of seeds that solve the task: Fisher's exact test
    seeds_corrected: int
    steps: int  # steps until solved, never after all others: the rank-sum test
    steps_corrected: int


def compared(steps: Mapping[str, np.ndarray]) -> Compared:
    """Compares the steps until solved [seeds] of all pairs of scores."""
    counts = []
    for test in (lambda a, b: fisher(np.isfinite(a), np.isfinite(b)), rank_sum):
        pairs = itertools.combinations(steps, 2)
        p_values = {f"{a}, {b}": test(steps[a], steps[b]) for a, b in pairs}
        for each in (p_values, holm(p_values)):
            counts.append(sum(p < 0.05 for p in each.values()))
    return Compared(*counts)


def steps_at(rows: Sequence[Row], where: str, scores: Sequence[str]) -> dict[str, np.ndarray]:
    """Steps until solved [seeds] of each score in one cell of its map.

    Args:
        rows: of one task.
        where: "constants", that of its paper at rate 0.003; "best cells"; "deviation", the logits
            have the deviation 1/4; "query part", the part of them that depends on the query has it;
            or a kind of rows of fresh seeds. "deviation" and "query part" take the nearest
            deviation of the grid, and the better of the rates 0.003 and 0.001.
        scores: the scores.
    """
    shares = {row["score"]: row["query_share"] for row in lab.where(rows, kind="size")}
    found = {}
    for score in scores:
        maps = lab.where(rows, kind="map", score=score)
        if where == "constants":
            found[score] = infinite(lab.where(maps, rate=3e-3)[0]["solved"])[-1]
        elif where == "best cells":
            found[score] = _cell(maps, *best_cell(maps))
        elif where in ("deviation", "query part"):
            size = 0.25 / (shares[score] ** 0.5 if where == "query part" else 1)
            near = min(maps[0]["deviations"][:-1], key=lambda x: abs(np.log(x / size)))
            cells = [_cell(maps, near, rate) for rate in (3e-3, 1e-3) if lab.where(maps, rate=rate)]
            found[score] = min(
                cells, key=lambda steps: (np.median(steps), -np.isfinite(steps).sum())
            )
        else:
            found[score] = times_of(lab.where(rows, "solved", kind=where, score=score)[0])
    return found


def _cell(maps: Sequence[Row], deviation: float, rate: float) -> np.ndarray:
    (of_rate,) = lab.where(maps, rate=rate)
    steps: np.ndarray = infinite(of_rate["solved"])[of_rate["deviations"].index(deviation)]
    return steps


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
