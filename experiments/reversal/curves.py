"""Shares measured on several seeds, drawn so that no point hides another."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attention_jax.reports import plotting
from attention_jax.training.metrics import mean_and_deviation

# What the legend or the title of a figure says about the bars.
BARS = "bars: one standard deviation over seeds, within the possible range"


def draw_shares(
    axes: Axes,
    x: Sequence[float],
    shares: np.ndarray,
    *,
    index: int,
    count: int,
    label: str,
    place: int | None = None,
    color: Any = None,
    most: float = 1.0,
    connected: bool = False,
) -> None:
    """Draws the mean over seeds at each x, with a bar of ± one deviation within [0, most].

    The curves of one figure stand side by side at each x, on a linear or a logarithmic axis: set
    the scale of the axis before.

    Args:
        axes: where to draw.
        x: where the shares were measured.
        shares: float [len(x), seeds].
        index: of the color and the marker.
        count: the number of curves.
        label: the name in the legend.
        place: which of the curves this is, from the left; None for the index.
        color: None for the color of the index.
        most: the largest possible share, 1 or 100.
        connected: whether to draw a line between neighbours: only where all x between are tested.
    """
    mean, deviation = mean_and_deviation(shares)
    bars = (mean - np.maximum(mean - deviation, 0), np.minimum(mean + deviation, most) - mean)
    offset = (index if place is None else place) - (count - 1) / 2
    places = np.asarray(x, float)
    places = places * 1.08**offset if axes.get_xscale() == "log" else places + 0.09 * offset
    axes.errorbar(
        places, mean, yerr=np.maximum(bars, 0), label=label,
        color=plotting.COLORS[index % len(plotting.COLORS)] if color is None else color,
        marker=plotting.MARKERS[index % len(plotting.MARKERS)], markersize=5,
        linestyle="-" if connected else "", linewidth=1, elinewidth=1.5,
    )  # fmt: skip


def draw_band(
    axes: Axes,
    x: Sequence[float],
    values: np.ndarray,
    *,
    index: int,
    label: str,
    least: float = 0.0,
    most: float = math.inf,
) -> None:
    """Draws the mean over seeds as a line, in a band of ± one deviation within [least, most].

    Curves with a larger index are thinner, so that those below them show.

    Args:
        axes: where to draw.
        x: the position of each row of `values`.
        values: float [len(x), seeds].
        index: of the color and the marker.
        label: the name in the legend.
        least: the smallest possible value.
        most: the largest possible value.
    """
    plotting.draw_band(
        axes, x, values, index=index, label=label, limits=(least, most),
        markersize=max(3, 7 - 2 * index), linewidth=max(1, 3 - index),
    )  # fmt: skip


def accuracy_by_length(
    panels: Mapping[str, Mapping[str, Mapping[int, Sequence[float]]]],
    *,
    ylabel: str,
    indices: Mapping[str, int] | None = None,
) -> Figure:
    """Accuracies by length: one panel per title, one colour per score.

    A point is the mean over seeds, a bar one deviation on either side of it, cut off at 0 and 1. A
    line joins the points of successive lengths, and no others. Scores stand a little apart so that
    none hides another.

    Args:
        panels: by title and score, {length: one number per seed}.
        ylabel: label of the accuracies.
        indices: of the colour and the marker of each score; None for the order of the scores.
    """
    columns = len(panels) if len(panels) <= 3 else 2
    rows = -(-len(panels) // columns)
    width, height = (4.2 if columns < 3 else 3.6) * columns, 3.2 * rows + 0.3
    figure, axes = plotting.new_figure(
        width, height, rows=rows, columns=columns, sharex=True, sharey=True
    )
    for unused in axes[len(panels) :]:
        unused.remove()
    scores = list(dict.fromkeys(score for by_score in panels.values() for score in by_score))
    indices = indices or {score: index for index, score in enumerate(scores)}
    handles: dict[str, Any] = {}
    for ax, (title, by_score) in zip(axes, panels.items(), strict=False):
        for score, by_length in by_score.items():
            shift = 0.13 * (scores.index(score) - (len(scores) - 1) / 2)
            handles[score] = _draw_lengths(ax, by_length, indices[score], shift)
        ax.set(title=title, xlabel="string length", ylabel=ylabel, ylim=(-0.03, 1.05))
        ax.label_outer()
        ax.grid(alpha=0.3)
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=min(len(scores), 4)
    )
    return figure


def _draw_lengths(
    axes: Axes, by_length: Mapping[int, Sequence[float]], index: int, shift: float
) -> Any:
    """The accuracies of one score, drawn `shift` to the right; returns the points."""
    lengths = np.array(sorted(by_length))
    mean, deviation = np.array([mean_and_deviation(by_length[length]) for length in lengths]).T
    color, marker = (
        plotting.COLORS[index % len(plotting.COLORS)],
        plotting.MARKERS[index % len(plotting.MARKERS)],
    )
    x = lengths + shift
    (points,) = axes.plot(x, mean, marker, color=color, markersize=5)
    axes.vlines(x, np.maximum(mean - deviation, 0), np.minimum(mean + deviation, 1), color=color)
    gaps = np.flatnonzero(np.diff(lengths) > 1) + 1
    for part in np.split(np.arange(len(lengths)), gaps):
        axes.plot(x[part], mean[part], color=color, linewidth=1.2)
    return points
