"""Results of many runs by their settings: a group per setting, a colour per score."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from attention_jax.reports.plotting import COLORS, MARKERS, new_figure

_GROUP = 0.84  # width of a group; the distance between two groups is 1
_SCORE_INCHES = 0.17  # room for the points of one score in a group
_LETTER_INCHES = 0.078
_LINE_INCHES = 0.17
_LONGEST_LINE = 26  # letters


class Panel(NamedTuple):
    """One metric of all runs."""

    label: str
    by_seed: Mapping[tuple[str, str], Sequence[float]]  # (score, setting) -> a number per seed
    low: float = 0.0  # the smallest number that the metric can be
    high: float | None = None  # the largest; None for no bound


def results_by_setting(panels: Sequence[Panel]) -> Figure:
    """One panel per metric; in it a point per seed and a line at their mean.

    Settings stand side by side, in the order in which they come, and scores side by side within a
    setting. A seed that diverged (NaN) has no point.

    Args:
        panels: the metrics; each may lack some pairs of score and setting.
    """
    pairs = list(dict.fromkeys(pair for panel in panels for pair in panel.by_seed))
    scores = list(dict.fromkeys(score for score, _ in pairs))
    settings = list(dict.fromkeys(setting for _, setting in pairs))
    labels = [_wrapped(setting) for setting in settings]
    label_width = _LETTER_INCHES * max(len(line) for label in labels for line in label)
    group_inches = max(0.6, _SCORE_INCHES * (len(scores) + 1))
    width = max(5.0, 1.0 + group_inches * len(settings))
    upright = label_width > (width - 1) / len(settings)  # there is no room side by side
    if upright:  # the lines of a label stand side by side
        group_inches = max(group_inches, _LINE_INCHES * (max(map(len, labels)) + 0.5))
        width = max(5.0, 1.0 + group_inches * len(settings))
    label_height = label_width if upright else _LINE_INCHES * max(map(len, labels))
    columns = min(len(scores), int(width / (0.5 + _LETTER_INCHES * max(map(len, scores)))) or 1)
    legend_height = 0.25 * -(-len(scores) // columns)
    figure, axes = new_figure(
        width,
        2.3 * len(panels) + label_height + legend_height + 0.2,
        rows=len(panels),
        sharex=True,
    )
    for ax, panel in zip(axes, panels, strict=True):
        for index, score in enumerate(scores):
            places = np.arange(len(settings)) + _GROUP * ((index + 0.5) / len(scores) - 0.5)
            values = [panel.by_seed.get((score, setting), ()) for setting in settings]
            _draw_seeds(ax, places, values, index, room=_GROUP / len(scores))
        _set_range(ax, panel)
        ax.set_ylabel(panel.label)
        ax.grid(axis="y", alpha=0.3)
        ax.set_xlim(-0.5, len(settings) - 0.5)
        for boundary in range(1, len(settings)):
            ax.axvline(boundary - 0.5, color="0.85", linewidth=0.8)
        ax.tick_params(axis="x", length=0)
    texts = ["\n".join(label) for label in labels]
    axes[-1].set_xticks(range(len(settings)), texts, rotation=90 if upright else 0)
    handles = [Line2D([], [], linestyle="", **_style(index)) for index in range(len(scores))]
    figure.legend(handles, scores, loc="outside upper center", ncols=columns)
    return figure


def _wrapped(setting: str) -> list[str]:
    """The lines of a label, long ones broken."""
    lines = [textwrap.wrap(line, _LONGEST_LINE) for line in setting.split("\n")]
    return list(itertools.chain.from_iterable(lines)) or [""]


def _draw_seeds(
    axes: Axes, places: np.ndarray, values: Sequence[Sequence[float]], index: int, *, room: float
) -> None:
    """The points of one score, side by side around each place, and a line at each mean."""
    for place, by_seed in zip(places, values, strict=True):
        if not len(by_seed):
            continue
        spread = 0.5 * room * (np.arange(len(by_seed)) + 0.5) / len(by_seed) - 0.25 * room
        style = _style(index)
        axes.plot(place + spread, by_seed, linestyle="", alpha=0.7, **style)
        mean = np.mean(by_seed)
        axes.plot(place + np.array([-0.4, 0.4]) * room, [mean, mean], color=style["color"])


def _style(index: int) -> dict[str, Any]:
    """The colour and the marker of a score; with more scores than colours, other markers."""
    shift = index + index // len(COLORS)
    return {
        "color": COLORS[index % len(COLORS)],
        "marker": MARKERS[shift % len(MARKERS)],
        "markersize": 4,
    }


def _set_range(axes: Axes, panel: Panel) -> None:
    """The whole range of a bounded metric; a logarithmic axis for numbers of many magnitudes."""
    values = np.concatenate([np.asarray(each, float) for each in panel.by_seed.values()])
    values = values[np.isfinite(values)]
    if panel.high is not None:
        margin = 0.04 * (panel.high - panel.low)
        axes.set_ylim(panel.low - margin, panel.high + margin)
    elif len(values) and values.min() > 0 and values.max() > 20 * values.min():
        axes.set_yscale("log")
