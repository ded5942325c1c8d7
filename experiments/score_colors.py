"""One colour and one marker per score, the same in the figures of all experiments."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from matplotlib import colormaps

# The scores that most experiments compare.
_FIRST = ("additive", "dot", "general", "scaled")
FIRST_FREE = len(_FIRST)  # index of the first colour that does not stand for one of them


def score_indices(scores: Iterable[str]) -> dict[str, int]:
    """Returns the index of each score's colour and marker in `attention_jax.reports.plotting`.

    The four scores of the literature keep theirs; others get the next ones in the given order.
    """
    others = [score for score in dict.fromkeys(scores) if score not in _FIRST]
    every = (*_FIRST, *others)
    return {score: every.index(score) for score in dict.fromkeys(scores)}


def ordered_colors(count: int) -> list[tuple[float, ...]]:
    """Returns colours from dark to light, for the values of a quantity such as a dimension."""
    return [tuple(color) for color in colormaps["viridis"](np.linspace(0, 0.88, count))]
