"""One colour and one marker per score, the same in the figures of all experiments."""

from __future__ import annotations

from collections.abc import Iterable

# The scores that most experiments compare.
_FIRST = ("additive", "dot", "general", "scaled")


def score_indices(scores: Iterable[str]) -> dict[str, int]:
    """Returns the index of each score's colour and marker in `attention_jax.reports.plotting`.

    The four scores of the literature keep theirs; others get the next ones in the given order.
    """
    others = [score for score in dict.fromkeys(scores) if score not in _FIRST]
    every = (*_FIRST, *others)
    return {score: every.index(score) for score in dict.fromkeys(scores)}
