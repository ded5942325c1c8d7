"""The leaderboard of tasks: what is read off the curves."""

import numpy as np

from experiments.bench import learning


def row_of(curve, by_seed):
    return {
        "curve_of": "accuracy", "curve": curve, "every": 50, "by_seed": by_seed,
        "larger_is_better": True,
    }  # fmt: skip


def test_steps_until_a_share_of_the_best_score():
    rows = {
        "fast": row_of([[0.5, 0.1], [0.9, 0.8], [1.0, 1.0]], [99, 100]),
        "slow": row_of([[0.1, 0.1], [0.2, 0.2], [0.9, 0.3]], [89, 31]),
    }
    assert learning.steps_until(rows, "fast", 0.9) == [100, 150]
    assert learning.steps_until(rows, "slow", 0.9) == [150, np.inf]


def test_intervals_that_touch_are_not_apart():
    low, middle, high = (row_of([], by_seed) for by_seed in ([1, 3], [3, 5], [88, 90]))
    assert not learning.apart(low, middle)
    assert learning.apart(low, high)
    assert learning.separates({"a": low, "b": high})
    assert not learning.separates({"a": low, "b": middle})
