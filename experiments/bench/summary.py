"""The table of the leaderboard: a line for each score, of the rows of several experiments."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from experiments import lab
from experiments.bench.map_rows import best_cell, infinite, tests_of
from experiments.lab import FOUR_SCORES, Row

OWN_RATE = 3e-3  # at which the scores are compared with the constants of their papers
LEARNED = 0.9  # of the answers to a relation, a mean over seeds
_NONE = "-"


def summary(
    of_relations: Sequence[Row], of_maps: Sequence[Row], of_cost: Sequence[Row]
) -> tuple[list[str], list[list[str]]]:
    """The head of the table and its lines; what has not been measured is "-".

    A score has solved a task at its own constant in so many of the seeds of the map, at the rate
    `OWN_RATE`. The steps until solved are those of the test seeds; without a test, those of the
    seeds by which the best cell was chosen.
    """
    of_relations = [row for row in of_relations if row["base"] == of_relations[0]["base"]]
    tasks = [*dict.fromkeys(row["task"] for row in of_maps)]
    costs = {row["score"]: row for row in of_cost}
    number = len({row["relation"] for row in of_relations})
    head = ["score", *([f"relations of {number} learned (90 %)"] if number else [])]
    for task in tasks:
        name = task.replace("_", " ")
        head += [f"{name}: solved at its own constant (rate {OWN_RATE:g})"]
        head += ["best deviation; rate", "median steps there until solved (seeds)"]
    head += ["time of a step / scaled dot's (95 % interval)"] if costs else []
    head += ["parameters"] if tasks else []
    head += ["device"] if tasks or costs else []
    lines = []
    for score in dict.fromkeys(row["score"] for row in (*of_maps, *of_relations, *of_cost)):
        mine = lab.where(of_maps, score=score)
        line = [score]
        if number:
            right = lab.column(of_relations, "right", score=score)
            learned = sum(float(np.mean(each)) >= LEARNED for each in right)
            line.append(f"{learned}" if right else _NONE)
        for task in tasks:
            line += _of_task(lab.where(mine, task=task), task)
        if costs:
            line.append(time_of_step(costs[score]) if score in costs else _NONE)
        if tasks:
            line.append(f"{mine[0]['parameters']:,}" if mine else _NONE)
        if tasks or costs:
            rows = [*mine, *lab.where(of_cost, score=score)]
            line.append(", ".join(dict.fromkeys(row["device"] for row in rows)) or _NONE)
        lines.append(line)
    return head, lines


def _of_task(rows: list[Row], task: str) -> list[str]:
    """Seeds that solve it at the score's own constant; the best cell; the steps there."""
    maps = lab.where(rows, kind="map")
    if not maps:
        return [_NONE] * 3
    own = [infinite(row["solved"])[-1] for row in lab.where(maps, rate=OWN_RATE)]
    deviation, rate = best_cell(maps)
    if tests := [*tests_of(rows, task).values()]:
        steps = infinite(tests[0]["solved"])[0]
    else:
        (of_rate,) = lab.where(maps, rate=rate)
        steps = infinite(of_rate["solved"])[of_rate["deviations"].index(deviation)]
    solved, median = np.isfinite(steps).sum(), np.median(steps)
    return [
        f"{np.isfinite(own[0]).sum()} of {len(own[0])}" if own else _NONE,
        f"{deviation:.3g}; {rate:g}" if solved else "none",  # the best cell of no map
        f"{steps_in_words(median)} ({solved} of {len(steps)})",
    ]


def steps_in_words(steps: float) -> str:
    """A number of steps, "never" if it is infinite."""
    return "never" if np.isinf(steps) else f"{steps:.0f}"


def time_of_step(row: Row) -> str:
    """The time of a step over scaled dot's, of a row of `cost`: "1.52 (1.50 to 1.53)"."""
    return in_words(row["over"]) + ("" if row["steady"] else ", not steady")


def in_words(interval: Sequence[float]) -> str:
    """A number between the ends of its interval, [low, number, high]: "1.52 (1.50 to 1.53)"."""
    low, number, high = interval
    return f"{number:.2f} ({low:.2f} to {high:.2f})"


def four_scores(rows: list[Row]) -> str:
    """The table of the four scores of the chapter on the first task, with the other rows."""
    others = [(lab.content_of(name) or {"rows": []})["rows"] for name in ("relations", "cost")]
    first = lab.where(rows, task=rows[0]["task"])
    head, lines = summary(others[0], [r for r in first if r["kind"] in ("map", "test")], others[1])
    by_score = {line[0]: line for line in lines}
    return lab.markdown(head, [by_score[score] for score in FOUR_SCORES if score in by_score])
