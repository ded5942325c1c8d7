"""The table of the leaderboard: a line for each score, of the rows of several experiments."""

from collections.abc import Sequence

import numpy as np

from experiments import lab
from experiments.bench.map_rows import (
    OWN,
    SAME,
    WITHOUT_KEY,
    best_cell,
    infinite,
    tests_of,
    times_of,
)
from experiments.lab import FOUR_SCORES, Row

OWN_RATE = 3e-3  # at which the scores are compared with the constants of their papers
LEARNED = 0.9  # of the answers to a relation, a mean over seeds
_NONE = "-"


def summary(
    of_relations: Sequence[Row], of_maps: Sequence[Row], of_cost: Sequence[Row]
) -> tuple[list[str], list[list[str]]]:
    """The head of the table and its lines; what has not been measured is "-".

    The steps until solved are medians of fresh seeds; without such, of the seeds of the map, by
    which the best cell was chosen. At its own constant a score trains at the rate `OWN_RATE`. Dot
    and distance share map and test with the score that they are a multiple of.
    """
    of_relations = [row for row in of_relations if row["base"] == of_relations[0]["base"]]
    tasks = [*dict.fromkeys(row["task"] for row in of_maps)]
    costs = {row["score"]: row for row in of_cost}
    number = len({row["relation"] for row in of_relations})
    head = ["score", *([f"relations of {number} learned (90 %)"] if number else [])]
    for task in tasks:
        name = task.replace("_", " ")
        head += [f"{name}: median steps at its own constant, rate {OWN_RATE:g} (seeds)"]
        head += ["best deviation; rate", "median steps there (seeds)"]
    head += ["time of a step / scaled dot's (95 % interval)"] if costs else []
    head += ["parameters"] if tasks else []
    head += ["device"] if tasks or costs else []
    lines = []
    for score in dict.fromkeys(row["score"] for row in (*of_maps, *of_relations, *of_cost)):
        mine = lab.where(of_maps, score=score)
        same = [row for row in lab.where(of_maps, score=SAME.get(score, "")) if row["kind"] != OWN]
        mine += [] if lab.where(mine, kind="map") else same
        line = [score]
        if number:
            right = lab.column(of_relations, "right", score=score)
            learned = sum(float(np.mean(each)) >= LEARNED for each in right)
            line.append(f"{learned}" if right else _NONE)
        for task in tasks:
            line += _of_task(lab.where(mine, task=task), task, score)
        if costs:
            line.append(time_of_step(costs[score]) if score in costs else _NONE)
        if tasks:
            line.append(f"{mine[0]['parameters']:,}" if mine else _NONE)
        if tasks or costs:
            rows = [*mine, *lab.where(of_cost, score=score)]
            line.append(", ".join(dict.fromkeys(row["device"] for row in rows)) or _NONE)
        lines.append(line)
    return head, lines


def _of_task(rows: list[Row], task: str, score: str) -> list[str]:
    """Steps at the score's own constant; the best cell; the steps there."""
    maps = [row for row in rows if row["kind"] in ("map", "long")]
    if not maps:
        return [_NONE] * 3
    own = [times_of(row) for row in lab.where(rows, kind=OWN)]
    of_maps = lab.where(maps, kind="map", rate=OWN_RATE, score=score)
    own += [infinite(row["solved"])[-1] for row in of_maps]
    deviation, rate = best_cell(maps)
    if tests := [*tests_of(rows, task).values()]:
        steps = times_of(tests[0])
    else:
        of_rate = next(r for r in lab.where(maps, rate=rate) if deviation in r["deviations"][:-1])
        steps = infinite(of_rate["solved"])[of_rate["deviations"].index(deviation)]
    cell = f"{deviation:.3g}; {rate:g}" if np.isfinite(steps).any() else "none"
    return [_in_seeds(own[0]) if own else _NONE, cell, _in_seeds(steps)]


def _in_seeds(steps: np.ndarray) -> str:
    """The median steps, and how many of the seeds solve the task: "250 (10 of 10)"."""
    return f"{steps_in_words(np.median(steps))} ({np.isfinite(steps).sum()} of {len(steps)})"


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
    """The table of the chapter's four scores, and of additive without its key-only part."""
    others = [(lab.content_of(name) or {"rows": []})["rows"] for name in ("relations", "cost")]
    first = lab.where(rows, task=rows[0]["task"])
    kinds = "map", "long", "test", OWN
    head, lines = summary(others[0], [r for r in first if r["kind"] in kinds], others[1])
    by_score = {line[0]: line for line in lines}
    shown = *FOUR_SCORES, WITHOUT_KEY["additive"]
    return lab.markdown(head, [by_score[score] for score in shown if score in by_score])
