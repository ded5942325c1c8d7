"""What the maps were expected to say: the claims of `maps`, whose bounds precede the runs."""

import itertools
from collections.abc import Sequence

import numpy as np

from experiments import lab
from experiments.bench.map_rows import (
    DIFFERENT,
    WITHOUT_KEY,
    best_cell,
    compared,
    edge_ratio,
    infinite,
    right_edges,
    share,
    steps_at,
    tests_of,
    times_of,
)
from experiments.bench.significance import fisher
from experiments.lab import Claim, Row

NAMES = {
    "additive": "additive",
    "manhattan": "manhattan",
    "experiments.bench.controls:Projected": "scaled dot with additive's kernels",
    "experiments.bench.controls:Features": "dot of features",
    "experiments.bench.controls:WithLength": "scaled dot + w |k|^2",
}
LEAST = {"additive": 0.5, "manhattan": 0.9, "experiments.bench.controls:Features": 0.9}


def claims(rows: Sequence[Row], others: Sequence[str]) -> list[Claim]:
    """The claims; see `maps`. `others` are the scores of the second task."""
    scores = DIFFERENT
    first, found = "recall", []
    of_first, pairs = lab.where(rows, task=first), len(scores) * (len(scores) - 1) // 2
    tests = tests_of(rows, first)

    # Steps come first: of fresh seeds, all on one device.
    for kind, low in {"own": 30, "test": 50}.items():
        text = "their papers' constants" if kind == "own" else "their best cells"
        number = compared(steps_at(of_first, kind, scores)).steps_corrected
        text = f"steps until solved: of {pairs} pairs of scores, those that differ at {text} (Holm)"
        found.append(Claim(text, number, low))
    number = compared(steps_at(of_first, "normalized", scores)).steps
    text = f"queries and keys normalised, papers' constants: of {pairs} pairs, those that differ"
    found.append(Claim(f"{text} (p < 0.05 each)", number, high=20))
    half = []
    for row in lab.where(of_first, kind="warm-up"):
        if row["score"] in scores:
            before = times_of(lab.where(of_first, kind="own", score=row["score"])[0])
            if np.mean(before <= row["steps"]) <= 0.5:
                half.append(bool(share(row) <= 0.5))
    text = f"warm-up: of {len(half)} scores that at most half of the seeds solve at own constant,"
    found.append(Claim(f"{text} share of which it stays so", float(np.mean(half)), 0.75))
    for base, score in WITHOUT_KEY.items():
        name = f"{base} without its key-only part"
        found.append(Claim(f"{name}: share of fresh seeds that solve", share(tests[score]), 0.9))
        median = float(np.median(times_of(tests[score])))
        found.append(Claim(f"{name}: median steps of fresh seeds until solved", median, high=1300))
    edges = right_edges(of_first, scores, of_pairs=True)
    text = f"right edges of {len(edges)} regions, deviation of the part that depends on the query:"
    found.append(Claim(f"{text} largest over smallest", edge_ratio(edges), high=2))
    widths = {(row["score"], row["dim"]) for row in lab.where(of_first, kind="width")}
    for score, dim in sorted(widths):
        best, _ = best_cell(lab.where(of_first, kind="width", score=score, dim=dim))
        text = f"{score}, width {dim}: the best deviation over 1/4"
        found.append(Claim(text, 4 * best, 0.5, 2.0))
    additive, scaled = (float(np.median(times_of(tests[name]))) for name in ("additive", "scaled"))
    text = "additive's median steps until it solves recall over scaled dot's"
    found.append(Claim(text, additive / scaled, 4))

    # Shares of seeds.
    for task, those in {first: scores, "selective_copy": others}.items():
        of_task = lab.where(rows, task=task)
        apart, still = (
            [fisher(*map(np.isfinite, pair)) < 0.05 for pair in itertools.combinations(at, 2)]
            for at in (
                [*steps_at(of_task, where, those).values()] for where in ("constants", "best cells")
            )
        )
        vanish = [not b for a, b in zip(apart, still, strict=True) if a]
        text = f"{task}: of {len(vanish)} pairs of scores that differ at their papers' constants,"
        measured = float(np.mean(vanish)) if vanish else np.nan  # a miss, as nothing was compared
        text += " share that do not differ at their best cells (share of seeds)"
        found.append(Claim(text, measured, 0.5))
    three = []
    for other, rate in itertools.product(("l2", "hyperbolic"), (1e-2, 3e-3, 1e-3)):
        both = [lab.where(of_first, kind="map", score=s, rate=rate) for s in ("scaled", other)]
        if all(both):
            solved = (np.isfinite(infinite(row["solved"]))[:-1] for (row,) in both)
            three += [fisher(a, b) < 0.05 for a, b in zip(*solved, strict=True)]
    text = "scaled dot beside l2 and hyperbolic at equal deviation: share of cells that differ"
    found.append(Claim(text, float(np.mean(three)), high=0.15))
    for score, name in NAMES.items():
        text = f"{name} at its best cell solves recall: share of other seeds"
        found.append(Claim(text, share(tests[score]), LEAST.get(score, 0.95)))
    return found
