"""The tables of `maps`: tests at the best cells, at the papers' constants, and how many differ."""

import numpy as np

from experiments import lab
from experiments.bench.map_rows import (
    CONTROLS,
    DIFFERENT,
    NORMALIZED,
    OWN,
    WARM_UP,
    against_scaled,
    best_cell,
    compared,
    infinite,
    share,
    steps_at,
    tests_of,
    times_of,
)
from experiments.bench.significance import ratio_interval
from experiments.bench.summary import in_words, steps_in_words
from experiments.lab import Row


def table(rows: list[Row]) -> str:
    """Fresh seeds at the best cells, of each task that has them."""
    parts = []
    for task in dict.fromkeys(row["task"] for row in lab.where(rows, kind="test")):
        tests, p_values = tests_of(rows, task), against_scaled(rows, task)
        shares = {row["score"]: row["query_share"] for row in lab.where(rows, kind="size")}
        head = [f"{task.replace('_', ' ')}: score", "solved", "median steps (least to most)"]
        head += ["over scaled dot's (95 %)", "p (Holm)", "deviation (query part); rate"]
        head += ["own deviation", "parameters", "device"]
        order = sorted(tests, key=lambda score: (np.median(times_of(tests[score])), score))
        lines = []
        for score in order:
            row, over = tests[score], "-"
            if score in p_values:
                interval = ratio_interval(times_of(row), times_of(tests["scaled"]))
                over = in_words(interval) if np.isfinite(interval[1]) else "never"
            p = f"{p_values[score]:.2g}" if score in p_values else "-"
            (deviation,) = row["deviations"]
            part = f" ({deviation * shares[score] ** 0.5:.2g})" if score in shares else ""
            chosen = f"{deviation:.3g}{part}; {row['rate']:g}"
            cells = [label(score), _solved(row), _steps(times_of(row)), over, p, chosen]
            lines.append([*cells, f"{row['own']:.2g}", f"{row['parameters']:,}", row["device"]])
        parts.append(lab.markdown(head, lines))
    return "\n\n".join(parts)


def label(score: str) -> str:
    """A score's name in tables and figures."""
    return f"control: {score.rpartition(':')[2]}" if score in CONTROLS else score


def _solved(row: Row) -> str:
    number = len(row["solved"][0])
    return f"{round(share(row) * number)} of {number}"


def _steps(solved: np.ndarray) -> str:
    """The median and the range of steps until solved, e.g. "400 (250 to never)"."""
    middle, low, high = map(steps_in_words, (np.median(solved), solved.min(), solved.max()))
    return f"{middle} ({low} to {high})"


def headline(rows: list[Row]) -> str:
    """How many pairs of the 16 different scores differ, where and by which measure."""
    of_first = lab.where(rows, task=rows[0]["task"])
    lines = []
    for where, text in {
        OWN: "fresh seeds, at the papers' constants, rate 0.003, 6,000 steps",
        "test": "fresh seeds, at the best cells, 6,000 steps",
        NORMALIZED: "fresh seeds, the same constants, queries and keys normalised, 3,000 steps",
        "constants": "seeds of the maps (1,500 steps), at the papers' constants, rate 0.003",
        "best cells": "seeds of the maps (1,500 steps), at the best cells of these",
        "deviation": "seeds of the maps, deviation 1/4, the better rate",
        "query part": "seeds of the maps, deviation 1/4 of the query part, the better rate",
    }.items():
        steps = steps_at(of_first, where, DIFFERENT)
        found, number = compared(steps), len(next(iter(steps.values())))
        counts = [f"{found.steps} ({found.steps_corrected})"]
        counts += [f"{found.seeds} ({found.seeds_corrected})"]
        solved = sum(float(np.isfinite(each).mean()) > 0.5 for each in steps.values())
        lines.append([text, str(number), *counts, f"{solved}"])
    pairs = len(DIFFERENT) * (len(DIFFERENT) - 1) // 2
    head = [f"of {pairs} pairs", "seeds per score", "differ in steps (Holm)"]
    head += ["differ in the share of seeds (Holm)", "scores that most seeds solve"]
    return lab.markdown(head, lines)


def constants(rows: list[Row]) -> str:
    """Fresh seeds at the papers' constants, plainly, with warm-up, and with normalisation."""
    lines = []
    for row in lab.where(rows, kind=OWN):
        cells = [label(row["score"]), f"{row['own']:.2g}"]
        for kind in (OWN, WARM_UP, NORMALIZED):
            of_kind = lab.where(rows, kind=kind, score=row["score"])
            cells += [f"{_solved(r)}; {_steps(times_of(r))}" for r in of_kind] or ["-"]
        lines.append(cells)
    head = ["score", "deviation", "as it is (6,000 steps)", "warm-up of 300 steps (3,000 steps)"]
    return lab.markdown([*head, "queries and keys normalised (3,000 steps)"], lines)


def widths(rows: list[Row]) -> str:
    """The best cell of each width, and the largest deviation at which half of the seeds solve."""
    lines = []
    for row in {(r["score"], r["dim"]): r for r in lab.where(rows, kind="width")}.values():
        of_width = lab.where(rows, kind="width", score=row["score"], dim=row["dim"])
        cells = [row["score"], str(row["dim"]), f"{row['own']:.2g}"]
        for rate in (1e-3, 3e-3):
            (at_rate,) = lab.where(of_width, rate=rate)
            medians = np.median(infinite(at_rate["solved"]), axis=1)
            words = " ".join(map(steps_in_words, medians[:-1]))
            cells.append(words)
        deviation, rate = best_cell(of_width)
        lines.append([*cells, f"{deviation:.3g}; {rate:g}"])
    first = lab.where(rows, kind="width")[:1]
    deviations = " ".join(f"{x:.3g}" for row in first for x in row["deviations"][:-1])
    rates = [f"steps at {deviations}, rate {rate:g}" for rate in (1e-3, 3e-3)]
    return lab.markdown(["score", "width", "own deviation", *rates, "best deviation; rate"], lines)
