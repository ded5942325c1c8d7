"""The leaderboard of tasks: what counts as a difference."""

from experiments.bench import learning


def row_of(by_seed):
    return {"by_seed": by_seed, "larger_is_better": True}


def test_intervals_that_touch_are_not_apart():
    low, middle, high = (row_of(by_seed) for by_seed in ([1, 3], [3, 5], [88, 90]))
    assert not learning.apart(low, middle)
    assert learning.apart(low, high)
    assert learning.separates({"a": low, "b": high})
    assert not learning.separates({"a": low, "b": middle})
